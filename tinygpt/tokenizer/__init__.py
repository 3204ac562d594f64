"""Text to token ids and back: GPT-2's byte-level BPE by tiktoken, all others by `tokenizers`; streams of text.

`tokenizer` is the front; `files` and `added_tokens` read a checkpoint's files into one form; `gpt2_bpe` runs it on
tiktoken; `prepared` keeps the result for the next start; `stream` makes text of tokens as they come.
"""
