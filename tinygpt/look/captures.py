"""Captures into steps: the captures and edits of a request, and of the sequences of a step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import RequestError
from ..kernels.backend import SCORES, Batch
from .cache import Activations
from .edits import Edit, PlacedEdit, place, salt_of
from .hooks import HookPoints

Place = tuple[str, int]  # a kind of point and a layer


@dataclass
class Captures:
    """The captures of one sequence, by name, and its edits. seen: rows (n, ...) of the places that captures need."""

    points: HookPoints | None = None
    names: Sequence[str] = ()
    edits: Mapping[Place, list[PlacedEdit]] = field(default_factory=dict)
    first_edit: int = 0  # the first position that an edit changes
    salt: int = 0  # of equal edits
    begin: tuple[int, int] = (0, 0)  # a layer whose input edits set, and from which position on
    wanted: frozenset[Place] = frozenset()
    seen: dict[Place, list[np.ndarray]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, capture: Any, edits: Iterable[Edit], points: HookPoints, num_prompt: int, length: int
    ) -> "Captures":
        """Read captures and edits for a prompt in a text of at most `length`. Raise RequestError."""
        names = points.find(capture, "capture")
        edits = tuple(edits)
        placed = place(edits, points, num_prompt, length)
        first = min((one.first for several in placed.values() for one in several), default=length)
        wanted = frozenset(source for name in names for source in points.sources(name))
        inputs = [
            (layer, one)
            for (kind, layer), several in placed.items()
            if kind == "resid_pre"
            for one in several
        ]
        needs_all = names or any(edit.function is not None for edit in edits)  # functions see real rows
        set_from = [(layer, one.first) for layer, one in inputs if not needs_all and one.sets_all(length)]
        begin = max(set_from, default=(0, 0))
        salt = salt_of(edits, num_prompt) ^ begin[0] << 40  # the layers before it write no keys
        return cls(points, names, placed, first, salt, begin, wanted)

    def first_layer(self, position: int) -> int:
        """Return the layer that a step from this position on begins with."""
        layer, start = self.begin
        return layer if position >= start else 0

    def copy(self) -> "Captures":
        """Return the looks of another sequence of the request."""
        return replace(self, seen={})

    def step(self, batch: Batch) -> "StepCaptures":
        """Return the Look of a step of this sequence alone."""
        return StepCaptures(batch, {0: self})

    def see(self, where: Place, rows: np.ndarray, start: int) -> None:
        """Edit rows (n, ...), of positions from `start` on, and capture them."""
        for edit in self.edits.get(where, ()):
            edit.apply(rows, start)
        if where in self.wanted:
            self.seen.setdefault(where, []).append(rows.astype(np.float32))  # a copy

    def prefix_ids(self, token_ids: list[int]) -> list[int]:
        """Return the ids by which the prefix cache compares tokens: from the first edit on, those of equal edits."""
        first, salt = self.first_edit, self.salt
        return token_ids[:first] + [salt + token_id for token_id in token_ids[first:]]

    def activations(self, token_ids: list[int]) -> Activations:
        seen = {where: _joined(where[0], parts) for where, parts in self.seen.items()}
        return Activations(self.points, self.names, seen, token_ids)


def check_size(looks: Captures, length: int, count: int, limit: int) -> None:
    """Raise RequestError if `count` texts of this length capture more than `limit` bytes."""
    sizes = {name: looks.points.num_bytes(name, length) for name in looks.names}
    total = count * sum(sizes.values())
    if total > limit:
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
        raise RequestError(
            f"takes {total / 2**20:,.1f} MiB for {count} x {length} positions, and max_capture_bytes is "
            f"{limit / 2**20:,.1f} MiB: ask for fewer names (the largest are {', '.join(largest)}) or raise it.",
            "capture",
        )


class StepCaptures:
    """The Look (kernels/backend.py) of a step: of its sequences, by their rows."""

    def __init__(self, batch: Batch, looks: dict[int, Captures], first: int = 0):
        """looks: by the number of a sequence in the batch."""
        self.first, self.failed = first, {}  # the error of a sequence's function, by number
        rows = {s: slice(*batch.seq_starts[s : s + 2]) for s in looks}
        self._looks = [(s, one, rows[s], batch.positions[rows[s].start]) for s, one in looks.items()]
        self.points = {where for one in looks.values() for where in (*one.wanted, *one.edits)}
        self.changes = any(one.edits for one in looks.values())

    def __call__(self, kind: str, layer: int, array: np.ndarray, sequence: int | None = None) -> None:
        if (kind, layer) not in self.points:
            return
        for s, looks, rows, start in self._looks:
            if s in self.failed or sequence not in (None, s):
                continue
            try:
                looks.see((kind, layer), array if kind in SCORES else array[rows], start)
            except BaseException as error:  # a user's: the step's other sequences go on
                self.failed[s] = f"an edit at {kind} of layer {layer} failed: {error!r}."


def _joined(kind: str, parts: list[np.ndarray]) -> np.ndarray:
    if kind not in SCORES or len(parts) == 1:
        return np.concatenate(parts) if len(parts) > 1 else parts[0]
    length = parts[-1].shape[-1]
    fill = 0.0 if kind == "pattern" else -np.inf
    padded = [np.pad(p, ((0, 0), (0, 0), (0, length - p.shape[-1])), constant_values=fill) for p in parts]
    return np.concatenate(padded)


def given(batch: Batch, num_layers: int, stream: np.ndarray) -> StepCaptures:
    """Return the Look of a step through no layer, whose head reads this stream (N, C)."""
    edit = Edit("resid_post", keep=0, value=stream)
    placed = {("resid_post", num_layers - 1): [PlacedEdit(edit, range(len(stream)), True)]}
    return StepCaptures(batch, {0: Captures(edits=placed)}, first=num_layers)


def trace(
    forward: Callable[[StepCaptures], Any], batch: Batch, num_layers: int, is_whole: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Run forward(look), a step of one sequence. Return the streams around layers (L + 1, N, C), and queries (L, N, C).

    is_whole: False for the last stream alone.
    """
    layers = range(num_layers if is_whole else 0)
    streams = [*(("resid_pre", layer) for layer in layers), ("resid_post", num_layers - 1)]
    queries = [("q", layer) for layer in layers]
    looks = Captures(wanted=frozenset(streams + queries))
    forward(looks.step(batch))
    found = [np.stack([looks.seen[where][0] for where in places]) for places in (streams, queries) if places]
    return found[0], found[-1].reshape(*found[-1].shape[:2], -1)
