"""The engine: one thread that runs requests, from prompts to sampled tokens.

Belongs here: everything about a request between the public classes and the backends. May import weights, kernels,
tokenizer and the records next to this folder.
"""
