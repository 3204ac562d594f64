"""ParallelRunner: a model that runs on several ranks, seen from rank 0: a ModelRunner for the engine."""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from tinygpt.engine.model_runner import ModelRunner
from tinygpt.engine.model_source import ModelSource
from tinygpt.errors import RequestError
from tinygpt.kernels.batch import Batch
from tinygpt.parallel.follower import Loaded, Opening, find_places, load_together, rank_threads
from tinygpt.parallel.groups import run_groups
from tinygpt.parallel.lead import Lead
from tinygpt.parallel.placement import advice
from tinygpt.parallel.plan import Order
from tinygpt.parallel.rank_model import RankModel

# Decode steps of a pipeline at once. A newcomer waits for all of them; with fewer, more is lost at both ends.
GROUP_STEPS = 4
LEAST_GROUP = 8  # sequences: smaller ones take nearly as long as all together, because each reads the weights


class ParallelRunner(ModelRunner):
    """Runs steps of one model on all ranks of a world. For one thread at a time; sampling is rank 0's alone."""

    def __init__(self, lead: Lead, source: ModelSource, opening: Opening):
        """Have all ranks load their parts. Raises CheckpointError or RequestError, naming the rank where it is another
        one that cannot, and all wait for the next model then."""
        self.config, self.dtype, self.kv_cache_dtype = source.config, source.dtype, source.kv_cache_dtype
        self._backend, self._source, self._lead, self._process = source.backend, source, lead, os.getpid()
        self._threads, self._stages = rank_threads(opening.threads, lead.world), opening.layout.pipeline_size
        self._workspace, self._kv_cache, self._file = None, None, source.file
        with lead.opening(), lead.order():
            lead.tell(Order.OPEN)
            lead.world.broadcast_object(opening)
            lead.advise(advice(find_places(lead.world, opening), opening.layout.tensor_size))
            loaded = load_together(lead.world, opening, source)
            if isinstance(loaded, Loaded):
                lead.note_model(opening.sizes)
                # Here, as an interrupt is felt behind the order. Once, and also where nobody calls `close`.
                self._close = weakref.finalize(self, lead.forget_model)
                self._close.atexit = False  # the lead ends by itself then
        if not isinstance(loaded, Loaded):
            raise loaded
        self._params = loaded.model

    def forward(self, batch: Batch) -> Any:
        return self._ordered(lambda model: model.forward(batch), Order.FORWARD, batch=batch)

    def stop_early(self, is_wanted: bool) -> None:
        """What the stages have begun is brought to its end."""

    def choose_num_steps(self, num_sequences: int, num_in_time: int) -> int:
        return GROUP_STEPS if self._stages > 1 and num_sequences >= self._stages * LEAST_GROUP else 1

    def multi_step(
        self, batch: Batch, warpers: Any, seeds: np.ndarray, indices: np.ndarray, steps: int, ends: np.ndarray
    ) -> Iterable[np.ndarray]:
        def begin(model: RankModel, group: Batch, first_row: int) -> Callable[[], np.ndarray]:
            self._lead.tell(Order.FORWARD, batch=group)
            return model.begin(group, first_row)

        def choose(logits: np.ndarray, rows: slice, step: int) -> np.ndarray:
            own = type(warpers)(*(column[rows] for column in warpers))
            return self.sample(logits, own, seeds[rows], indices[rows], batch.context_lens[rows] + step)

        with self._one_order() as model:
            return run_groups(batch, self._stages, steps, partial(begin, model), choose)

    def trace(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        return self._ordered(lambda model: model.trace(batch), Order.TRACE, batch=batch)

    def copy_positions(self, source_slot: int, target_slot: int, start: int, stop: int) -> None:
        numbers = source_slot, target_slot, start, stop
        self._ordered(lambda model: model.copy_positions(*numbers), Order.COPY, *numbers)

    def read_positions(self, slot: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        numbers = slot, start, stop
        return self._ordered(lambda model: model.read_positions(*numbers), Order.READ, *numbers)

    def write_positions(self, slot: int, start: int, keys: np.ndarray, values: np.ndarray) -> None:
        self._ordered(lambda model: model.write_positions(slot, start, (keys, values)), Order.WRITE, slot, start)

    def close(self) -> None:
        self._params = None
        self._close()

    def _ordered(self, do: Callable[[RankModel], Any], order: Order, *numbers: int, batch: Batch | None = None) -> Any:
        with self._one_order() as model:
            self._lead.tell(order, *numbers, batch=batch)
            return do(model)

    @contextmanager
    def _one_order(self) -> Iterator[RankModel]:
        if os.getpid() != self._process:
            raise RequestError("this process was forked from a rank: its LLM is the parent's alone.")
        self._params.check_file()
        with self._lead.order():
            yield self._params
