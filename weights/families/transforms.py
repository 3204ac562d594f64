"""How what files hold becomes a parameter: a small closed set, which the tables of families are made of.

A parameter may lie in several parts: matrices of its own for queries, keys and values, or a part for each GPU that the
model was trained on. Each part is brought into the parameter's order first, and then they are joined.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tinygpt.weights.tensor import Derived, Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Transform:
    """`of_part` of every part, joined along `axis`, then `of_whole`. An axis of None is for one part alone.

    stored_shape: the shape that each of n parts has in the files, from the parameter's shape and n.
    to_parts: the way back, from the parameter to its n parts, for families whose files are written too.
    """

    stored_shape: Callable[[Shape, int], Shape]
    of_part: Callable[[np.ndarray], np.ndarray] | None = None
    axis: int | None = None
    of_whole: Callable[[np.ndarray], np.ndarray] | None = None
    to_parts: Callable[[np.ndarray, int], list[np.ndarray]] | None = None

    def of(self, parts: tuple[Tensor, ...]) -> Tensor:
        """The parameter; where nothing is to be done, the very tensor in the file."""
        if len(parts) == 1 and self.of_part is None and self.of_whole is None:
            return parts[0]
        return Derived(self._apply, parts)

    def _apply(self, *arrays: np.ndarray) -> np.ndarray:
        parts = [self.of_part(array) for array in arrays] if self.of_part else arrays
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts, self.axis)
        return self.of_whole(whole) if self.of_whole else whole


def _shared(shape: Shape, axis: int | None, n: int) -> Shape:
    """The shape of one of n equal parts along an axis."""
    return shape if axis is None else (*shape[:axis], shape[axis] // n, *shape[axis + 1 :])


def _split(array: np.ndarray, n: int, axis: int | None) -> list[np.ndarray]:
    return [array] if axis is None else np.split(array, n, axis)


def as_is(axis: int | None = None) -> Transform:
    return Transform(lambda shape, n: _shared(shape, axis, n), axis=axis, to_parts=lambda a, n: _split(a, n, axis))


AS_IS = as_is()


def transposed(axis: int | None = None) -> Transform:
    """Of matrices that are (out, in), as torch's Linear has them; `axis` is the parameter's."""
    return Transform(
        lambda shape, n: _shared(shape, axis, n)[::-1],
        np.transpose,
        axis,
        to_parts=lambda array, n: [part.T for part in _split(array, n, axis)],
    )


def without_rows(count: int) -> Transform:
    """Of a table whose first rows belong to nothing."""
    return Transform(
        lambda shape, n: (shape[0] + count, *shape[1:]),
        lambda array: array[count:],
        to_parts=lambda array, n: [np.pad(array, ((count, 0), (0, 0)))],
    )


# Of matrices that were convolutions of width 1.
WITHOUT_FIRST_AXIS = Transform(lambda shape, n: (1, *shape), lambda array: array[0])


def queries_keys_values(order: str, head_size: int) -> Transform:
    """Of parts that are (out, in) matrices or biases, each with its own heads, which are joined.

    order: in which a part's rows lie: those of h heads, of head size d, of 3 matrices, such as "h3d".
    """
    sizes = tuple({"3": 3, "h": -1, "d": head_size}[letter] for letter in order)
    axes = tuple(order.index(letter) for letter in "3hd")

    def of_part(array: np.ndarray) -> np.ndarray:
        rest = array.shape[1:]
        ordered = array.reshape(*sizes, *rest).transpose(*axes, *range(3, 3 + len(rest)))  # (3, heads, head size, ...)
        return ordered.reshape(3, -1, *rest)  # (3, C of the part, ...)

    def of_whole(array: np.ndarray) -> np.ndarray:
        return array.reshape(-1, *array.shape[2:]).T  # (..., 3 C)

    def to_parts(array: np.ndarray, n: int) -> list[np.ndarray]:
        rest = array.shape[:-1][::-1]
        heads = np.split(array.T.reshape(3, -1, head_size, *rest), n, axis=1)  # each (3, heads, head size, ...)
        back = (*np.argsort(axes), *range(3, 3 + len(rest)))
        return [part.transpose(back).reshape(-1, *rest) for part in heads]

    return Transform(lambda shape, n: (shape[-1] // n, *shape[:-1]), of_part, 1, of_whole, to_parts)


def flat(shape: Shape, n: int, axis: int | None) -> Transform:
    """Of n parts without shapes, which lie as the parameter does."""
    return _flat(_shared(shape, axis, n), axis)


def flat_queries_keys_values(shape: Shape, n: int) -> Transform:
    """Of n parts without shapes, each with its own heads of all three: (..., 3, C of the part)."""
    return _flat((*shape[:-1], 3, shape[-1] // 3 // n), len(shape), lambda array: array.reshape(shape))


def _flat(part: Shape, axis: int | None, of_whole: Callable[[np.ndarray], np.ndarray] | None = None) -> Transform:
    return Transform(lambda shape, n: (math.prod(part),), lambda array: array.reshape(part), axis, of_whole)
