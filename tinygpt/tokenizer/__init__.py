"""Text to token ids and back: GPT-2's byte-level BPE by tiktoken, all others by `tokenizers`; streams of text.

Belongs here: whatever knows characters. May import the errors, `regular_file` and `tokenizer_files` alone. `tokenizer`
is the front; `files` and `added_token_files` read a checkpoint's files into one form, which `byte_level_bpe` runs on
tiktoken (by `tiktoken_ranks`) and `tokenizers_library` on Hugging Face's package; `prepared` keeps what the first one
has made of them; `text_stream` makes text of tokens as they come.
"""
