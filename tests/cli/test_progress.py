"""Bars of long work on a terminal, and Ctrl-C during each: one sentence, and no record is lost."""

import json
import os
import re
import signal
import struct
import subprocess
import sys

import pytest

from support.paths import ROOT
from support.processes import SECONDS, heed_interrupts, run_process
from support.tables import rows

pty, fcntl, termios = map(pytest.importorskip, ("pty", "fcntl", "termios"))  # Windows has none

# Reading a parameter takes a while, as of a large model.
SLOW = """
import sys, time
from tinygpt.__main__ import main
from tinygpt.engine import model_runner
from tinygpt.weights.checkpoint import Checkpoint
model_runner.LARGE = 0
Checkpoint.release = lambda self, name: (self.on_release(name), time.sleep(0.05))
sys.exit(main())
"""
# The bar that shows, its unit, the command.
BARS = rows("""
loading | B | generate -n 4 --input prompts --output records
prompt | prompts | generate -n 4 --input prompts --output records
window | windows | eval ppl text --max-model-len 64
row | rows | eval lambada lines
packing | B | convert demo target
writing | B | convert demo target --to safetensors
writing | B | convert demo target --to gguf
sample | samples | convert demo target --calibrate text
""")


@pytest.fixture
def folder(tmp_path):
    text = "There was once a miller who had three sons. " * 12_000
    (tmp_path / "text").write_text(text)
    (tmp_path / "prompts").write_text('{"prompt": "The mill"}\n' * 6_000)
    (tmp_path / "lines").write_text('{"text": "The cat has three sons"}\n' * 6_000)
    return tmp_path


@pytest.mark.parametrize(("name", "unit", "words"), BARS)
def test_ctrl_c_during_a_bar_ends_in_one_sentence(folder, name, unit, words):
    screen, stderr = pty.openpty()
    fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    command = [sys.executable, "-c", SLOW, *words.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    started = subprocess.Popen(
        command,
        cwd=folder,
        stderr=stderr,
        env=environment,
        stdout=subprocess.DEVNULL,
        preexec_fn=heed_interrupts,
    )
    os.close(stderr)
    seen = b""
    has_rate = rf"{name if unit == 'B' else ''}.*%\|.*, +[\d.]+([kM]? ?{unit}/s|s/ ?{unit})\]".encode()
    is_sent = False
    while more := read(screen):
        seen += more
        if not is_sent and re.search(has_rate, seen):
            is_sent = True
            started.send_signal(signal.SIGINT)
    os.close(screen)
    assert is_sent, seen
    assert started.wait(SECONDS) == 130, seen
    *_, last = seen.decode().replace("\r", "\n").strip().split("\n")
    assert last.startswith("tinygpt: interrupted")
    assert b"Traceback" not in seen
    kept = (folder / "records").read_text().splitlines() if (folder / "records").exists() else []
    assert "answered" not in last or f": {len([*map(json.loads, kept)])} of 6000 prompts answered" in last
    assert not [*folder.glob("target*")]


def read(screen: int) -> bytes:
    try:
        return os.read(screen, 2**16)
    except OSError:  # the process has closed the terminal
        return b""


def test_a_pipe_has_no_bar(folder):
    (folder / "prompts").write_text('{"prompt": "The mill"}\n' * 3)
    done = run_process("generate", "-n", "2", "--input", str(folder / "prompts"))
    assert done.returncode == 0
    assert b"%|" not in done.stderr
