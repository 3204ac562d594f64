"""The part of a model on one rank: how a model and its steps are cut, and RankModel, which computes its part."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from ..engine.model_runner import ModelSource, check_memory
from ..errors import RequestError, TinyGPTError
from ..kernels.backend import Batch, Hooks
from ..kernels.cpu.arrays import can_share
from ..kernels.numbers import even_bounds
from ..kernels.rank_share import RankBackend, RankShare
from ..llm_args import EngineConfig
from ..weights.config import ModelConfig
from .mpi import Layout, World

# Structure of other models than GPT-2: a field with any value, or with one.
SUPPORTED = {
    ("norm_placement", "post"),
    ("positions", "alibi"),
    ("embed_norm", True),
    ("final_norm", False),
    "embed_scale",
    "local_layers",
    "window_size",
}
RANK_DEVICES = ("cpu", "cuda")
TOKENS_OF_A_READING = 16  # computed while a stage reads its weights
NO_ROWS = np.empty(0, np.int32)
HEADS = ("q", "k")  # kinds of points (N, H, D), of which each rank has its heads
SHOWN = ("resid_pre", *HEADS, "resid_post")  # kinds of points that are gathered
Place = tuple[str, int]  # a kind of point and a layer


def check_cut(layout: Layout, config: ModelConfig, dtype: str, device: str) -> None:
    """Raise RequestError if a model cannot be split."""
    if layout.size == 1:
        return
    sizes = (
        f"tensor_parallel_size is {layout.tensor_size} and pipeline_parallel_size is {layout.pipeline_size}"
    )
    if device not in RANK_DEVICES:
        raise RequestError(f"device is {device!r}, {sizes}: several ranks compute on the CPU or on GPUs.")
    if unsupported := config.unsupported(SUPPORTED):
        named = ", ".join(f"{name} is {value!r}" for name, value in unsupported.items())
        raise RequestError(f"this model's {named}, which several ranks cannot run: run it on 1.")
    least = {
        "layers: each stage": ("pipeline_parallel_size", layout.pipeline_size, config.n_layer),
        "heads: each rank": ("tensor_parallel_size", layout.tensor_size, config.n_head),
        "hidden units: each rank": ("tensor_parallel_size", layout.tensor_size, config.inner_size),
        "tokens: each rank": ("tensor_parallel_size", layout.tensor_size, config.vocab_size),
    }
    for parts, (name, size, count) in least.items():
        if size > count:
            raise RequestError(f"is {size} and this model has {count} {parts} takes one or more.", name)
    if layout.tensor_size > 1 and device == "cpu" and not can_share(config, dtype):
        raise RequestError(
            f"is {layout.tensor_size} and this model's {config.n_head} heads of {config.head_size} and "
            f"{config.inner_size} hidden units cannot be shared in {dtype} with the same results: use another dtype, "
            "or pipeline_parallel_size.",
            "tensor_parallel_size",
        )


def share_of_rank(
    backend: RankBackend, layout: Layout, rank: int, config: ModelConfig, dtype: str
) -> RankShare:
    stage, tensor_rank = layout.place_of(rank)
    layers = stage_layers(config, layout.pipeline_size)[stage]
    return backend.share_of(config, dtype, layers, tensor_rank, layout.tensor_size)


def stage_layers(config: ModelConfig, stages: int) -> list[range]:
    """Return the layers of each stage, with the head in the last: the largest has fewest bytes."""
    layers = config.n_layer
    if stages == 1:
        return [range(layers)]
    layer = config.n_embd * (4 * config.n_embd + 2 * config.inner_size)
    head = config.n_embd * config.vocab_size
    others = stages - 1

    def largest(in_last: int) -> int:
        return max(in_last * layer + head, -(-(layers - in_last) // others) * layer)

    in_last = min(range(1, layers - others + 1), key=largest)
    bounds = [*even_bounds(layers - in_last, others), layers]
    return [range(*pair) for pair in pairwise(bounds)]


def micro_batches(batch: Batch, stages: int) -> list[Batch]:
    """Return the runs of tokens that pass the stages soonest, in order.

    G runs of N tokens take G + P - 1 turns of R + N / G, R being TOKENS_OF_A_READING: least for G**2 = (P - 1) N / R.
    """
    tokens = batch.token_ids.size
    count = max(math.isqrt((stages - 1) * tokens // TOKENS_OF_A_READING), 1)
    bounds = [tokens * i // count for i in range(count + 1)]
    return [batch] if count == 1 else [tokens_of(batch, *pair) for pair in pairwise(bounds)]


def tokens_of(batch: Batch, start: int, stop: int) -> Batch:
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


class ShownRows:
    """Hooks that copy the rows of some places."""

    changes = False
    first = 0

    def __init__(self, points: set[Place]):
        self.points = points
        self._rows: dict[Place, list[np.ndarray]] = {}

    def __call__(self, kind: str, layer: int, array: np.ndarray, sequence: int | None = None) -> None:
        if (kind, layer) in self.points:
            self._rows.setdefault((kind, layer), []).append(array.astype(np.float32))

    def joined(self) -> dict[Place, np.ndarray]:
        return {place: np.concatenate(rows) for place, rows in self._rows.items()}


class RankModel:
    """All ranks call the same methods in one order.

    allgather: World's, of the ranks that share the rank's layers, or None.
    rooms: of all ranks, as of RankBackend.gpu_room, before any of them loads.
    Shapes: N new tokens, R rows of logits, V vocabulary, L layers, H heads, D head size, C n_embd.
    """

    def __init__(
        self,
        world: World,
        layout: Layout,
        allgather: Any,
        source: ModelSource,
        sizes: EngineConfig,
        threads: int,
        rooms: list[tuple[str, int] | None],
    ):
        self._world = world
        self._layout = layout
        self._config = source.config
        self._backend = source.backend
        self._file = source.file
        self._stage, self._tensor_rank = layout.place_of(world.rank)
        self._shares = [
            share_of_rank(source.backend, layout, rank, source.config, source.dtype)
            for rank in range(layout.size)
        ]
        self.share = self._shares[world.rank]
        if (room := rooms[world.rank]) is not None:
            alike = [i for i, other in enumerate(rooms) if other is not None and other[0] == room[0]]
            free = min(rooms[i][1] for i in alike)
            check_memory(source, sizes, shares=[self._shares[i] for i in alike], free=free)
        self._params = source.load_params(threads, share=self.share)
        slots = sizes.num_slots, sizes.max_model_len
        self._kv_cache = source.backend.new_kv_cache(self.share, *slots, source.kv_cache_dtype)
        steps = sizes.max_num_batched_tokens, sizes.max_num_logits
        group = layout.tensor_group(world.rank)
        self._workspace = source.backend.new_workspace(
            source.config, *steps, threads, source.dtype, self.share, allgather
        )
        self._vocab_parts = [self._shares[rank].vocab for rank in group]
        self._vocab_starts = np.array([part.start for part in self._vocab_parts])
        self._rows = np.empty((sizes.max_num_batched_tokens, source.config.n_embd), np.float32)
        if world.rank == 0:
            self._logits = np.empty((sizes.max_num_logits, source.config.vocab_size), np.float32)

    def forward(self, batch: Batch) -> Any:
        """Run a step. Return logits (R, V) on rank 0, valid until the next step."""
        return self.begin(batch)()

    def begin(self, batch: Batch, first_row: int = 0, look: Hooks | None = None) -> Callable[[], Any]:
        """Start a step. Return a function that waits for the logits on rank 0.

        first_row: in a buffer that several steps share. look: sees this rank's layers, numbered from 0.
        """
        row = 0
        all_logits = None if self._world.rank else self._logits[first_row : first_row + batch.logit_rows.size]
        arriving = [] if all_logits is None else self._receive_logits(all_logits)
        for part in micro_batches(batch, self._layout.pipeline_size):
            rows = part.logit_rows if self.share.is_last else NO_ROWS
            logits = self._backend.forward(
                self._params,
                replace(self._with_input(part), logit_rows=rows),
                self._kv_cache,
                self._workspace,
                look,
            )
            self._pass_on(part)
            self._deliver(logits, None if all_logits is None else all_logits[row : row + len(logits)])
            row += len(logits)

        def finish() -> Any:
            for wait in arriving:
                wait()
            if all_logits is None:
                return None
            return self._backend.logits_of(self._workspace, all_logits, first_row)

        return finish

    def forward_with(
        self, batch: Batch, places: frozenset[Place]
    ) -> tuple[dict[Place, np.ndarray], Any] | None:
        """Run a step. Return the rows of the places, kinds of SHOWN with layers, and the logits (R, V), on rank 0."""
        first = self.share.layers.start
        is_mine = self._tensor_rank == 0  # streams are alike
        look = ShownRows(
            {
                (kind, layer - first)
                for kind, layer in places
                if layer in self.share.layers and (is_mine or kind in HEADS)
            }
        )
        finish = self.begin(batch, look=look)
        mine = {(kind, first + layer): rows for (kind, layer), rows in look.joined().items()}
        gathered = self._world.gather_objects(mine)
        logits = finish()
        if gathered is None:
            return None
        of_place: dict[Place, list[np.ndarray]] = {}
        for of_rank in gathered:
            for place, rows in of_rank.items():
                of_place.setdefault(place, []).append(rows)
        return {place: np.concatenate(shares, axis=1) for place, shares in of_place.items()}, logits

    def final_norm(self, x: np.ndarray) -> np.ndarray | None:
        """Return ln_f of rows (N, C) on rank 0, from the last stage, which has its weights."""
        mine = self._backend.final_norm(self._params, x) if self.share.is_last else None
        gathered = self._world.gather_objects(mine)
        return None if gathered is None else gathered[-1]

    def copy_positions(self, source_slot: int, target_slot: int, start: int, stop: int) -> None:
        self._backend.copy_positions(self._kv_cache, source_slot, target_slot, start, stop)

    def read_positions(self, slot: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return keys and values (L, H, stop - start, D) on rank 0."""
        mine = self._backend.read_positions(self._kv_cache, slot, start, stop, self.share.head_size)
        gathered = self._world.gather_objects(mine)
        if gathered is None:
            return None
        return tuple(self._joined([pair[i] for pair in gathered], 1) for i in (0, 1))

    def write_positions(self, slot: int, start: int, *whole: np.ndarray) -> None:
        """Write rank 0's `whole`, keys and values (L, H, n, D), into a slot, each rank its share."""
        shares = None
        if whole:
            cuts = [np.ix_(share.layers, share.heads) for share in self._shares]
            shares = [[array[cut] for array in whole] for cut in cuts]
        self._backend.write_positions(self._kv_cache, slot, start, *self._world.scatter_objects(shares))

    def check_file(self) -> None:
        if self._file is not None:
            self._file.check_whole()

    def _with_input(self, batch: Batch) -> Batch:
        count = batch.token_ids.size
        if self._stage > 0:
            x = self._rows[:count]
            self._world.receive(x, self._layout.rank_at(self._stage - 1, self._tensor_rank))
            return replace(batch, token_ids=-1 - np.arange(count, dtype=np.int32), embeds=x)
        if self._layout.tensor_size == 1:
            return batch
        return self._backend.share_embedding(self._workspace, batch, self._vocab_starts, self._tensor_rank)

    def _pass_on(self, batch: Batch) -> None:
        if self._workspace.has_lost_rank:
            raise TinyGPTError("another rank is gone.")
        if not self.share.is_last:
            x = self._backend.stream_of(self._workspace, batch.token_ids.size)
            self._world.send(x, self._layout.rank_at(self._stage + 1, self._tensor_rank))

    def _receive_logits(self, all_logits: np.ndarray) -> list[Callable[[], Any]]:
        """Start to receive before the step, to avoid a deadlock."""
        last = self._layout.pipeline_size - 1
        sources = [(self._layout.rank_at(last, i), tokens) for i, tokens in enumerate(self._vocab_parts)]
        return [
            self._world.receive_later(row[tokens.start : tokens.stop], source)
            for source, tokens in sources
            if source
            for row in all_logits
        ]

    def _deliver(self, logits: np.ndarray, all_logits: np.ndarray | None) -> None:
        if self._world.rank:
            for row in logits:
                self._world.send(row, 0)
        elif self.share.is_last:
            for row, into in zip(logits, all_logits, strict=True):
                into[: len(self.share.vocab)] = row

    def _joined(self, parts: list[Any], axis: int) -> np.ndarray:
        """Join within a stage along `axis`, then the stages."""
        size = self._layout.tensor_size
        stages = [np.concatenate(parts[i : i + size], axis=axis) for i in range(0, len(parts), size)]
        return np.concatenate(stages)
