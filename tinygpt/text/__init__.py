"""Text to token ids and back: GPT-2's BPE by tiktoken, others by `tokenizers` or sentencepiece; streams."""

from collections.abc import Callable


class TextEncoder:
    """What a tokenizer has by its `encode`."""

    encode: Callable[..., list[int]]

    def __call__(self, text: str | list[str], split_special_tokens: bool | None = None) -> dict[str, list]:
        """Return Hugging Face's {"input_ids", "attention_mask"}, with lists of lists for a list of texts."""
        if isinstance(text, str):
            ids = self.encode(text, split_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        encodings = [self(one, split_special_tokens) for one in text]
        return {name: [encoded[name] for encoded in encodings] for name in ("input_ids", "attention_mask")}
