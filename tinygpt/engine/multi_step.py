"""Running ahead: several decode steps at once, where the backend can choose tokens by itself and nobody has to look.

A card takes a decode step in less time than Python needs to make one and to wait for it. What is chosen is the same
as step by step: a sequence that turns out to have ended before the last of the steps takes none of the later tokens.
"""

from types import ModuleType

import numpy as np

from tinygpt.engine.scheduler import Chunk
from tinygpt.sampling.metadata import gather_warpers
from tinygpt.sampling.sampler import NOT_FINITE, is_drawn_alone

# Steps at once: few enough that a new request, or a reader of a stream, waits some milliseconds at most.
MAX_STEPS = 16


def num_steps_ahead(backend: ModuleType, chunks: list[Chunk], vocab_size: int, max_model_len: int) -> int:
    """How many steps may be taken at once for these chunks; 1: one step, looked at before the next."""
    if backend.multi_step is None:
        return 1
    steps = MAX_STEPS
    for chunk in chunks:
        sequence = chunk.sequence
        if not chunk.is_sampled or chunk.count > 1 or chunk.num_prompt_logits or sequence.beams is not None:
            return 1
        if sequence.window is not None or not is_drawn_alone(sequence, vocab_size):
            return 1
        room = max_model_len - sequence.num_cached
        steps = min(steps, room, sequence.params.max_tokens - len(sequence.new_token_ids))
    return steps


def take_tokens(chunks: list[Chunk], token_ids: np.ndarray) -> None:
    """Give each sequence its tokens of (steps, S), up to the one that ends it."""
    for of_step in token_ids.tolist():
        for chunk, token_id in zip(chunks, of_step, strict=True):
            sequence = chunk.sequence
            if sequence.is_finished:
                continue
            if token_id < 0:
                sequence.fail(NOT_FINITE.format(len(sequence) - 1))
                continue
            sequence.append(token_id)
            sequence.num_cached += 1


def draws_of(chunks: list[Chunk]) -> tuple:
    """What the sequences' tokens are drawn by: their warpers, seeds and sample indices."""
    sequences = [chunk.sequence for chunk in chunks]
    seeds, indices = ([getattr(s, name) for s in sequences] for name in ("seed", "index"))
    return gather_warpers([s.controls for s in sequences]), np.array(seeds, np.uint64), np.array(indices, np.uint64)
