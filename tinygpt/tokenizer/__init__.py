"""Text to token ids and back: GPT-2's byte-level BPE by tiktoken, all others by `tokenizers`; streams of text.

Belongs here: whatever knows characters. May import errors alone.
"""
