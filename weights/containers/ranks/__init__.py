"""Checkpoints in a torch file for each GPU that a model was trained on: Megatron-LM's, DeepSpeed's and NeMo's.

Belongs here: which files are the ranks of one model, and what lies beside them. May import `pickles` and below.
"""
