"""Answers of transformers: live with the extra `parity`, otherwise as recorded.

A function marked `recorded` asks transformers. A live answer must be near the recorded one. Without transformers, an
answer too large to be recorded skips the test, and an unknown question fails it.

`python tests/support/recorded.py [TEST FILE...]` runs the tests that ask, or all such files', and records the answers.
Near answers stay as recorded, so that another CPU changes none, and so do those of an older release alone (groups of
beams, before 4.57).
"""

import functools
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "data" / "recorded"
HAS_TRANSFORMERS = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
MISSING = "needs torch and transformers: pip install -e '.[parity]'"
needs_transformers = pytest.mark.skipif(not HAS_TRANSFORMERS, reason=MISSING)
ASKS = ("@recorded", "support.oracles")  # in the text of a test file that asks
MAX_SIZE = 5_000  # numbers of an answer in the repository
NEAR = 1e-3  # difference between CPUs and between releases
IS_RECORDING = "TINYGPT_RECORD"  # an environment variable

Oracle = Callable[..., np.ndarray]


class Recordings:
    """Answers of one function. heard: this process's, by key_of(arguments); None is too large to be recorded."""

    def __init__(self, name: str):
        self.path = FOLDER / f"{name}.npz"
        self.heard: dict[str, np.ndarray | None] = {}

    @functools.cached_property
    def stored(self) -> dict[str, np.ndarray | None]:
        if not self.path.exists():
            return {}
        with np.load(self.path) as file:
            index = json.loads(file["index"].tobytes())
            data = file["data"].tobytes()
        answers, start = {}, 0
        for key, dtype, shape in index:
            if dtype is None:
                answers[key] = None
                continue
            answers[key] = np.frombuffer(data, dtype, int(np.prod(shape)), start).reshape(shape)
            start += answers[key].nbytes
        return answers

    def _is_near_stored(self, key: str) -> bool:
        new, old = self.heard[key], self.stored.get(key)
        if new is None or old is None or (new.dtype, new.shape) != (old.dtype, old.shape):
            return False
        return np.allclose(new, old, rtol=NEAR, atol=NEAR, equal_nan=True)

    def write(self, is_whole: bool) -> None:
        """Write the heard answers, near ones as stored; unless they are all, next to the other stored ones."""
        others = {} if is_whole else self.stored
        near = {key: self.stored[key] for key in self.heard if self._is_near_stored(key)}
        answers = sorted((others | self.heard | near).items())
        index = [
            (key, None, None) if array is None else (key, array.dtype.str, array.shape)
            for key, array in answers
        ]
        data = b"".join(array.tobytes() for _, array in answers if array is not None)
        FOLDER.mkdir(exist_ok=True)
        parts = {"index": json.dumps(index).encode(), "data": data}
        np.savez_compressed(
            self.path, **{name: np.frombuffer(part, np.uint8) for name, part in parts.items()}
        )


def recorded(function: Oracle | None = None, *, is_live: bool = True, varies: bool = False) -> Any:
    """Mark a function of plain values and arrays.

    is_live: the installed transformers can answer. varies: questions or answers depend on the CPU by more than NEAR;
    live answers are not compared with stored ones, and a test without a stored one is skipped.
    """
    if function is None:
        return functools.partial(recorded, is_live=is_live, varies=varies)
    recordings = Recordings(function.__name__)

    @functools.wraps(function)
    def ask(*arguments, **named):
        key = key_of(*arguments, **named)
        stored = recordings.stored.get(key)
        if recordings.heard.get(key) is not None:  # by the test of another backend
            return recordings.heard[key].copy()
        if HAS_TRANSFORMERS and is_live:
            answer = function(*arguments, **named)
            if not varies and not os.environ.get(IS_RECORDING):
                _compare(function.__name__, answer, key in recordings.stored, stored)
        elif stored is not None:
            answer = stored.copy()
        elif varies or key in recordings.stored or not is_live:
            pytest.skip(MISSING)
        else:
            pytest.fail(unasked(function.__name__))
        recordings.heard[key] = answer if answer.size <= MAX_SIZE else None
        return answer

    ask.recordings = recordings
    return ask


def unasked(name: str) -> str:
    test_file = os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]
    return f"{name} was never asked this: python tests/support/recorded.py {test_file} (with .[parity])"


def _compare(name: str, answer: np.ndarray, is_known: bool, stored: np.ndarray | None) -> None:
    assert is_known, unasked(name)
    if stored is not None:
        np.testing.assert_allclose(
            answer, stored, rtol=NEAR, atol=NEAR, err_msg=f"{name}: recorded otherwise"
        )


def key_of(*arguments, **named) -> str:
    """Return the same key for equal arguments: arrays by their bits, anything else by its JSON."""
    digest = hashlib.sha256()
    for value in (*arguments, sorted(named.items())):
        if isinstance(value, np.ndarray):
            digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
        else:
            digest.update(json.dumps(value, default=float).encode())
    return digest.hexdigest()[:16]


class Recorder:
    """A pytest plugin that writes the answers heard by the `recorded` functions of all collected modules."""

    def __init__(self, is_whole: bool):
        self.is_whole, self.modules = is_whole, set()

    def pytest_collection_finish(self, session):
        self.modules = {item.module for item in session.items}

    def pytest_sessionfinish(self, session, exitstatus):
        functions = {f for module in self.modules for f in vars(module).values() if hasattr(f, "recordings")}
        for function in functions if not exitstatus else ():
            function.recordings.write(self.is_whole)
            print(f"\n{function.recordings.path.name}: {len(function.recordings.heard)} answers", end="")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    if not HAS_TRANSFORMERS:
        sys.exit(f"Recording {MISSING}.")
    os.environ[IS_RECORDING] = "1"
    asking = [
        str(f) for f in sorted(ROOT.glob("tests/*/**/test_*.py")) if any(a in f.read_text() for a in ASKS)
    ]
    options = ["-q", "--slow", "-p", "no:cacheprovider", *(sys.argv[1:] or asking)]
    sys.exit(pytest.main(options, [Recorder(is_whole=len(sys.argv) == 1)]))
