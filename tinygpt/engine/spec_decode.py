"""Speculative decoding: draft the next tokens, so that one step of the model confirms several at once.

Samples never depend on drafts: logits have the same bits in a step of any size, and draws are keyed by position.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import RequestError
from ..kernels.backend import Batch
from ..llm_args import EngineConfig, LLMArgs
from .model_runner import ModelRunner, ModelSource
from .part import Part
from .sampler import Sampler
from .sampling_state import Sample
from .sequence import Sequence, common_prefix
from .step import Chunk, Step, num_after_first


class Drafter(Part):
    """Drafts for sequences, as far as a step has room: by prompt lookup, or by the draft model.

    All of an engine draft alike: a step asks the first for all its sequences.
    """

    def __init__(self, engine_config: EngineConfig, draft_model: "DraftModel | None"):
        self._max_num_tokens = engine_config.max_num_batched_tokens
        self._max_num_logits = engine_config.max_num_logits
        self._draft_model = draft_model

    def acts_on_next(self, sequence: Sequence) -> bool:
        return self.num_wanted(sequence) > 0

    def num_wanted(self, sequence: Sequence) -> int:
        count = sequence.params.prompt_lookup_num_tokens
        if not count and self._draft_model is not None:
            count = self._draft_model.num_speculative_tokens
        if (window := sequence.sample.window) is not None:
            count = min(count, window.size - len(sequence) + sequence.num_dropped)
        return min(count, sequence.params.max_tokens - len(sequence.new_token_ids) - 1)

    @classmethod
    def before(cls, step: Step, parts: "dict[int, Drafter]") -> None:
        drafter = next(iter(parts.values()))
        step.drafts |= drafter.propose(step.chunks, parts)
        step.chosen.update(step.drafts)

    @classmethod
    def after(cls, step: Step, parts: "dict[int, Drafter]", logits: Any) -> None:
        """Sample on, as long as the sampled tokens are the drafted ones."""
        sequences = [step.chunks[i].sequence for i in step.drafts]
        num_before = num_after_first(sequences)
        running = list(step.drafts)
        num_confirmed = 0
        while running:
            rows = [step.last_rows[i] + num_confirmed for i in running]
            drawing = [step.chunks[i].sequence for i in running]
            for sequence, token in zip(drawing, step.sampler.sample(logits[rows], drawing), strict=True):
                sequence.append(token)
                sequence.num_cached += num_confirmed > 0
            running = [
                i for i in running if _is_confirmed(step.chunks[i].sequence, step.drafts[i], num_confirmed)
            ]
            num_confirmed += 1
        step.num_new += num_after_first(sequences) - num_before

    def propose(self, chunks: list[Chunk], drafted: Iterable[int]) -> dict[int, list[int]]:
        """Return drafts by i for those of chunks[i] that reach their sequence's last token."""
        due = [i for i in drafted if chunks[i].is_due]
        wanted = {i: count for i in due if (count := self.num_wanted(chunks[i].sequence)) > 0}
        if not wanted:
            return {}
        num_tokens = sum(chunk.count for chunk in chunks)
        num_logits = sum(chunk.num_logits for chunk in chunks)
        room = min(self._max_num_tokens - num_tokens, self._max_num_logits - num_logits)
        drafts, by_model = {}, {}
        for i, count in wanted.items():
            sequence = chunks[i].sequence
            params = chunks[i].sequence.params
            count = min(count, room)
            if params.prompt_lookup_num_tokens:
                drafts[i] = propose_by_lookup(sequence.token_ids, count, params.max_matching_ngram_size)
                count = len(drafts[i])
            else:
                by_model[i] = count
            room -= count
        if by_model:
            proposed = self._draft_model.propose(
                [chunks[i].sequence for i in by_model], list(by_model.values())
            )
            drafts |= zip(by_model, proposed, strict=True)
        return {i: draft for i, draft in drafts.items() if draft}


def _is_confirmed(sequence: Sequence, draft: list[int], index: int) -> bool:
    if index == len(draft) or sequence.is_finished:
        return False
    return sequence.new_token_ids[-1] == draft[index]


def propose_by_lookup(token_ids: list[int], count: int, max_ngram: int) -> list[int]:
    """Return up to `count` tokens that followed the first earlier occurrence of the last max_ngram tokens, or fewer.

    Source: Saxena, "Prompt Lookup Decoding" (2023), as in transformers' PromptLookupCandidateGenerator.
    """
    size, after = 0, len(token_ids)  # of the longest match, and the place after it
    for end in (i for i, token_id in enumerate(token_ids[:-1], 1) if token_id == token_ids[-1]):
        while size < min(max_ngram, end) and token_ids[end - size - 1 : end] == token_ids[-size - 1 :]:
            size, after = size + 1, end
        if size == max_ngram:
            break
    return token_ids[after : after + count]


class DraftModel:
    """A smaller checkpoint that runs each sequence a few tokens ahead, in a KV cache with the larger model's slots.

    It draws by the numbers that the larger model will use: a draft is right if the models agree.
    """

    def __init__(self, source: ModelSource, engine_config: EngineConfig, threads: int):
        sizes = replace(
            engine_config, max_model_len=min(engine_config.max_model_len, source.config.n_positions)
        )
        self.num_speculative_tokens = sizes.num_speculative_tokens
        self._runner = ModelRunner(source, sizes, threads)
        self._sampler = Sampler(self._runner.backend)
        self._max_model_len = sizes.max_model_len
        self._max_num_tokens = sizes.max_num_batched_tokens
        self._cached: dict[int, list[int]] = {}  # tokens by slot
        self._plain_samples: WeakKeyDictionary[Sample, Sample] = WeakKeyDictionary()

    @classmethod
    def open(
        cls, args: LLMArgs, target: ModelSource, engine_config: EngineConfig, threads: int
    ) -> "DraftModel":
        """Open args.draft_model, to draft for `target`. Raise RequestError for another vocabulary."""
        name = args.draft_model
        source = ModelSource.open(
            LLMArgs(name, args.dtype, args.device, kv_cache_dtype=target.kv_cache_dtype)
        )
        if source.config.vocab_size != target.config.vocab_size:
            raise RequestError(
                f"is {name!r} with {source.config.vocab_size} tokens and the model has {target.config.vocab_size}: "
                "they must have the same vocabulary.",
                "draft_model",
            )
        return cls(source, engine_config, threads)

    def close(self) -> None:
        self._runner.close()

    def propose(self, sequences: Seq[Sequence], counts: Seq[int]) -> list[list[int]]:
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
        sample = sequence.sample
        if sample not in self._plain_samples:  # users' functions are not called for drafts
            params = replace(sample.params, logits_processors=None, logprobs=None, best_of=None)
            self._plain_samples[sample] = replace(sample, params=params, window=None, on_chunk=None)
        num_cached = common_prefix(self._cached.get(sequence.slot, []), sequence.token_ids)
        return Sequence(
            self._plain_samples[sample],
            sequence.index,
            guide=None if sequence.guide is None else sequence.guide.copy(),
            new_token_ids=list(sequence.new_token_ids),
            num_cached=min(num_cached, len(sequence) - 1),
            slot=sequence.slot,
        )

    def _catch_up(self, drafts: list[Sequence]) -> None:
        while behind := [draft for draft in drafts if draft.num_uncached > 1]:
            room, counts = self._max_num_tokens, []
            for draft in behind:
                counts.append(min(draft.num_uncached - 1, room))
                room -= counts[-1]
            self._forward([(draft, count) for draft, count in zip(behind, counts, strict=True) if count], 0)

    def _extend(self, drafts: list[Sequence]) -> None:
        logits = self._forward([(draft, 1) for draft in drafts], 1)  # (R, V)
        for draft, token in zip(drafts, self._sampler.sample(logits, drafts), strict=True):
            if token.error is None:
                draft.new_token_ids.append(token.token_id)
                if draft.guide is not None:
                    draft.guide.take(token.token_id)

    def _forward(self, chunks: list[tuple[Sequence, int]], num_logits: int) -> Any:
        batch = Batch.of(
            [draft.next_token_ids(count) for draft, count in chunks],
            [draft.num_cached for draft, _ in chunks],
            [draft.slot for draft, _ in chunks],
            [num_logits] * len(chunks),
        )
        if num_logits:
            batch = replace(batch, drawn_by=lambda: self._sampler.drawn_by([draft for draft, _ in chunks]))
        logits = self._runner.forward(batch)  # (R, V)
        for draft, count in chunks:
            draft.num_cached += count
            self._cached[draft.slot] = draft.token_ids[: draft.num_cached]
        return logits
