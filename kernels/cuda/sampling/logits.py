"""DeviceLogits: a step's logits, which stay on the device. Only a row that is asked for comes to the host."""

from collections.abc import Iterator
from typing import Any

import numpy as np


class DeviceLogits:
    """Rows of logits (R, V) float32. They may be written over, and the next step does so.

    logits[r] is a copy of row r on the host, and logits[r] = row writes it; logits[some rows] is those, on the device.
    """

    def __init__(self, workspace: Any, rows: np.ndarray, vocab_size: int):
        """rows: (R,), of the workspace's logits."""
        self.workspace, self.rows, self.vocab_size = workspace, rows, vocab_size

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.vocab_size

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> "np.ndarray | DeviceLogits":
        rows = self.rows[key]
        if rows.ndim:
            return DeviceLogits(self.workspace, rows, self.vocab_size)
        return self.workspace.device.read(self._part(rows))

    def __setitem__(self, r: int, row: np.ndarray) -> None:
        self.workspace.device.write(self._part(self.rows[r]), row)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[r] for r in range(len(self)))

    def copy(self) -> np.ndarray:
        """All rows, (R, V), on the host."""
        return np.stack(list(self)) if len(self) else np.empty((0, self.vocab_size), np.float32)

    def _part(self, row: int) -> Any:
        start = int(row) * self.vocab_size
        return self.workspace.logits[start : start + self.vocab_size]
