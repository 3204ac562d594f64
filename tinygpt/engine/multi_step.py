"""Multi-step: several decode steps in one call, where the backend samples by itself and nobody has to look in between.

A GPU takes a decode step in less time than Python needs to prepare one and to wait for it, and takes the later ones
while tokens of the earlier ones are looked at. The tokens are those of single steps: a sequence that turns out to have
ended before the last of the steps takes none of the later ones.
"""

from tinygpt.engine.scheduler import Chunk
from tinygpt.execution.batch import Batch
from tinygpt.execution.model_runner import ModelRunner
from tinygpt.sampling.metadata import gather_warpers
from tinygpt.sampling.sampler import Sampler, draws_of, sampled


def num_steps(runner: ModelRunner, sampler: Sampler, chunks: list[Chunk], max_model_len: int) -> int:
    """How many steps may be taken at once for these chunks; 1: one step, looked at before the next."""
    steps = runner.steps_at_once(len(chunks)) if chunks else 1
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


def run_steps(runner: ModelRunner, chunks: list[Chunk], steps: int) -> None:
    """Run so many steps, and give each sequence its tokens up to the one that ends it."""
    sequences = [chunk.sequence for chunk in chunks]
    starts, slots = [s.num_cached for s in sequences], [s.slot for s in sequences]
    batch = Batch.of([s.next_token_ids(1) for s in sequences], starts, slots)
    warpers = gather_warpers([s.sampling_state for s in sequences])
    for token_ids in runner.multi_step(batch, warpers, *draws_of(sequences), steps):  # (S,)
        for sequence, token_id in zip(sequences, token_ids.tolist(), strict=True):
            if sequence.is_finished:
                continue
            sequence.take(sampled(token_id, sequence))
            if token_id >= 0:
                sequence.advance(1)
