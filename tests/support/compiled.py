"""The kernels that a block of a test compiles."""

from collections.abc import Iterator
from contextlib import contextmanager

from numba.core import event

from tinygpt.kernels.cpu.jit import DiskCache


class Compiled(event.Listener):
    """A listener of Numba. names: the kernels, in the order in which they began to compile."""

    def __init__(self):
        self.names: list[str] = []

    def on_start(self, event) -> None:
        dispatcher = event.data["dispatcher"]
        if isinstance(getattr(dispatcher, "_cache", None), DiskCache):
            self.names.append(dispatcher.py_func.__name__)

    def on_end(self, event) -> None:
        pass


@contextmanager
def compiled_kernels() -> Iterator[Compiled]:
    with event.install_listener("numba:compile", listener := Compiled()):
        yield listener
