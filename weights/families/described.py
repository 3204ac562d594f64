"""GPT-2 by any names: a description tells which tensors of a file are its parameters.

Known programs have theirs in `programs`, a user's is tensor_names.json. By parameter or module, such as
h.*.attn.c_attn, it gives a name in the file, names that are joined, or {"names": [...], "axis": 0, "transpose": true};
null leaves a parameter, or tensors of the file, out. The first * is the layer, a second one each head in turn.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np

from ..config import EMBEDDING, HEAD, HEAD_BIAS, POSITIONS, ModelConfig, is_transposed, parameter_shapes
from ..containers.torch import Stub, fields_of
from ..errors import CheckpointError, is_bool, is_whole, listed, shown
from ..tensor import LazyTensor, Tensor
from .family import (
    MODULES,
    NO_BIAS,
    OURS,
    NamedTensor,
    Shape,
    Source,
    TensorRule,
    Transform,
    renamed,
    shared,
    split_name,
)
from .gpt2 import BESIDE, named_in

MAX_LAYERS, MAX_HEADS = 10_000, 10_000
MAX_LEFT_OUT = 100  # patterns, each of which is compared with all names
# Settings next to the tensors: nanoGPT's, and every name of the one that no shape tells.
_SAID = {"block_size": "n_positions", **{name: name for name in ("vocab_size", "n_layer", "n_embd", "bias")}}
_HEADS = ("n_head", "n_heads", "num_heads", "num_head", "num_attention_heads", "n_attention_heads", "nhead")
MAX_DEPTH, MAX_FIELDS = 4, 200_000
NORMS = ("ln_1", "ln_2", "ln_f")
LEAST_GAIN = 1e-3  # of a layer norm, relative to its largest


@dataclass(frozen=True)
class Stored:
    """Names in a file, joined along an axis of (out, in). is_in_out: a matrix is (in, out); None: its shape tells."""

    names: tuple[str, ...]
    axis: int = 0
    is_in_out: bool | None = None

    def of_heads(self, heads: int) -> tuple[str, ...]:
        """Return the names with each head's number in place of a *."""
        return tuple(
            name.replace("*", str(head)) for name in self.names for head in range(heads if "*" in name else 1)
        )


def _stored(value: Any) -> Stored | None:
    """Raise ValueError for a value that is no name, no names and no null."""
    if value is None:
        return None
    fields = value if isinstance(value, dict) else {"names": value}
    names = [fields["names"]] if isinstance(fields.get("names"), str) else fields.get("names")
    axis, is_in_out = fields.get("axis", 0), fields.get("transpose")
    are_texts = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    is_known = fields.keys() <= {"names", "axis", "transpose"} and axis in (0, 1)
    if not (are_texts and is_known and (is_in_out is None or is_bool(is_in_out))):
        raise ValueError(shown(value))
    return Stored(tuple(names), axis, is_in_out)


def _pattern(name: str) -> str:
    """Return a regular expression in which a part * is any part, and all others at the end: no match takes long."""
    *parts, last = ("[^.]+" if part == "*" else re.escape(part) for part in name.split("."))
    return r"\.".join([*parts, ".+" if last == "[^.]+" else last])


@dataclass(frozen=True)
class Description:
    """Where parameters lie. left_out: patterns of a file's other names; is_in_out: of matrices that do not say it."""

    entries: Mapping[str, Stored | None]
    left_out: tuple[str, ...] = ()
    is_in_out: bool | None = None
    has_wrappers: bool = False  # around the names, as torch and transformers put them

    @classmethod
    def of(cls, names: Mapping[str, Any], **fields: Any) -> "Description":
        """Raise ValueError for a value that is none."""
        left_out = [key for key in names if not OURS.fullmatch(key)]
        if len(left_out) > MAX_LEFT_OUT:
            raise ValueError(f"{len(left_out)} patterns to leave out")
        if strange := [key for key in left_out if names[key] is not None]:
            raise ValueError(f"names for {listed(strange, 3)}, which is no parameter of GPT-2")
        entries = {key: _stored(names[key]) for key in names.keys() - {*left_out}}
        return cls(entries, tuple(map(_pattern, left_out)), **fields)

    def stored(self, parameter: str) -> Stored | None:
        """Return the names of a parameter: its own without an entry. A * of a head may remain."""
        layer, module, kind = split_name(parameter)
        of_layers = module if layer is None else f"h.*.{module}"
        for key in (parameter, parameter.removesuffix(f".{kind}"), f"{of_layers}.{kind}", of_layers):
            stored = self.entries.get(key, _NO_ENTRY)
            if stored is None:
                return None
            if stored is not _NO_ENTRY:
                end = "" if key.endswith(f".{kind}") else f".{kind}"
                names = (name.replace("*", str(layer), 1) if "*" in key else name for name in stored.names)
                is_in_out = self.is_in_out if stored.is_in_out is None else stored.is_in_out
                return Stored(tuple(name + end for name in names), stored.axis, is_in_out)
        return Stored((parameter,), is_in_out=self.is_in_out)

    def named(self, source: Source, within: str = "") -> Iterable[NamedTensor]:
        """Yield all tensors, by their names in the state dict that holds the embedding."""
        embedding = self.stored(EMBEDDING)
        return named_in(embedding.names[0] if embedding else "", source, self.has_wrappers, within)


_NO_ENTRY = Stored(())


class Model:
    """A source's tensors, as a description names them."""

    def __init__(self, description: Description, source: Source, within: str = ""):
        self.description, self.source = description, source
        found = description.named(source, within)
        self.tensors = {one.name: one.tensor for one in found if not one.name.startswith(BESIDE)}

    def names(self, parameter: str) -> tuple[str, ...]:
        stored = self.description.stored(parameter)
        return stored.of_heads(self.heads or 1) if stored else ()

    def has(self, parameter: str) -> bool:
        names = self.names(parameter)
        return bool(names) and all(name in self.tensors for name in names)

    def has_any(self, parameter: str) -> bool:
        return any(name in self.tensors for name in self.names(parameter))

    @cached_property
    def heads(self) -> int | None:
        """Return the number of heads if each has a matrix of its own."""
        stored = self.description.stored("h.0.attn.c_attn.weight")
        name = next((name for name in stored.names if "*" in name), None) if stored else None
        numbers = range(MAX_HEADS if name else 0)
        lost = (head for head in numbers if name and name.replace("*", str(head)) not in self.tensors)
        return next(lost, None) if name else None

    @cached_property
    def n_layer(self) -> int:
        """Count layers by their numbers: a gap shows in names that are missing, or unexpected."""
        return next(layer for layer in count() if layer > MAX_LAYERS or not self._has_layer(layer))

    def _has_layer(self, layer: int) -> bool:
        return any(self.has_any(f"h.{layer}.{module}.weight") for module in MODULES)

    @property
    def is_there(self) -> bool:
        """Return whether all weights of the first layer, and around the layers, are there."""
        weights = [f"h.0.{module}.weight" for module in MODULES]
        return all(map(self.has, [EMBEDDING, POSITIONS, "ln_f.weight", *weights]))

    def shape(self, parameter: str) -> Shape:
        """Return the shape of a matrix, of its first part. Raise CheckpointError if it is absent."""
        names = self.names(parameter)
        shape = self.tensors[names[0]].shape if names and names[0] in self.tensors else ()
        if len(shape) != 2:
            raise self.source.error(f"holds no matrix {listed(names) or parameter}, which shows a size.")
        return shape

    def sizes(self) -> dict[str, Any]:
        V, C = self.shape(EMBEDDING)
        inner = self.shape("h.0.mlp.c_fc.weight")
        F = inner[inner[0] == C] * len(self.names("h.0.mlp.c_fc.weight"))
        # The list of names has to be in proportion to the files.
        if self.heads and self.heads * self.n_layer > len(self.tensors):
            raise self.source.error(f"has {self.heads} heads in its first layer, and others in none.")
        seen = {"vocab_size": V, "n_embd": C, "n_positions": self.shape(POSITIONS)[0], "n_inner": F}
        heads = {"n_head": self.heads} if self.heads else {}
        return {**seen, "n_layer": self.n_layer, "tie_word_embeddings": not self.has(HEAD), **heads}

    def rules(self, config: ModelConfig, requires_biases: bool) -> dict[str, TensorRule]:
        """Return the rules. A kind of layer may have no biases; if one is there, all are."""
        shapes = parameter_shapes(config)
        biases = [name for name in shapes if name.endswith(".bias")]
        with_bias = {_kind(name) for name in biases if requires_biases or self.has_any(name)}
        rules = {}
        turns = self._turns(shapes)
        for parameter in shapes:
            if parameter in biases and _kind(parameter) not in with_bias:
                rules[parameter] = NO_BIAS
            elif names := self.names(parameter):
                stored = self.description.stored(parameter)
                rules[parameter] = TensorRule(names, joined(stored.axis, turns.get(parameter, False)))
            elif parameter != HEAD:
                raise self.source.error(f"is described without {parameter}, which every GPT-2 has.")
        if self.has(HEAD_BIAS):
            rules[HEAD_BIAS] = TensorRule(self.names(HEAD_BIAS))
        return rules

    def _turns(self, shapes: Mapping[str, Shape]) -> dict[str, bool]:
        """Return which matrices are (in, out): square ones as the others. Raise CheckpointError if no shape tells."""
        turns: dict[str, bool | None] = {}
        told = set()
        for parameter in filter(is_transposed, shapes):
            stored, names = self.description.stored(parameter), self.names(parameter)
            turns[parameter] = stored.is_in_out if stored else None
            if turns[parameter] is None and names and names[0] in self.tensors:
                wanted, found = (
                    shared(shapes[parameter], stored.axis, len(names)),
                    self.tensors[names[0]].shape,
                )
                if found in (wanted, wanted[::-1]) and wanted != wanted[::-1]:
                    turns[parameter] = found != wanted
                    told.add(turns[parameter])
        if None in turns.values() and len(told) != 1 and self.is_there:
            names = [name for name, turn in turns.items() if turn is None]
            raise self.source.error(
                f"holds square matrices, of which no shape tells rows from columns, such as {names[0]}: write "
                '{"names": ..., "transpose": true} for (in, out), or false.'
            )
        return {name: turn if turn is not None else told == {True} for name, turn in turns.items()}


def _kind(bias: str) -> str:
    """Return the kind of layer: all layer norms are one."""
    _, module, _ = split_name(bias)
    return "norm" if module in NORMS else module


def joined(axis: int, is_in_out: bool) -> Transform:
    """Return the transform of parts that are joined along an axis of (out, in)."""

    def stored_shape(shape: Shape, n: int) -> Shape:
        part = shared(shape, axis, n)
        return part[::-1] if is_in_out else part

    return Transform(stored_shape, np.transpose if is_in_out else None, axis)


def settings_of(source: Source) -> dict[str, Any]:
    """Return fields of the settings next to the tensors. Raise CheckpointError for two numbers of heads."""
    said: dict[str, Any] = {}
    heads = set()
    left = MAX_FIELDS
    waiting: list[tuple[int, Any]] = [(0, source.container.metadata)]
    for depth, value in waiting:
        fields = fields_of(value)
        left -= len(fields)
        if left < 0:
            break
        if here := {fields[name] for name in _HEADS if is_whole(fields.get(name))}:
            heads |= here
            said |= renamed(fields, _SAID)
        if depth < MAX_DEPTH:
            waiting += [(depth + 1, one) for one in fields.values() if isinstance(one, dict | Stub)]
    if len(heads) > 1:
        raise source.error(
            f"has settings of {listed(sorted(map(str, heads)))} heads: write n_head in config.json."
        )
    return {**said, **({"n_head": heads.pop()} if heads else {})}


def with_head_bias(stored: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Put a bias of the head into the last layer norm's bias, and the head.

    Of a normed x, which sums to 0, the norm's output g x + b, weighted by 1 / g, sums to that of b / g: a shift of b
    along g makes it C, and 1 / (g C) of the bias in each column of the head adds the bias.
    """
    if HEAD_BIAS not in stored:
        return stored
    norm = stored["ln_f.weight"], stored["ln_f.bias"]
    head = stored.get(HEAD, stored[EMBEDDING])
    folded = {
        "ln_f.bias": LazyTensor(_shifted, norm),
        HEAD: LazyTensor(_with_bias, (head, stored[HEAD_BIAS], *norm)),
    }
    return {name: tensor for name, tensor in (stored | folded).items() if name != HEAD_BIAS}


def _shift(gain: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, float]:
    gain = gain.astype(np.float64)  # (C,)
    if np.abs(gain).min() <= LEAST_GAIN * np.abs(gain).max():
        raise CheckpointError(
            "a head with a bias needs a last layer norm without weights of 0: it is not implemented."
        )
    return gain, 1 - np.mean(bias / gain)


def _shifted(gain: np.ndarray, bias: np.ndarray) -> np.ndarray:
    gain, shift = _shift(gain, bias)
    return (bias + shift * gain).astype(np.float32)


def _with_bias(head: np.ndarray, head_bias: np.ndarray, gain: np.ndarray, bias: np.ndarray) -> np.ndarray:
    gain, shift = _shift(gain, bias)
    added = (head_bias - shift * (head @ gain)) / len(gain)  # (V,)
    return (head + np.outer(added, 1 / gain)).astype(np.float32)
