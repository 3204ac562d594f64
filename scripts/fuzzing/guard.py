"""What a load must not do, seen through Python's audit hook: reach outside its folder, write, run or import."""

import os
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
# Where code may be read from while a file loads: modules that are imported late, and their data.
CODE = tuple({str(path) + os.sep for path in (PROJECT, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve())})
NEVER = ("subprocess.", "socket.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "pty.", "shutil.")
NEVER += ("ctypes.dlopen", "pickle.find_class")
WRITES = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.chmod",
    "os.chown",
    "os.link",
    "os.symlink",
    "os.truncate",
)
READS = ("os.listdir", "os.scandir", "glob.glob")


class Guard:
    """Notes what happens in a block that should not. There is one in a process: a hook cannot be taken away."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self._folder, self._is_writing = "", False  # of the block, where there is one
        self._known: set[str] = set()
        sys.addaudithook(self._hear)

    @contextmanager
    def watching(self, folder: Path, is_writing: bool = False):
        """The block may read `folder` alone, or write to it if `is_writing`; `violations` are of the last block."""
        self._is_writing = is_writing
        self.violations = []
        self._known = {name.partition(".")[0] for name in sys.modules} | set(sys.stdlib_module_names)
        self._folder = str(folder.resolve())
        try:
            yield
        finally:
            self._folder = ""

    def _hear(self, event: str, args: tuple) -> None:
        if not self._folder:
            return
        if event == "open" and not isinstance(args[0], int):
            self._hear_open(args)
        elif event in READS and not self._is_inside(args[0]):
            self._note(f"{event} {args[0]}")
        elif event == "import" and args[0].partition(".")[0] not in self._known:
            self._note(f"import {args[0]}")
        elif event.startswith(WRITES) and self._is_writing and all(map(self._is_inside, _paths(args))):
            return
        elif event.startswith((*NEVER, *WRITES)):
            self._note(f"{event} {args}")
            raise PermissionError(f"{event} while a file is read")  # so that it does not happen

    def _hear_open(self, args: tuple) -> None:
        path, _mode, flags = args
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and not (self._is_writing and self._is_inside(path)):
            self._note(f"write {path}")
        elif not self._is_inside(path) and not os.path.realpath(path).startswith(CODE):
            self._note(f"read {path}")

    def _is_inside(self, path: object) -> bool:
        real = os.path.realpath(os.fsdecode(path))
        return real == self._folder or real.startswith(self._folder + os.sep)

    def _note(self, what: str) -> None:
        self.violations.append(f"{what} ({threading.current_thread().name})")


def _paths(args: tuple) -> list[str]:
    return [arg for arg in args if isinstance(arg, (str, bytes, os.PathLike))]
