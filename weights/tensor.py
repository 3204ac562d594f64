"""Tensors that are read only when they are asked for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Tensor(Protocol):
    """A tensor in a file, one that is drawn at random, or one made of others."""

    def float32(self) -> np.ndarray:
        """Return the elements: a view of memory if possible, otherwise a copy."""
        ...

    def release(self) -> None:
        """Let the file's pages leave memory; they are read again when they are touched."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that `make` computes from the arrays of `sources`: transposed or joined."""

    make: Callable[..., np.ndarray]
    sources: tuple[Tensor, ...]

    def float32(self) -> np.ndarray:
        return self.make(*(source.float32() for source in self.sources))

    def release(self) -> None:
        for source in self.sources:
            source.release()


@dataclass(frozen=True)
class DefaultTensor:
    """A parameter that files leave out: `make` returns an array of a shape."""

    shape: tuple[int, ...]
    make: Callable[[tuple[int, ...]], np.ndarray]

    def float32(self) -> np.ndarray:
        return self.make(self.shape)

    def release(self) -> None: ...


def shortest(number: float) -> float:
    """Return the shortest decimal of a file's float32: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(number)))


def zeros(shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape, np.float32)


def ones(shape: tuple[int, ...]) -> np.ndarray:
    return np.ones(shape, np.float32)
