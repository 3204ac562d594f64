"""Service: runs submitted requests in a thread of its own, callers who know nothing of each other in one batch."""

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from tinygpt.engine.after_fork import call_after_fork
from tinygpt.engine.engine import Engine
from tinygpt.engine.multi_step import STREAM_SECONDS
from tinygpt.errors import QueueFullError, RequestError, TinyGPTError, is_ctrl_c
from tinygpt.outputs import RequestOutput
from tinygpt.request.request import Progress, Request, refuse_fork

# Seconds without work after which the thread ends, so that an LLM that is forgotten can be collected.
IDLE_SECONDS = 1.0


class SubmittedFuture(Future[RequestOutput]):
    """A future for which a forked process does not wait: nobody would settle it there.

    progress: how far its request has come, which is known of a cancelled one too.
    """

    def __init__(self, progress: Callable[[], Progress]):
        super().__init__()
        self.progress = progress
        self._process = os.getpid()

    def result(self, timeout: float | None = None) -> RequestOutput:
        self._check_process()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._check_process()
        return super().exception(timeout)

    def _check_process(self) -> None:
        if not self.done():
            refuse_fork(self._process)


class Service:
    """Takes steps while a submitted request is unfinished, and sleeps otherwise.

    num_samples: of all submitted requests that have not ended. No more than the engine's max_queue may wait.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._max_queue = engine.engine_config.max_queue
        self._is_closed = False
        self.begin_anew()
        call_after_fork(self)

    def begin_anew(self) -> None:
        """Have nothing to do: at first, and in a forked process. No future is settled, for the parent does that."""
        self._changed = threading.Condition()
        self._pending: dict[Future[RequestOutput], Request] = {}
        self.num_samples = 0  # of the pending requests
        self._failure: BaseException | None = None  # of the last step, or what has ended the thread
        self._thread: threading.Thread | None = None

    def submit(self, request: Request) -> "Future[RequestOutput]":
        """Have `request` run. Cancelling the future, which works until it has a result, frees its slots.

        Raises QueueFullError if there is no room for it.
        """
        future: Future[RequestOutput] = SubmittedFuture(partial(request.progress, self._engine.compile_clock))
        with self._changed:
            self._check_room(len(request.sequences))
            self._pending[future] = request
            self.num_samples += len(request.sequences)
            request.when_finished(partial(self._resolve, future))
            future.add_done_callback(self._forget_cancelled)
            self._engine.add(request.sequences)
            self._wake()
        return future

    def check_health(self) -> None:
        """TinyGPTError if the last step has failed, or the thread that takes them."""
        if self._failure is not None:
            raise TinyGPTError(f"the engine has failed: {self._failure!r}.") from self._failure

    def close(self) -> None:
        """Fail whatever is pending, and refuse what comes later."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._fail_pending(RequestError("this LLM was closed before the request was finished."))

    def _check_room(self, count: int) -> None:
        self._engine.check_open()
        if self._max_queue is None:
            return
        max_num_seqs = self._engine.engine_config.max_num_seqs
        if count > self._max_queue + max_num_seqs:
            raise RequestError(
                f"the request has {count} samples, but max_queue is {self._max_queue} and max_num_seqs "
                f"{max_num_seqs}: there is never room for more than those together, so split the "
                "request, or raise one of them."
            )
        waiting = max(self.num_samples - max_num_seqs, 0)
        if waiting + count > self._max_queue + max(max_num_seqs - self.num_samples, 0):
            raise QueueFullError(
                f"max_queue is {self._max_queue} and the queue holds {waiting}, so there is no room for {count} "
                "more: submit again later, or raise max_queue."
            )

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tinygpt-service", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        try:
            self._take_steps()
        except BaseException as error:  # nothing that is known; but nobody may wait for ever
            with self._changed:
                self._failure, self._thread = error, None
            self._fail_pending(RuntimeError(f"the engine's thread has ended by {error!r}."))
            raise

    def _take_steps(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._is_closed, IDLE_SECONDS)
                if not self._pending:
                    self._thread = None
                    return
            try:
                self._engine.step(STREAM_SECONDS)
                self._failure = None
            except Exception as error:  # whatever it is, nobody may wait for ever
                self._failure = error
                self._fail_pending(error)
            except BaseException as error:  # raised again by a future's result(), it would end its caller's thread
                self._failure = error
                self._fail_pending(RuntimeError(f"a step was broken off by {error!r}."))

    def _take(self, future: Future) -> Request | None:
        """The request of a pending future, to the one caller that settles it; None to every other."""
        with self._changed:
            request = self._pending.pop(future, None)
            if request is not None:
                self.num_samples -= len(request.sequences)
            return request

    def _resolve(self, future: Future) -> None:
        request = self._take(future)
        if request is not None:
            _settle(future, partial(request.output, self._engine.compile_clock))

    def _forget_cancelled(self, future: Future) -> None:
        request = self._take(future)
        if request is not None:
            self._engine.remove(request.sequences)
            future.set_running_or_notify_cancel()  # or concurrent.futures.wait would not see it

    def _fail_pending(self, error: Exception) -> None:
        def fail() -> RequestOutput:
            raise error

        for future in list(self._pending):
            request = self._take(future)
            if request is not None:
                self._engine.remove(request.sequences)
                _settle(future, fail)


def _settle(future: Future, result: Callable[[], RequestOutput]) -> None:
    """Give the future its result, or the error that comes instead, unless it has been cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        settle = partial(future.set_result, result())
    except Exception as error:  # it belongs to whoever waits for the future
        settle = partial(future.set_exception, error)
    try:
        settle()
    except BaseException as error:  # a user's callback: where it is an Exception, the future itself does the same
        if is_ctrl_c(error):
            raise
        logging.getLogger(__name__).exception("exception calling a callback of %r", future)
