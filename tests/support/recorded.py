"""Answers of transformers: live where it is installed, and else as they were recorded.

A function marked `recorded` asks transformers. With the extra `parity` it runs. Without it the stored answer to the
same arguments is given, and a test that asks for what was never recorded is skipped by name. `python
tests/support/record.py` runs the tests that ask, and stores what they heard.
"""

import functools
import hashlib
import importlib.util
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from support.paths import ROOT

FOLDER = ROOT / "tests" / "data" / "recorded"
HAS_TRANSFORMERS = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
MISSING = "needs torch and transformers: pip install -e '.[parity]'"
needs_transformers = pytest.mark.skipif(not HAS_TRANSFORMERS, reason=MISSING)
MAX_SIZE = 5_000  # numbers in an answer that is worth a place in the repository

Oracle = Callable[..., np.ndarray]


class Recordings:
    """The answers of one function. heard: those of this process, by key_of(arguments)."""

    def __init__(self, name: str):
        self.path = FOLDER / f"{name}.npz"
        self.heard: dict[str, np.ndarray] = {}

    @functools.cached_property
    def stored(self) -> dict[str, np.ndarray]:
        if not self.path.exists():
            return {}
        with np.load(self.path) as file:
            index, data = json.loads(file["index"].tobytes()), file["data"].tobytes()
        answers, start = {}, 0
        for key, dtype, shape in index:
            answers[key] = np.frombuffer(data, dtype, int(np.prod(shape)), start).reshape(shape)
            start += answers[key].nbytes
        return answers

    def write(self, is_whole: bool) -> None:
        """What was heard, in place of what was stored if it is the whole, and else beside it.

        All answers lie end to end, as an entry for each would be mostly names.
        """
        if not is_whole:
            self.heard = self.stored | self.heard
        index = [(key, array.dtype.str, array.shape) for key, array in sorted(self.heard.items())]
        data = b"".join(self.heard[key].tobytes() for key, _, _ in index)
        FOLDER.mkdir(exist_ok=True)
        parts = {"index": json.dumps(index).encode(), "data": data}
        np.savez_compressed(self.path, **{name: np.frombuffer(part, np.uint8) for name, part in parts.items()})


def recorded(function: Oracle | None = None, *, is_live: bool = True) -> Any:
    """Mark a function of plain values and arrays, whose name no other has.

    is_live: whether the transformers that is installed can answer.
    """
    if function is None:
        return functools.partial(recorded, is_live=is_live)
    recordings = Recordings(function.__name__)

    @functools.wraps(function)
    def ask(*arguments, **named):
        key = key_of(*arguments, **named)
        if HAS_TRANSFORMERS and is_live:
            answer = function(*arguments, **named)
        elif key in recordings.stored:
            answer = recordings.stored[key].copy()
        else:
            pytest.skip(MISSING)
        if answer.size <= MAX_SIZE:
            recordings.heard[key] = answer
        return answer

    ask.recordings = recordings
    return ask


def key_of(*arguments, **named) -> str:
    """The same for equal arguments: arrays to the bit, anything else as JSON writes it."""
    digest = hashlib.sha256()
    for value in (*arguments, sorted(named.items())):
        if isinstance(value, np.ndarray):
            digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
        else:
            digest.update(json.dumps(value, default=float).encode())
    return digest.hexdigest()[:16]
