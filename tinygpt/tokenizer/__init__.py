"""Text to token ids and back: GPT-2's byte-level BPE by tiktoken, others by `tokenizers`; streams of text."""
