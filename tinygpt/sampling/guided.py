"""Guided decoding: which tokens a grammar lets come next. The work on the grammar itself is llguidance's."""

import functools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from copy import copy
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from tinygpt.guided_grammar import grammar_of, in_short, load_llguidance, refuse
from tinygpt.sampling_params import SamplingParams
from tinygpt.tokenizer.tokenizer import Tokenizer

# What a model keeps of earlier steps: to compile a grammar takes milliseconds, to spread a mask as long as to find it.
MAX_GRAMMARS, MAX_MASKS = 32, 64
_OF_BYTE = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, np.float32(0), -np.float32(np.inf))  # (256, 8)


class Mask(NamedTuple):
    """Which tokens may come next."""

    added: np.ndarray  # (V,) float32, to be added to the scores: 0 for those that may, -inf for those that may not
    count: int  # of those that may


class Guidance:
    """Makes the guides of one model's requests."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        """RequestError if the tokens of this tokenizer are not bytes."""
        self._tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self._special_ids = sorted(token_id for token_id in tokenizer.special_ids if token_id < vocab_size)
        self._tokenizer = functools.cache(self._new_tokenizer)
        self._grammar = functools.lru_cache(MAX_GRAMMARS)(self._compile)
        self._spread = functools.lru_cache(MAX_MASKS)(_spread)

    def check(self, field: str, value: Any) -> None:
        """RequestError unless `value` of a guided field is one that can be followed; the package may be missing."""
        self._grammar(field, value)

    def guide(self, params: SamplingParams, eos_token_ids: frozenset[int]) -> "Guide":
        """Of one sample, whose params have guidance."""
        eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        vocab_size = len(self._tokens)
        end_ids = frozenset(i for i in eos_token_ids.union(params.stop_token_ids) if i < vocab_size)
        spread = functools.partial(self._spread, end_ids=end_ids, vocab_size=vocab_size)
        return Guide(self._grammar(*params.guidance), end_ids, spread)

    def _compile(self, field: str, value: Any) -> "_Grammar":
        llguidance = load_llguidance(field)
        grammar = _Grammar(llguidance, self._tokenizer(llguidance), grammar_of(field, value))
        refuse(field, value, grammar.first.get_error())
        if grammar.can_only_end(len(self._tokens)):  # a text that has no token would never be seen to have ended
            refuse(field, value, "it allows no text but the empty one")
        return grammar

    def _new_tokenizer(self, llguidance: Any) -> Any:
        return llguidance.LLTokenizer(_Vocabulary(self._tokens, self._special_ids))


class _Vocabulary:
    """What llguidance asks of a tokenizer. Its end-of-text token is one more than the model has."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_ids: list[int]):
        self.tokens, self.special_token_ids, self.eos_token_id = [*tokens, b""], special_ids, len(tokens)


class _Grammar:
    """A compiled grammar. Matchers of `matcher` find what they have in common once, those of `compile` do not."""

    def __init__(self, llguidance: Any, tokenizer: Any, text: str):
        self.compile = functools.partial(llguidance.LLMatcher, tokenizer, text, log_level=0)
        self.first = self.compile()

    def matcher(self) -> Any:
        return self.first.deep_copy()

    def can_only_end(self, end_bit: int) -> bool:
        """Whether no token may come, not even first."""
        matcher = self.matcher()
        if not matcher.is_accepting():
            return False
        packed = matcher.compute_bitmask()  # of an error too
        return not matcher.is_error() and int.from_bytes(packed, "little") == 1 << end_bit


class Guide:
    """Where one sample stands in its grammar. Another thread may compute the mask ahead of who asks for it.

    end_ids: the tokens that end the sample. spread: makes the mask of what the package says.
    """

    def __init__(self, grammar: _Grammar, end_ids: frozenset[int], spread: Callable[[bytes], Mask]):
        self._grammar, self._end_ids, self._spread = grammar, end_ids, spread
        self._lock = Lock()
        self._last: tuple[bytes, Mask] | None = None  # most masks are the one before
        self.restart()

    def restart(self) -> None:
        """Stand at the beginning."""
        with self._lock:
            self._matcher, self._is_alone = self._grammar.matcher(), False
            self._token_ids: list[int] = []
            self._mask: Mask | None = None
            self.error: str | None = None  # why nothing can come next
            self.is_over = False  # whether the text can only end here

    def take(self, token_id: int) -> None:
        """Stand behind one token more."""
        with self._lock:
            self._mask = None
            if token_id in self._end_ids:
                return
            self._token_ids.append(token_id)
            if not self._matcher.consume_token(token_id):
                self._begin_alone()
            self.is_over = self._matcher.is_stopped() and not self._matcher.is_error()

    def follow(self, token_ids: list[int]) -> None:
        """Stand behind these tokens, all that there are."""
        if token_ids[:-1] != self._token_ids:
            self.restart()
        for token_id in token_ids[len(self._token_ids) :]:
            self.take(token_id)

    def copy(self) -> "Guide":
        """Another one that stands here, and goes its own way."""
        with self._lock:
            other = copy(self)
            other._matcher, other._token_ids, other._lock = self._matcher.deep_copy(), list(self._token_ids), Lock()
        return other

    def mask(self) -> Mask | None:
        """What may come next; None where `error` says why nothing can be said."""
        with self._lock:
            if self._mask is None and self.error is None:
                self._mask = self._compute()
            return self._mask

    def _compute(self) -> Mask | None:
        packed = self._matcher.compute_bitmask()  # of an error too
        if self._matcher.is_error():
            self._begin_alone()
            packed = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self.error = _why(self._matcher.get_error())
            return None
        if self._last is None or self._last[0] != packed:
            self._last = packed, self._spread(packed)
        return self._last[1]

    def _begin_alone(self) -> None:
        """Come here again with a matcher of its own: others have used up part of what the package has limits for."""
        if not self._is_alone:
            self._matcher, self._is_alone = self._grammar.compile(), True
            self._matcher.consume_tokens(self._token_ids)


def compute_masks(guides: Seq[Guide]) -> None:
    """Ahead of who will ask for them."""
    for guide in guides:
        guide.mask()


def _spread(packed: bytes, end_ids: frozenset[int], vocab_size: int) -> Mask:
    """Of a bit for each token, and one for the end, which is what `end_ids` are here, whatever the grammar names."""
    each = np.take(_OF_BYTE, np.frombuffer(packed, np.uint8), axis=0).ravel()
    added, end = each[:vocab_size], each[vocab_size]  # (V,)
    added[[*end_ids]] = end
    added.flags.writeable = False  # others are given the same one
    return Mask(added, np.count_nonzero(added == 0))


def _why(error: str) -> str:
    is_stuck = error.startswith("NoExtension")
    return "no token of the vocabulary goes on with the text" if is_stuck else in_short(error)
