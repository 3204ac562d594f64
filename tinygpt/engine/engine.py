"""Engine: one thread that owns scheduler, KV slots and sequences and takes all steps.

Every other thread puts a command into the inbox and waits for a future or a queue: Ctrl-C interrupts it at once.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import finalize

from ..errors import QueueFullError, RequestError, TinyGPTError, closed
from ..llm_args import EngineConfig
from ..outputs import RequestOutput, ThreadFuture, Throughput, check_thread, has_threads
from .model_runner import ModelRunner
from .sequence import Request
from .step_loop import CALL_SECONDS, Closable, StepLoop

T = TypeVar("T")


class RequestFuture(ThreadFuture[RequestOutput]):
    """The result of a request: a RequestOutput, or what the request's `result_of` makes of it."""

    def __init__(self, request: Request):
        super().__init__()
        self.request = request


class Engine:
    """A running step loop, for other threads. Its own ends when the engine is closed or `owner` is collected."""

    def __init__(
        self,
        runner: ModelRunner,
        engine_config: EngineConfig,
        owner: Any,
        to_close: Iterable[Closable] = (),
    ):
        self.engine_config = engine_config
        self.after_step: list[Callable[[], None]] = []  # called by the thread, for a server
        self._steps = StepLoop(runner, engine_config, to_close)
        self.scheduler = self._steps.scheduler
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._pending: set[RequestFuture] = set()  # the thread's alone
        self._failure: BaseException | None = None  # of the last step
        self._is_broken = False  # whether the failure ended the thread
        self._queued: set[RequestFuture] = set()  # that count against max_queue
        self._pid = os.getpid()
        # Reentrant: garbage collection can close a generator, which cancels its future, at any line.
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._work, name="tinygpt-engine", daemon=True)
        self._thread.start()
        self._end = finalize(owner, self._inbox.put, None)
        self._end.atexit = False

    @property
    def runner(self) -> ModelRunner:
        return self._steps.runner

    @property
    def throughput(self) -> Throughput:
        return self._steps.throughput

    @property
    def is_closed(self) -> bool:
        return not self._end.alive

    def check_open(self) -> None:
        """Raise RequestError once the engine is closed or in a forked child, TinyGPTError if it cannot go on."""
        check_thread(self._pid)
        if self._is_broken:
            self._raise_failure()
        if self.is_closed:
            raise closed("LLM")

    def check_health(self) -> None:
        """Raise TinyGPTError if the last step failed."""
        self.check_open()
        if self._failure is not None:
            self._raise_failure()

    def _raise_failure(self) -> None:
        raise TinyGPTError(f"the engine has failed: {self._failure!r}.") from self._failure

    def submit(self, futures: list[RequestFuture]) -> None:
        for future in futures:
            future.add_done_callback(self._on_done)
        self._post(partial(self._start, futures))

    def submit_queued(self, futures: list[RequestFuture], is_admitted: bool = False) -> None:
        """Run requests that count against max_queue. Raise QueueFullError if there is no room for all.

        is_admitted: others of the same caller had room.
        """
        self.check_open()
        with self._lock:
            if not is_admitted:
                self._check_room(sum(len(future.request.sequences) for future in futures))
            self.submit(futures)
            self._queued.update(futures)  # last: after an interrupt none may count that never ends

    def call(self, work: Callable[[], T]) -> T:
        """Call `work` in the engine's thread, between two steps."""
        self.refuse_own_thread()
        future: ThreadFuture[T] = ThreadFuture()
        self._post(partial(future.settle, work))
        return future.result()

    @contextmanager
    def wrapped(self, wrap: Callable[[ModelRunner], Any]) -> Iterator[Any]:
        """Run the steps of the block through wrap(runner), for benchmarks."""
        plain = self.runner
        wrapper = wrap(plain)
        self.call(partial(self._steps.use, wrapper))
        try:
            yield wrapper
        finally:
            if not self.is_closed:
                self.call(partial(self._steps.use, plain))

    def refuse_own_thread(self) -> None:
        """Raise RequestError in a function that a step calls: the thread would wait for itself."""
        if threading.current_thread() is self._thread:
            raise RequestError(
                "a function that the engine calls during a step may submit requests, but not run them or close the LLM."
            )

    def close(self) -> None:
        self.refuse_own_thread()
        with self._lock:
            self._end()
        if has_threads(self._pid):
            self._thread.join()

    def _post(self, command: Callable[[], None]) -> None:
        with self._lock:  # no command may follow the end of the inbox
            self.check_open()
            self._inbox.put(command)
        self.runner.stop_early(True)  # a command waits for one pass at most

    def _check_room(self, count: int) -> None:
        max_queue = self.engine_config.max_queue
        max_num_seqs = self.engine_config.max_num_seqs
        if max_queue is None:
            return
        if count > max_queue + max_num_seqs:
            raise RequestError(
                f"the request has {count} samples, but max_queue is {max_queue} and max_num_seqs {max_num_seqs}: there "
                "is never room for more than those together, so split the request, or raise one of them."
            )
        num_queued = sum(len(future.request.sequences) for future in tuple(self._queued))
        if num_queued + count > max_queue + max_num_seqs:
            waiting = max(num_queued - max_num_seqs, 0)
            raise QueueFullError(
                f"max_queue is {max_queue} and the queue holds {waiting}, so there is no room for {count} more: submit "
                "again later, or raise max_queue."
            )

    def _on_done(self, future: RequestFuture) -> None:
        if not future.cancelled() or not has_threads(self._pid):
            return
        with self._lock:
            self._queued.discard(future)
            if not self.is_closed:
                self._post(partial(self._forget, future))

    # In the engine's thread.

    def _work(self) -> None:
        error: Exception = RequestError("this LLM was closed before the request was finished.")
        try:
            while self._take_turn():
                pass
        except BaseException as failure:
            # The requests of a failed step could not be removed: no step can follow.
            error = _plain(failure)
            with self._lock:
                self._failure, self._is_broken = failure, True
                self._end()
            while (command := self._inbox.get()) is not None:
                with suppress(BaseException):
                    command()
        finally:  # no caller may wait for a thread that has ended
            try:
                self._fail_pending(error)
            finally:
                self._steps.close()

    def _take_turn(self) -> bool:
        """Run the commands and then a step, whose failure is its requests' alone. Return False at the inbox's end."""
        try:
            while not self._pending or not self._inbox.empty():
                command = self._inbox.get()
                if command is None:
                    return False
                command()
            self.runner.stop_early(False)
            if self._inbox.empty():  # otherwise a command came between
                self._steps.step(CALL_SECONDS)
                self._failure = None
            for call in self.after_step:
                call()
        except BaseException as error:
            self._failure = error
            self._fail_pending(_plain(error))
        return True

    def _start(self, futures: list[RequestFuture]) -> None:
        running = []
        for future in futures:
            if future.cancelled():
                self._drop(future)
                future.set_running_or_notify_cancel()
            else:
                running.append(future)
        self._pending.update(running)  # before any can fail
        for future in running:
            future.request.when_finished(partial(self._finish, future))
        self._steps.add([sequence for future in running for sequence in future.request.sequences])

    def _finish(self, future: RequestFuture) -> None:
        self._drop(future)
        future.settle(future.request.output)

    def _forget(self, future: RequestFuture) -> None:
        if future in self._pending:
            self._steps.remove(future.request.sequences)
            self._drop(future)
            future.set_running_or_notify_cancel()

    def _drop(self, future: RequestFuture) -> None:
        self._pending.discard(future)
        with self._lock:
            self._queued.discard(future)

    def _fail_pending(self, error: Exception) -> None:
        def fail() -> RequestOutput:
            raise error

        futures, self._pending = self._pending, set()
        sequences = [sequence for future in futures for sequence in future.request.sequences]
        for sequence in sequences:  # before any is removed: a failed sequence gives nothing to the others
            sequence.error = sequence.error or "it was cancelled."
        try:
            self._steps.remove(sequences)
        finally:
            for future in futures:
                self._drop(future)
                future.settle(fail)


def _plain(error: BaseException) -> Exception:
    """Return the error as callers get it: a SystemExit would end a caller's thread."""
    return error if isinstance(error, Exception) else RuntimeError(f"a step was broken off by {error!r}.")
