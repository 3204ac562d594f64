"""A family of checkpoints: its names in files, their parameters, and its configuration."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..config import ModelConfig, is_transposed
from ..containers.mapped_file import Container, StoredTensor
from ..errors import CheckpointError
from ..files import read_json_object
from ..tensor import LazyTensor, Tensor, zeros

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """A container at the user's `path`, and the JSON files next to it."""

    path: Path
    container: Container

    @property
    def folder(self) -> Path:
        return self.path.parent if self.path.is_file() else self.path

    def json(self, name: str) -> dict[str, Any] | None:
        return read_json_object(self.folder / name) if (self.folder / name).exists() else None

    @cached_property
    def config_json(self) -> dict[str, Any] | None:
        return self.json("config.json")

    @property
    def model_type(self) -> Any:
        return (self.config_json or {}).get("model_type")

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path} {text}")


@dataclass(frozen=True)
class NamedTensor:
    """A tensor by its name in the family's rules. part: of a tensor in several files."""

    name: str
    file_name: str
    tensor: StoredTensor
    part: int = 0


def named_by(name_of: Callable[[str], str], source: Source) -> Iterable[NamedTensor]:
    return (NamedTensor(name_of(name), name, tensor) for name, tensor in source.container.tensors.items())


def as_named(source: Source) -> Iterable[NamedTensor]:
    return named_by(lambda name: name, source)


def _no_way_back(array: np.ndarray, n: int) -> list[np.ndarray]:
    raise NotImplementedError


@dataclass(frozen=True)
class Transform:
    """How parts become a parameter: `of_part` of each, joined along `axis` if there are several, then `of_whole`.

    stored_shape: of a part, from the parameter's shape and the number of parts. to_parts: the way back.
    """

    stored_shape: Callable[[Shape, int], Shape]
    of_part: Callable[[np.ndarray], np.ndarray] | None = None
    axis: int | None = None
    of_whole: Callable[[np.ndarray], np.ndarray] | None = None
    to_parts: Callable[[np.ndarray, int], list[np.ndarray]] = _no_way_back

    def of(self, parts: tuple[Tensor, ...]) -> Tensor:
        if len(parts) == 1 and self.of_part is None and self.of_whole is None:
            return parts[0]
        return LazyTensor(self._apply, parts)

    def _apply(self, *arrays: np.ndarray) -> np.ndarray:
        parts = [self.of_part(array) for array in arrays] if self.of_part else arrays
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts, self.axis)
        return self.of_whole(whole) if self.of_whole else whole


def shared(shape: Shape, axis: int | None, n: int) -> Shape:
    """Return the shape of one of n parts along an axis."""
    return shape if axis is None else (*shape[:axis], shape[axis] // n, *shape[axis + 1 :])


def as_is(axis: int | None = None) -> Transform:
    return Transform(
        lambda shape, n: shared(shape, axis, n),
        axis=axis,
        to_parts=lambda array, n: [array] if axis is None else np.split(array, n, axis),
    )


AS_IS = as_is()
TRANSPOSED = Transform(
    lambda shape, n: shape[::-1], np.transpose, to_parts=lambda array, n: [array.T]
)  # (in, out)


def qkv_by_heads(order: str, head_size: int) -> Transform:
    """Join parts, each with some heads. order: of a part's rows: h heads, head size d, 3 matrices."""
    sizes = tuple({"3": 3, "h": -1, "d": head_size}[letter] for letter in order)
    axes = tuple(order.index(letter) for letter in "3hd")

    def of_part(array: np.ndarray) -> np.ndarray:
        rest = array.shape[1:]
        ordered = array.reshape(*sizes, *rest).transpose(
            *axes, *range(3, 3 + len(rest))
        )  # (3, heads, head size, ...)
        return ordered.reshape(3, -1, *rest)  # (3, C of the part, ...)

    def of_whole(array: np.ndarray) -> np.ndarray:
        return array.reshape(-1, *array.shape[2:])  # (3 C, ...)

    def to_parts(array: np.ndarray, n: int) -> list[np.ndarray]:
        rest = array.shape[1:]
        heads = np.split(array.reshape(3, -1, head_size, *rest), n, axis=1)  # each (3, heads, head size, ...)
        back = (*np.argsort(axes), *range(3, 3 + len(rest)))
        return [part.transpose(back).reshape(-1, *rest) for part in heads]

    return Transform(lambda shape, n: shared(shape, 0, n), of_part, 1, of_whole, to_parts)


@dataclass(frozen=True)
class TensorRule:
    """The tensors of a parameter. default: makes a parameter that files leave out."""

    sources: tuple[str, ...]
    transform: Transform = AS_IS
    default: Callable[[Shape], np.ndarray] | None = None


NO_BIAS = TensorRule((), default=zeros)  # one in the files is unexpected


def rule_in_out(parameter: str, name: str) -> TensorRule:
    """Return the rule of a family whose matrices of layers are (in, out)."""
    return TensorRule((name,), TRANSPOSED if is_transposed(parameter) else AS_IS)


MODULES = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")  # of a layer
_PARAMETER = re.compile(r"h\.(\d+)\.(.+)\.(\w+)")


def split_name(parameter: str) -> tuple[str | None, str, str]:
    """h.3.ln_1.bias is 3, ln_1, bias."""
    found = _PARAMETER.fullmatch(parameter)
    return found.groups() if found else (None, *parameter.rsplit(".", 1))


@dataclass(frozen=True)
class Names:
    """A family's names. layers: of the list of layers; others: of modules outside layers; in_layer: of MODULES."""

    layers: str
    others: Mapping[str, str]
    in_layer: tuple[str, ...] = MODULES

    def of(self, parameter: str) -> str:
        """h.3.ln_1.bias may be layers.3.input_layernorm.bias."""
        layer, module, kind = split_name(parameter)
        if layer is None:
            return f"{self.others[module]}.{kind}"
        return f"{self.layers}.{layer}.{self.in_layer[MODULES.index(module)]}.{kind}"


@dataclass(frozen=True)
class Layout:
    """transformers' layout of a family, which `convert` writes.

    file_name: of a name in the rules; short_name: the way back, without wrappers. has_defaults: files may leave out
    parameters. config_json: for models without one.
    """

    rules: Callable[[ModelConfig], Mapping[str, TensorRule]]
    file_name: Callable[[str], str]
    short_name: Callable[[str], str]
    has_defaults: bool = True
    config_json: Callable[[ModelConfig], dict[str, Any]] | None = None


@dataclass(frozen=True)
class Family:
    """One way in which files name and lay out a model.

    name, described_by: of the model and the place of its configuration, for messages. config: raises one
    CheckpointError for all wrong fields. rules: of every parameter. named: every tensor by its name in the rules.
    is_ignored: of known, unused names. parts: the number of parts of divided tensors. quirks: what loading evens out.
    advice: for an error of matching. tokenizer: in the weights' files, as tokenizer.json has it. layout: transformers'.
    """

    name: str
    described_by: str
    detect: Callable[[Source], bool]
    config: Callable[[Source], ModelConfig]
    rules: Callable[[Source, ModelConfig], Mapping[str, TensorRule]]
    named: Callable[[Source], Iterable[NamedTensor]] = as_named
    is_ignored: Callable[[str], bool] = lambda name: False
    parts: Callable[[Source], int] = lambda source: 1
    quirks: Callable[[Source, ModelConfig], Iterable[str]] = lambda source, config: ()
    advice: str = ""
    tokenizer: Callable[[Source], dict[str, Any] | None] = lambda source: None
    layout: Layout | None = None
