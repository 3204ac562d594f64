"""A model on several ranks with the interface of a ModelRunner; how ranks are joined."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..engine.model_runner import ModelRunner, ModelSource
from ..errors import RequestError
from ..kernels.backend import Hooks
from ..kernels.batch import Batch
from ..llm_args import EngineConfig, LLMArgs
from .cut import check_cut, run_groups
from .driver import (
    Command,
    LoadCommand,
    RankZeroDriver,
    driver_of,
    follow_as_process,
    load_together,
    rank_threads,
)
from .launch import Layout
from .mpi import World
from .rank_model import RankModel

GROUP_STEPS = 4  # decode steps of a pipeline at once; a new sequence waits for all of them
LEAST_GROUP = 8  # sequences: each group reads the weights


class ParallelRunner(ModelRunner):
    """Runs steps on all ranks, from one thread. Rank 0 alone samples."""

    def __init__(self, lead: RankZeroDriver, source: ModelSource, opening: LoadCommand):
        """Raise CheckpointError or RequestError with the rank that fails."""
        self.config = source.config
        self.dtype = source.dtype
        self.kv_cache_dtype = source.kv_cache_dtype
        self._backend = source.backend
        self._source = source
        self._lead = lead
        self._threads = rank_threads(opening.args.threads, lead.world)
        self._stages = opening.args.pipeline_parallel_size
        self._workspace = None
        self._kv_cache = None
        self._file = source.file
        with lead.order(opens_model=True):
            lead.tell(Command.OPEN)
            lead.world.broadcast_object(opening)
            loaded = load_together(lead.world, opening, source)
            if isinstance(loaded, RankModel):
                lead.note_model(opening.sizes)
        if not isinstance(loaded, RankModel):
            raise loaded
        self._params = loaded

    def forward(self, batch: Batch, look: Hooks | None = None) -> Any:
        """Run one step. `look` sees streams and queries, after the step, and changes nothing."""
        if look is None:
            return self._run(Command.FORWARD, batch=batch)
        if look.changes:
            raise RequestError("need an LLM of one process, without ranks or Ray.", "edits")
        for (kind, layer), rows in self._run(Command.TRACE, batch=batch).items():
            look(kind, layer, rows)
        return None

    def final_norm(self, x: np.ndarray) -> np.ndarray:
        return self._run(Command.FINAL_NORM, here=[x])

    def stop_early(self, is_wanted: bool) -> None:
        """Do nothing: stages finish the steps that they have begun."""

    def choose_num_steps(self, num_sequences: int, num_in_time: int) -> int:
        return GROUP_STEPS if self._stages > 1 and num_sequences >= self._stages * LEAST_GROUP else 1

    def multi_step(
        self, batch: Batch, warpers: Any, seeds: np.ndarray, indices: np.ndarray, steps: int, ends: np.ndarray
    ) -> Iterable[np.ndarray]:
        def begin(model: RankModel, group: Batch, first_row: int) -> Callable[[], np.ndarray]:
            self._lead.tell(Command.FORWARD, batch=group)
            return model.begin(group, first_row)

        def choose(logits: np.ndarray, rows: slice, step: int) -> np.ndarray:
            own = type(warpers)(*(column[rows] for column in warpers))
            return self.sample(logits, own, seeds[rows], indices[rows], batch.context_lens[rows] + step)

        with self._order() as model:
            return run_groups(batch, self._stages, steps, partial(begin, model), choose)

    def copy_positions(self, source_slot: int, target_slot: int, start: int, stop: int) -> None:
        self._run(Command.COPY_POSITIONS, source_slot, target_slot, start, stop)

    def read_positions(self, slot: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return self._run(Command.READ_POSITIONS, slot, start, stop)

    def write_positions(self, slot: int, start: int, keys: np.ndarray, values: np.ndarray) -> None:
        self._run(Command.WRITE_POSITIONS, slot, start, here=[(keys, values)])

    def close(self) -> None:
        if self._params is not None:
            self._params = None
            self._lead.close_model()

    def _run(
        self, command: Command, *numbers: int, batch: Batch | None = None, here: Sequence[Any] = ()
    ) -> Any:
        """Run a command on all ranks. here: rank 0's further arguments."""
        with self._order() as model:
            self._lead.tell(command, *numbers, batch=batch)
            return command.run(model, *(numbers if batch is None else [batch]), *here)

    @contextmanager
    def _order(self) -> Iterator[RankModel]:
        self._params.check_file()
        with self._lead.order():
            yield self._params


@dataclass(frozen=True)
class Ranks:
    """The ranks of this program, seen from rank 0."""

    lead: RankZeroDriver
    layout: Layout

    def threads(self, threads: int | None) -> int:
        return rank_threads(threads, self.lead.world)

    def new_runner(self, source: ModelSource, args: LLMArgs, sizes: EngineConfig) -> ParallelRunner:
        check_cut(self.layout, source.config, source.dtype, args.device)
        return ParallelRunner(self.lead, source, LoadCommand(args, sizes))


def join(layout: Layout, world: World) -> Ranks:
    """Return the ranks on rank 0. Other ranks follow until rank 0 ends, then exit."""
    if world.rank:
        follow_as_process(world)
        sys.exit(0)
    return Ranks(driver_of(world), layout)


def open_sources(args: LLMArgs, dtypes: Sequence[str]) -> list[ModelSource]:
    """Return the checkpoint, opened once, in each dtype."""
    sources = ModelSource.open_all(args, dtypes)
    for source in sources:
        check_cut(args.layout, source.config, source.dtype, args.device)
    return sources
