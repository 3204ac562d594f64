"""Texts of params as token ids: bad words, and breakers of a repeat (dry_sequence_breakers)."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache

from ..sampling_params import SamplingParams
from ..text.tokenizer import Tokenizer
from .prompts import encode
from .sampling_state import Breakers

# Of a breaker: characters, and tokens after the first, as in llama.cpp; texts that are kept.
MAX_BREAKER = 40
MAX_REST = 20
NUM_BREAKERS = 64

Way = tuple[int, tuple[int, ...]]  # a token that the text begins in, and the tokens after it


def resolve_bad_words(params: SamplingParams, encode: Callable[[str], list[int]]) -> SamplingParams:
    """Return the params with the texts of bad_words in bad_words_ids, with and without a space."""
    texts = [space + word.lstrip() for word in params.bad_words for space in ("", " ")]
    resolved = (tuple(encode(text)) for text in texts)
    return replace(params, bad_words=None, bad_words_ids=dict.fromkeys((*params.bad_words_ids, *resolved)))


class BreakerFinder:
    """Finds each way in which a model's tokens write a text, as llama.cpp does.

    A text may begin within a token and end within another: ":" is in " :)", too.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._token_texts = [tokenizer.decode([token_id]) for token_id in range(vocab_size)]
        self._ways = lru_cache(NUM_BREAKERS)(self._find_ways)

    def find(self, texts: Iterable[str]) -> Breakers:
        """Return the first token of each way to write one of the texts, and the tokens after it."""
        breakers: dict[int, list[tuple[int, ...]]] = {}
        for text in texts:
            for first, rest in self._ways(text[:MAX_BREAKER]):
                breakers.setdefault(first, []).append(rest)
        return breakers

    def _find_ways(self, text: str) -> set[Way]:
        rest_of = {
            text[:n]: self._rest(text[n:]) for n in range(1, len(text))
        }  # by what a token writes of it
        ways: set[Way] = set()
        for token_id, written in enumerate(self._token_texts):
            if text in written:
                ways.add((token_id, ()))
            elif text[0] in written:
                ways |= {(token_id, rest) for begun, rest in rest_of.items() if written.endswith(begun)}
        return ways

    def _rest(self, text: str) -> tuple[int, ...]:
        return tuple(encode(text, self._tokenizer, self._vocab_size, split_special_tokens=True)[:MAX_REST])
