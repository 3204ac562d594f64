"""What ranks other than 0 do: load what rank 0 opens, and take part in its steps until it ends."""

import logging
import os
import signal
from dataclasses import dataclass, replace

import numpy as np

from tinygpt.config import EngineConfig
from tinygpt.engine.model_source import ModelSource
from tinygpt.errors import CheckpointError, RequestError, TinyGPTError
from tinygpt.hardware import physical_cores
from tinygpt.parallel.driver import NO_PLAN, Command, batch_of, plan_size
from tinygpt.parallel.launch import Layout
from tinygpt.parallel.mpi import World, end_all
from tinygpt.parallel.rank_model import RankModel


@dataclass(frozen=True)
class LoadCommand:
    """A model that all ranks load."""

    source: tuple
    layout: Layout
    sizes: EngineConfig  # as its `for_model` gives it
    threads: int | None


@dataclass(frozen=True)
class Identity:
    """Values that must be equal on all ranks."""

    model: tuple | None = None
    weights: str | None = None


@dataclass(frozen=True)
class Loaded:
    model: RankModel


def rank_threads(threads: int | None, world: World) -> int:
    """Return the threads of a rank: by default its share of the host's cores."""
    return max(physical_cores() // world.local_size, 1) if threads is None else threads


def load_together(world: World, opening: LoadCommand, source: ModelSource | None = None) -> Loaded | TinyGPTError:
    """Load the part of this rank. Return it, or the first error of any rank, on all ranks.

    All ranks read their files whole and compare checksums: files that differ in a few values would mix two models.

    source: already open on rank 0.
    """
    layout = opening.layout
    group = world.group(layout.tensor_group(world.rank)) if layout.tensor_size > 1 else None
    model = error = None
    about = Identity()
    try:
        source = source or ModelSource.open(*opening.source)
        checksum = source.begin_checksum()
        about = Identity((source.config, source.dtype, source.kv_cache_dtype))
        model = RankModel(world, group, layout, source, opening.sizes, rank_threads(opening.threads, world))
        about = replace(about, weights=checksum.result())
    except Exception as caught:  # whatever it is, the others wait
        error = caught if isinstance(caught, TinyGPTError) else TinyGPTError(f"{type(caught).__name__}: {caught}")
    found = world.gather_objects((error, about, world.host))
    failure = None if found is None else _first_failure(found)
    failure = world.broadcast_object(failure)
    return failure or Loaded(model)


def _first_failure(found: list[tuple]) -> TinyGPTError | None:
    if found[0][0] is not None:
        return found[0][0]
    for rank, (error, about, host) in enumerate(found):
        where = f"rank {rank} of {len(found)}, on {host}"
        if error is not None:
            kinds = CheckpointError, RequestError, TinyGPTError
            return next(kind for kind in kinds if isinstance(error, kind))(f"{where}: {error}")
        if about != found[0][1]:
            what = "another model" if about.model != found[0][1].model else "other weights"
            return CheckpointError(f"{where}, has {what} than rank 0: give all hosts the same files.")
    return None


def follow(world: World) -> None:
    """Take part in all commands of rank 0. If this rank fails, all ranks end."""
    try:
        plan = np.zeros(NO_PLAN, np.int32)
        world.broadcast(plan)
        while plan[0] != Command.END:
            opening: LoadCommand = world.broadcast_object()
            loaded = load_together(world, opening)
            if isinstance(loaded, Loaded):
                _take_part(world, loaded.model, opening.sizes)
            del loaded
            world.broadcast(plan)
    except BaseException as error:
        end_all(world, error)


def follow_as_process(world: World) -> None:
    """Run `follow` in a process that leaves stdin, signals and logging to rank 0."""
    logging.getLogger("tinygpt").setLevel(logging.ERROR)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    follow(world)


def _take_part(world: World, model: RankModel, sizes: EngineConfig) -> None:
    plan = np.zeros(plan_size(sizes), np.int32)
    while True:
        world.broadcast(plan)
        order, numbers = plan[0], plan[1:5].tolist()
        if order == Command.CLOSE:
            return
        model.check_file()
        if order == Command.FORWARD:
            model.forward(batch_of(plan))
        elif order == Command.TRACE:
            model.trace(batch_of(plan))
        elif order == Command.COPY:
            model.copy_positions(*numbers)
        elif order == Command.READ:
            model.read_positions(*numbers[:3])
        elif order == Command.WRITE:
            model.write_positions(*numbers[:2])
        else:
            raise ValueError(f"an order that has no place while a model is open: {order}")
