"""CompileLog: a line in the server's log for kernels that requests waited for."""

import logging
import threading
import time

log = logging.getLogger("tinygpt.server")


class CompileLog:
    """A listener of kernels that compile: one line for those that did so at a time, once they have."""

    def __init__(self):
        self._lock = threading.Lock()
        self._num_kernels = self._num_open = 0
        self._began = 0.0

    def begin(self, name: str) -> None:
        with self._lock:
            if not self._num_open:
                self._began, self._num_kernels = time.perf_counter(), 0
            self._num_kernels += 1
            self._num_open += 1

    def end(self) -> None:
        with self._lock:
            self._num_open -= 1
            if not self._num_open:
                seconds = round(time.perf_counter() - self._began, 6)
                log.info("kernels compiled", extra={"fields": {"kernels": self._num_kernels, "seconds": seconds}})
