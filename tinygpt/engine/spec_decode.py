"""Spec decode: draft the next tokens, so that one step of the model can confirm several at once.

What is sampled never depends on a draft: the model's logits at a position are the same bits however many tokens a step
has, and draws are keyed by position. A draft only saves steps, where it is the token that is sampled anyway.
"""

from typing import Any

from tinygpt.engine.draft_model import DraftModel
from tinygpt.engine.scheduler import Chunk
from tinygpt.engine.step_input import StepInput
from tinygpt.sampling.sampler import Sampler


class Drafter:
    """Drafts for the sequences of a step, as far as they want them and the step has room for more tokens.

    max_num_tokens, max_num_logits: how many tokens a step may have, and of how many it may want the logits.
    draft_model: drafts for all sequences that do not look their tokens up.
    """

    def __init__(self, max_num_tokens: int, max_num_logits: int, draft_model: DraftModel | None):
        self._max_num_tokens = max_num_tokens
        self._max_num_logits = max_num_logits
        self._draft_model = draft_model

    def close(self) -> None:
        """Give the draft model's memory back."""
        self._draft_model = None

    def propose(self, chunks: list[Chunk]) -> dict[int, list[int]]:
        """What may come after chunks[i], by i; only for chunks that reach their sequence's last token."""
        wanted = {i: count for i, chunk in enumerate(chunks) if (count := self.num_wanted(chunk))}
        if not wanted:
            return {}
        num_tokens, num_logits = sum(chunk.count for chunk in chunks), sum(chunk.num_logits for chunk in chunks)
        room = min(self._max_num_tokens - num_tokens, self._max_num_logits - num_logits)
        drafts, by_model = {}, {}
        for i, count in wanted.items():
            sequence, count = chunks[i].sequence, min(count, room)
            if sequence.params.prompt_lookup_num_tokens:
                drafts[i] = propose_by_lookup(sequence.token_ids, count, sequence.params.max_matching_ngram_size)
                room -= len(drafts[i])
            else:
                by_model[i] = count
                room -= count
        if by_model:
            proposed = self._draft_model.propose([chunks[i].sequence for i in by_model], list(by_model.values()))
            drafts |= zip(by_model, proposed, strict=True)
        return {i: draft for i, draft in drafts.items() if draft}

    def num_wanted(self, chunk: Chunk) -> int:
        """Tokens to draft for a sequence; a step that confirms them all yields one more than that."""
        sequence = chunk.sequence
        count = sequence.params.prompt_lookup_num_tokens
        if not count and self._draft_model is not None:
            count = self._draft_model.num_speculative_tokens
        if not count or sequence.beams is not None or not chunk.is_sampled:
            return 0
        if sequence.window is not None:
            count = min(count, sequence.window.size - len(sequence) + sequence.num_dropped)
        return min(count, sequence.params.max_tokens - len(sequence.new_token_ids) - 1)


def confirm_drafts(sampler: Sampler, logits: Any, step: StepInput) -> None:
    """Go on with the sequences whose next tokens are those drafted: the logits (R, V) after them are there already."""
    num_tokens, running = 0, list(step.drafts)
    while running := [i for i in running if _is_confirmed(step.chunks[i], step.drafts[i], num_tokens)]:
        num_tokens += 1
        sequences = [step.chunks[i].sequence for i in running]
        tokens = sampler.sample(logits[[step.last_rows[i] + num_tokens for i in running]], sequences)
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.take(token)
            sequence.advance(1)


def _is_confirmed(chunk: Chunk, draft: list[int], index: int) -> bool:
    """Whether the token that the chunk's sequence has just been given is draft[index], and not its last."""
    if index == len(draft) or chunk.sequence.is_finished:
        return False
    return chunk.sequence.new_token_ids[-1] == draft[index]


def propose_by_lookup(token_ids: list[int], count: int, max_ngram: int) -> list[int]:
    """Up to `count` tokens that followed the same last few tokens before.

    Of token_ids' last max_ngram tokens, or else of fewer, the first earlier occurrence decides; empty if even the last
    token is new. Source: Saxena, "Prompt Lookup Decoding" (2023), as in transformers' PromptLookupCandidateGenerator.
    """
    for size in range(min(max_ngram, len(token_ids) - 1), 0, -1):
        ngram = token_ids[-size:]
        start = token_ids.index(ngram[0])
        while start + size < len(token_ids):
            if token_ids[start : start + size] == ngram:
                return token_ids[start + size : start + size + count]
            start = token_ids.index(ngram[0], start + 1)
    return []
