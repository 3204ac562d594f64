"""RankZeroDriver: the commands of rank 0 to the other ranks, each an array of integers of one size for a model."""

import atexit
import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from functools import cache
from itertools import pairwise

import numpy as np

from tinygpt.config import EngineConfig
from tinygpt.errors import RequestError, TinyGPTError
from tinygpt.kernels.batch import Batch
from tinygpt.parallel.mpi import EndAtOnce, World, end_all


class Command(IntEnum):
    FORWARD = 1  # a batch follows
    TRACE = 2  # a batch follows
    COPY = 3  # source slot, target slot, start, stop
    READ = 4  # slot, start, stop
    WRITE = 5  # slot, start; an object follows: keys and values
    CLOSE = 6  # forget the model
    OPEN = 7  # an object follows: an LoadCommand
    END = 8  # there will be no other model


HEAD = 8  # integers before a batch
NO_PLAN = 8  # integers of a plan while there is no model


def plan_size(sizes: EngineConfig) -> int:
    """Return the number of integers of the largest plan."""
    tokens, sequences = sizes.max_num_batched_tokens, sizes.max_num_seqs + 1
    return HEAD + 2 * tokens + 3 * sequences + 1 + sizes.max_num_logits


def put_numbers(plan: np.ndarray, order: Command, *numbers: int) -> None:
    plan[: 1 + len(numbers)] = order, *numbers


def put_batch(plan: np.ndarray, order: Command, batch: Batch) -> None:
    """Write a batch without its embeds, which only rank 0 needs."""
    put_numbers(plan, order, batch.token_ids.size, batch.slots.size, batch.logit_rows.size)
    arrays = batch.token_ids, batch.positions, batch.seq_starts, batch.slots, batch.context_lens, batch.logit_rows
    whole = np.concatenate(arrays)
    plan[HEAD : HEAD + whole.size] = whole


def batch_of(plan: np.ndarray) -> Batch:
    """Return a copy of the batch in a plan."""
    tokens, sequences, rows = plan[1:4].tolist()
    bounds = np.cumsum([HEAD, tokens, tokens, sequences + 1, sequences, sequences, rows])
    parts = [plan[start:stop].copy() for start, stop in pairwise(bounds.tolist())]
    return Batch(*parts, np.empty((0, 0), np.float32))


class RankZeroDriver:
    """Sends commands to the other ranks, which hold one model at a time. They end with this process or a failed
    command.
    """

    def __init__(self, world: World):
        self.world = world
        self._plan = np.zeros(NO_PLAN, np.int32)
        self._process = os.getpid()
        self._turn = threading.Lock()  # of the thread that gives an order
        self._opener = threading.Lock()  # of the thread that opens a model
        self._model_is_open = self._model_is_forgotten = self._has_ended = False
        atexit.register(self.end)

    @contextmanager
    def order(self) -> Iterator[None]:
        """Run a block that all ranks take part in. If it fails, all ranks end.

        Ctrl-C and SIGTERM are deferred to the end. Raise TinyGPTError after the ranks have ended.
        """
        with _interrupts_put_off():
            with self._turn:
                self._close_forgotten()
                if self._has_ended:
                    raise TinyGPTError("the other ranks have ended with this program.")
                try:
                    yield
                except BaseException as error:
                    self._has_ended = True
                    end_all(self.world, error)
            self._try_to_close_forgotten()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Let one thread at a time open a model. Raise RequestError while another model is open."""
        with self._opener:
            self._check_no_model()
            yield

    def _check_no_model(self) -> None:
        if self._model_is_open:
            gc.collect()  # it may have been forgotten
            self._try_to_close_forgotten()
        if self._model_is_open:
            raise RequestError("another LLM of several ranks is open in this program: close it first.")

    # In an order.

    def tell(self, order: Command, *numbers: int, batch: Batch | None = None) -> None:
        """Broadcast a command, within `order`."""
        if batch is None:
            put_numbers(self._plan, order, *numbers)
        else:
            put_batch(self._plan, order, batch)
        self.world.broadcast(self._plan)

    def note_model(self, sizes: EngineConfig) -> None:
        self._plan, self._model_is_open = np.zeros(plan_size(sizes), np.int32), True

    # From anywhere.

    def forget_model(self) -> None:
        """Close the model now, or after the current command, which may be of this thread: a finalizer calls this."""
        if os.getpid() == self._process:
            self._model_is_forgotten = True
            with _interrupts_put_off():
                self._try_to_close_forgotten()

    def end(self) -> None:
        """End the other ranks after the current command."""
        if os.getpid() != self._process:
            return
        atexit.unregister(self.end)
        with _interrupts_put_off(), self._turn:
            if not self._has_ended:
                self._has_ended = True
                self._close_model()
                self.tell(Command.END)

    def _try_to_close_forgotten(self) -> None:
        while self._model_is_forgotten and self._turn.acquire(blocking=False):
            try:
                self._close_forgotten()
            finally:
                self._turn.release()

    def _close_forgotten(self) -> None:
        if self._model_is_forgotten:
            self._model_is_forgotten = False
            if not self._has_ended:
                self._close_model()

    def _close_model(self) -> None:
        if self._model_is_open:
            self.tell(Command.CLOSE)
            self._plan, self._model_is_open = np.zeros(NO_PLAN, np.int32), False


@cache
def driver_of(world: World) -> RankZeroDriver:
    """Return the one driver of this program."""
    return RankZeroDriver(world)


@contextmanager
def _interrupts_put_off() -> Iterator[None]:
    """Defer signals whose Python handlers may raise, in the main thread: other ranks would wait in the middle of a
    command.
    """
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if callable(handler) and not isinstance(handler, EndAtOnce):
                    stack.enter_context(_put_off(number))
        yield


@contextmanager
def _put_off(number: int) -> Iterator[None]:
    seen: list[tuple] = []
    handler = signal.signal(number, lambda *arguments: seen.append(arguments))
    try:
        yield
    finally:
        signal.signal(number, handler)
    if seen:
        handler(*seen[0])
