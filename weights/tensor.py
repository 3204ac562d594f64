"""Tensors that are read, computed or drawn when they are asked for."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from .config import is_transposed

STD = np.float32(0.02)


class Tensor(Protocol):
    """A tensor in a file, at random, or made of others. float32: a view of memory if possible, otherwise a copy."""

    def float32(self) -> np.ndarray: ...

    def release(self) -> None:
        """Let the file's pages leave memory; they are read again when they are touched."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that `make` computes from the arrays of `sources`."""

    make: Callable[..., np.ndarray]
    sources: tuple[Tensor, ...]

    def float32(self) -> np.ndarray:
        return self.make(*(source.float32() for source in self.sources))

    def release(self) -> None:
        for source in self.sources:
            source.release()


@dataclass(frozen=True)
class DefaultTensor:
    """A parameter that files leave out."""

    shape: tuple[int, ...]
    make: Callable[[tuple[int, ...]], np.ndarray]

    def float32(self) -> np.ndarray:
        return self.make(self.shape)

    def release(self) -> None: ...


zeros = partial(np.zeros, dtype=np.float32)
ones = partial(np.ones, dtype=np.float32)


@dataclass(frozen=True)
class RandomTensor:
    """A tensor that is drawn from its name, with the same bits every time, in GPT-2's own layout.

    The mean is 1 for weights of layer norms, otherwise 0, of biases too, so that a lost bias shows in the logits.
    """

    name: str
    shape: tuple[int, ...]

    def float32(self) -> np.ndarray:
        is_in_out = is_transposed(self.name)
        generator = np.random.default_rng(zlib.crc32(self.name.encode()))
        array = generator.standard_normal(self.shape[::-1] if is_in_out else self.shape, np.float32)
        array *= STD
        if ".ln_" in f".{self.name}" and self.name.endswith(".weight"):
            array += 1
        return array.T if is_in_out else array

    def release(self) -> None: ...


def shortest(number: float) -> float:
    """Return the shortest decimal of a file's float32: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(number)))
