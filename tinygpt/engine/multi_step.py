"""Multi-step: several decode steps in one call, where the backend chooses by itself and nobody has to look in between.

A GPU takes a decode step in less time than Python needs to prepare one and to wait for it, and takes the later ones
while tokens of the earlier ones are looked at. Beside a CPU's step, Python costs a tenth. The tokens are those of
single steps: a sequence that turns out to have ended before the last of the steps takes none of the later ones.
"""

import numpy as np

from tinygpt.engine.scheduler import Chunk
from tinygpt.execution.batch import Batch
from tinygpt.execution.model_runner import ModelRunner
from tinygpt.request.sequence import Sequence
from tinygpt.sampling.metadata import gather_warpers
from tinygpt.sampling.sampler import Sampler, draws_of, sampled

STREAM_SECONDS = 0.05  # of decode steps in one call, where somebody may wait for a token
CALL_SECONDS = 0.1  # where all that is waited for is an end, with which the call ends, or Ctrl-C


class Pace:
    """How many decode steps fit into a time, by the last ones."""

    def __init__(self):
        self._seconds = float("inf")  # of a step

    def note(self, seconds: float, num_steps: int) -> None:
        self._seconds = seconds / num_steps

    def num_steps(self, seconds: float) -> int:
        """At least 1."""
        return max(1, int(seconds / self._seconds)) if self._seconds else 1


def num_steps(runner: ModelRunner, sampler: Sampler, chunks: list[Chunk], max_model_len: int, num_in_time: int) -> int:
    """How many steps may be taken at once for these chunks; 1: one step, looked at before the next.

    num_in_time: as the runner's `steps_at_once` takes it.
    """
    steps = runner.steps_at_once(len(chunks), num_in_time)
    if steps == 1:
        return 1
    for chunk in chunks:
        sequence = chunk.sequence
        if not chunk.is_sampled or chunk.count > 1 or chunk.num_prompt_logits or sequence.beams is not None:
            return 1
        if sequence.window is not None or not sampler.is_drawn_alone(sequence):
            return 1
        room = max_model_len - sequence.num_cached
        steps = min(steps, room, sequence.params.max_tokens - len(sequence.new_token_ids))
    return steps


def run_steps(runner: ModelRunner, chunks: list[Chunk], steps: int) -> int:
    """Run so many steps, or fewer if a sequence ends, and give each sequence its tokens up to the one that ends it.
    Returns how many they were."""
    sequences = [chunk.sequence for chunk in chunks]
    starts, slots = [s.num_cached for s in sequences], [s.slot for s in sequences]
    batch = Batch.of([s.next_token_ids(1) for s in sequences], starts, slots)
    warpers = gather_warpers([s.sampling_state for s in sequences])
    taken = 0
    for token_ids in runner.multi_step(batch, warpers, *draws_of(sequences), steps, _ends(runner, sequences)):  # (S,)
        taken += 1
        for sequence, token_id in zip(sequences, token_ids.tolist(), strict=True):
            if sequence.is_finished:
                continue
            sequence.take(sampled(token_id, sequence))
            if token_id >= 0:
                sequence.advance(1)
            if sequence.is_finished:
                runner.stop_early(True)  # its slot is another's, or who waits for it is told
    return taken


def _ends(runner: ModelRunner, sequences: list[Sequence]) -> np.ndarray:
    """The tokens (E,) behind which one of the sequences may have ended, int32."""
    ends = frozenset().union(*(sequence.end_token_ids for sequence in sequences))
    return np.array([token_id for token_id in ends if token_id < runner.config.vocab_size], np.int32)
