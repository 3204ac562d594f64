"""Scores of given continuations, and Probe: logits, hidden states and attention of given tokens."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from tinygpt.engine.model_runner import ModelRunner
from tinygpt.engine.model_source import LOGIT_ROWS, EngineConfig
from tinygpt.engine.prompts import Prompt, VirtualTokens, describe_positions, read_prompt, text_or_ids
from tinygpt.engine.sampler import PromptLogprobs
from tinygpt.engine.sequence import Request, Sequence
from tinygpt.errors import RequestError, invalid
from tinygpt.kernels.batch import Batch
from tinygpt.outputs import ContinuationScore
from tinygpt.sampling_params import SamplingParams
from tinygpt.tokenizer.tokenizer import Tokenizer
from tinygpt.weights.config import ModelConfig

POOLINGS = {
    "last": lambda states: states[-1],
    "mean": lambda states: states.mean(0),
    "sum": lambda states: states.sum(0),
}


def read_continuations(
    prompt: Any,
    continuations: Seq[Any],
    config: ModelConfig,
    tokenizer_of: Callable[[], Tokenizer],
    split_special_tokens: bool | None,
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield, for each continuation, the ids of its context and its own. `LLM.score` says where one ends."""
    prompt = text_or_ids(prompt)
    for continuation in map(text_or_ids, continuations):
        if not continuation:
            raise RequestError("a continuation is empty: give each some text, or a token id at least.")
        before, are_texts = prompt, isinstance(prompt, str) and isinstance(continuation, str)
        if are_texts:
            before = prompt.rstrip()
            continuation = prompt[len(before) :] + continuation
        context = read_prompt(before, config, tokenizer_of, split_special_tokens).token_ids
        token_ids = read_prompt(continuation, config, tokenizer_of, split_special_tokens).token_ids
        if are_texts and before:
            whole = tokenizer_of().encode(before + continuation, split_special_tokens)
            if whole[: len(context)] == context and len(whole) > len(context):
                token_ids = whole[len(context) :]
        yield context, token_ids


def scoring_request(
    context: list[int],
    continuation: list[int],
    virtual: VirtualTokens | None,
    max_model_len: int,
    n_positions: int,
) -> Request:
    """Return a request that reads a prompt and a continuation without its last token, whose logits are not needed.

    A sequence draws a token at the end of its prompt, which is ignored.
    """
    context = [*(virtual.token_ids if virtual else ()), *context]
    total = len(context) + len(continuation)
    if total > max_model_len + 1:
        raise RequestError(
            f"the prompt has {len(context)} tokens and a continuation {len(continuation)}, together {total}, but "
            f"{describe_positions(max_model_len, n_positions)}: shorten them to {max_model_len + 1} tokens together, "
            "the last of which needs no position."
        )
    token_ids, params = context + continuation[:-1], SamplingParams(max_tokens=1)
    wanted = PromptLogprobs(len(context) - 1, continuation, num_best=1)
    sequence = Sequence(token_ids, params, 0, 0, frozenset(), text=None, soft_prompt=virtual, prompt_logprobs=wanted)
    return Request(Prompt(None, token_ids), params, [sequence])


def score_of(request: Request) -> ContinuationScore:
    wanted = request.sequences[0].prompt_logprobs
    best = [next(iter(found)) for found in wanted.found]  # the most probable comes first
    return ContinuationScore(wanted.targets, wanted.logprobs, is_greedy=wanted.targets == best)


class Probe:
    """Computes in a slot that steps never use. The engine's thread alone calls the methods."""

    def __init__(self, runner: ModelRunner, engine_config: EngineConfig):
        self._runner = runner
        self._slot = engine_config.spare_slot
        self._chunk_size = min(LOGIT_ROWS, engine_config.max_num_batched_tokens)

    def logits(self, token_ids: list[int]) -> np.ndarray:
        # Copies: the next step overwrites them.
        return np.concatenate([self._runner.forward(batch).copy() for batch in self._batches(token_ids, "all")])

    def hidden_states(self, token_ids: list[int], layers: slice = slice(None)) -> np.ndarray:
        return np.concatenate([hidden[layers].copy() for hidden, _ in self._traces(token_ids)], axis=1)

    def attentions(self, token_ids: list[int]) -> np.ndarray:
        queries = np.concatenate([queries for _, queries in self._traces(token_ids)], axis=1)  # (L, T, C)
        keys, _ = self._runner.read_positions(self._slot, 0, len(token_ids))  # (L, H, T, D)
        return self._runner.attention_maps(queries, keys)

    def embedding(self, token_ids: list[int], pooling: str) -> np.ndarray:
        return POOLINGS[pooling](self.hidden_states(token_ids, slice(-1, None))[0])

    def _traces(self, token_ids: list[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return map(self._runner.trace, self._batches(token_ids, [0]))

    def _batches(self, token_ids: list[int], logits_of: str | list[int]) -> Iterator[Batch]:
        for first in range(0, len(token_ids), self._chunk_size):
            yield Batch.of([token_ids[first : first + self._chunk_size]], [first], [self._slot], logits_of)


def check_pooling(pooling: str) -> None:
    if pooling not in tuple(POOLINGS):
        raise invalid("pooling", pooling, f"one of {', '.join(map(repr, POOLINGS))}")
