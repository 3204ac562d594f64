"""Rank 0 leads: its commands to the other ranks, how they follow, and a model on all of them as a ModelRunner.

In decode steps of a pipeline, each stage works on another group of sequences:

    stage 0   A1 B1 A2 B2 A3 B3        A1: group A's first step
    stage 1      A1 B1 A2 B2 A3 B3
"""

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from ..engine.model_runner import ModelRunner, ModelSource, load_backend
from ..errors import CheckpointError, RequestError, TinyGPTError
from ..hardware import local_rank
from ..kernels.backend import NO_EMBEDS, Batch, Hooks
from ..llm_args import EngineConfig, LLMArgs
from .mpi import Layout, World, end_all, rank_threads
from .rank import SHOWN, RankModel, check_cut, tokens_of

HEAD = 8  # integers of a plan before a batch, or without a model
GROUP_STEPS = 4  # decode steps of a pipeline at once; a new sequence waits for all of them
LEAST_GROUP = 8  # sequences: each group reads the weights


class Command(IntEnum):
    FORWARD = 1  # a batch follows
    CALL = 2  # an object follows: a method of RankModel and its arguments
    CLOSE = 3
    OPEN = 4  # an object follows: a LoadCommand
    END = 5


@dataclass(frozen=True)
class LoadCommand:
    args: LLMArgs
    sizes: EngineConfig


def plan_size(sizes: EngineConfig) -> int:
    tokens = sizes.max_num_batched_tokens
    sequences = sizes.max_num_seqs + 1
    return HEAD + 2 * tokens + 3 * sequences + 1 + sizes.max_num_logits


def put_batch(plan: np.ndarray, batch: Batch) -> None:
    """Write a batch without its embeds and `drawn_by`: ranks compute all logits."""
    plan[1:4] = batch.token_ids.size, batch.slots.size, batch.logit_rows.size
    *arrays, _, _ = vars(batch).values()
    whole = np.concatenate(arrays)
    plan[HEAD : HEAD + whole.size] = whole


def batch_of(plan: np.ndarray) -> Batch:
    """Return a copy of the batch in a plan."""
    tokens, sequences, rows = plan[1:4].tolist()
    bounds = np.cumsum([HEAD, tokens, tokens, sequences + 1, sequences, sequences, rows])
    parts = [plan[start:stop].copy() for start, stop in pairwise(bounds.tolist())]
    return Batch(*parts, NO_EMBEDS)


class RankZeroDriver:
    """Sends commands to the other ranks, which hold one model at a time."""

    def __init__(self, world: World):
        self.world = world
        self._plan = np.zeros(HEAD, np.int32)
        self._process = os.getpid()
        self._turn = threading.Lock()
        self._model_is_open = False
        self._has_ended = False
        atexit.register(self.end)

    @contextmanager
    def order(self, opens_model: bool = False) -> Iterator[None]:
        """Run a block that all ranks take part in. If it fails, all ranks end.

        Raise TinyGPTError after the ranks' end, RequestError for a second model.
        """
        with self._turn:
            if self._has_ended:
                raise TinyGPTError("the other ranks have ended with this program.")
            if opens_model and self._model_is_open:
                raise RequestError("another LLM of several ranks is open in this program: close it first.")
            try:
                yield
            except BaseException as error:
                self._has_ended = True
                end_all(self.world, error)

    def tell(self, command: Command, batch: Batch | None = None) -> None:
        """Broadcast a command, within `order`."""
        self._plan[0] = command
        if batch is not None:
            put_batch(self._plan, batch)
        self.world.broadcast(self._plan)

    def note_model(self, sizes: EngineConfig) -> None:
        self._plan = np.zeros(plan_size(sizes), np.int32)
        self._model_is_open = True

    def close_model(self) -> None:
        with self._turn:
            self._close_model()

    def end(self) -> None:
        if os.getpid() != self._process:
            return
        try:
            atexit.unregister(self.end)
            with self._turn:
                self._close_model()
                if not self._has_ended:
                    self._has_ended = True
                    self.tell(Command.END)
        except KeyboardInterrupt as error:  # the other ranks would wait
            self._has_ended = True
            end_all(self.world, error)

    def _close_model(self) -> None:
        if self._model_is_open and not self._has_ended:
            self.tell(Command.CLOSE)
            self._plan = np.zeros(HEAD, np.int32)
            self._model_is_open = False


@cache
def driver_of(world: World) -> RankZeroDriver:
    return RankZeroDriver(world)


def load_together(
    world: World, opening: LoadCommand, source: ModelSource | None = None
) -> RankModel | TinyGPTError:
    """Load this rank's part. Return it, or on all ranks the first error of any.

    Ranks compare their files' checksums. source: already open on rank 0.
    """
    layout = opening.args.layout
    allgather = world.allgather(layout.tensor_group(world.rank)) if layout.tensor_size > 1 else None
    model = description = weights = error = None
    rooms = world.broadcast_object(world.gather_objects(_gpu_room(opening.args.device)))
    try:
        source = source or ModelSource.open(opening.args)
        checksum = source.checkpoint.begin_checksum()
        description = source.config, source.dtype, source.kv_cache_dtype
        threads = rank_threads(opening.args.threads, world)
        model = RankModel(world, layout, allgather, source, opening.sizes, threads, rooms)
        weights = checksum.result()
    except Exception as caught:  # of any kind: the other ranks wait
        is_ours = isinstance(caught, TinyGPTError)
        error = caught if is_ours else TinyGPTError(f"{type(caught).__name__}: {caught}")
    reports = world.gather_objects((error, description, weights, world.host))
    return world.broadcast_object(None if reports is None else _first_failure(reports)) or model


def _gpu_room(device: str) -> tuple[str, int] | None:
    """Return this rank's, None on a CPU, or if it has none: opening a model then says why."""
    with suppress(Exception):
        return load_backend(device, "auto", local_rank()).gpu_room()
    return None


def _first_failure(reports: list[tuple]) -> TinyGPTError | None:
    _, first_description, first_weights, _ = reports[0]
    for rank, (error, description, weights, host) in enumerate(reports):
        place = f"rank {rank} of {len(reports)}, on {host}"
        if error is not None and rank == 0:
            return error
        if error is not None:
            kind = next(k for k in (CheckpointError, RequestError, TinyGPTError) if isinstance(error, k))
            return kind(f"{place}: {error}")
        if (description, weights) != (first_description, first_weights):
            what = "another model" if description != first_description else "other weights"
            return CheckpointError(f"{place}, has {what} than rank 0: give all hosts the same files.")
    return None


def follow(world: World) -> None:
    """Take part in all commands of rank 0. If this rank fails, all ranks end."""
    try:
        plan = np.zeros(HEAD, np.int32)
        world.broadcast(plan)
        while plan[0] != Command.END:
            opening: LoadCommand = world.broadcast_object()
            loaded = load_together(world, opening)
            if isinstance(loaded, RankModel):
                _take_part(world, loaded, opening.sizes)
            del loaded
            world.broadcast(plan)
    except BaseException as error:
        end_all(world, error)


def follow_as_process(world: World) -> None:
    """Leave stdin, signals and logging to rank 0."""
    logging.getLogger("tinygpt").setLevel(logging.ERROR)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    follow(world)


def _take_part(world: World, model: RankModel, sizes: EngineConfig) -> None:
    plan = np.zeros(plan_size(sizes), np.int32)
    while True:
        world.broadcast(plan)
        if plan[0] == Command.CLOSE:
            return
        model.check_file()
        if plan[0] == Command.FORWARD:
            model.forward(batch_of(plan))
        else:
            name, arguments = world.broadcast_object()
            getattr(model, name)(*arguments)


class ParallelRunner(ModelRunner):
    """Runs steps on all ranks, from one thread. Rank 0 alone samples."""

    def __init__(self, lead: RankZeroDriver, source: ModelSource, opening: LoadCommand):
        """Raise CheckpointError or RequestError with the rank that fails."""
        self.config = source.config
        self.dtype = source.dtype
        self.kv_cache_dtype = source.kv_cache_dtype
        self.backend = source.backend
        self._lead = lead
        self._stages = opening.args.pipeline_parallel_size
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
        """Run one step. `look` sees the kinds of SHOWN, after the step, and changes nothing."""
        if look is None:
            with self._order() as model:
                self._lead.tell(Command.FORWARD, batch)
                return model.forward(batch)
        if look.changes:
            raise RequestError("need an LLM of one process, without ranks or Ray.", "edits")
        rows_of_places, logits = self._call("forward_with", batch, frozenset(look.points))
        for (kind, layer), rows in rows_of_places.items():
            look(kind, layer, rows)
        return logits

    def final_norm(self, x: np.ndarray) -> np.ndarray:
        return self._call("final_norm", x)

    def stop_early(self, is_wanted: bool) -> None:
        """Do nothing: stages finish the steps that they have begun."""

    def choose_num_steps(self, num_sequences: int, num_in_time: int) -> int:
        return GROUP_STEPS if self._stages > 1 and num_sequences >= self._stages * LEAST_GROUP else 1

    def multi_step(
        self, batch: Batch, warpers: Any, seeds: np.ndarray, indices: np.ndarray, steps: int, ends: np.ndarray
    ) -> Iterable[np.ndarray]:
        def begin(model: RankModel, group: Batch, first_row: int) -> Callable[[], np.ndarray]:
            self._lead.tell(Command.FORWARD, group)
            return model.begin(group, first_row)

        def choose(logits: np.ndarray, rows: slice, step: int) -> np.ndarray:
            own = type(warpers)(*(column[rows] for column in warpers))
            return self.backend.sample(
                logits, own, seeds[rows], indices[rows], batch.context_lens[rows] + step
            )

        with self._order() as model:
            return run_groups(batch, self._stages, steps, partial(begin, model), choose)

    def copy_positions(self, source_slot: int, target_slot: int, start: int, stop: int) -> None:
        self._call("copy_positions", source_slot, target_slot, start, stop)

    def read_positions(self, slot: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return self._call("read_positions", slot, start, stop)

    def write_positions(self, slot: int, start: int, keys: np.ndarray, values: np.ndarray) -> None:
        self._call("write_positions", slot, start, here=(keys, values))

    def close(self) -> None:
        if self._params is not None:
            self._params = None
            self._lead.close_model()

    def _call(self, name: str, *arguments: Any, here: Sequence[Any] = ()) -> Any:
        """here: rank 0's further arguments."""
        with self._order() as model:
            self._lead.tell(Command.CALL)
            self._lead.world.broadcast_object((name, arguments))
            return getattr(model, name)(*arguments, *here)

    @contextmanager
    def _order(self) -> Iterator[RankModel]:
        self._params.check_file()
        with self._lead.order():
            yield self._params


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
    rows_of = [slice(count * i // stages, count * (i + 1) // stages) for i in range(stages)]
    groups = [tokens_of(batch, rows.start, rows.stop) for rows in rows_of]
    waits = [begin(group, rows.start) for group, rows in zip(groups, rows_of, strict=True)]
    tokens = np.empty((steps, count), np.int32)
    for step in range(steps):
        for i, rows in enumerate(rows_of):
            tokens[step, rows] = choose(waits[i](), rows, step)
            if step < steps - 1:
                groups[i] = groups[i].next_step(tokens[step, rows])
                waits[i] = begin(groups[i], rows.start)
    return tokens


@dataclass(frozen=True)
class Ranks:
    """The ranks of this program, seen from rank 0. seen: the kinds of points that requests may capture."""

    seen: ClassVar[tuple[str, ...]] = SHOWN
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
    sources = ModelSource.open_all(args, dtypes)
    for source in sources:
        check_cut(args.layout, source.config, source.dtype, args.device)
    return sources
