"""Which files a tokenizer may be read from: one list for those who read them, download them and copy them."""

VOCAB_AND_MERGES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
TOKENIZER_FILES = (
    *("tokenizer.json", *(name for pair in VOCAB_AND_MERGES for name in pair), "vocab.txt"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)
