"""A tensor_names.json for a GPT-2 of unknown names, for `tinygpt info --write-names`.

Shapes tell kinds of tensors apart, and words in names tensors of one shape. The user says how matrices lie, and the
caller matches the model before names are written.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ..errors import listed, truth_of
from ..files import TENSOR_NAMES
from ..tensor import StoredTensor
from .family import Source
from .gpt2 import is_beside
from .settings import norms_come_first

LAYOUTS = {"linear": False, "conv1d": True, "linear-qkv": False}  # whether matrices are (in, out)
_NUMBER = re.compile(r"(?<![^._])\d{1,5}(?=\.)")
_KIND = re.compile(r"(.*)[._](?:(weight|scale|gamma)|bias|shift|beta)")
_MASK = re.compile(r"(?:.*[._])?(?:\w{0,20}mask|tril|triu|bias|position_ids)")
_LEAST_MASKED = -1e4  # of scores, as OpenAI's code has it
# Words in names of tensors that share their shape with others.
_TABLES = {
    "wpe": "pos|positions?|positional|wpe",
    "wte": "tok|tokens?|words?|vocab|wte",
    "lm_head": r"(?:head|out|outputs?|logits?|unembed|unembedding)\Z",
}
_SECOND = r"(?:^|[._])(?:mlp|ff|ffn|feed|post_att)[^.]*\Z|(?<!\d)2\Z"
_FUSED = r"[._](?:c_attn|in_proj)\Z"
_QKV = [
    rf"(?:^|[._])(?:w_?|to_)?(?:{words})(?:_proj|_lin)?(?:\.\*)?\Z"
    for words in ("q|query|queries", "k|keys?", "v|values?")
]
# Of torch's TransformerEncoderLayer, whose norms may come after its blocks: both are of one shape.
_EITHER_WAY = r"(?:^|[._])(?:self_attn\.in_proj|linear[12])\Z"
Part = dict[str, tuple[str, tuple[int, ...]]]  # names in the file and shapes of a module's weight and bias


class _UndecidedError(Exception):
    """A tensor or parameter for which there is no answer, or more than one."""


class _Modules:
    """Modules that are not chosen yet, with matrices (out, in), and masks, which are left out.

    tensors: of all layers, by name. needs_biases: of norms.
    """

    def __init__(
        self, tensors: Mapping[str, list[StoredTensor]], needs_biases: bool, is_in_out: bool = False
    ):
        self.needs_biases = needs_biases
        self.masks: dict[str, None] = {}
        self.left: dict[str, Part] = defaultdict(dict)
        for name, of_layers in tensors.items():
            shape = of_layers[0].shape[::-1] if is_in_out else of_layers[0].shape
            if _MASK.fullmatch(name) and all(map(_is_mask, of_layers)):
                self.masks[name] = None
            elif of_layers[0].is_floating and (parameter := _KIND.fullmatch(name)):
                self.left[parameter[1]]["weight" if parameter[2] else "bias"] = name, shape
            elif of_layers[0].is_floating and len(shape) > 1:
                self.left[name]["weight"] = name, shape[-2:] if shape[0] == 1 else shape
            else:
                raise _UndecidedError(name)

    def has(self, words: str) -> bool:
        return any(re.search(words, module, re.IGNORECASE) for module in self.left)

    def take(self, what: str, words: str, *shape: int | None) -> Part:
        """Return the module whose name has the words. None: any size."""
        fitting = [
            module
            for module, part in self.left.items()
            if _is_like(part, shape) and re.search(words, module, re.IGNORECASE)
        ]
        if len(fitting) != 1:
            raise _UndecidedError(f"{what} ({listed(fitting, 4) or 'nothing fits'})")
        part = self.left.pop(fitting[0])
        if self.needs_biases and len(shape) == 1 and "bias" not in part:
            raise _UndecidedError(
                f"{what}, which has no bias, as RMSNorm, which is no LayerNorm (bias false in config.json says that it "
                "is one)"
            )
        return part


def _is_mask(tensor: StoredTensor) -> bool:
    """Return whether a tensor keeps scores, or makes them least: no parameter that was trained."""
    if not tensor.is_floating or tensor.shape[-2:-1] != tensor.shape[-1:]:
        return not tensor.is_floating
    values = tensor.float32()
    keeps = ((values == 0) | (values == 1)) & (values.size > 1)
    return bool((keeps | (values <= _LEAST_MASKED)).all())


def _is_like(part: Part, wanted: tuple[int | None, ...]) -> bool:
    sizes = part["weight"][1] if "weight" in part else ()
    return len(sizes) == len(wanted) and all(
        one in (None, size) for one, size in zip(wanted, sizes, strict=True)
    )


def proposed_names(source: Source, layout: str) -> dict[str, Any]:
    """Raise CheckpointError if there is no answer, or more than one."""
    try:
        return _proposed(source, LAYOUTS[layout], layout.endswith("-qkv"))
    except _UndecidedError as error:
        raise source.error(
            f"shows no one answer for {error}: write {TENSOR_NAMES} by hand, with a name, or names, of each parameter. "
            "A model without one of them is no GPT-2."
        ) from None


def _proposed(source: Source, is_in_out: bool, is_in_order: bool) -> dict[str, Any]:
    """is_in_order: rows of one matrix are those of all queries, then keys, then values."""
    groups: dict[str, list[StoredTensor]] = defaultdict(list)
    for name, tensor in source.container.tensors.items():
        if not is_beside(source, name, None):
            groups[_NUMBER.sub("*", name, 1)].append(tensor)
    top = {name: of_layers for name, of_layers in groups.items() if "*" not in name}
    widths = {of_layers[0].shape[1] for of_layers in top.values() if len(of_layers[0].shape) == 2}
    if len(widths) != 1:
        raise _UndecidedError("the embeddings, which are not of one width")
    C = widths.pop()
    needs_biases = truth_of(source.beside.get("bias")) is not False
    around = _Modules(top, needs_biases)
    in_layers = {_of_heads(name, groups, C): groups[name] for name in groups if name not in top}
    inside = _Modules(in_layers, needs_biases, is_in_out)
    if inside.has(_EITHER_WAY) and not norms_come_first(source):
        raise source.error(
            "has torch's TransformerEncoderLayer, whose layer norms come before or after its blocks: write "
            f"{source.folder / 'config.json'} with norm_first, true if the program gives it that."
        )
    parts = {**_around(around, C), **_in_layer(inside, C, is_in_order)}
    if left := [*around.left, *inside.left]:
        raise _UndecidedError(listed(left))
    names: dict[str, Any] = {**around.masks, **inside.masks}
    for ours, of_ours in parts.items():
        for kind in ("weight", "bias"):
            of_kind = [part[kind] for part in of_ours if kind in part]
            theirs = [name for name, _ in of_kind]
            is_matrix = ours.startswith("h.") and of_kind and len(of_kind[0][1]) == 2
            if theirs:
                names[f"{ours}.{kind}"] = {"names": theirs, "transpose": is_in_out} if is_matrix else theirs
    return names


def _of_heads(name: str, groups: Mapping[str, list[StoredTensor]], C: int) -> str:
    """Put a * for a head's number: of the head's matrix (D, C), and its bias."""
    matrix = groups.get(re.sub(r"bias\Z", "weight", name), groups[name])[0].shape
    is_of_head = len(matrix) == 2 and matrix[0] < C == matrix[1]
    return _NUMBER.sub("*", name) if is_of_head else name


def _table(ours: str, is_named: bool = True) -> str:
    """Match names with a table's words, unless they are any, without the others'."""
    has = {table: rf"(?:.*[._])?(?:{words})(?:[._]|\Z)" for table, words in _TABLES.items()}
    return (
        rf"\A{''.join(f'(?!{has[table]})' for table in has if table != ours)}{has[ours] if is_named else ''}"
    )


def _around(modules: _Modules, C: int) -> dict[str, list[Part]]:
    parts = {"wpe": [modules.take("wpe", _table("wpe"), None, C)], "ln_f": [modules.take("ln_f", "", C)]}
    if len(modules.left) > 1:
        parts["lm_head"] = [modules.take("lm_head", _table("lm_head"), None, C)]
    return {**parts, "wte": [modules.take("wte", _table("wte", is_named=False), None, C)]}


def _in_layer(modules: _Modules, C: int, is_in_order: bool) -> dict[str, list[Part]]:
    words = [_FUSED] if modules.has(_FUSED) else _QKV if modules.has(_QKV[0]) else [""] * is_in_order
    if not words:
        raise _UndecidedError(
            "c_attn: rows of one matrix may be interleaved by head, as query_key_value's are, or else in order, for "
            "linear-qkv"
        )
    rows = 3 * C if words == [""] else None
    in_layer = {
        "attn.c_attn": [modules.take("c_attn", word, rows, C) for word in words],
        "attn.c_proj": [modules.take("attention's output", "", C, C)],
        "ln_2": [modules.take("ln_2", _SECOND, C)],
        "ln_1": [modules.take("ln_1", "", C)],
        "mlp.c_fc": [modules.take("c_fc", "", None, C)],
        "mlp.c_proj": [modules.take("the MLP's output", "", C, None)],
    }
    return {f"h.*.{ours}": parts for ours, parts in in_layer.items()}
