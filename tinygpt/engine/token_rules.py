"""The token ids that SamplingParams name: checked, texts among them encoded, and as the sampler uses them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..errors import RequestError
from ..kernels.reference.sampling import processors_of
from ..sampling_params import LogitsProcessor, SamplingParams

# The first token of a text of dry_sequence_breakers -> the others of each such text.
Breakers = Mapping[int, list[tuple[int, ...]]]


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError, naming field and id, for token ids that the model does not know."""
    of_field = {
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words_ids": [token_id for word in params.bad_words_ids for token_id in word],
        "eos_token_id": params.eos_token_id or (),
        "logit_bias": [token_id for token_id, _ in params.logit_bias],
        "stop_token_ids": params.stop_token_ids,
        "suppress_tokens": params.suppress_tokens,
        "top_p_reset_ids": params.top_p_reset_ids or (),
    }
    for name, token_ids in of_field.items():
        if outside := [token_id for token_id in token_ids if token_id >= vocab_size]:
            known = f"this model knows ids 0 to {vocab_size - 1}."
            raise RequestError(f"holds token id {outside[0]}, which is outside the vocabulary: {known}", name)


def resolve_bad_words(params: SamplingParams, encode: Callable[[str], list[int]]) -> SamplingParams:
    """Return the params with the texts of bad_words in bad_words_ids, with and without a space."""
    texts = [space + word.lstrip() for word in params.bad_words for space in ("", " ")]
    resolved = (tuple(encode(text)) for text in texts)
    return replace(params, bad_words=None, bad_words_ids=dict.fromkeys((*params.bad_words_ids, *resolved)))


@dataclass(frozen=True, eq=False)
class TokenRules:
    """The token ids of params as arrays and functions, which the samples of a request share."""

    bias_ids: np.ndarray  # int32
    biases: np.ndarray  # float32
    processors: tuple[LogitsProcessor, ...]  # those of `processors_of`

    @classmethod
    def of(
        cls, params: SamplingParams, eos_token_ids: frozenset[int], vocab_size: int, breakers: Breakers
    ) -> "TokenRules":
        known = {token_id for token_id in eos_token_ids if token_id < vocab_size}
        return cls(
            bias_ids=np.array([token_id for token_id, _ in params.logit_bias], np.int32),
            biases=np.array([bias for _, bias in params.logit_bias], np.float32),
            processors=processors_of(params, known, breakers),
        )


NO_RULES = TokenRules(np.empty(0, np.int32), np.empty(0, np.float32), ())
