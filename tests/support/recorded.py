"""Answers of transformers: live where it is installed, and else as they were recorded.

A function marked `recorded` asks transformers. With the extra `parity` it runs, and its answer has to be near the
stored one. Without it the stored answer to the same arguments is given; to ask for one that is too large to be kept
skips the test, and for one that nobody has recorded fails it. `python tests/support/record.py` runs the tests that ask,
and stores what they heard.
"""

import functools
import hashlib
import importlib.util
import json
import os
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
NEAR = 1e-3  # what other CPUs and releases may change
IS_RECORDING = "TINYGPT_RECORD"  # an environment variable

Oracle = Callable[..., np.ndarray]


class Recordings:
    """The answers of one function. heard: those of this process, by key_of(arguments); None: too large to be kept."""

    def __init__(self, name: str):
        self.path = FOLDER / f"{name}.npz"
        self.heard: dict[str, np.ndarray | None] = {}

    @functools.cached_property
    def stored(self) -> dict[str, np.ndarray | None]:
        if not self.path.exists():
            return {}
        with np.load(self.path) as file:
            index, data = json.loads(file["index"].tobytes()), file["data"].tobytes()
        answers, start = {}, 0
        for key, dtype, shape in index:
            if dtype is None:
                answers[key] = None
                continue
            answers[key] = np.frombuffer(data, dtype, int(np.prod(shape)), start).reshape(shape)
            start += answers[key].nbytes
        return answers

    def write(self, is_whole: bool) -> None:
        """What was heard, in place of what was stored if it is the whole, and else beside it.

        All answers lie end to end, as an entry for each would be mostly names.
        """
        if not is_whole:
            self.heard = self.stored | self.heard
        heard = sorted(self.heard.items())
        index = [(key, None, None) if array is None else (key, array.dtype.str, array.shape) for key, array in heard]
        data = b"".join(array.tobytes() for _, array in heard if array is not None)
        FOLDER.mkdir(exist_ok=True)
        parts = {"index": json.dumps(index).encode(), "data": data}
        np.savez_compressed(self.path, **{name: np.frombuffer(part, np.uint8) for name, part in parts.items()})


def recorded(function: Oracle | None = None, *, is_live: bool = True, varies: bool = False) -> Any:
    """Mark a function of plain values and arrays.

    is_live: whether the transformers that is installed can answer. varies: the questions or the answers depend on the
    CPU in more than NEAR, so that no stored answer is held against a live one, and a test without one is skipped.
    """
    if function is None:
        return functools.partial(recorded, is_live=is_live, varies=varies)
    recordings = Recordings(function.__name__)

    @functools.wraps(function)
    def ask(*arguments, **named):
        key = key_of(*arguments, **named)
        stored = recordings.stored.get(key)
        if HAS_TRANSFORMERS and is_live:
            answer = function(*arguments, **named)
            if not varies and not os.environ.get(IS_RECORDING):
                _compare(function.__name__, answer, key in recordings.stored, stored)
        elif stored is not None:
            answer = stored.copy()
        elif varies or key in recordings.stored or not is_live:
            pytest.skip(MISSING)
        else:
            pytest.fail(f"{function.__name__} was never asked this: python tests/support/record.py")
        recordings.heard[key] = answer if answer.size <= MAX_SIZE else None
        return answer

    ask.recordings = recordings
    return ask


def _compare(name: str, answer: np.ndarray, is_known: bool, stored: np.ndarray | None) -> None:
    assert is_known, f"{name} was never asked this: python tests/support/record.py"
    if stored is not None:
        np.testing.assert_allclose(answer, stored, rtol=NEAR, atol=NEAR, err_msg=f"{name}: recorded otherwise")


def key_of(*arguments, **named) -> str:
    """The same for equal arguments: arrays to the bit, anything else as JSON writes it."""
    digest = hashlib.sha256()
    for value in (*arguments, sorted(named.items())):
        if isinstance(value, np.ndarray):
            digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
        else:
            digest.update(json.dumps(value, default=float).encode())
    return digest.hexdigest()[:16]
