"""How a model and its steps are cut.

In decode steps of a pipeline, each stage works on another group of sequences:

    stage 0   A1 B1 A2 B2 A3 B3        A1: group A's first step
    stage 1      A1 B1 A2 B2 A3 B3
"""

import math
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise

import numpy as np

from ..errors import RequestError
from ..kernels.batch import NO_EMBEDS, Batch
from ..kernels.cpu.arrays import RankShare, can_share, share_of
from ..weights.config import ModelConfig
from .launch import Layout

# Fields of ModelConfig that ranks support with any value.
KNOWN = {
    *("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "tie_word_embeddings"),
    *("activation_function", "layer_norm_epsilon", "bos_token_id", "eos_token_ids"),
    *("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"),
    *("embed_norm", "final_norm", "embed_scale"),
}
# Fields with these supported values.
KNOWN_VALUES = {"norm_placement": ("pre", "post"), "positions": ("learned", "alibi")}


def part_of_rank(layout: Layout, rank: int, config: ModelConfig, dtype: str) -> RankShare:
    stage, tensor_rank = layout.place_of(rank)
    layers = stage_layers(config, layout.pipeline_size)[stage]
    return share_of(config, dtype, layers, tensor_rank, layout.tensor_size)


def check_cut(layout: Layout, config: ModelConfig, dtype: str, device: str) -> None:
    """Raise RequestError if a model cannot be split."""
    if layout.size == 1:
        return
    if device != "cpu":
        sizes = f"tensor_parallel_size is {layout.tensor_size} and pipeline_parallel_size is {layout.pipeline_size}"
        raise RequestError(f"device is {device!r}, {sizes}: several ranks compute on the CPU alone.")
    unlike = {
        field.name: value
        for field in fields(config)
        if field.name not in KNOWN
        and (value := getattr(config, field.name)) not in KNOWN_VALUES.get(field.name, (field.default,))
    }
    if unlike:
        named = ", ".join(f"{name} is {value!r}" for name, value in unlike.items())
        raise RequestError(f"this model's {named}, which several ranks cannot run: run it on 1.")
    if layout.pipeline_size > config.n_layer:
        raise RequestError(
            f"is {layout.pipeline_size} and this model has {config.n_layer} layers: each stage takes one or more.",
            "pipeline_parallel_size",
        )
    if layout.tensor_size > 1 and not can_share(config, dtype):
        raise RequestError(
            f"is {layout.tensor_size} and this model's {config.n_head} heads of {config.head_size} and "
            f"{config.inner_size} hidden units cannot be shared in {dtype} with the same results: use another dtype, "
            "or pipeline_parallel_size.",
            "tensor_parallel_size",
        )


def stage_layers(config: ModelConfig, stages: int) -> list[range]:
    """Return the layers of each stage, with the head in the last: the largest has fewest bytes."""
    width, layers = config.n_embd, config.n_layer
    layer = width * (4 * width + 2 * config.inner_size)
    head = width * config.vocab_size
    if stages == 1:
        return [range(layers)]
    others = stages - 1

    def largest(in_last: int) -> int:
        return max(in_last * layer + head, -(-(layers - in_last) // others) * layer)

    in_last = min(range(1, layers - others + 1), key=largest)
    share, longer = divmod(layers - in_last, others)
    bounds = [i * share + min(i, longer) for i in range(stages)] + [layers]
    return [range(*pair) for pair in pairwise(bounds)]


def run_groups(
    batch: Batch,
    stages: int,
    steps: int,
    begin: Callable[[Batch, int], Callable[[], np.ndarray]],
    choose: Callable[[np.ndarray, slice, int], np.ndarray],
) -> np.ndarray:
    """Return tokens (steps, S) of a batch with one new token a sequence.

    begin(batch, first_row): starts a step, and returns a function that waits for its logits.
    """
    count = batch.token_ids.size
    groups = [slice(count * i // stages, count * (i + 1) // stages) for i in range(stages)]
    tokens = np.empty((steps, count), np.int32)
    waits = {}
    for step in range(steps + 1):
        for i, rows in enumerate(groups):
            if step:
                tokens[step - 1, rows] = choose(waits[i](), rows, step - 1)
            if step < steps:
                # If the logits were not finite, the token is 0 and is discarded.
                given = np.maximum(tokens[step - 1, rows], 0) if step else batch.token_ids[rows]
                waits[i] = begin(
                    _decode(given, batch.positions[rows] + np.int32(step), batch.slots[rows]), rows.start
                )
    return tokens


def _decode(token_ids: np.ndarray, positions: np.ndarray, slots: np.ndarray) -> Batch:
    bounds = np.arange(token_ids.size + 1, dtype=np.int32)
    return Batch(token_ids, positions, bounds, slots, positions + np.int32(1), bounds[:-1], NO_EMBEDS)


TOKENS_OF_A_READING = 16  # computed while a stage reads its weights


def micro_batches(batch: Batch, stages: int) -> list[Batch]:
    """Return the runs of tokens that pass the stages soonest, in order.

    G runs of N tokens take G + P - 1 turns of R + N / G, R being TOKENS_OF_A_READING: least for G**2 = (P - 1) N / R.
    """
    tokens = batch.token_ids.size
    count = max(math.isqrt((stages - 1) * tokens // TOKENS_OF_A_READING), 1)
    bounds = [tokens * i // count for i in range(count + 1)]
    return [batch] if count == 1 else [_run(batch, *pair) for pair in pairwise(bounds)]


def _run(batch: Batch, start: int, stop: int) -> Batch:
    first = np.searchsorted(batch.seq_starts, start, "right") - 1  # of the sequences
    last = np.searchsorted(batch.seq_starts, stop, "left")
    bounds = np.clip(batch.seq_starts[first : last + 1], start, stop)
    rows = batch.logit_rows[(start <= batch.logit_rows) & (batch.logit_rows < stop)]
    return Batch(
        token_ids=batch.token_ids[start:stop],
        positions=batch.positions[start:stop],
        seq_starts=bounds - np.int32(start),
        slots=batch.slots[first:last],
        context_lens=batch.positions[bounds[1:] - 1] + np.int32(1),
        logit_rows=rows - np.int32(start),
        embeds=batch.embeds,
    )
