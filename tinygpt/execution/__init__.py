"""A loaded model, and what runs it: `ModelRunner`, the choice of a backend, the arrays of a step.

Belongs here: whatever holds weights, KV cache or buffers. The one folder that knows kernels and weights both. May
import request (whose sequences a step is made of) and below.
"""
