"""DraftModel: a smaller checkpoint that guesses the tokens of a larger one."""

from collections.abc import Sequence as Seq
from dataclasses import replace
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from tinygpt.config import ModelConfig
from tinygpt.engine.kv_slots import common_prefix
from tinygpt.engine_config import EngineConfig
from tinygpt.errors import RequestError
from tinygpt.execution.backend import (
    check_memory,
    load_backend,
    load_params,
    new_workspace,
    resolve_dtype,
    resolve_kv_cache_dtype,
)
from tinygpt.execution.batch import Batch
from tinygpt.request.sequence import Sequence
from tinygpt.sampling.sampler import choose
from tinygpt.sampling_params import SamplingParams
from tinygpt.weights.open import open_checkpoint


class DraftModel:
    """Runs each sequence a few tokens ahead, in a KV cache that has the slots of the larger model's.

    Tokens are drawn by the same numbers that the larger model will draw by, so a guess is right as often as the two
    models agree, greedily or not.
    max_model_len: positions of a slot. max_num_tokens: new tokens in a step of this model.
    """

    def __init__(
        self,
        backend: ModuleType,
        params: Any,
        cache: Any,
        workspace: Any,
        max_model_len: int,
        max_num_tokens: int,
        num_speculative_tokens: int,
    ):
        self.num_speculative_tokens = num_speculative_tokens
        self._backend, self._params, self._cache, self._workspace = backend, params, cache, workspace
        self._max_model_len = max_model_len
        self._max_num_tokens = max_num_tokens
        self._held: dict[int, list[int]] = {}  # slot -> the tokens it holds
        self._plain_params: WeakKeyDictionary[Sequence, SamplingParams] = WeakKeyDictionary()

    def propose(self, sequences: Seq[Sequence], counts: Seq[int]) -> list[list[int]]:
        """At most counts[i] tokens that may follow sequences[i]."""
        ends = [len(s) + self._num_possible(s, count) for s, count in zip(sequences, counts, strict=True)]
        guesses = [self._guess(sequence) for sequence in sequences]
        wanting = [(guess, end) for guess, end in zip(guesses, ends, strict=True) if len(guess) < end]
        self._catch_up([guess for guess, _ in wanting])
        while wanting:
            self._extend([guess for guess, _ in wanting])
            wanting = [(guess, end) for guess, end in wanting if len(guess) < end and guess.num_uncached]
        return [g.new_token_ids[len(s.new_token_ids) :] for g, s in zip(guesses, sequences, strict=True)]

    def _num_possible(self, sequence: Sequence, count: int) -> int:
        if min(sequence.prompt_token_ids) < 0:  # a soft prompt, which only the larger model has
            return 0
        return max(min(count, self._max_model_len - len(sequence)), 0)

    def _guess(self, sequence: Sequence) -> Sequence:
        """The same sequence, to be continued by this model."""
        if sequence not in self._plain_params:  # users' functions are not called for guesses
            plain = replace(sequence.params, logits_processors=None, logprobs=None, best_of=None)
            self._plain_params[sequence] = plain
        num_held = common_prefix(self._held.get(sequence.slot, []), sequence.token_ids)
        return Sequence(
            sequence.prompt_token_ids,
            self._plain_params[sequence],
            sequence.seed,
            sequence.index,
            sequence.eos_token_ids,
            text=None,
            new_token_ids=list(sequence.new_token_ids),
            num_cached=min(num_held, len(sequence) - 1),
            slot=sequence.slot,
        )

    def _catch_up(self, guesses: list[Sequence]) -> None:
        """Read what this model has not seen yet, but for each sequence's last token."""
        while behind := [guess for guess in guesses if guess.num_uncached > 1]:
            room, counts = self._max_num_tokens, []
            for guess in behind:
                counts.append(min(guess.num_uncached - 1, room))
                room -= counts[-1]
            self._forward([(guess, count) for guess, count in zip(behind, counts, strict=True) if count], 0)

    def _extend(self, guesses: list[Sequence]) -> None:
        """Add a token to each; those that can have none stay as they are, with all tokens cached."""
        logits = self._forward([(guess, 1) for guess in guesses], 1)  # (R, V)
        chosen = choose(self._backend, self._workspace, logits, guesses)
        for guess, token_id, error in zip(guesses, chosen.token_ids, chosen.errors, strict=True):
            if error is None:
                guess.new_token_ids.append(token_id)

    def _forward(self, chunks: list[tuple[Sequence, int]], num_logits: int) -> Any:
        batch = Batch.of(
            [guess.next_token_ids(count) for guess, count in chunks],
            [guess.num_cached for guess, _ in chunks],
            [guess.slot for guess, _ in chunks],
            [num_logits] * len(chunks),
        )
        logits = self._backend.forward(self._params, batch, self._cache, self._workspace)  # (R, V)
        for guess, count in chunks:
            guess.num_cached += count
            self._held[guess.slot] = guess.token_ids[: guess.num_cached]
        return logits


def load_draft_model(
    model: str,
    num_speculative_tokens: int,
    target: ModelConfig,
    limits: EngineConfig,
    device: str,
    dtype: str,
    kv_cache_dtype: str,
    threads: int,
) -> DraftModel:
    """Open `model` beside the larger one, whose config is `target`.

    Raises CheckpointError if it cannot be loaded, RequestError if its vocabulary is another or memory does not suffice.
    """
    backend = load_backend(device, dtype)
    checkpoint = open_checkpoint(model)
    config = checkpoint.config
    if config.vocab_size != target.vocab_size:
        raise RequestError(
            f"draft_model {model!r} has {config.vocab_size} tokens and the model has {target.vocab_size}: they must "
            "have the same vocabulary."
        )
    dtype = resolve_dtype(dtype, device, checkpoint)
    kv_cache_dtype = resolve_kv_cache_dtype(kv_cache_dtype, device, dtype)
    max_model_len = min(limits.max_model_len, config.n_positions)
    check_memory(device, checkpoint, dtype, kv_cache_dtype, limits)
    params = load_params(backend, checkpoint, dtype, threads)
    try:
        cache = backend.new_kv_cache(config, limits.num_slots, max_model_len, kv_cache_dtype)
    except MemoryError:
        raise RequestError(
            f"this machine cannot give the memory for the KV cache of draft_model {model!r}: lower max_num_seqs, "
            "prefix_cache_seqs or max_model_len."
        ) from None
    num_tokens = limits.max_num_batched_tokens
    workspace = new_workspace(backend, config, num_tokens, limits.max_num_seqs, threads, dtype)
    return DraftModel(backend, params, cache, workspace, max_model_len, num_tokens, num_speculative_tokens)
