"""Which kernels a block of a test compiles."""

from contextlib import contextmanager

from tinygpt.kernels.compiling import ANNOUNCER


class Compiled:
    """Listens. `names`: of the kernels in their order; `num_open`: how many have not come to their end."""

    def __init__(self):
        self.names: list[str] = []
        self.num_open = 0

    def begin(self, name: str) -> None:
        self.names.append(name)
        self.num_open += 1

    def end(self) -> None:
        self.num_open -= 1


@contextmanager
def compiled_kernels():
    listener = Compiled()
    with ANNOUNCER.told(listener):
        yield listener
