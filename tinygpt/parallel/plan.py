"""What rank 0 tells the others to do next: one array of integers, of one size for all steps of a model."""

from enum import IntEnum
from itertools import pairwise

import numpy as np

from tinygpt.config import EngineConfig
from tinygpt.kernels.batch import Batch


class Order(IntEnum):
    """The first number of a plan."""

    FORWARD = 1  # a batch follows
    TRACE = 2  # a batch follows
    COPY = 3  # source slot, target slot, start, stop
    READ = 4  # slot, start, stop
    WRITE = 5  # slot, start; an object follows: keys and values
    CLOSE = 6  # forget the model
    OPEN = 7  # an object follows: an Opening
    END = 8  # there will be no other model


HEAD = 8  # integers before a batch
NO_PLAN = 8  # integers of a plan while there is no model


def plan_size(sizes: EngineConfig) -> int:
    """Integers of the largest plan."""
    tokens, sequences = sizes.max_num_batched_tokens, sizes.max_num_seqs + 1
    return HEAD + 2 * tokens + 3 * sequences + 1 + sizes.max_num_logits


def put_numbers(plan: np.ndarray, order: Order, *numbers: int) -> None:
    plan[: 1 + len(numbers)] = order, *numbers


def put_batch(plan: np.ndarray, order: Order, batch: Batch) -> None:
    """All of a batch but its embeds, which rank 0 alone needs."""
    put_numbers(plan, order, batch.token_ids.size, batch.slots.size, batch.logit_rows.size)
    arrays = batch.token_ids, batch.positions, batch.seq_starts, batch.slots, batch.context_lens, batch.logit_rows
    whole = np.concatenate(arrays)
    plan[HEAD : HEAD + whole.size] = whole


def batch_of(plan: np.ndarray) -> Batch:
    """The batch that was put into a plan; copies."""
    tokens, sequences, rows = plan[1:4].tolist()
    bounds = np.cumsum([HEAD, tokens, tokens, sequences + 1, sequences, sequences, rows])
    parts = [plan[start:stop].copy() for start, stop in pairwise(bounds.tolist())]
    return Batch(*parts, np.empty((0, 0), np.float32))
