"""GPT-2 by any names: a description tells which tensors of a file are its parameters.

Known programs have theirs in `programs`, a user's is tensor_names.json. By parameter or module, such as
h.*.attn.c_attn, it gives a name in the file, names that are joined, or {"names": [...], "axis": 0, "transpose": true};
null leaves a parameter, or tensors of the file, out. The first * is the layer, a second one each head in turn.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from typing import Any

import numpy as np

from ..config import EMBEDDING, HEAD, HEAD_BIAS, POSITIONS, ModelConfig, is_transposed, parameter_shapes
from ..errors import CheckpointError, is_bool, listed, shown
from ..files import TENSOR_NAMES
from ..tensor import LazyTensor, Tensor
from .family import (
    MODULES,
    NO_BIAS,
    NamedTensor,
    Shape,
    Source,
    TensorRule,
    Transform,
    as_is,
    matches,
    shared,
    split_name,
)
from .gpt2 import BESIDE, named_in

MAX_LEFT_OUT = 100  # patterns, each of which is compared with all names
MAX_COMPARED = 2_000_000  # parts of patterns, by the names that they are compared with
MAX_NAME = 1000  # characters
# Characters of all names that a description gives, next to the file's own: biases may be absent, layers given twice.
MAX_LENGTHS = 4
_IN_LAYER = "|".join(map(re.escape, MODULES))
_OURS = re.compile(
    rf"(?:wte|wpe|ln_f|lm_head|h\.(?:\*|0|[1-9]\d{{0,4}})\.(?:{_IN_LAYER}))(?:\.(?:weight|bias))?"
)
_NORM = "norm"
OF_BATCH = Transform(lambda shape, n: (1, *shape), lambda array: array[0])  # (1, T, C), as it is added
LEAST_GAIN = 1e-3  # of a layer norm, relative to its largest


@dataclass(frozen=True)
class Stored:
    """Names in a file, joined along an axis of (out, in). is_in_out: a matrix is (in, out); None: its shape tells."""

    names: tuple[str, ...]
    axis: int = 0
    is_in_out: bool | None = None

    @classmethod
    def of(cls, key: str, value: Any) -> "Stored | None":
        """Raise ValueError for other values."""
        if value is None:
            return None
        fields = value if isinstance(value, dict) else {"names": value}
        names = [fields["names"]] if isinstance(fields.get("names"), str) else fields.get("names")
        axis, is_in_out = fields.get("axis", 0), fields.get("transpose")
        are_texts = isinstance(names, list) and names and all(map(_is_name, names))
        is_known = fields.keys() <= {"names", "axis", "transpose"} and type(axis) is int and 0 <= axis <= 1
        if not (are_texts and is_known and (is_in_out is None or is_bool(is_in_out))):
            raise ValueError(shown(value))
        if "*" in key and not all("*" in name for name in names):
            raise ValueError(f"{key} a name without a * for the layer")
        return cls(tuple(names), axis, is_in_out)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_NAME


def _pattern(name: str) -> str:
    """Return a regular expression in which a part * is any part, and all others at the end: no match takes long."""
    *parts, last = ("[^.]+" if part == "*" else re.escape(part) for part in name.split("."))
    return r"\.".join([*parts, ".+" if last == "[^.]+" else last])


_NO_ENTRY = Stored(())
_LAYER = re.compile(r"h\.(\d+)\..*")


@dataclass(frozen=True)
class Description:
    """Where parameters lie.

    left_out: patterns of a file's other names. is_users: names are whole, and matrices may be (in, out); names of a
    program stand in wrappers, as torch and transformers have them. unlike: modules that may lack biases if others have
    them.
    """

    entries: Mapping[str, Stored | None]
    left_out: tuple[str, ...] = ()
    is_users: bool = False
    unlike: tuple[str, ...] = MODULES

    @classmethod
    def of(cls, names: Mapping[str, Any], **fields: Any) -> "Description":
        left_out = [key for key in names if not _OURS.fullmatch(key)]
        if len(left_out) > MAX_LEFT_OUT:
            raise ValueError(f"{len(left_out)} patterns to leave out")
        if strange := [key for key in left_out if names[key] is not None]:
            raise ValueError(f"names for {listed(strange, 3)}, which is no parameter of GPT-2")
        entries = {key: Stored.of(key, names[key]) for key in names.keys() - {*left_out}}
        return cls(entries, tuple(map(_pattern, left_out)), **fields)

    def entry(self, parameter: str) -> tuple[str | None, Stored]:
        """Return the key and entry of a parameter: of its own name without one, of no names if it is left out."""
        layer, module, kind = split_name(parameter)
        of_layers = module if layer is None else f"h.*.{module}"
        for key in (parameter, parameter.removesuffix(f".{kind}"), f"{of_layers}.{kind}", of_layers):
            if (stored := self.entries.get(key, _NO_ENTRY)) is not _NO_ENTRY:
                return key, stored or _NO_ENTRY
        return None, Stored((parameter,))

    def names(self, parameter: str) -> Iterator[str]:
        """Yield names, in which a head's * remains."""
        key, stored = self.entry(parameter)
        layer, _, kind = split_name(parameter)
        end = "" if key is None or key.endswith(f".{kind}") else f".{kind}"
        for name in stored.names:
            yield (name.replace("*", str(layer), 1) if key and "*" in key else name) + end

    def named(self, source: Source) -> Iterable[NamedTensor]:
        """Yield all tensors, by their names in the state dict that holds the embedding, or the head."""
        tables = (next(self.names(table), "") for table in (EMBEDDING, HEAD))
        return named_in(tuple(filter(None, tables)), source, not self.is_users)

    def kind(self, parameter: str) -> str:
        """Return the kind of layer: all layer norms are one, and all matrices that are not unlike others."""
        _, module, _ = split_name(parameter)
        is_norm = module.rpartition(".")[2].startswith("ln_")
        return _NORM if is_norm else module if module in self.unlike else "matrix"


class Model:
    def __init__(self, description: Description, source: Source):
        self.description, self.source = description, source
        named = description.named(source)
        self.tensors = {one.name: one.tensor for one in named if not one.name.startswith(BESIDE)}

    @cached_property
    def heads(self) -> int:
        name = next(self.description.names("h.0.attn.c_attn.weight"), "")
        return _length(lambda head: name.replace("*", str(head)) in self.tensors) if "*" in name else 0

    @cached_property
    def n_layer(self) -> int:
        """Raise CheckpointError for entries of other layers, and for a list of names out of proportion to the file."""
        # A gap shows in names that are missing, or unexpected.
        L = _length(self._begins)
        entries = self.description.entries
        layers = {key: in_layer[1] for key in entries if (in_layer := _LAYER.fullmatch(key))}
        if beyond := [key for key, layer in layers.items() if int(layer) >= L]:
            raise self.source.error(
                f"has {L} layers, from h.0 on, and {TENSOR_NAMES} gives {listed(beyond, 3)}."
            )
        lengths = sum(
            len(name) * (L if "*" in key else 1) * (self.heads if name.count("*") > key.count("*") else 1)
            for key, stored in entries.items()
            for name in (stored or _NO_ENTRY).names
        )
        if lengths > MAX_LENGTHS * sum(map(len, self.tensors)):
            raise self.source.error(f"is described by more names than it has: {lengths} characters.")
        return L

    def _begins(self, layer: int) -> bool:
        names = (next(self.description.names(f"h.{layer}.{module}.weight"), "") for module in MODULES)
        return any(name.replace("*", "0") in self.tensors for name in names)

    def names(self, parameter: str) -> tuple[str, ...]:
        counts = ((name, self.heads if "*" in name else 1) for name in self.description.names(parameter))
        return tuple(name.replace("*", str(i)) for name, n in counts for i in range(n))

    def has_any(self, parameter: str) -> bool:
        return any(name in self.tensors for name in self.names(parameter))

    def shape(self, parameter: str) -> Shape:
        """Return the first part's shape. Raise CheckpointError if it is absent."""
        names = self.names(parameter)
        shape = self.tensors[names[0]].shape if names and names[0] in self.tensors else ()
        if parameter == POSITIONS and len(shape) == 3 and shape[0] == 1:
            shape = shape[1:]
        if len(shape) != 2:
            raise self.source.error(f"holds no matrix {listed(names) or parameter}, which shows a size.")
        return shape

    def sizes(self) -> dict[str, Any]:
        n_layer = self.n_layer  # raises before names are listed
        has_head = self.has_any(HEAD)
        key, _ = self.description.entry(HEAD)
        if self.description.is_users and self.names(HEAD) and key and not has_head:
            raise self.source.error(
                f"is missing {listed(self.names(HEAD))}, which {TENSOR_NAMES} gives for {key}."
            )
        V, C = self.shape(HEAD if has_head and not self.has_any(EMBEDDING) else EMBEDDING)
        inner = "h.0.mlp.c_fc.weight"
        sizes = {
            "vocab_size": V,
            "n_embd": C,
            "n_layer": n_layer,
            "n_positions": self.shape(POSITIONS)[0],
            "n_inner": math.prod(self.shape(inner)) * len(self.names(inner)) // max(C, 1),
            "tie_word_embeddings": not has_head,
        }
        return sizes | ({"n_head": self.heads} if self.heads else {})

    def has_biases(self, config: ModelConfig) -> bool:
        return any(self.has_any(name) for name in parameter_shapes(config) if name.endswith(".bias"))

    def rules(
        self, config: ModelConfig, has_biases: bool | None, is_by_width: bool = False
    ) -> dict[str, TensorRule]:
        """Return the rules. A kind of layer may have no biases; if one is there, all are.

        has_biases: as the files say, or None. is_by_width: scores are divided by the root of C, which queries take in.
        """
        if config.n_layer != self.n_layer:
            raise self.source.error(
                f"has {self.n_layer} layers, from h.0 on, and {config.n_layer} by its settings."
            )
        shapes = parameter_shapes(config)
        with_bias = self._kinds_with_biases(shapes, has_biases)
        rules = {}
        for parameter, shape in shapes.items():
            names = self.names(parameter)
            if parameter.endswith(".bias") and self.description.kind(parameter) not in with_bias:
                rules[parameter] = NO_BIAS
            elif names:
                transform = self._joined(parameter, names, shape)
                if is_by_width and ".c_attn." in parameter:
                    transform = replace(transform, of_whole=partial(_with_queries_by, config.n_head**-0.5))
                rules[parameter] = TensorRule(names, transform)
            elif parameter != HEAD:
                raise self.source.error(f"is described without {parameter}, which every GPT-2 has.")
        if self.has_any(HEAD_BIAS):
            rules[HEAD_BIAS] = TensorRule(self.names(HEAD_BIAS))
        uses = Counter(
            name for parameter, rule in rules.items() if parameter != HEAD for name in rule.sources
        )
        if twice := [name for name, times in uses.items() if times > 1]:
            raise self.source.error(f"is described by {listed(twice)} more than once.")
        return rules

    def _kinds_with_biases(self, parameters: Iterable[str], has_biases: bool | None) -> set[str]:
        """Raise CheckpointError for layer norms without biases, unless the files say that there are none."""
        biases = [name for name in parameters if name.endswith(".bias")]
        kinds = {self.description.kind(name) for name in biases if has_biases or self.has_any(name)}
        if has_biases is None and _NORM not in kinds:
            raise self.source.error(
                "has layer norms without biases, which may be RMSNorms: if they subtract the mean, as LayerNorm does, "
                f"write {self.source.folder / 'config.json'} with bias, false."
            )
        return kinds

    def _joined(self, parameter: str, names: tuple[str, ...], shape: Shape) -> Transform:
        """Raise CheckpointError if neither the description nor a shape tells rows from columns."""
        _, stored = self.description.entry(parameter)
        axis = min(stored.axis, len(shape) - 1)
        if shape[axis] % len(names):
            raise self.source.error(
                f"cannot have {parameter} in {len(names)} names of one size: axis {axis} is {shape[axis]} long."
            )
        part = shared(shape, axis, len(names))
        is_in_out = stored.is_in_out
        if is_in_out is None and self.description.is_users and is_transposed(parameter):
            if part == part[::-1]:
                raise self.source.error(
                    f"holds {names[0]}, a square matrix, of which no shape tells rows from columns: write "
                    '{"names": ..., "transpose": true} for (in, out), or false.'
                )
            is_in_out = names[0] in self.tensors and self.tensors[names[0]].shape == part[::-1]
        if parameter == POSITIONS and names[0] in self.tensors and len(self.tensors[names[0]].shape) == 3:
            return OF_BATCH
        turned = Transform(lambda shape, n: part[::-1], np.transpose, axis)
        return turned if is_in_out else as_is(axis)


def by_user(source: Source, names: Mapping[str, Any]) -> Source:
    """Return the source with a description, or by the names, if all are its own, that are given to its tensors."""
    tensors = source.container.tensors
    parts = sum(1 + name.count(".") for name, value in names.items() if value is None)
    if parts * len(tensors) > MAX_COMPARED:
        raise source.error(
            f"has a {TENSOR_NAMES} of patterns of {parts} parts for {len(tensors)} names: give fewer."
        )
    theirs = {name: value for name, value in names.items() if value is not None}
    is_rename = all(isinstance(value, str) and name in tensors for name, value in theirs.items())
    if not is_rename and any(map(_OURS.fullmatch, theirs)):
        return replace(source, description=names)
    patterns = {name: _pattern(name) for name in names if name not in theirs}
    if len(patterns) > MAX_LEFT_OUT:
        raise source.error(f"has a {TENSOR_NAMES} of {len(patterns)} patterns to leave out.")
    renamed = {name: theirs.get(name, name) for name in tensors if not matches(name, patterns.values())}
    times = Counter(map(str, renamed.values()))
    wrong = {
        "names tensors that the files lack": [
            *(name for name in theirs if name not in tensors),
            *(name for name in patterns if not any(matches(one, (patterns[name],)) for one in tensors)),
        ],
        "gives no text for": [name for name, value in theirs.items() if not isinstance(value, str)],
        "gives one name to several": [name for name in times if times[name] > 1],
    }
    problems = [f"{what}: {listed(wrong_names)}" for what, wrong_names in wrong.items() if wrong_names]
    if problems:
        raise source.error(f"has a {TENSOR_NAMES} that {'; '.join(problems)}.")
    container = replace(source.container, tensors={new: tensors[name] for name, new in renamed.items()})
    return replace(source, container=container)


def _length(has: Callable[[int], bool]) -> int:
    return next(number for number in count() if not has(number))


def _with_queries_by(factor: float, array: np.ndarray) -> np.ndarray:
    """Multiply the queries, the first third of rows."""
    scaled = array.copy()
    scaled[: len(array) // 3] *= np.float32(factor)
    return scaled


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
