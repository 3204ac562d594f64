"""Edits: changes of activations at points of a step, placed in a request's text, and control vectors."""

import math
import operator
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError, RequestError, invalid
from ..fields import FieldRule, need, read_field
from ..weights.errors import shown
from ..weights.files import followed
from .hooks import HookPoints

END = 2**31  # after all positions
MAX_PLACED = 1000  # edits of a request, each at one point: each costs every step microseconds
KIND = "controlvector"  # the architecture of llama.cpp's files
DIRECTION = re.compile(r"direction\.([1-9]\d{0,5})")


@dataclass(frozen=True, eq=False)
class Edit:
    """At some positions of a text, x[index] = keep * x[index] + value: steering, ablation, scaling, patching.

    name: of points, as in `capture`; "z" is every layer's. keep, value: numbers, or arrays that fit x[index] of a
    position; value may have an axis in front, of the positions in `at`, or from 0 on.
    at: a position, a list of them or a slice; negative ones count from the prompt's end. None is all; "new" is all
    after the prompt, which other requests then share. index: of x at a position: a head, a unit, a tuple for both axes.
    project_out: a vector; x[index] loses its part along it. function: returns the new x[index] (n, ...) of n positions,
    float32 or the reference's float64; a call has those of a step, so that each row must depend on itself alone.

    Raise RequestError for an impossible value.
    """

    name: str
    keep: Any = 1.0
    value: Any = 0.0
    at: Any = None
    index: Any = ()
    project_out: Any = None
    function: Callable[[np.ndarray], Any] | None = None

    def __post_init__(self):
        if not isinstance(self.name, str):
            raise invalid("name", self.name, 'a text, as "blocks.0.hook_resid_pre"')
        if self.function is not None and not callable(self.function):
            raise invalid("function", self.function, "a function of rows, or None")
        for name, rule in RULES.items():
            object.__setattr__(self, name, read_field(name, getattr(self, name), rule))
        is_plain = self.keep.size == 1 and self.keep == 1 and not self.value.any()
        if (self.function is not None) + (self.project_out is not None) + (not is_plain) > 1:
            raise RequestError(
                "is given next to another change: make an edit of each.", "function or project_out"
            )

    @property
    def key(self) -> tuple:
        """All that decides the change."""
        arrays = self.keep, self.value, self.project_out
        digests = (None if a is None else (a.shape, blake2b(a.tobytes()).digest()) for a in arrays)
        return self.name, *digests, repr(self.at), repr(self.index), self.function

    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, Edit) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key)

    def changed(self, x: np.ndarray, value: np.ndarray) -> Any:
        """Return the new x[index] (n, ...). value: of these positions."""
        if self.function is not None:
            return self.function(x)
        if self.project_out is not None:
            direction = self.project_out / np.linalg.norm(self.project_out)
            return x - (x * direction).sum(-1, keepdims=True) * direction  # BLAS's bits depend on n
        return self.keep * x + value if self.keep.any() else value  # 0 times infinity is NaN


EditsType = Edit | Iterable[Edit]


def _whole(number: Any) -> int:
    need(not isinstance(number, bool))  # of a mask
    return operator.index(number)


def _array(numbers: Any) -> np.ndarray:
    owner = numbers if getattr(numbers, "base", None) is None else numbers.base
    is_fixed = isinstance(owner, np.ndarray) and owner.base is None and not owner.flags.writeable
    is_kept = is_fixed and numbers.dtype == np.float32 and not numbers.flags.writeable
    need(not np.iscomplexobj(numbers))
    array = numbers if is_kept else np.array(numbers, np.float32)  # a copy; None is NaN
    need(not np.isnan(array).any())
    array.flags.writeable = False
    return array


def _direction(vector: Any) -> np.ndarray | None:
    if vector is None:
        return None
    array = _array(vector)
    need(array.ndim == 1 and array.any())
    return array


def _at(positions: Any) -> Any:
    if positions is None or (isinstance(positions, str) and positions == "new"):
        return positions
    if isinstance(positions, slice):
        need(positions.step in (None, 1))
        return slice(
            *(part if part is None else operator.index(part) for part in (positions.start, positions.stop))
        )
    listed = tuple(map(_whole, positions if hasattr(positions, "__iter__") else (positions,)))
    need(0 < len({*listed}) == len(listed))
    return listed


def _index(index: Any) -> tuple:
    return tuple(
        one if isinstance(one, slice) else [*map(_whole, one)] if hasattr(one, "__iter__") else _whole(one)
        for one in (index if isinstance(index, tuple) else (index,))
    )


NUMBERS = FieldRule("a number or an array of numbers", _array)
RULES = {
    "keep": NUMBERS,
    "value": NUMBERS,
    "project_out": FieldRule("a vector that is not zero", _direction),
    "at": FieldRule(
        "None, 'new', a position, a list of positions, each once, or a slice without a step", _at
    ),
    "index": FieldRule("a whole number, a list of them, a slice, or a tuple of one for each axis", _index),
}


@dataclass(frozen=True)
class PlacedEdit:
    """An edit at positions of a request: a range, or an array (n,). has_axis: whether `value` has one of positions."""

    edit: Edit
    positions: range | np.ndarray
    has_axis: bool

    @classmethod
    def of(cls, edit: Edit, shape: tuple[int, ...], num_prompt: int) -> "PlacedEdit | None":
        """Return the edit, or None if it does not fit rows of this shape after a prompt of num_prompt tokens."""
        bounds = _bounds(edit.at, num_prompt)
        positions = np.array(bounds) if isinstance(edit.at, tuple) else range(*bounds)  # (n,)
        part = _part(shape, edit.index)
        if part is None:
            return None
        has_axis = edit.value.ndim > len(part)
        if has_axis and isinstance(positions, range):
            positions = range(positions.start, min(positions.stop, positions.start + len(edit.value)))
        fits = len(positions) > 0 and min(positions[0], positions[-1]) >= 0
        fits &= not has_axis or len(edit.value) == len(positions)
        value = (1, *edit.value.shape[1:]) if has_axis else edit.value.shape
        fits &= _broadcasts(edit.keep.shape, part) and _broadcasts(value, part)
        fits &= edit.project_out is None or edit.project_out.shape == part[-1:]
        return cls(edit, positions, has_axis) if fits else None

    @property
    def first(self) -> int:
        return self.positions.start if isinstance(self.positions, range) else int(self.positions.min())

    @property
    def last(self) -> int:
        """The last position that is named; a range may go on to the end of any text."""
        return self.positions.start if isinstance(self.positions, range) else int(self.positions.max())

    def sets_all(self, length: int) -> bool:
        """Return whether no value before it counts, from its first position to `length`."""
        is_whole = not (self.edit.keep.any() or self.edit.index)
        return is_whole and isinstance(self.positions, range) and self.positions.stop >= length

    def apply(self, array: np.ndarray, start: int) -> None:
        """Change array (n, ...), the positions from `start` on. Raise ValueError, or a function's error."""
        positions = self.positions
        stop = start + len(array)
        edit = self.edit
        if isinstance(positions, range):
            edited = np.arange(max(positions.start, start), min(positions.stop, stop))
            numbers = edited - positions.start
        else:
            numbers = np.flatnonzero((positions >= start) & (positions < stop))
            edited = positions[numbers]
        if not edited.size:
            return
        rows = array[edited - start]
        index = (slice(None), *edit.index)  # a copy
        new = edit.changed(rows[index], edit.value[numbers] if self.has_axis else edit.value)
        if edit.function is not None and np.shape(new) != rows[index].shape:
            raise ValueError(f"it returned an array of shape {np.shape(new)} for one of {rows[index].shape}")
        if np.iscomplexobj(new):
            raise ValueError("it returned complex numbers")
        rows[index] = new
        array[edited - start] = rows


def _part(shape: tuple[int, ...], index: tuple) -> tuple[int, ...] | None:
    """Return the shape of x[index] of a position x, or None if x lacks a place or the index has it twice."""
    num_places = math.prod(shape)
    if any(isinstance(one, list) and len(one) > num_places for one in index):
        return None
    try:
        places = np.arange(num_places).reshape(shape)[index]
    except IndexError:
        return None
    is_once = places.size <= num_places and np.bincount(places.ravel(), minlength=1).max() <= 1
    return places.shape if is_once else None


def _broadcasts(shape: tuple[int, ...], part: tuple[int, ...]) -> bool:
    """Return whether an array of this shape counts for each position of x[index] alike, and makes it no larger."""
    try:
        return np.broadcast_shapes(shape, (1, *part)) == (1, *part)
    except ValueError:
        return False


def _bounds(at: str | slice | tuple[int, ...] | None, num_prompt: int) -> list[int]:
    """Return each position, or of a slice its start and stop."""
    if at is None or isinstance(at, str):
        return [0 if at is None else num_prompt, END]
    bounds = [at.start or 0, END if at.stop is None else at.stop] if isinstance(at, slice) else at
    return [position + num_prompt if position < 0 else position for position in bounds]


def place(edits: Iterable[Edit], points: HookPoints, num_prompt: int, length: int) -> dict:
    """Return lists of PlacedEdit by (kind, layer), for a prompt of num_prompt tokens in a text of `length` at most.

    Raise RequestError for an edit that cannot be made.
    """
    placed: dict[tuple[str, int], list[PlacedEdit]] = {}
    count = 0
    for i, edit in enumerate(edits):
        names = points.find(edit.name, f"edits[{i}].name")
        count += len(names)
        if count > MAX_PLACED:
            raise RequestError(f"are at more than {MAX_PLACED} points.", "edits")
        for name in names:
            kind, layer = points.places[name]
            if kind not in points.changed:
                instead = ", ".join(map(repr, points.changed))
                raise RequestError(
                    f"is {name!r}, which cannot be changed here: {instead} can.", f"edits[{i}].name"
                )
            one = PlacedEdit.of(edit, points.shape(kind, length), num_prompt)
            if one is None:
                shape = points.shape(kind, length)
                reason = f"does not fit {name}: a position has shape {shape}, and the prompt {num_prompt} positions."
                raise RequestError(reason, f"edits[{i}]")
            placed.setdefault((kind, layer), []).append(one)
    return placed


def first_needed_layer(placed: Mapping[Any, list[PlacedEdit]], length: int) -> tuple[int, int]:
    """Return the last layer whose input an edit sets whole, and from which position on.

    length: positions of the text.
    """
    set_from = [
        (layer, edit.first)
        for (kind, layer), edits in placed.items()
        for edit in edits
        if kind == "resid_pre" and edit.sets_all(length)
    ]
    return max(set_from, default=(0, 0))


def salt_of(edits: Iterable[Edit], num_prompt: int, begin: tuple[int, int] = (0, 0)) -> int:
    """Return a number for the prefix cache, which equal edits at equal positions share, and a function with none.

    begin: the first layer that runs, and from which position on.
    """
    if any(edit.function is not None for edit in edits):
        return secrets.randbits(63)
    keys = [(edit.key, *_bounds(edit.at, num_prompt)) for edit in edits]
    return int.from_bytes(blake2b(repr((begin, keys)).encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True, eq=False, repr=False)
class ControlVector:
    """Directions (C,) by layer, from 1, that are added to blocks.N.hook_resid_post: direction.N of llama.cpp's file."""

    directions: Mapping[int, np.ndarray]

    def __repr__(self) -> str:
        size = next(iter(self.directions.values())).size
        return f"ControlVector({len(self.directions)} layers, {min(self.directions)} to {max(self.directions)}, {size})"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ControlVector":
        """Read a GGUF file, as llama.cpp's cvector-generator and repeng write it. Raise CheckpointError."""
        from ..weights.containers.gguf import read_gguf
        from ..weights.families.gguf import ARCHITECTURE

        file = followed(Path(path))
        container = read_gguf(file)
        kind = container.metadata.get(ARCHITECTURE)
        if kind != KIND:
            raise CheckpointError(f"{file} holds {shown(kind)} and must hold {KIND!r}.")
        directions = {}
        for name, tensor in container.tensors.items():
            match = DIRECTION.fullmatch(name)
            if match is None or len(tensor.shape) != 1 or not tensor.is_floating:
                raise CheckpointError(
                    f"{file} holds {shown(name)} {tensor.shape} and must hold vectors direction.1, ..."
                )
            vector = tensor.float32().copy()
            if not np.isfinite(vector).all():
                raise CheckpointError(f"{file} holds {name}, whose values are not all finite numbers.")
            directions[int(match[1])] = vector
        if len({vector.size for vector in directions.values()}) != 1:
            raise CheckpointError(f"{file} must hold vectors of one length, and at least one.")
        return cls(directions)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a GGUF file for llama.cpp's --control-vector. Raise CheckpointError for a layer 0, which it lacks."""
        from ..weights.convert.gguf import write_tensors

        if min(self.directions) < 1:
            raise CheckpointError(
                "a control vector's file has directions from layer 1 on, and none of layer 0."
            )
        keys = {f"{KIND}.model_hint": "gpt2", f"{KIND}.layer_count": len(self.directions)}
        tensors = {f"direction.{i}": vector for i, vector in self.directions.items()}
        return write_tensors(Path(path), KIND, keys, tensors)

    def edits(self, alpha: float = 1.0, layers: Iterable[int] | None = None) -> list[Edit]:
        """Return edits that add alpha times the directions, of these layers alone, to all positions."""
        chosen = self.directions if layers is None else set(layers) & set(self.directions)
        return [Edit(f"blocks.{i}.hook_resid_post", value=alpha * self.directions[i]) for i in sorted(chosen)]
