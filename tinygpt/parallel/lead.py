"""Lead: what rank 0 tells the others to do, one order after another, whichever of its threads gives it."""

import atexit
import gc
import logging
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import numpy as np

from tinygpt.config import EngineConfig
from tinygpt.errors import RequestError, TinyGPTError
from tinygpt.kernels.batch import Batch
from tinygpt.parallel.ending import EndAtOnce, end_all
from tinygpt.parallel.plan import NO_PLAN, Order, plan_size, put_batch, put_numbers
from tinygpt.parallel.world import World

logger = logging.getLogger(__name__)


class Lead:
    """Rank 0's word to the others, who have one model at a time and wait for the next order between two.

    They end with this process, or with an order that fails.
    """

    def __init__(self, world: World):
        self.world = world
        self._plan = np.zeros(NO_PLAN, np.int32)
        self._process = os.getpid()
        self._advice: set[str] = set()
        self._turn = threading.Lock()  # of the thread that gives an order
        self._opener = threading.Lock()  # of the thread that opens a model
        self._model_is_open = self._model_is_forgotten = self._has_ended = False
        atexit.register(self.end)

    @contextmanager
    def order(self) -> Iterator[None]:
        """In the block, something is done by all ranks. If it fails, all of them end, this one too.

        Ctrl-C and SIGTERM are felt behind it. TinyGPTError once they have ended.
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
        """In the block one thread has the others open a model, and the next one waits. RequestError while they have one
        that may still be used."""
        with self._opener:
            self._check_no_model()
            yield

    def _check_no_model(self) -> None:
        if self._model_is_open:
            gc.collect()  # it may have been forgotten
            self._try_to_close_forgotten()
        if self._model_is_open:
            raise RequestError("another LLM of several ranks is open in this program: close it first.")

    def advise(self, sentences: Iterable[str]) -> None:
        """Log what could be faster, once in a program."""
        for sentence in sentences:
            if sentence not in self._advice:
                self._advice.add(sentence)
                logger.warning(sentence)

    # In an order.

    def tell(self, order: Order, *numbers: int, batch: Batch | None = None) -> None:
        """Let the others know what comes next, and with what."""
        if batch is None:
            put_numbers(self._plan, order, *numbers)
        else:
            put_batch(self._plan, order, batch)
        self.world.broadcast(self._plan)

    def note_model(self, sizes: EngineConfig) -> None:
        """All have loaded one, whose steps are of these sizes."""
        self._plan, self._model_is_open = np.zeros(plan_size(sizes), np.int32), True

    # From anywhere.

    def forget_model(self) -> None:
        """Close the model: now, or behind the order that is given now. That may be this thread's own, where an LLM is
        found to be garbage."""
        if os.getpid() == self._process:
            self._model_is_forgotten = True
            with _interrupts_put_off():
                self._try_to_close_forgotten()

    def end(self) -> None:
        """Let the others end, at the end of this process, when the order under way is done."""
        if os.getpid() != self._process:
            return
        atexit.unregister(self.end)
        with _interrupts_put_off(), self._turn:
            if not self._has_ended:
                self._has_ended = True
                self._close_model()
                self.tell(Order.END)

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
        """Have the others forget theirs, if they have one, and wait for the next."""
        if self._model_is_open:
            self.tell(Order.CLOSE)
            self._plan, self._model_is_open = np.zeros(NO_PLAN, np.int32), False


@cache
def lead_of(world: World) -> Lead:
    """The one Lead of this program, which ends the others however the program ends."""
    return Lead(world)


@contextmanager
def _interrupts_put_off() -> Iterator[None]:
    """Signals in the block are felt at its end, if this thread is the one that feels them and a function of Python's
    handles them, which may raise: the others would wait in the middle of an order. What ends them too, ends at once.
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
