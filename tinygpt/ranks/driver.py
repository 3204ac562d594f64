"""Commands of rank 0 to the other ranks, as integers, and how ranks follow."""

import atexit
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from ..engine.model_runner import ModelSource
from ..errors import CheckpointError, RequestError, TinyGPTError
from ..hardware import physical_cores
from ..kernels.batch import Batch
from ..llm_args import EngineConfig, LLMArgs
from .mpi import World, end_all
from .rank_model import RankModel


class Command(IntEnum):
    """What ranks do together: on an open model, RankModel's method of that name."""

    FORWARD = 1  # a batch follows
    TRACE = 2  # a batch follows
    COPY_POSITIONS = 3  # source slot, target slot, start, stop
    READ_POSITIONS = 4  # slot, start, stop
    WRITE_POSITIONS = 5  # slot, start; an object follows: keys and values
    FINAL_NORM = 6  # an object follows: rows
    CLOSE = 7
    OPEN = 8  # an object follows: a LoadCommand
    END = 9

    def run(self, model: RankModel, *arguments: Any) -> Any:
        return getattr(model, self.name.lower())(*arguments)


NUMBERS = {  # that follow
    Command.COPY_POSITIONS: 4,
    Command.READ_POSITIONS: 3,
    Command.WRITE_POSITIONS: 2,
    Command.FINAL_NORM: 0,
}


@dataclass(frozen=True)
class LoadCommand:
    """A model that all ranks load."""

    args: LLMArgs
    sizes: EngineConfig


HEAD = 8  # integers before a batch
NO_PLAN = 8  # integers of a plan without a model


def plan_size(sizes: EngineConfig) -> int:
    tokens = sizes.max_num_batched_tokens
    sequences = sizes.max_num_seqs + 1
    return HEAD + 2 * tokens + 3 * sequences + 1 + sizes.max_num_logits


def put_batch(plan: np.ndarray, command: Command, batch: Batch) -> None:
    """Write a batch without its embeds."""
    plan[:4] = command, batch.token_ids.size, batch.slots.size, batch.logit_rows.size
    arrays = (
        batch.token_ids,
        batch.positions,
        batch.seq_starts,
        batch.slots,
        batch.context_lens,
        batch.logit_rows,
    )
    whole = np.concatenate(arrays)
    plan[HEAD : HEAD + whole.size] = whole


def batch_of(plan: np.ndarray) -> Batch:
    """Return a copy of the batch in a plan."""
    tokens, sequences, rows = plan[1:4].tolist()
    bounds = np.cumsum([HEAD, tokens, tokens, sequences + 1, sequences, sequences, rows])
    parts = [plan[start:stop].copy() for start, stop in pairwise(bounds.tolist())]
    return Batch(*parts, np.empty((0, 0), np.float32))


class RankZeroDriver:
    """Sends commands to the other ranks, which hold one model at a time."""

    def __init__(self, world: World):
        self.world = world
        self._plan = np.zeros(NO_PLAN, np.int32)
        self._process = os.getpid()
        self._turn = threading.Lock()
        self._model_is_open = self._has_ended = False
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

    def tell(self, command: Command, *numbers: int, batch: Batch | None = None) -> None:
        """Broadcast a command, within `order`."""
        if batch is None:
            self._plan[: 1 + len(numbers)] = command, *numbers
        else:
            put_batch(self._plan, command, batch)
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
            self._plan = np.zeros(NO_PLAN, np.int32)
            self._model_is_open = False


@cache
def driver_of(world: World) -> RankZeroDriver:
    return RankZeroDriver(world)


def rank_threads(threads: int | None, world: World) -> int:
    return max(physical_cores() // world.local_size, 1) if threads is None else threads


def load_together(
    world: World, opening: LoadCommand, source: ModelSource | None = None
) -> RankModel | TinyGPTError:
    """Load this rank's part. Return it, or on all ranks the first error of any.

    Ranks compare their files' checksums. source: already open on rank 0.
    """
    layout = opening.args.layout
    allgather = world.allgather(layout.tensor_group(world.rank)) if layout.tensor_size > 1 else None
    model = about = weights = error = None
    try:
        source = source or ModelSource.open(opening.args)
        checksum = source.checkpoint.begin_checksum()
        about = source.config, source.dtype, source.kv_cache_dtype
        model = RankModel(
            world, layout, allgather, source, opening.sizes, rank_threads(opening.args.threads, world)
        )
        weights = checksum.result()
    except Exception as caught:  # of any kind: the other ranks wait
        error = (
            caught if isinstance(caught, TinyGPTError) else TinyGPTError(f"{type(caught).__name__}: {caught}")
        )
    found = world.gather_objects((error, about, weights, world.host))
    return world.broadcast_object(None if found is None else _first_failure(found)) or model


def _first_failure(found: list[tuple]) -> TinyGPTError | None:
    _, first_about, first_weights, _ = found[0]
    for rank, (error, about, weights, host) in enumerate(found):
        place = f"rank {rank} of {len(found)}, on {host}"
        if error is not None:
            kinds = CheckpointError, RequestError, TinyGPTError
            return (
                error
                if rank == 0
                else next(kind for kind in kinds if isinstance(error, kind))(f"{place}: {error}")
            )
        if (about, weights) != (first_about, first_weights):
            what = "another model" if about != first_about else "other weights"
            return CheckpointError(f"{place}, has {what} than rank 0: give all hosts the same files.")
    return None


def follow(world: World) -> None:
    """Take part in all commands of rank 0. If this rank fails, all ranks end."""
    try:
        plan = np.zeros(NO_PLAN, np.int32)
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
    """Run `follow`, and leave stdin, signals and logging to rank 0."""
    logging.getLogger("tinygpt").setLevel(logging.ERROR)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    follow(world)


def _take_part(world: World, model: RankModel, sizes: EngineConfig) -> None:
    plan = np.zeros(plan_size(sizes), np.int32)
    while True:
        world.broadcast(plan)
        command = Command(plan[0])
        if command == Command.CLOSE:
            return
        model.check_file()
        if command in NUMBERS:
            command.run(model, *plan[1 : 1 + NUMBERS[command]].tolist())
        else:
            command.run(model, batch_of(plan))
