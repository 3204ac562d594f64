"""The part of a model on one rank. All ranks call the same methods in one order."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..engine.model_runner import ModelSource
from ..errors import TinyGPTError
from ..kernels.batch import Batch
from ..kernels.cpu.workspace import new_workspace, share_embedding
from ..llm_args import EngineConfig
from ..look.captures import Place, captured
from .cut import micro_batches, part_of_rank
from .launch import Layout
from .mpi import World

NO_ROWS = np.empty(0, np.int32)


class RankModel:
    """The part of a model on one rank. allgather: World's, of the ranks that share its layers, or None.

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
    ):
        self._world = world
        self._layout = layout
        self._config = source.config
        self._backend = source.backend
        self._file = source.file
        self._stage, self._tensor_rank = layout.place_of(world.rank)
        self._parts = [part_of_rank(layout, rank, source.config, source.dtype) for rank in range(layout.size)]
        self.part = self._parts[world.rank]
        self._params = source.load_part(threads, self.part)
        slots = sizes.num_slots, sizes.max_model_len
        self._kv_cache = source.backend.new_kv_cache(self.part, *slots, source.kv_cache_dtype)
        steps = sizes.max_num_batched_tokens, sizes.max_num_logits
        self._workspace = new_workspace(self.part, *steps, threads, source.dtype, allgather)
        vocab_parts = [self._parts[rank].vocab for rank in layout.tensor_group(world.rank)]
        self._vocab_parts = vocab_parts
        self._vocab_starts = np.array([part.start for part in vocab_parts])
        self._rows = np.empty((sizes.max_num_batched_tokens, source.config.n_embd), np.float32)
        if world.rank == 0:
            self._logits = np.empty((sizes.max_num_logits, source.config.vocab_size), np.float32)

    def forward(self, batch: Batch) -> np.ndarray | None:
        """Run a step. Return logits (R, V) on rank 0, valid until the next step."""
        return self.begin(batch)()

    def begin(self, batch: Batch, first_row: int = 0) -> Callable[[], np.ndarray | None]:
        """Start a step. Return a function that waits for the logits on rank 0.

        first_row: in a buffer that several steps share.
        """
        row = 0
        found = None if self._world.rank else self._logits[first_row : first_row + batch.logit_rows.size]
        arriving = [] if found is None else self._receive_logits(found)
        for part in micro_batches(batch, self._layout.pipeline_size):
            rows = part.logit_rows if self.part.is_last else NO_ROWS
            logits = self._backend.forward(
                self._params,
                replace(self._with_input(part), logit_rows=rows),
                self._kv_cache,
                self._workspace,
            )
            self._pass_on(part)
            self._deliver(logits, None if found is None else found[row : row + len(logits)])
            row += len(logits)

        def finish() -> np.ndarray | None:
            for wait in arriving:
                wait()
            return found

        return finish

    def trace(self, batch: Batch) -> dict[Place, np.ndarray] | None:
        """Run a step. Return the streams (N, C) and queries (N, H, D) on rank 0."""
        layers = range(len(self.part.layers))
        places = [(kind, layer) for layer in layers for kind in ("resid_pre", "q", "resid_post")]
        given = replace(self._with_input(batch), logit_rows=NO_ROWS)
        on = self._params, given, self._kv_cache, self._workspace
        rows = captured(lambda _, look: self._backend.forward(*on, look), [batch], places)
        self._pass_on(batch)
        found = self._world.gather_objects(
            {
                (kind, layer + self.part.layers.start): each
                for (kind, layer), each in zip(places, rows, strict=True)
            }
        )
        if found is None:
            return None
        shares: dict[Place, list[np.ndarray]] = {}
        for of_rank in found:
            for place, each in of_rank.items():
                shares.setdefault(place, []).append(each)
        return {
            place: np.concatenate(each, axis=1) if place[0] == "q" else each[0]
            for place, each in shares.items()
        }

    def final_norm(self, x: np.ndarray | None = None) -> np.ndarray | None:
        """Return ln_f of rank 0's rows (N, C) on rank 0, from the last stage, which has its weights."""
        x = self._world.broadcast_object(x)
        mine = self._backend.final_norm(self._params, x) if self.part.is_last else None
        found = self._world.gather_objects(mine)
        return None if found is None else found[-1]

    def copy_positions(self, source_slot: int, target_slot: int, start: int, stop: int) -> None:
        self._backend.copy_positions(self._kv_cache, source_slot, target_slot, start, stop)

    def read_positions(self, slot: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return keys and values (L, H, stop - start, D) on rank 0."""
        mine = self._backend.read_positions(self._kv_cache, slot, start, stop, self.part.head_size)
        found = self._world.gather_objects(mine)
        return None if found is None else tuple(self._joined([pair[i] for pair in found], 1) for i in (0, 1))

    def write_positions(
        self, slot: int, start: int, whole: tuple[np.ndarray, np.ndarray] | None = None
    ) -> None:
        """Write keys and values (L, H, n, D) of rank 0 into a slot, each rank its share."""
        shares = None
        if whole is not None:
            cuts = [
                (slice(p.layers.start, p.layers.stop), slice(p.heads.start, p.heads.stop))
                for p in self._parts
            ]
            shares = [[np.ascontiguousarray(array[cut]) for array in whole] for cut in cuts]
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
        token_ids = share_embedding(self._workspace, batch.token_ids, self._vocab_starts, self._tensor_rank)
        return replace(batch, token_ids=token_ids)

    def _pass_on(self, batch: Batch) -> None:
        if self._layout.tensor_size > 1 and self._workspace.buffers.ranks.status[0]:
            raise TinyGPTError("another rank is gone.")
        if not self.part.is_last:
            x = self._workspace.buffers.x[: batch.token_ids.size]
            self._world.send(x, self._layout.rank_at(self._stage + 1, self._tensor_rank))

    def _receive_logits(self, found: np.ndarray) -> list[Callable[[], Any]]:
        """Start to receive before the step, to avoid a deadlock."""
        last = self._layout.pipeline_size - 1
        sources = [(self._layout.rank_at(last, i), tokens) for i, tokens in enumerate(self._vocab_parts)]
        return [
            self._world.receive_later(row[tokens.start : tokens.stop], source)
            for source, tokens in sources
            if source
            for row in found
        ]

    def _deliver(self, logits: np.ndarray, found: np.ndarray | None) -> None:
        if self._world.rank:
            for row in logits:
                self._world.send(row, 0)
        elif self.part.is_last:
            found[:, : len(self.part.vocab)] = logits

    def _joined(self, parts: list[Any], axis: int) -> np.ndarray:
        """Join within a stage along `axis`, then the stages."""
        size = self._layout.tensor_size
        stages = [np.concatenate(parts[i : i + size], axis=axis) for i in range(0, len(parts), size)]
        return np.concatenate(stages)
