"""A tensor_names.json for a GPT-2 of unknown names, for `tinygpt info --write-names`.

Shapes tell kinds of tensors apart, and words in names tensors of one shape. The user says how matrices lie.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import listed
from ..files import TENSOR_NAMES
from ..tensor import StoredTensor
from .described import MAX_NAME
from .family import Shape, Source
from .gpt2 import is_beside

LAYOUTS = {"linear": False, "conv1d": True}  # whether matrices are (in, out)
_NUMBER = re.compile(r"(?<![^._])\d{1,5}(?=\.)")
_KIND = re.compile(r"(.*)[._](?:(weight|scale|gamma)|bias|shift|beta)")
_MASK = re.compile(r"(?:.*[._])?(?:\w{0,20}mask|tril|triu|bias)")
# By parameter, words of its name; others may have its shape.
_WORDS = {
    name: re.compile(words, re.IGNORECASE)
    for name, words in {
        "wpe": "pos|wpe",
        "lm_head": "head|out|logit|unembed",
        "queries": r"(?:^|[._])(?:w_?|to_)?q(?:uery|ueries)?(?:_proj|_lin)?\Z",
        "keys": r"(?:^|[._])(?:w_?|to_)?k(?:eys?)?(?:_proj|_lin)?\Z",
        "values": r"(?:^|[._])(?:w_?|to_)?v(?:alues?)?(?:_proj|_lin)?\Z",
        "ln_2": r"(?:mlp|ff|feed|post)[^.]*\Z|(?<!\d)2\Z",
    }.items()
}
# Of others, such as query_key_value, the rows may be interleaved by head.
_FUSED = re.compile(r".*[._](c_attn|in_proj)")
# Of torch's TransformerEncoderLayer, whose norms may come after its blocks: both are of one shape.
_EITHER_WAY = re.compile(r".*\*\.(self_attn\.in_proj|linear[12])")
Modules = dict[str, dict[str, tuple[str, Shape]]]  # names in the file and shapes, by module and kind


class _UndecidedError(Exception):
    """A tensor or parameter for which there is no answer, or more than one."""


def proposed_names(source: Source, layout: str) -> dict[str, Any]:
    """Return the content of a TENSOR_NAMES. Raise CheckpointError if there is no answer, or more than one."""
    try:
        return _proposed(source, LAYOUTS[layout])
    except _UndecidedError as error:
        raise source.error(
            f"shows no one answer for {error}: write {TENSOR_NAMES} by hand, with a name, or names, of each parameter."
        ) from None


def _proposed(source: Source, is_in_out: bool) -> dict[str, Any]:
    dicts = source.container.dicts
    tensors = {
        name: one for name, one in source.container.tensors.items() if not is_beside(source, name, None)
    }
    if len({dicts.get(name) for name in tensors}) != 1 or max(map(len, tensors)) > MAX_NAME:
        raise _UndecidedError("the dictionary of the model")
    top: dict[str, StoredTensor] = {}
    layers: dict[str, dict[int, StoredTensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if found := _NUMBER.search(name):
            layers[f"{name[: found.start()]}*{name[found.end() :]}"][int(found[0])] = tensor
        else:
            top[name] = tensor
    numbers = range(max(map(len, layers.values()), default=0))
    for name, each in layers.items():
        if each.keys() != {*numbers} or len({tensor.shape for tensor in each.values()}) > 1:
            raise _UndecidedError(f"the layers, which differ in {name} or are not numbered from 0")
    around, masks = _modules(top, False)
    roles = _around(around)
    C = around[roles["wte"][0]]["weight"][1][1]
    first = {_of_heads(name, each[0].shape, C): each[0] for name, each in layers.items()}
    inside, more = _modules(first, is_in_out)
    roles |= _in_layer(inside, C)
    modules = {**around, **inside}
    if rest := modules.keys() - {module for theirs in roles.values() for module in theirs}:
        raise _UndecidedError(listed(sorted(rest)))
    names: dict[str, Any] = {**masks, **more}
    for ours, theirs in roles.items():
        names |= _entries(ours, [modules[module] for module in theirs], is_in_out)
    return names


def _of_heads(name: str, shape: Shape, C: int) -> str:
    """Return the name with a * for a head's number: of the head's matrix (D, C)."""
    is_of_head = len(shape) == 2 and shape[0] < C == shape[1]
    return _NUMBER.sub("*", name) if is_of_head else name


def _modules(tensors: Mapping[str, StoredTensor], is_in_out: bool) -> tuple[Modules, dict[str, None]]:
    """Return shapes by module, of matrices (out, in), and masks, which are left out."""
    modules: Modules = defaultdict(dict)
    masks = {}
    for name, tensor in tensors.items():
        shape = tensor.shape
        if not tensor.is_floating or (
            _MASK.fullmatch(name) and len(shape) != 1 and shape[-1:] == shape[-2:-1]
        ):
            masks[name] = None
        elif (found := _KIND.fullmatch(name)) and len(shape) in (1, 2):
            kind = "weight" if found[2] else "bias"
            modules[found[1]][kind] = name, shape[::-1] if is_in_out else shape
        else:
            raise _UndecidedError(name)
    return modules, masks


def _one(found: Iterable[str], what: str) -> str:
    names = list(found)
    if len(names) != 1:
        raise _UndecidedError(f"{what} ({listed(names, 4) or 'nothing fits'})")
    return names[0]


def _by_word(modules: Iterable[str], ours: str) -> str:
    return _one(filter(_WORDS[ours].search, modules), ours)


def _weights(modules: Modules) -> dict[str, Shape]:
    return {module: kinds["weight"][1] for module, kinds in modules.items() if "weight" in kinds}


def _around(modules: Modules) -> dict[str, list[str]]:
    weights = _weights(modules)
    tables = [module for module, shape in weights.items() if len(shape) == 2]
    wpe = _by_word(tables, "wpe")
    others = [module for module in tables if module != wpe]
    heads = [_by_word(others, "lm_head")] if len(others) > 1 else []
    wte = _one((module for module in others if module not in heads), "wte")
    if len({weights[module][1] for module in tables}) != 1:
        raise _UndecidedError("the embeddings, which are not of one width")
    norm = _one((module for module, shape in weights.items() if len(shape) == 1), "ln_f")
    return {"wte": [wte], "wpe": [wpe], "ln_f": [norm]} | ({"lm_head": heads} if heads else {})


def _in_layer(modules: Modules, C: int) -> dict[str, list[str]]:
    """Return our modules' parts. The MLP's matrices are the two that no other shape has."""
    if any(map(_EITHER_WAY.fullmatch, modules)):
        raise _UndecidedError("whether its layer norms come before or after its blocks")
    weights = _weights(modules)
    fused = [module for module, shape in weights.items() if shape == (3 * C, C) and _FUSED.fullmatch(module)]
    of_heads = [module for module in weights if module.count("*") > 1]
    square = [module for module, shape in weights.items() if shape == (C, C)]
    if len(square) == 1 and not (fused or of_heads):
        raise _UndecidedError(
            "c_attn: rows of one matrix may be interleaved by head, as query_key_value's are"
        )
    qkv = fused or [_by_word(of_heads or square, matrix) for matrix in ("queries", "keys", "values")]
    proj = _one((module for module in square if module not in qkv), "attention's output")
    wide = {m: shape for m, shape in weights.items() if len(shape) == 2 and m not in (*qkv, proj)}
    fc = _one((m for m, shape in wide.items() if shape[1] == C), "the MLP's first matrix")
    down = _one((m for m, shape in wide.items() if shape == weights[fc][::-1] and m != fc), "its second")
    for module in (*qkv, proj, fc, down):
        if "bias" in modules[module] and modules[module]["bias"][1] != weights[module][:1]:
            raise _UndecidedError(f"rows and columns of {module}, whose bias is of the other size")
    norms = [module for module, shape in weights.items() if shape == (C,)]
    second = _by_word(norms, "ln_2")
    first = _one((module for module in norms if module != second), "ln_1")
    found = {"ln_1": [first], "attn.c_attn": qkv, "attn.c_proj": [proj], "ln_2": [second]}
    found |= {"mlp.c_fc": [fc], "mlp.c_proj": [down]}
    return {f"h.*.{ours}": theirs for ours, theirs in found.items()}


def _entries(ours: str, modules: list[dict[str, tuple[str, Shape]]], is_in_out: bool) -> dict[str, Any]:
    """Return the entries of a module's weight and bias."""
    entries: dict[str, Any] = {}
    for kind in ("weight", "bias"):
        names = [one[kind][0] for one in modules if kind in one]
        if names:
            is_matrix = ours.startswith("h.") and len(modules[0][kind][1]) == 2
            entries[f"{ours}.{kind}"] = {"names": names, "transpose": is_in_out} if is_matrix else names
    return entries
