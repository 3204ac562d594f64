"""Tensors that are read only when they are asked for, wherever they come from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Tensor(Protocol):
    """A tensor in a file, one that is drawn at random, or one made of others."""

    def float32(self) -> np.ndarray:
        """Its elements: a view of what is in memory already where that is possible, otherwise a copy."""

    def release(self) -> None:
        """Let the file's pages behind it leave memory; they are read again when they are touched."""


@dataclass(frozen=True)
class LazyTensor:
    """What `make` returns for the arrays of `sources`: a matrix transposed, or several joined into one."""

    make: Callable[..., np.ndarray]
    sources: tuple[Tensor, ...]

    def float32(self) -> np.ndarray:
        return self.make(*(source.float32() for source in self.sources))

    def release(self) -> None:
        for source in self.sources:
            source.release()


@dataclass(frozen=True)
class DefaultTensor:
    """What stands for a parameter that files leave out: `make` gives an array of that shape."""

    shape: tuple[int, ...]
    make: Callable[[tuple[int, ...]], np.ndarray]

    def float32(self) -> np.ndarray:
        return self.make(self.shape)

    def release(self) -> None:
        """Nothing is held."""


def shortest(number: float) -> float:
    """A number that a file keeps as a float32, as the shortest decimal that gives the same one: 1e-05, and not
    9.999999747378752e-06."""
    return float(str(np.float32(number)))


def zeros(shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape, np.float32)


def ones(shape: tuple[int, ...]) -> np.ndarray:
    return np.ones(shape, np.float32)
