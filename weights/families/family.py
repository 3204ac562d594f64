"""A family of checkpoints: its names in files, their parameters, and its configuration."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ..config import ACTIVATIONS, STRUCTURE, ModelConfig, is_transposed
from ..errors import (
    BOOLEAN,
    LARGEST,
    TOKEN_ID,
    CheckpointError,
    Checks,
    is_number,
    is_whole,
    one_of,
    only,
    or_null,
    size_to,
    wrong_fields,
)
from ..files import StoredTokenizer, read_json_object
from ..tensor import Container, LazyTensor, StoredTensor, Tensor, zeros

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """A container at the user's `path`, and the JSON files next to it. description: TENSOR_NAMES, if it is one."""

    path: Path
    container: Container
    description: Mapping[str, Any] | None = None

    @property
    def folder(self) -> Path:
        return self.path.parent if self.path.is_file() else self.path

    def json(self, name: str) -> dict[str, Any] | None:
        return read_json_object(self.folder / name) if (self.folder / name).exists() else None

    @cached_property
    def config_json(self) -> dict[str, Any] | None:
        return self.json("config.json")

    @property
    def beside(self) -> dict[str, Any]:
        """The fields of a config.json next to the file."""
        return self.config_json or {}

    @property
    def generation_json(self) -> dict[str, Any] | None:
        return self.json("generation_config.json")

    @property
    def model_type(self) -> Any:
        return self.beside.get("model_type")

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path} {text}")


@dataclass(frozen=True)
class NamedTensor:
    """A tensor by its name in the family's rules. part: of a tensor in several files."""

    name: str
    file_name: str
    tensor: StoredTensor
    part: int = 0


def num_parts(tensors: Iterable[NamedTensor]) -> int:
    """Return in how many parts divided tensors are."""
    return 1 + max((named.part for named in tensors), default=0)


def named_by(name_of: Callable[[str], str], source: Source) -> Iterable[NamedTensor]:
    return (NamedTensor(name_of(name), name, tensor) for name, tensor in source.container.tensors.items())


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.fullmatch(pattern, name, re.DOTALL) for pattern in patterns)


def as_named(source: Source) -> Iterable[NamedTensor]:
    return named_by(lambda name: name, source)


@dataclass(frozen=True)
class Transform:
    """How parts become a parameter: `of_part` of each, joined along `axis` if there are several, then `of_whole`.

    stored_shape: of a part, from the parameter's shape and the number of parts. to_parts: the way back, which `convert`
    takes in a family's Layout.
    """

    stored_shape: Callable[[Shape, int], Shape]
    of_part: Callable[[np.ndarray], np.ndarray] | None = None
    axis: int | None = None
    of_whole: Callable[[np.ndarray], np.ndarray] | None = None
    to_parts: Callable[[np.ndarray, int], list[np.ndarray]] = lambda array, n: [array]

    def of(self, parts: tuple[Tensor, ...]) -> Tensor:
        if len(parts) == 1 and self.of_part is None and self.of_whole is None:
            return parts[0]
        return LazyTensor(self.of_arrays, parts)

    def of_arrays(self, *arrays: np.ndarray) -> np.ndarray:
        parts = [self.of_part(array) for array in arrays] if self.of_part else arrays
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts, self.axis)
        return self.of_whole(whole) if self.of_whole else whole


def shared(shape: Shape, axis: int | None, n: int) -> Shape:
    """Return the shape of one of n parts along an axis. Raise CheckpointError if they would differ."""
    if axis is None:
        return shape
    if shape[axis] % n:
        raise CheckpointError(f"axis {axis} of a tensor {shape} cannot be in {n} parts of one size.")
    return *shape[:axis], shape[axis] // n, *shape[axis + 1 :]


def as_is(axis: int | None = None) -> Transform:
    return Transform(
        lambda shape, n: shared(shape, axis, n),
        axis=axis,
        to_parts=lambda array, n: [array] if axis is None else np.split(array, n, axis),
    )


AS_IS = as_is()
TRANSPOSED = Transform(lambda shape, n: shape[::-1], np.transpose, to_parts=lambda array, n: [array.T])


def qkv_by_heads(order: str, head_size: int) -> Transform:
    """Join parts, each with some heads. order: of a part's rows: h heads, head size d, 3 matrices."""
    sizes = tuple({"3": 3, "h": -1, "d": head_size}[letter] for letter in order)
    axes = tuple(order.index(letter) for letter in "3hd")

    def of_part(array: np.ndarray) -> np.ndarray:
        rest = array.shape[1:]
        order = *axes, *range(3, 3 + len(rest))
        ordered = array.reshape(*sizes, *rest).transpose(order)  # (3, heads, head size, ...)
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


def rule_of_qkv(usual: TensorRule) -> TensorRule:
    """Take c_attn from a matrix each of queries, keys and values: "qkv" in the usual name stands for them."""
    return TensorRule(tuple(usual.sources[0].replace("qkv", matrix) for matrix in "qkv"), as_is(0))


def rule_in_out(parameter: str, name: str) -> TensorRule:
    """Take matrices of layers as (in, out)."""
    return TensorRule((name,), TRANSPOSED if is_transposed(parameter) else AS_IS)


MODULES = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")  # of a layer
_PARAMETER = re.compile(r"h\.(\d+)\.(.+)\.(\w+)")


def split_name(parameter: str) -> tuple[str | None, str, str]:
    """Return the layer, the module and the kind: h.3.ln_1.bias is 3, ln_1, bias."""
    in_layer = _PARAMETER.fullmatch(parameter)
    return in_layer.groups() if in_layer else (None, *parameter.rsplit(".", 1))


@dataclass(frozen=True)
class Names:
    """A family's names. layers: of the list of layers; others: of modules outside layers; in_layer: of MODULES."""

    layers: str
    others: Mapping[str, str]
    in_layer: tuple[str, ...] = MODULES

    def of(self, parameter: str) -> str:
        """Return the family's name: h.3.ln_1.bias may be layers.3.input_layernorm.bias."""
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

    name, described_by: of the model and the place of its configuration, for messages; adds: where sizes come from that
    it leaves out. config: raises one CheckpointError for all wrong fields. rules: of every parameter. named: every
    tensor by its name in the rules.
    ignored: patterns of known, unused names. quirks: what loading evens out. advice: for an error of matching.
    tokenizer: in the weights' files. chat_options: of a Checkpoint. layout: transformers'.
    finish: folds tensors that are no parameters into parameters.
    """

    name: str
    described_by: str
    config: Callable[[Source], ModelConfig]
    rules: Callable[[Source, ModelConfig], Mapping[str, TensorRule]]
    adds: Callable[[Source], str] = lambda source: ""
    detect: Callable[[Source], bool] = lambda source: True
    named: Callable[[Source], Iterable[NamedTensor]] = as_named
    ignored: tuple[str, ...] = ()
    quirks: Callable[[Source, ModelConfig], Iterable[str]] = lambda source, config: ()
    advice: str = ""
    tokenizer: Callable[[Source], StoredTokenizer | None] = lambda source: None
    chat_options: Callable[[Source], Mapping[str, Any]] = lambda source: {}
    layout: Layout | None = None
    finish: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda stored: stored


NONE: Mapping[str, Any] = MappingProxyType({})


def checked_config(
    values: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    checks: Checks = NONE,
    described_by: str = "config.json or generation_config.json",
    structure: Mapping[str, Any] = NONE,
) -> ModelConfig:
    """Return ModelConfig from `values`, by its field names, and from generation_config.json if there is one.

    structure: fields of STRUCTURE, which `values` cannot give. As in transformers, the ids that end a text come from
    generation_config.json alone if it exists, even if it names none. Raise one CheckpointError for all fields that are
    impossible or not implemented.
    """
    ending = values if generation is None else {"eos_token_id": None, **generation}
    starting = generation if generation and generation.get("bos_token_id") is not None else values
    values = {
        **values,
        "bos_token_id": starting.get("bos_token_id", ModelConfig.bos_token_id),
        "eos_token_id": ending.get("eos_token_id", ModelConfig.eos_token_ids[0]),
    }
    problems = wrong_fields(values, {**checks, **CHECKS})
    n_embd, n_head = (values.get(name, getattr(ModelConfig, name)) for name in ("n_embd", "n_head"))
    if is_whole(n_embd) and is_whole(n_head) and n_head > 0 and n_embd % n_head:
        problems.append(f"n_embd {n_embd} cannot be divided into {n_head} heads (n_head)")
    if problems:
        raise CheckpointError(f"{described_by} cannot be used: {'; '.join(problems)}.")
    names = ModelConfig.__dataclass_fields__.keys() - {*STRUCTURE, "eos_token_ids"}
    fields = {name: values[name] for name in names if name in values}
    return ModelConfig(**fields, **structure, eos_token_ids=_as_tuple(values["eos_token_id"]))


def written_config(
    model_type: str, architecture: str, config: ModelConfig, names: Mapping[str, str]
) -> dict[str, Any]:
    """Return the fields of a config.json. names: ModelConfig's names by the written ones."""
    ids = list(config.eos_token_ids)
    fields = {theirs: getattr(config, ours) for theirs, ours in names.items()}
    ends = {"eos_token_id": ids[0] if len(ids) == 1 else ids or None}
    return {"model_type": model_type, "architectures": [architecture], **fields, **ends}


def renamed(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {ours: fields[theirs] for theirs, ours in names.items() if theirs in fields}


def _as_tuple(token_ids: Any) -> tuple[Any, ...]:
    if isinstance(token_ids, list):
        return tuple(token_ids)
    return () if token_ids is None else (token_ids,)


# As in transformers, token ids outside the vocabulary are allowed: they are never produced.
CHECKS: Checks = {
    "quantization_config": only(None, "quantized checkpoints are not implemented"),
    "activation_function": one_of(ACTIVATIONS),
    **dict.fromkeys(("vocab_size", "n_positions", "n_embd", "n_head"), size_to(LARGEST)),
    "n_layer": size_to(10_000),
    "n_inner": or_null(size_to(LARGEST)),
    "scale_attn_weights": BOOLEAN,
    "scale_attn_by_inverse_layer_idx": BOOLEAN,
    "reorder_and_upcast_attn": BOOLEAN,
    "tie_word_embeddings": BOOLEAN,
    "layer_norm_epsilon": (
        lambda value: is_number(value) and 0 <= value <= sys.float_info.max,
        "a number from 0 up",
    ),
    "bos_token_id": TOKEN_ID,
    "eos_token_id": (
        lambda value: all(map(is_whole, _as_tuple(value))),
        "a token id, a list of token ids or null",
    ),
}


class Shapes:
    def __init__(self, source: Source, tensors: Iterable[NamedTensor] | None = None):
        tensors = as_named(source) if tensors is None else tensors
        self._source = source
        self._shapes = {one.name: one.tensor.shape for one in tensors if one.part == 0}

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def size(self, name: str, axis: int) -> int:
        """Raise CheckpointError if the tensor or the axis is absent."""
        if name not in self._shapes or len(self._shapes[name]) <= axis:
            raise self._source.error(
                f"holds no tensor {name} of {axis + 1} dimensions or more, which shows a size."
            )
        return self._shapes[name][axis]

    def shown(self, places: Mapping[str, tuple[str, int]], layer: str) -> dict[str, int]:
        """Return sizes by tensors and their axes, as far as they are there, and n_layer."""
        sizes = {
            field: self._shapes[name][axis]
            for field, (name, axis) in places.items()
            if len(self._shapes.get(name, ())) > axis
        }
        numbers = [
            int(in_layer[1])
            for name in self._shapes
            if (in_layer := re.match(rf"{layer}(\d{{1,9}})[./]", name))
        ]
        return sizes | ({"n_layer": 1 + max(numbers)} if numbers else {})

    def sizes(self, embedding: str, positions: str, inner: tuple[str, int], layer: str) -> dict[str, int]:
        """Return ModelConfig's sizes. inner: a tensor and its axis; layer: the names' beginning before the number."""
        return {
            "n_layer": 0,
            **self.shown({}, layer),
            "vocab_size": self.size(embedding, 0),
            "n_embd": self.size(embedding, 1),
            "n_positions": self.size(positions, 0),
            "n_inner": self.size(*inner),
        }
