"""LogprobArrays: log probabilities in the four lists of OpenAI's completions, token after token."""

import codecs
from collections.abc import Iterable
from typing import NamedTuple

from tinygpt.server.protocol.completions import Logprobs
from tinygpt.server.replies.finite import finite
from tinygpt.server.replies.token_names import Namer, TokenNames


class TokenLogprobs(NamedTuple):
    """A token, and the log probabilities of it and of the most probable ones, these first; None: nobody knows."""

    token_id: int
    logprobs: dict[int, float] | None


class LogprobArrays:
    """Of one choice: `add` knows what came before, as offsets count characters from the beginning of its text.

    Every token is listed, those too whose text is cut off: harnesses count them.
    """

    def __init__(self, names: TokenNames, num_top: int, name: Namer, with_ids: bool = False):
        """with_ids: tell the ids of the most probable ones too."""
        self._names, self._num_top, self._name, self._with_ids = names, num_top, name, with_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def add(self, tokens: Iterable[TokenLogprobs]) -> Logprobs:
        arrays = Logprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if self._with_ids:
            arrays.top_token_ids = []
        for token_id, logprobs in tokens:
            arrays.tokens.append(self._name(token_id))
            arrays.token_logprobs.append(None if logprobs is None else finite(logprobs[token_id]))
            top = None if logprobs is None else self._top(token_id, logprobs)
            arrays.top_logprobs.append(top and {self._name(i): finite(logprob) for i, logprob in top.items()})
            if self._with_ids:
                arrays.top_token_ids.append(top and {self._name(i): i for i in top})
            arrays.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(self._names.bytes_of(token_id)))
        return arrays

    def _top(self, token_id: int, logprobs: dict[int, float]) -> dict[int, float]:
        """The most probable ones, and the token itself behind them if it is none of them."""
        best = dict(list(logprobs.items())[: self._num_top])
        return best | {token_id: logprobs[token_id]}
