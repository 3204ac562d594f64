"""Megatron-LM's names of a GPT: its own checkpoints, those with experts, and FasterTransformer's copies of them.

Belongs here: models that are divided among GPUs as Megatron does it. May import `hugging_face` and below.
"""
