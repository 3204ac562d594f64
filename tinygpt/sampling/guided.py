"""Guided decoding: which tokens a grammar lets come next. The work on the grammar itself is llguidance's."""

import functools
from collections.abc import Sequence as Seq
from copy import copy
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from tinygpt.guided_grammar import grammar_of, in_short, load_llguidance, refuse
from tinygpt.sampling_params import SamplingParams
from tinygpt.tokenizer.tokenizer import Tokenizer

MAX_KEPT = 32  # grammars of a model: to compile one takes a millisecond or more


class Mask(NamedTuple):
    """The tokens that may come next: the only ones, or those that may not, whichever are fewer; int32.

    One of them is empty. Where both are, all tokens may come.
    """

    allowed_ids: np.ndarray
    forbidden_ids: np.ndarray


class Guidance:
    """Makes the guides of one model's requests."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        """RequestError if the tokens of this tokenizer are not bytes."""
        self._tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self._special_ids = sorted(token_id for token_id in tokenizer.special_ids if token_id < vocab_size)
        self._tokenizer = functools.cache(self._new_tokenizer)
        self._grammar = functools.lru_cache(MAX_KEPT)(self._compile)

    def check(self, field: str, value: Any) -> None:
        """RequestError unless `value` of a guided field is one that can be followed; the package may be missing."""
        self._grammar(field, value)

    def guide(self, params: SamplingParams, eos_token_ids: frozenset[int]) -> "Guide":
        """Of one sample, whose params have guidance."""
        eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        end_ids = {i for i in eos_token_ids.union(params.stop_token_ids) if i < len(self._tokens)}
        return Guide(self._grammar(*params.guidance), end_ids, end_ids.difference(self._special_ids))

    def _compile(self, field: str, value: Any) -> "_Grammar":
        llguidance = load_llguidance(field)
        grammar = _Grammar(llguidance, self._tokenizer(llguidance), grammar_of(field, value))
        refuse(field, value, grammar.first.get_error())
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
        self.vocab_size = tokenizer.vocab_size - 1
        self.compile = functools.partial(llguidance.LLMatcher, tokenizer, text, log_level=0)
        self.first = self.compile()

    def matcher(self) -> Any:
        return self.first.deep_copy()


class Guide:
    """Where one sample stands in its grammar. Another thread may compute the mask ahead of who asks for it.

    end_ids: the tokens that end the sample; plain_end_ids: those of them that are text for the grammar.
    """

    def __init__(self, grammar: _Grammar, end_ids: set[int], plain_end_ids: set[int]):
        self.error: str | None = None  # why nothing can come next
        self._grammar, self._end_ids = grammar, end_ids
        self._end_indices, self._plain_end_indices = np.array([*end_ids], int), np.array([*plain_end_ids], int)
        self._lock = Lock()
        self.restart()

    @property
    def is_over(self) -> bool:
        """Whether the text can only end here."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def restart(self) -> None:
        """Stand at the beginning."""
        with self._lock:
            self._matcher, self._is_alone = self._grammar.matcher(), False
            self._token_ids: list[int] = []
            self._mask: Mask | None = None

    def take(self, token_id: int) -> None:
        """Stand behind one token more."""
        with self._lock:
            self._mask = None
            if token_id in self._end_ids:
                return
            self._token_ids.append(token_id)
            if not self._matcher.consume_token(token_id):
                self._begin_alone()

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
        vocab_size = self._grammar.vocab_size
        bits = np.frombuffer(packed, np.uint8)
        may_come = np.unpackbits(bits, count=vocab_size + 1, bitorder="little").view(bool)  # (V + 1,)
        may_end, may_come = may_come[vocab_size], may_come[:vocab_size]  # (V,)
        may_come[self._plain_end_indices] = False
        if may_end:
            may_come[self._end_indices] = True
        if 0 < 2 * np.count_nonzero(may_come) <= vocab_size:
            return Mask(np.flatnonzero(may_come).astype(np.int32), _NO_IDS)
        return Mask(_NO_IDS, np.flatnonzero(~may_come).astype(np.int32))

    def _begin_alone(self) -> None:
        """Come here once more with a matcher of its own: others have used up part of what the package has limits for."""
        if not self._is_alone:
            self._matcher, self._is_alone = self._grammar.compile(), True
            self._matcher.consume_tokens(self._token_ids)


def compute_masks(guides: Seq[Guide]) -> None:
    """Ahead of who will ask for them."""
    for guide in guides:
        guide.mask()


def _why(error: str) -> str:
    is_stuck = error.startswith("NoExtension")
    return "no token of the vocabulary goes on with the text" if is_stuck else in_short(error)


_NO_IDS = np.empty(0, np.int32)
