"""Guided decoding: the tokens that a grammar allows next."""

import functools
import re
import reprlib
from collections.abc import Callable
from copy import copy
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from ..errors import RequestError, how_to_install
from ..text.tokenizer import Tokenizer
from .grammar_process import COMPILE_SECONDS, Grammar, GrammarServer, GrammarState, LimitError

# 20 000 alternatives compile in a second, and then in the square of their number.
MAX_CHARACTERS = 2**16
# Kept by a model: a grammar compiles in milliseconds.
MAX_GRAMMARS, MAX_MASKS = 32, 64
_BITS = np.arange(256)[:, None] >> np.arange(8) & 1  # (256, 8)
_OF_BYTE = np.where(_BITS, np.float32(0), -np.float32(np.inf))


class Mask(NamedTuple):
    added: np.ndarray  # (V,) float32, added to the scores: 0 for tokens that may come, -inf for others
    count: int  # of tokens that may come


class Guidance:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int, has_open_schemas: bool = False):
        """Raise RequestError if the tokens of this tokenizer are not bytes."""
        self._has_open_schemas = has_open_schemas
        special_token_ids = sorted(token_id for token_id in tokenizer.special_ids if token_id < vocab_size)
        # The end is one more than the model has.
        tokens = [*map(tokenizer.token_bytes, range(vocab_size)), b""]
        self._vocab_size = vocab_size
        self._server = GrammarServer(tokens, special_token_ids)
        self._grammar = functools.lru_cache(MAX_GRAMMARS)(self._compile)
        self._spread = functools.lru_cache(MAX_MASKS)(_spread)

    def check(self, field: str, value: Any) -> Grammar:
        """Return the grammar of a guided field. Raise RequestError if no text can follow it."""
        try:
            compiled = self._grammar(field, value)
            if isinstance(compiled, Grammar) and compiled.has_ended:
                self._grammar.cache_clear()
                compiled = self._grammar(field, value)
        except LimitError as error:  # not kept: another time, an idle machine may do it
            compiled = f"it {error}"
        if isinstance(compiled, str):
            shown = reprlib.repr(list(value)) if field == "guided_choice" else reprlib.repr(value)
            reason = in_short(compiled, field == "guided_grammar")
            raise RequestError(f"is {shown}, which is not possible: {reason}.", field, value)
        return compiled

    def guide(self, guidance: tuple[str, Any], end_token_ids: frozenset[int]) -> "Guide":
        end_ids = frozenset(i for i in end_token_ids if i < self._vocab_size)
        spread = functools.partial(self._spread, end_ids=end_ids, vocab_size=self._vocab_size)
        return Guide(self.check(*guidance), end_ids, spread)

    def close(self) -> None:
        self._server.close()

    def _compile(self, field: str, value: Any) -> Grammar | str:
        """Return a grammar, or the reason why it is refused: to find it can take seconds. Raise LimitError."""
        try:
            import llguidance  # noqa: F401
        except ImportError:
            reason = f"needs the package llguidance, which is not installed: {how_to_install('guided')}."
            raise RequestError(reason, field) from None
        num_characters = sum(map(len, value))  # of a text, or of all choices
        if num_characters > MAX_CHARACTERS:
            return f"it has {num_characters} characters, and at most {MAX_CHARACTERS} are taken"
        grammar = self._server.grammar()
        problem = grammar.ask(COMPILE_SECONDS, "read", field, value, self._has_open_schemas)
        return problem or grammar.ask(COMPILE_SECONDS, "compile") or grammar


class Guide:
    """The state of one sample in its grammar. The sampler's thread may compute a mask in advance.

    end_ids: the tokens that end the sample. spread: expands the package's bits to a Mask.
    """

    def __init__(self, grammar: Grammar, end_ids: frozenset[int], spread: Callable[[bytes], Mask]):
        self._grammar = grammar
        self._end_ids = end_ids
        self._spread = spread
        self._lock = Lock()
        self.restart()

    def restart(self) -> None:
        with self._lock:
            self._token_ids: list[int] = []
            self._mask: Mask | None = None
            self.error: str | None = None  # the reason why nothing can come next
            self.is_over = False  # whether the text can only end here
            self._state = GrammarState(self._grammar)

    def take(self, token_id: int) -> None:
        with self._lock:
            self._mask = None
            if token_id in self._end_ids:
                return
            self._token_ids.append(token_id)
            if self.error is None:
                self.is_over = bool(self._try(self._state.ask, "take", token_id))

    def follow(self, token_ids: list[int]) -> None:
        if token_ids[:-1] != self._token_ids:
            self.restart()
        for token_id in token_ids[len(self._token_ids) :]:
            self.take(token_id)

    def copy(self) -> "Guide":
        with self._lock:
            other = copy(self)
            other._token_ids = list(self._token_ids)
            other._lock = Lock()
            other._state = other._try(GrammarState, self._grammar, self._state)
        return other

    def mask(self) -> Mask | None:
        """Return the tokens that may come next; None: `error` has the reason."""
        with self._lock:
            if self._mask is None and self.error is None:
                self._mask = self._compute()
            return self._mask

    def _compute(self) -> Mask | None:
        packed, error = self._try(self._state.ask, "mask") or (b"", self.error)
        if error:
            is_stuck = error.startswith("NoExtension")
            self.error = "no token of the vocabulary goes on with the text" if is_stuck else in_short(error)
            return None
        return self._spread(packed)

    def _try(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return the result, or None, and keep the error, if the grammar's process has ended."""
        try:
            return call(*args)
        except LimitError as error:
            self.error = f"it {error}"
            return None


def in_short(problem: str, has_lines: bool = False) -> str:
    """Return the last reason of the package's message in one line; has_lines: the user wrote the lines it counts."""
    message = re.split(r"\n +1 \| |\n<", problem)[0]
    reason = message.rpartition("error: ")[2]
    reason = re.sub(r"^(?:at )?(\d+)\(\d+\): ", r"line \1: " if has_lines else "", reason)
    readable = "".join(c if c.isprintable() else " " for c in reason)
    return " ".join(readable.split())[:300].rstrip(".")


def _spread(packed: bytes, end_ids: frozenset[int], vocab_size: int) -> Mask:
    """Expand a bit for each token and one for the end, which is `end_ids` here, whatever the grammar names."""
    scores = np.take(_OF_BYTE, np.frombuffer(packed, np.uint8), axis=0).ravel()
    added, end = scores[:vocab_size], scores[vocab_size]  # (V,)
    added[[*end_ids]] = end
    added.flags.writeable = False  # shared by samples
    return Mask(added, np.count_nonzero(added == 0))
