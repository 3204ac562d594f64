"""Checks of the readers taken out, and other harm, to see that fuzz.py finds it. Each is called in a worker process."""

import ctypes
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from scripts.fuzzing import loaders
from tinygpt.weights.containers import shards, torch_file
from tinygpt.weights.containers.mapped_file import MappedTensor
from tinygpt.weights.containers.pickle_reader import PickleReader
from tinygpt.weights.stored import packed, session_file


def execute_pickles() -> None:
    PickleReader.read = lambda self: pickle.load(self.file)


def believe_views() -> None:
    """Nobody looks whether a view lies inside its storage."""
    torch_file._tensor = lambda file, name, view, storages: MappedTensor(
        file, view.storage.dtype, view.shape, view.strides, storages[view.storage.key].start + view.offset
    )


def follow_shards_anywhere() -> None:
    shards._is_plain_name = lambda shard: True


def forget_checksums() -> None:
    """As if every checksum were right."""
    packed._checksum = session_file._checksum = lambda *_: _Anything()


class _Anything:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None


def read_for_ever() -> None:
    _harm_goldens(lambda path: [None for _ in iter(int, 1)])


def allocate() -> None:
    _harm_goldens(lambda path: np.ones(2**31))


def crash() -> None:
    _harm_goldens(lambda path: ctypes.string_at(0))


def _harm_goldens(load: Callable[[Path], Any]) -> None:
    """Those that are damaged; the undamaged one is read as ever, or no worker would start."""
    undamaged = loaders.load_goldens
    loaders.load_goldens = lambda path: load(path) if path.read_bytes()[:2] != b"PK" else undamaged(path)
