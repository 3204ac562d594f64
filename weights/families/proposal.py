"""A tensor_names.json for a GPT-2 of unknown names, for `tinygpt info --write-names`.

Shapes tell kinds of tensors apart, and words and numbers in names tensors of one shape.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import listed
from ..files import TENSOR_NAMES
from .described import Description, Model
from .family import Shape, Source

_LAYER = re.compile(r"(?:.*?[._])??(\d{1,5})\.(?=.)")
_HEAD = re.compile(r"(?<=[._])\d{1,4}(?=\.)")
_KIND = re.compile(r"(.*)[._](weight|scale|gamma|bias|shift|beta)")
_BIASES = ("bias", "shift", "beta")
# By words in names, tensors of one shape.
_POSITIONS, _OUTPUT = (re.compile(words, re.IGNORECASE) for words in ("pos|wpe", "head|out|logit|unembed"))
_QKV = tuple(
    re.compile(rf"(?:.*[._])?(?:w_?|to_)?{letter}(?:{word})?(?:_proj|_lin)?", re.IGNORECASE)
    for letter, word in (("q", "uery|ueries"), ("k", "ey|eys"), ("v", "alue|alues"))
)
_FIRST = re.compile(r"att|input|(?<!\d)[01]\Z", re.IGNORECASE)
_SECOND = re.compile(r"mlp|ff|feed|post|(?<!\d)[12]\Z", re.IGNORECASE)
_MASK = re.compile(r"mask|tril|bias|freq|scale", re.IGNORECASE)
# Of torch's TransformerEncoderLayer, whose norms may come after its blocks: both are of one shape.
_EITHER_WAY = {"self_attn.in_proj", "linear1", "linear2"}
Modules = dict[str, dict[str, tuple[str, Shape]]]  # names in the file and shapes, by module and kind


class _UndecidedError(Exception):
    """A tensor or parameter for which there is no answer, or more than one."""


def proposed_names(source: Source) -> dict[str, Any]:
    """Return the content of a TENSOR_NAMES. Raise CheckpointError if there is no answer, or more than one."""
    try:
        names = _proposed(source)
        if not Model(Description.of(names), source).is_there:
            raise _UndecidedError("the layers")
    except _UndecidedError as error:
        raise source.error(
            f"shows no one answer for {error}: write {TENSOR_NAMES} by hand, with a name, or names, of each parameter."
        ) from None
    return names


def _proposed(source: Source) -> dict[str, Any]:
    dicts = source.container.dicts
    holders = Counter(dicts.get(name, "") for name in source.container.tensors).most_common(2)
    if not holders or (len(holders) == 2 and holders[0][1] == holders[1][1]):
        raise _UndecidedError("the dictionary of the model")
    tensors = {
        name: tensor.shape if tensor.is_floating else ()
        for name, tensor in source.container.tensors.items()
        if dicts.get(name, "") == holders[0][0]
    }
    layers: dict[str, dict[int, dict[str, Shape]]] = defaultdict(lambda: defaultdict(dict))
    top: dict[str, Shape] = {}
    for name, shape in tensors.items():
        found = _LAYER.match(name)
        if found:
            start, end = found.span(1)
            layers[name[:start]][int(found[1])][name[:start] + "*" + name[end:]] = shape
        else:
            top[name] = shape
    if len(layers) != 1:
        raise _UndecidedError(f"the layers ({listed(sorted(layers)) or 'no name has a number'})")
    ((_, by_number),) = layers.items()
    first, *others = by_number.values()
    if sorted(by_number) != [*range(len(by_number))] or any(other != first for other in others):
        raise _UndecidedError("the layers, which differ or are not numbered from 0")
    C = _width(top)
    return {**_around(top, C), **_in_layer(first, C)}


def _width(top: Mapping[str, Shape]) -> int:
    widths = {shape[1] for shape in top.values() if len(shape) == 2}
    if len(widths) != 1:
        raise _UndecidedError("the embeddings")
    return widths.pop()


def _modules(shapes: Mapping[str, Shape]) -> tuple[Modules, dict[str, None]]:
    """Return the tensors by module, and the masks, which are left out."""
    modules: Modules = defaultdict(dict)
    masks = {}
    for name, shape in shapes.items():
        found = _KIND.fullmatch(name)
        is_square = len(shape) == 2 and shape[0] == shape[1]
        if len(shape) not in (1, 2) or (is_square and _MASK.search(name.rpartition(".")[2])):
            masks[name] = None
        elif found is None:
            raise _UndecidedError(name)
        else:
            modules[found[1]]["bias" if found[2] in _BIASES else "weight"] = name, shape
    return modules, masks


def _one(found: Iterable[str], what: str) -> str:
    names = list(found)
    if len(names) != 1:
        raise _UndecidedError(f"{what} ({listed(names, 4) or 'nothing fits'})")
    return names[0]


def _entries(
    ours: str, tensors: Iterable[Mapping[str, tuple[str, Shape]]], transpose: bool = False
) -> dict[str, Any]:
    """Return the entries of a module's weight and bias."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for one in tensors:
        for kind, (name, _) in one.items():
            kinds[kind].append(name)
    return {
        f"{ours}.{kind}": {"names": names, "transpose": transpose}
        if kind == "weight" and ours.startswith("h.") and ".ln_" not in ours
        else names[0]
        if len(names) == 1
        else names
        for kind, names in kinds.items()
    }


def _around(top: Mapping[str, Shape], C: int) -> dict[str, Any]:
    modules, names = _modules(top)
    matrices = [module for module, kinds in modules.items() if len(kinds.get("weight", ("", ()))[1]) == 2]
    wpe = _one(filter(_POSITIONS.search, matrices), "the positions")
    tables = [module for module in matrices if module != wpe]
    heads = [module for module in tables if _OUTPUT.search(module)] if len(tables) > 1 else []
    wte = _one((module for module in tables if module not in heads), "the token embedding")
    norm = _one(
        (m for m, kinds in modules.items() if kinds.get("weight", ("", ()))[1] == (C,)), "the last norm"
    )
    found = {"wte": wte, "wpe": wpe, "ln_f": norm} | ({"lm_head": _one(heads, "the head")} if heads else {})
    if rest := modules.keys() - found.values():
        raise _UndecidedError(listed(sorted(rest)))
    entries = (_entries(ours, [modules[theirs]]) for ours, theirs in found.items())
    return {**names, **{name: value for each in entries for name, value in each.items()}}


def _in_layer(shapes: Mapping[str, Shape], C: int) -> dict[str, Any]:
    modules, names = _modules(
        {
            _HEAD.sub("*", name) if _is_of_head(name, shape, C) else name: shape
            for name, shape in shapes.items()
        }
    )
    if {module.partition("*.")[2] for module in modules} >= _EITHER_WAY:
        raise _UndecidedError("whether its layer norms come before or after its blocks")
    weights = {module: kinds["weight"][1] for module, kinds in modules.items() if "weight" in kinds}
    fused = [module for module, shape in weights.items() if sorted(shape) == [C, 3 * C]]
    square = [module for module, shape in weights.items() if shape == (C, C)]
    parts = [module for module in weights if module.count("*") > 1] or square
    qkv = fused or [
        _one((m for m in parts if word.fullmatch(m)), "queries, keys and values") for word in _QKV
    ]
    proj = _one((module for module in square if module not in qkv), "attention's output")
    wide = [m for m, shape in weights.items() if len(shape) == 2 and m not in (*qkv, proj)]
    if len(wide) != 2 or weights[wide[0]] != weights[wide[1]][::-1] or len(fused) > 1:
        raise _UndecidedError(f"the MLP ({listed(wide, 4)})")
    is_in_out = _is_in_out(modules, wide, weights[fused[0]][0] == C if fused else None, C)
    fc = _one((module for module in wide if weights[module][is_in_out] != C), "the MLP's first matrix")
    norms = [module for module, shape in weights.items() if shape == (C,)]
    first = _one((m for m in norms if _FIRST.search(m.rpartition(".")[2])), "the first norm")
    second = _one(
        (m for m in norms if _SECOND.search(m.rpartition(".")[2]) and m != first), "the second norm"
    )
    found = {"ln_1": [first], "attn.c_attn": qkv, "attn.c_proj": [proj], "ln_2": [second], "mlp.c_fc": [fc]}
    found["mlp.c_proj"] = [module for module in wide if module != fc]
    if rest := modules.keys() - {module for theirs in found.values() for module in theirs}:
        raise _UndecidedError(listed(sorted(rest)))
    for ours, theirs in found.items():
        names |= _entries(f"h.*.{ours}", [modules[module] for module in theirs], is_in_out)
    return names


def _is_of_head(name: str, shape: Shape, C: int) -> bool:
    return len(shape) == 2 and bool(_HEAD.search(name)) and shape[1] == C and shape[0] < C


def _is_in_out(modules: Modules, wide: list[str], of_fused: bool | None, C: int) -> bool:
    """Tell (in, out) from (out, in) by the fused matrix, or by the bias of the MLP that is not of the width."""
    if of_fused is not None:
        return of_fused
    first = [m for m in wide if modules[m].get("bias", ("", (C,)))[1] != (C,)]
    return modules[_one(first, "rows and columns of matrices")]["weight"][1][0] == C
