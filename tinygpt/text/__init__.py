"""Text to token ids and back: GPT-2's BPE by tiktoken, others by `tokenizers`; streams."""
