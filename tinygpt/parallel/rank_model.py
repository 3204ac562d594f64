"""RankModel: what one rank has of a model, and its share of each step. All ranks call the same methods in one order."""

from dataclasses import replace
from typing import Any

import numpy as np

from tinygpt.engine_config import EngineConfig
from tinygpt.errors import TinyGPTError
from tinygpt.execution.batch import NO_EMBEDS, Batch
from tinygpt.execution.model_source import ModelSource
from tinygpt.kernels.cpu import rank as kernels
from tinygpt.parallel.cut import part_of_rank
from tinygpt.parallel.layout import Layout
from tinygpt.parallel.world import Group, World

NO_ROWS = np.empty(0, np.int32)


class RankModel:
    """Shapes: N new tokens, R rows whose logits are wanted, V vocabulary, L layers, H heads, D head size, C n_embd."""

    def __init__(
        self, world: World, group: Group | None, layout: Layout, source: ModelSource, sizes: EngineConfig, threads: int
    ):
        """Load this rank's part. group: those that share its layers, if any do. Raises as ModelRunner does."""
        self._world, self._group, self._layout, self._config = world, group, layout, source.config
        self._backend, self._file = source.backend, source.file
        self._stage, self._tensor_rank = layout.place_of(world.rank)
        self.part = part_of_rank(layout, world.rank, source.config, source.dtype)
        self._params = source.load_part(threads, self.part, kernels.load_part)
        slots = sizes.num_slots, sizes.max_model_len
        self._kv_cache = source.backend.new_kv_cache(self.part, *slots, source.kv_cache_dtype)
        steps = sizes.max_num_batched_tokens, sizes.max_num_logits
        allgather = None if group is None else group.allgather
        self._workspace = kernels.workspace_of_part(self.part, *steps, threads, source.dtype, allgather)
        group_ranks = layout.tensor_group(world.rank)
        vocab_parts = [part_of_rank(layout, r, source.config, source.dtype).vocab for r in group_ranks]
        self._vocab_parts, self._vocab_starts = vocab_parts, np.array([part.start for part in vocab_parts])
        self._rows = np.empty((sizes.max_num_batched_tokens, source.config.n_embd), np.float32)
        if world.rank == 0:
            self._logits = np.empty((sizes.max_num_logits, source.config.vocab_size), np.float32)

    def forward(self, batch: Batch) -> np.ndarray | None:
        """Take a step. Logits (R, V), valid until the next one, on rank 0."""
        rows = batch.logit_rows if self.part.is_last else NO_ROWS
        logits = self._backend.forward(
            self._params, replace(self._with_input(batch), logit_rows=rows), self._kv_cache, self._workspace
        )
        self._pass_on(batch)
        return self._collect(logits, batch.logit_rows.size)

    def trace(self, batch: Batch) -> tuple[np.ndarray, np.ndarray] | None:
        """Take a step. Hidden states (L + 1, N, C) and queries (L, N, C), on rank 0."""
        batch = replace(self._with_input(batch), logit_rows=NO_ROWS)
        hidden, queries = self._backend.trace(self._params, batch, self._kv_cache, self._workspace)
        self._pass_on(batch)
        hidden = hidden if self.part.is_last else hidden[:-1]
        found = self._world.gather_objects((hidden if self._tensor_rank == 0 else None, queries))
        if found is None:
            return None
        hidden = [part for part, _ in found if part is not None]
        return np.concatenate(hidden), self._joined([queries for _, queries in found], 2)

    def copy_positions(self, source_slot: int, target_slot: int, start: int, stop: int) -> None:
        self._backend.copy_positions(self._kv_cache, source_slot, target_slot, start, stop)

    def read_positions(self, slot: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Keys and values (L, H, stop - start, D), on rank 0."""
        mine = self._backend.read_positions(self._kv_cache, slot, start, stop, self.part.head_size)
        found = self._world.gather_objects(mine)
        return None if found is None else tuple(self._joined([pair[i] for pair in found], 1) for i in (0, 1))

    def write_positions(self, slot: int, start: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Put this rank's share of keys and values (L, H, n, D) into a slot."""
        layers, heads = (slice(r.start, r.stop) for r in (self.part.layers, self.part.heads))
        self._backend.write_positions(self._kv_cache, slot, start, keys[layers, heads], values[layers, heads])

    def check_file(self) -> None:
        """CheckpointError if the weights are mapped from a file that was cut short."""
        if self._file is not None:
            self._file.check_whole()

    def _with_input(self, batch: Batch) -> Batch:
        """The batch with what the first of this rank's layers works on."""
        count = batch.token_ids.size
        if self._stage > 0:
            x = self._rows[:count]
            self._world.receive(x, self._layout.rank_at(self._stage - 1, self._tensor_rank))
            return replace(batch, token_ids=-1 - np.arange(count, dtype=np.int32), embeds=x)
        if self._group is None:
            return batch
        # Each rank has the embeddings of some tokens; those that a soft prompt stands for are rank 0's.
        owners = np.maximum(np.searchsorted(self._vocab_starts, batch.token_ids, side="right") - 1, 0)
        order = np.argsort(owners, kind="stable")
        mine = self._own_rows(batch, batch.token_ids[owners == self._tensor_rank])
        rows = self._rows[:count]
        self._group.gather_rows(mine, rows, np.bincount(owners, minlength=self._layout.tensor_size).tolist())
        token_ids = np.empty(count, np.int32)
        token_ids[order] = -1 - np.arange(count, dtype=np.int32)
        return replace(batch, token_ids=token_ids, embeds=rows)

    def _own_rows(self, batch: Batch, token_ids: np.ndarray) -> np.ndarray:
        found = kernels.embedded(self._params, np.maximum(token_ids - self.part.vocab.start, 0))  # (n, C)
        if batch.embeds is not NO_EMBEDS and batch.embeds.size:
            given = np.flatnonzero(token_ids < 0)
            found[given] = batch.embeds[-1 - token_ids[given]]
        return np.ascontiguousarray(found, np.float32)

    def _pass_on(self, batch: Batch) -> None:
        """Give the next stage what it goes on with."""
        if self._group is not None and self._workspace.buffers.ranks.status[0]:
            raise TinyGPTError("another rank is gone.")
        if not self.part.is_last:
            x = kernels.hidden_rows(self._workspace, batch.token_ids.size)
            self._world.send(x, self._layout.rank_at(self._stage + 1, self._tensor_rank))

    def _collect(self, logits: np.ndarray, count: int) -> np.ndarray | None:
        """The logits of all tokens (R, V), on rank 0."""
        if self._world.rank and self.part.is_last:
            for row in logits[:count]:
                self._world.send(row, 0)
        if self._world.rank:
            return None
        found = self._logits[:count]
        for tensor_rank, tokens in enumerate(self._vocab_parts):
            source = self._layout.rank_at(self._layout.pipeline_size - 1, tensor_rank)
            if source == 0:
                found[:, tokens.start : tokens.stop] = logits
                continue
            for row in found:  # each where it belongs, so that nothing is copied twice
                self._world.receive(row[tokens.start : tokens.stop], source)
        return found

    def _joined(self, parts: list[Any], axis: int) -> np.ndarray:
        """What all ranks have, by rank: joined along `axis` within a stage, and stage after stage."""
        size = self._layout.tensor_size
        stages = [np.concatenate(parts[i : i + size], axis=axis) for i in range(0, len(parts), size)]
        return np.concatenate(stages)
