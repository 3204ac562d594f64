"""A loaded model, and what runs it: `ModelRunner`, the choice of a backend, the arrays of a step.

Belongs here: whatever holds weights, KV cache or buffers. Below `bench` and `cli`, the one folder that imports kernels.
May import weights, kernels and the plain records beside this folder.
"""
