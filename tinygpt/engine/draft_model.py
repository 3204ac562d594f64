"""DraftModel: a smaller checkpoint that drafts the next tokens of a larger one."""

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from tinygpt.engine.kv_slots import Held, common_prefix
from tinygpt.engine_config import EngineConfig
from tinygpt.errors import RequestError
from tinygpt.execution.model_runner import ModelRunner
from tinygpt.execution.model_source import ModelSource
from tinygpt.kernels.batch import Batch
from tinygpt.request.sequence import Sequence
from tinygpt.sampling.sampler import Sampler
from tinygpt.sampling_params import SamplingParams
from tinygpt.weights.config import ModelConfig


class DraftModel:
    """Runs each sequence a few tokens ahead, in a KV cache that has the slots of the larger model's.

    Tokens are drawn by the same numbers that the larger model will draw by, so a draft is right as often as the two
    models agree, greedily or not.
    """

    def __init__(self, source: ModelSource, engine_config: EngineConfig, threads: int):
        """Load it, in sizes that suit the larger model's engine_config. Raises as ModelRunner does."""
        sizes = replace(engine_config, max_model_len=min(engine_config.max_model_len, source.config.n_positions))
        self.num_speculative_tokens = sizes.num_speculative_tokens
        self._runner = ModelRunner(source, sizes, threads)
        self._sampler = Sampler(self._runner)
        self._max_model_len, self._max_num_tokens = sizes.max_model_len, sizes.max_num_batched_tokens
        self._held: dict[int, Held] = {}  # by slot
        self._plain_params: WeakKeyDictionary[Sequence, SamplingParams] = WeakKeyDictionary()

    def propose(self, sequences: Seq[Sequence], counts: Seq[int]) -> list[list[int]]:
        """At most counts[i] tokens that may follow sequences[i]."""
        ends = [len(s) + self._num_possible(s, count) for s, count in zip(sequences, counts, strict=True)]
        drafts = [self._draft(sequence) for sequence in sequences]
        wanting = [(draft, end) for draft, end in zip(drafts, ends, strict=True) if len(draft) < end]
        self._catch_up([draft for draft, _ in wanting])
        while wanting:
            self._extend([draft for draft, _ in wanting])
            wanting = [(draft, end) for draft, end in wanting if len(draft) < end and draft.num_uncached]
        return [d.new_token_ids[len(s.new_token_ids) :] for d, s in zip(drafts, sequences, strict=True)]

    def _num_possible(self, sequence: Sequence, count: int) -> int:
        if min(sequence.prompt_token_ids) < 0:  # a soft prompt, which only the larger model has
            return 0
        return max(min(count, self._max_model_len - len(sequence)), 0)

    def _draft(self, sequence: Sequence) -> Sequence:
        """The same sequence, to be continued by this model."""
        if sequence not in self._plain_params:  # users' functions are not called for drafts
            plain = replace(sequence.params, logits_processors=None, logprobs=None, best_of=None)
            self._plain_params[sequence] = plain
        held = self._held.get(sequence.slot)
        is_shared = held is not None and held.cache_salt == sequence.cache_salt
        num_held = common_prefix(held.token_ids, sequence.token_ids) if is_shared else 0
        return Sequence(
            sequence.prompt_token_ids,
            self._plain_params[sequence],
            sequence.seed,
            sequence.index,
            sequence.eos_token_ids,
            text=None,
            guide=None if sequence.guide is None else sequence.guide.copy(),
            cache_salt=sequence.cache_salt,
            new_token_ids=list(sequence.new_token_ids),
            num_cached=min(num_held, len(sequence) - 1),
            slot=sequence.slot,
        )

    def _catch_up(self, drafts: list[Sequence]) -> None:
        """Read what this model has not seen yet, but for each sequence's last token."""
        while behind := [draft for draft in drafts if draft.num_uncached > 1]:
            room, counts = self._max_num_tokens, []
            for draft in behind:
                counts.append(min(draft.num_uncached - 1, room))
                room -= counts[-1]
            self._forward([(draft, count) for draft, count in zip(behind, counts, strict=True) if count], 0)

    def _extend(self, drafts: list[Sequence]) -> None:
        """Add a token to each; those that can have none stay as they are, with all tokens cached."""
        logits = self._forward([(draft, 1) for draft in drafts], 1)  # (R, V)
        for draft, token in zip(drafts, self._sampler.sample(logits, drafts), strict=True):
            if token.error is None:
                draft.extend(token.token_id)

    def _forward(self, chunks: list[tuple[Sequence, int]], num_logits: int) -> Any:
        batch = Batch.of(
            [draft.next_token_ids(count) for draft, count in chunks],
            [draft.num_cached for draft, _ in chunks],
            [draft.slot for draft, _ in chunks],
            [num_logits] * len(chunks),
        )
        logits = self._runner.forward(batch)  # (R, V)
        for draft, count in chunks:
            draft.advance(count)
            self._held[draft.slot] = Held(draft.token_ids[: draft.num_cached], draft.cache_salt)
        return logits


def check_draft(name: str, source: ModelSource, target: ModelConfig) -> None:
    """RequestError if the draft model `name` has another vocabulary than the model it drafts for."""
    if source.config.vocab_size != target.vocab_size:
        raise RequestError(
            f"draft_model {name!r} has {source.config.vocab_size} tokens and the model has "
            f"{target.vocab_size}: they must have the same vocabulary."
        )
