"""Of several processes, one compiles a kernel. The others wait for it, and never in vain for long."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from support.paths import ROOT
from tinygpt.kernels import compile_claim
from tinygpt.kernels.compile_claim import CompileClaim
from tinygpt.kernels.compiling import ANNOUNCER

needs_locks = pytest.mark.skipif(os.name == "nt", reason="nobody waits on Windows")
TAKE = """
import sys, time
from pathlib import Path
from tinygpt.kernels.compile_claim import CompileClaim
claim = CompileClaim()
claim.take(Path(sys.argv[1]))
print("taken", flush=True)
time.sleep(600)
"""


class Waiting:
    """Another claim, which is taken in a thread."""

    def __init__(self, path: Path):
        self.claim, self.waits = CompileClaim(), threading.Event()
        self.thread = threading.Thread(target=self._take, args=(path,), daemon=True)
        self.thread.start()

    def _take(self, path: Path) -> None:
        with ANNOUNCER.told(self):
            self.claim.take(path)

    def begin(self, name: str) -> None:
        self.waits.set()

    def end(self) -> None:
        pass

    def is_done(self, seconds: float) -> bool:
        self.thread.join(seconds)
        return not self.thread.is_alive()


@needs_locks
def test_a_claim_waits_for_the_end_of_another(tmp_path):
    kernel, first = tmp_path / "add.kernel", CompileClaim()
    first.take(kernel)
    other = Waiting(tmp_path / "other.kernel")
    assert other.is_done(60)
    assert not other.waits.is_set()
    second = Waiting(kernel)  # behind it: who listens hears of all that wait
    assert second.waits.wait(60)
    assert not second.is_done(0.1)
    first.end()
    assert second.is_done(60)
    third = Waiting(kernel)
    assert third.is_done(60)  # the second one has a file that is gone, and has found the kernel
    for claim in (second.claim, third.claim, other.claim):
        claim.end()
    assert not [*tmp_path.iterdir()]


@needs_locks
def test_the_death_of_its_owner_ends_a_claim(tmp_path):
    kernel = tmp_path / "add.kernel"
    owner = subprocess.Popen([sys.executable, "-c", TAKE, kernel], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert owner.stdout.readline() == b"taken\n"
        second = Waiting(kernel)
        assert second.waits.wait(60)
        assert not second.is_done(0.1)
    finally:
        owner.kill()
        owner.communicate()
    assert second.is_done(60)
    second.claim.end()


@needs_locks
def test_patience_ends(tmp_path, monkeypatch):
    """It is for all claims of a process: it waits no more for others, and leaves their claims alone."""
    owner, slept = CompileClaim(), []
    monkeypatch.setattr(compile_claim, "PATIENCE", 0.1)
    second = CompileClaim()
    for name in ("add.kernel", "more.kernel"):
        owner.take(tmp_path / name)
        second.take(tmp_path / name)
        second.end()
        assert (tmp_path / f"{name}.lock").exists()
        monkeypatch.setattr(time, "sleep", slept.append)
    assert not slept


@needs_locks
def test_a_wait_that_is_broken_off_leaves_the_owner_its_file(tmp_path, monkeypatch):
    owner, second = CompileClaim(), CompileClaim()
    owner.take(tmp_path / "add.kernel")

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        second.take(tmp_path / "add.kernel")
    second.end()
    assert (tmp_path / "add.kernel.lock").exists()
    owner.end()


@needs_locks
@pytest.mark.parametrize("trouble", ["no folder", "a link", "no locks here", "no locks at all"])
def test_where_nothing_can_be_locked_nobody_waits(tmp_path, monkeypatch, trouble):
    kernel = tmp_path / ("none/add.kernel" if trouble == "no folder" else "add.kernel")
    if trouble == "a link":
        (tmp_path / "add.kernel.lock").symlink_to(tmp_path / "elsewhere")
    elif trouble == "no locks at all":
        monkeypatch.setattr(compile_claim, "fcntl", None)
    elif trouble == "no locks here":
        monkeypatch.setattr(compile_claim.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "no")))
    first = CompileClaim()
    first.take(kernel)
    second = Waiting(kernel)
    assert second.is_done(60)
    assert not second.waits.is_set()
    assert not (tmp_path / "elsewhere").exists()
