"""Parts: arrays that lie in one, so that one copy brings all of them to the device."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Parts:
    """Each part's length and dtype, by its name. Those of larger items come first, so that all lie on boundaries."""

    shapes: dict[str, tuple[int, Any]]

    @property
    def num_bytes(self) -> int:
        return sum(length * np.dtype(dtype).itemsize for length, dtype in self.shapes.values())

    def split(self, whole: Any) -> dict[str, Any]:
        """Views of an array of num_bytes uint8."""
        found, start = {}, 0
        for name, (length, dtype) in self.shapes.items():
            stop = start + length * np.dtype(dtype).itemsize
            found[name], start = whole[start:stop].view(dtype), stop
        return found

    def join(self, values: dict[str, np.ndarray]) -> np.ndarray:
        """The array of num_bytes uint8 in which each part begins with its values and goes on with zeros."""
        whole = np.zeros(self.num_bytes, np.uint8)
        for name, part in self.split(whole).items():
            given = np.ravel(values[name])
            part[: given.size] = given
        return whole
