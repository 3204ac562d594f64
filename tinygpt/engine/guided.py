"""Guided decoding: the tokens that a grammar allows next. The package llguidance does the work on grammars."""

import functools
from collections.abc import Callable
from copy import copy
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from tinygpt.errors import RequestError, how_to_install
from tinygpt.field_rules import grammar_of, in_short, refuse
from tinygpt.sampling_params import SamplingParams
from tinygpt.tokenizer.tokenizer import Tokenizer

# Kept by a model: a grammar compiles in milliseconds, and a mask is expanded in the time it takes to compute.
MAX_GRAMMARS, MAX_MASKS = 32, 64
_OF_BYTE = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, np.float32(0), -np.float32(np.inf))  # (256, 8)


class Mask(NamedTuple):
    added: np.ndarray  # (V,) float32, added to the scores: 0 for those that may come, -inf for the others
    count: int  # of those that may come


class Guidance:
    """The guides of one model's requests."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        """Raise RequestError if the tokens of this tokenizer are not bytes."""
        self._vocabulary = _Vocabulary(tokenizer, vocab_size)
        self._vocab_size = vocab_size
        self._tokenizer: Any = None  # the package's
        self._grammar = functools.lru_cache(MAX_GRAMMARS)(self._compile)
        self._spread = functools.lru_cache(MAX_MASKS)(_spread)

    def check(self, field: str, value: Any) -> None:
        self._grammar(field, value)

    def guide(self, params: SamplingParams, eos_token_ids: frozenset[int]) -> "Guide":
        eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        end_ids = frozenset(i for i in eos_token_ids.union(params.stop_token_ids) if i < self._vocab_size)
        spread = functools.partial(self._spread, end_ids=end_ids, vocab_size=self._vocab_size)
        return Guide(*self._grammar(*params.guidance), end_ids, spread)

    def _compile(self, field: str, value: Any) -> tuple[Callable[[], Any], Any]:
        """Return a function that makes a matcher of the grammar, and a matcher to copy: copies share their work."""
        try:
            import llguidance
        except ImportError:
            reason = f"needs the package llguidance, which is not installed: {how_to_install('guided')}."
            raise RequestError(reason, field) from None
        self._tokenizer = self._tokenizer or llguidance.LLTokenizer(self._vocabulary)
        grammar = grammar_of(llguidance, field, value)
        new_matcher = functools.partial(llguidance.LLMatcher, self._tokenizer, grammar, log_level=0)
        first = new_matcher()
        refuse(field, value, first.get_error())
        matcher = first.deep_copy()
        if matcher.is_accepting():
            packed = matcher.compute_bitmask()  # sets the error, too
            if not matcher.is_error() and int.from_bytes(packed, "little") == 1 << self._vocab_size:
                refuse(field, value, "it allows no text but the empty one")  # its end would never be noticed
        return new_matcher, first


class _Vocabulary:
    """The interface of a tokenizer for llguidance. Its end-of-text token is one more than the model has."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self.tokens = [*(tokenizer.token_bytes(token_id) for token_id in range(vocab_size)), b""]
        self.special_token_ids = sorted(token_id for token_id in tokenizer.special_ids if token_id < vocab_size)
        self.eos_token_id = vocab_size


class Guide:
    """The state of one sample in its grammar. The sampler's thread may compute a mask in advance.

    end_ids: the tokens that end the sample. spread: expands the package's bits to a Mask.
    """

    def __init__(
        self,
        new_matcher: Callable[[], Any],
        first_matcher: Any,
        end_ids: frozenset[int],
        spread: Callable[[bytes], Mask],
    ):
        self._new_matcher, self._first_matcher = new_matcher, first_matcher
        self._end_ids, self._spread = end_ids, spread
        self._lock = Lock()
        self._last: tuple[bytes, Mask] | None = None  # most masks equal the one before
        self.restart()

    def restart(self) -> None:
        with self._lock:
            self._matcher, self._is_alone = self._first_matcher.deep_copy(), False
            self._token_ids: list[int] = []
            self._mask: Mask | None = None
            self.error: str | None = None  # the reason why nothing can come next
            self.is_over = False  # whether the text can only end here

    def take(self, token_id: int) -> None:
        with self._lock:
            self._mask = None
            if token_id in self._end_ids:
                return
            self._token_ids.append(token_id)
            if not self._matcher.consume_token(token_id):
                self._begin_alone()
            self.is_over = self._matcher.is_stopped() and not self._matcher.is_error()

    def follow(self, token_ids: list[int]) -> None:
        if token_ids[:-1] != self._token_ids:
            self.restart()
        for token_id in token_ids[len(self._token_ids) :]:
            self.take(token_id)

    def copy(self) -> "Guide":
        with self._lock:
            other = copy(self)
            other._matcher, other._token_ids, other._lock = self._matcher.deep_copy(), list(self._token_ids), Lock()
        return other

    def mask(self) -> Mask | None:
        """Return the tokens that may come next; None: `error` has the reason."""
        with self._lock:
            if self._mask is None and self.error is None:
                self._mask = self._compute()
            return self._mask

    def _compute(self) -> Mask | None:
        packed = self._matcher.compute_bitmask()  # sets the error, too
        if self._matcher.is_error():
            self._begin_alone()
            packed = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            error = self._matcher.get_error()
            is_stuck = error.startswith("NoExtension")
            self.error = "no token of the vocabulary goes on with the text" if is_stuck else in_short(error)
            return None
        if self._last is None or self._last[0] != packed:
            self._last = packed, self._spread(packed)
        return self._last[1]

    def _begin_alone(self) -> None:
        """Follow the tokens with a matcher that shares no limits of the package with other samples."""
        if not self._is_alone:
            self._matcher, self._is_alone = self._new_matcher(), True
            self._matcher.consume_tokens(self._token_ids)


def _spread(packed: bytes, end_ids: frozenset[int], vocab_size: int) -> Mask:
    """Expand a bit for each token and one for the end, which is `end_ids` here, whatever the grammar names."""
    each = np.take(_OF_BYTE, np.frombuffer(packed, np.uint8), axis=0).ravel()
    added, end = each[:vocab_size], each[vocab_size]  # (V,)
    added[[*end_ids]] = end
    added.flags.writeable = False  # shared by samples
    return Mask(added, np.count_nonzero(added == 0))
