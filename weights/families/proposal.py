"""A tensor_names.json for a GPT-2 of unknown names, for `tinygpt info --write-names`.

Shapes tell kinds of tensors apart, and words in names tensors of one shape. The user says how matrices lie.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import listed
from ..files import TENSOR_NAMES
from ..tensor import StoredTensor
from .described import MAX_NAME
from .family import Source
from .gpt2 import is_beside

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
    rf"(?:^|[._])(?:w_?|to_)?{words}(?:_proj|_lin)?(?:\.\*)?\Z"
    for words in ("q(?:uery|ueries)?", "k(?:eys?)?", "v(?:alues?)?")
]
# Of torch's TransformerEncoderLayer, whose norms may come after its blocks: both are of one shape.
_EITHER_WAY = r"(?:^|[._])(?:self_attn\.in_proj|linear[12])\Z"
Part = dict[str, tuple[str, tuple[int, ...]]]  # names in the file and shapes of a module's weight and bias


class _UndecidedError(Exception):
    """A tensor or parameter for which there is no answer, or more than one."""


class _Modules:
    """Modules that are not chosen yet, with matrices (out, in), and masks, which are left out.

    tensors: of all layers, by name.
    """

    def __init__(self, tensors: Mapping[str, list[StoredTensor]], width: int, is_in_out: bool = False):
        self.width = width
        self.masks: dict[str, None] = {}
        self.left: dict[str, Part] = defaultdict(dict)
        for name, each in tensors.items():
            shape = each[0].shape[::-1] if is_in_out else each[0].shape
            if _MASK.fullmatch(name) and all(map(_is_mask, each)):
                self.masks[name] = None
            elif each[0].is_floating and (found := _KIND.fullmatch(name)) and len(shape) in (1, 2):
                self.left[found[1]]["weight" if found[2] else "bias"] = name, shape
            else:
                raise _UndecidedError(name)

    def has(self, words: str) -> bool:
        return any(re.search(words, module, re.IGNORECASE) for module in self.left)

    def take(self, what: str, words: str, *shape: int | None) -> Part:
        """Return the one module of a shape whose name has the words. None: any size."""
        found = [
            module
            for module, part in self.left.items()
            if _is_like(part, shape) and re.search(words, module, re.IGNORECASE)
        ]
        if len(found) != 1:
            raise _UndecidedError(f"{what} ({listed(found, 4) or 'nothing fits'})")
        part = self.left.pop(found[0])
        if "bias" in part and part["bias"][1] != part["weight"][1][:1]:
            raise _UndecidedError(f"rows and columns of {found[0]}, whose bias is of the other size")
        return part

    def norm(self, what: str, words: str) -> Part:
        part = self.take(what, words, self.width)
        if "bias" not in part:
            raise _UndecidedError(f"{what}, which has no bias, as RMSNorm, which is no LayerNorm")
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
    """Return the content of a TENSOR_NAMES. Raise CheckpointError if there is no answer, or more than one."""
    try:
        return _proposed(source, LAYOUTS[layout], layout.endswith("-qkv"))
    except _UndecidedError as error:
        raise source.error(
            f"shows no one answer for {error}: write {TENSOR_NAMES} by hand, with a name, or names, of each parameter. "
            "A model without one of them is no GPT-2."
        ) from None


def _proposed(source: Source, is_in_out: bool, is_in_order: bool) -> dict[str, Any]:
    dicts = source.container.dicts
    tensors = {
        name: one for name, one in source.container.tensors.items() if not is_beside(source, name, None)
    }
    if len({dicts.get(name) for name in tensors}) != 1 or max(map(len, tensors)) > MAX_NAME:
        raise _UndecidedError("the dictionary of the model")
    top: dict[str, list[StoredTensor]] = {}
    layers: dict[str, dict[int, StoredTensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if found := _NUMBER.search(name):
            layers[f"{name[: found.start()]}*{name[found.end() :]}"][int(found[0])] = tensor
        else:
            top[name] = [tensor]
    numbers = range(max(map(len, layers.values()), default=0))
    for name, each in layers.items():
        if each.keys() != {*numbers} or len({tensor.shape for tensor in each.values()}) > 1:
            raise _UndecidedError(f"the layers, which differ in {name} or are not numbered from 0")
    each_layer = {name: list(each.values()) for name, each in layers.items()}
    widths = {tensor.shape[1] for (tensor,) in top.values() if len(tensor.shape) == 2}
    if len(widths) != 1:
        raise _UndecidedError("the embeddings, which are not of one width")
    C = widths.pop()
    around = _Modules(top, C)
    inside = _Modules({_of_heads(name, each, C): each for name, each in each_layer.items()}, C, is_in_out)
    parts = {**_around(around), **_in_layer(inside, C, is_in_order)}
    if left := [*around.left, *inside.left]:
        raise _UndecidedError(listed(left))
    entries = (_entries(ours, theirs, is_in_out) for ours, theirs in parts.items())
    return {**around.masks, **inside.masks} | {name: value for each in entries for name, value in each}


def _of_heads(name: str, each: list[StoredTensor], C: int) -> str:
    """Return the name with a * for a head's number: of the head's matrix (D, C)."""
    is_of_head = len(each[0].shape) == 2 and each[0].shape[0] < C == each[0].shape[1]
    return _NUMBER.sub("*", name) if is_of_head else name


def _table(ours: str, is_named: bool = True) -> str:
    """Return the expression of names with a table's words, unless they are any, and without the others' words."""
    has = {table: rf"(?:.*[._])?(?:{words})(?:[._]|\Z)" for table, words in _TABLES.items()}
    return (
        rf"\A{''.join(f'(?!{has[table]})' for table in has if table != ours)}{has[ours] if is_named else ''}"
    )


def _around(modules: _Modules) -> dict[str, list[Part]]:
    C = modules.width
    found = {"wpe": [modules.take("wpe", _table("wpe"), None, C)], "ln_f": [modules.norm("ln_f", "")]}
    if len(modules.left) > 1:
        found["lm_head"] = [modules.take("lm_head", _table("lm_head"), None, C)]
    return {**found, "wte": [modules.take("wte", _table("wte", is_named=False), None, C)]}


def _in_layer(modules: _Modules, C: int, is_in_order: bool) -> dict[str, list[Part]]:
    """is_in_order: rows of one matrix are those of all queries, then keys, then values."""
    if modules.has(_EITHER_WAY):
        raise _UndecidedError("whether its layer norms come before or after its blocks")
    if modules.has(_FUSED):
        qkv = [modules.take("c_attn", _FUSED, None, C)]
    elif modules.has(_QKV[0]):
        rows = None if modules.has(r"\*.*\*") else C
        qkv = [modules.take("c_attn", words, rows, C) for words in _QKV]
    elif is_in_order:
        qkv = [modules.take("c_attn", "", 3 * C, C)]
    else:
        raise _UndecidedError(
            "c_attn: rows of one matrix may be interleaved by head, as query_key_value's are, or else in order, for "
            "linear-qkv"
        )
    found = {
        "attn.c_attn": qkv,
        "attn.c_proj": [modules.take("attention's output", "", C, C)],
        "ln_2": [modules.norm("ln_2", _SECOND)],
        "ln_1": [modules.norm("ln_1", "")],
        "mlp.c_fc": [modules.take("c_fc", "", None, C)],
        "mlp.c_proj": [modules.take("the MLP's output", "", C, None)],
    }
    return {f"h.*.{ours}": parts for ours, parts in found.items()}


def _entries(ours: str, parts: list[Part], is_in_out: bool) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a module's weight and bias."""
    for kind in ("weight", "bias"):
        if names := [part[kind][0] for part in parts if kind in part]:
            is_matrix = ours.startswith("h.") and len(parts[0][kind][1]) == 2
            yield f"{ours}.{kind}", {"names": names, "transpose": is_in_out} if is_matrix else names
