"""From the tensors in files to the parameters of a model: the families, and the match with a family's rules."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path

from .checkpoint import Checkpoint
from .config import EMBEDDING, HEAD, HEAD_BIAS, ModelConfig, parameter_shapes
from .containers.formats import read_weights
from .errors import CheckpointError, listed, of_any_layer, shown
from .families.family import Family, NamedTensor, Source, TensorRule, matches, num_parts
from .families.gpt2 import OTHER_HEAD
from .files import TENSOR_NAMES
from .tensor import DefaultTensor, StoredTensor, Tensor, have_equal_values

# Words in names of tables of angles.
_ROTARY = re.compile(r"(?i)(?:^|[._])(?:rope|rotary\w*|inv_freq|freqs_cis|(?:cos|sin)_cached?)(?:[._]|$)")
MAX_GROUPS = 50  # of names in a message; GPT-2 has 17
Shapes = Mapping[str, tuple[int, ...]]
Problems = dict[str, list[tuple[str, str]]]  # names and remarks, by the kind of problem


# "module.NAME" of families, whose modules are imported for their own sources alone: of containers that hold models of
# one program.
BY_FORMAT: dict[str, tuple[str, ...]] = {
    "GGUF": ("gguf.BLOOM", "gguf.FAMILY"),
    "ONNX": ("onnx.FAMILY",),
    "TensorFlow bundle": ("gpt2.OPENAI",),
    "FasterTransformer folder": ("fastertransformer.BLOOM", "fastertransformer.FAMILY"),
}
# Of programs in torch, the narrower ones first.
PROGRAMS = ("NANOGPT", "BUILD_NANOGPT", "MINGPT", "UNDECIDED", "LLMS_FROM_SCRATCH", "LECTURE")


def _has_megatrons_names(source: Source) -> bool:
    return any("embedding." in name or ".deepspeed_moe." in name for name in source.container.tensors)


def _may_be_in_torch(source: Source) -> bool:
    """Return whether another program in torch may have written it: no config.json says another model_type."""
    return source.model_type is None or "model_args" in source.container.metadata


# Of other containers: by names, then by config.json, which may lie next to any file. Each row has a quick test of a
# source, which may be true of other families too; a family's own `detect` decides.
OTHERS: tuple[tuple[Callable[[Source], bool], tuple[str, ...]], ...] = (
    (_has_megatrons_names, ("megatron.WITH_EXPERTS", "megatron.FAMILY")),
    (_may_be_in_torch, tuple(f"programs.{name}" for name in PROGRAMS)),
    (lambda source: True, ("gpt2.FAMILY",)),
)


def family_of(source: Source) -> Family:
    """Raise CheckpointError if the source has no family's names and layout."""
    format = source.container.format
    check_positions(source)
    if source.description:
        from .families.programs import of_user

        return of_user(source, source.description)
    for place in BY_FORMAT[format] if format in BY_FORMAT else _candidates(source):
        module, name = place.split(".")
        family = getattr(import_module(f".families.{module}", __package__), name)
        if family.detect(source):
            return family
    if source.model_type is not None:
        from .families.transformers import model_type_of

        model_type = model_type_of(source.config_json)  # raises CheckpointError
        if format not in BY_FORMAT:
            return model_type.family
    raise source.error(
        f"holds {format} of no model that is implemented, and no config.json beside it has a model_type. If it is a "
        f"GPT-2 by other names, give them in {TENSOR_NAMES}, which `tinygpt info --write-names linear` may propose."
    )


def check_positions(source: Source) -> None:
    """Raise CheckpointError for a table of rotary positions."""
    rotary = next(filter(_ROTARY.search, source.container.tensors), None)
    if rotary is not None:
        raise source.error(f"has rotary positions, as {shown(rotary)} shows, which are not implemented.")


def _candidates(source: Source) -> Iterator[str]:
    return (place for may_be, places in OTHERS if may_be(source) for place in places)


def read_checkpoint(path: Path) -> Checkpoint:
    """Raise one CheckpointError for all that is wrong."""
    source = by_own_names(Source(path, read_weights(path)))
    family = family_of(source)
    return match(source, family, family.config(source))


def match(source: Source, family: Family, config: ModelConfig) -> Checkpoint:
    """Return the checkpoint that a source holds: each tensor is used, or ignored by name, and none is absent.

    Raise one CheckpointError that lists all that does not fit. Ties are transformers' own: a tied checkpoint may keep
    the matrix under either name, and a head that differs from the embedding is used whatever config.json says.
    """
    tensors = list(family.named(source))
    named_tensors = _NamedTensors(family, tensors)
    rules = dict(family.rules(source, config))
    if config.tie_word_embeddings and HEAD in rules:
        if not named_tensors.has(rules[HEAD].sources):
            del rules[HEAD]
        elif not named_tensors.has(rules[EMBEDDING].sources):
            rules[EMBEDDING] = rules[HEAD]
    shapes = {**parameter_shapes(config), HEAD_BIAS: (config.vocab_size,)}
    described_by = family.described_by + family.adds(source)
    problems = named_tensors.problems(rules, shapes, described_by)
    if any(problems.values()):
        raise CheckpointError(_explain(source.path, family, described_by.rstrip(","), problems))
    stored = family.finish(
        {name: named_tensors.parameter(rule, shapes[name]) for name, rule in rules.items()}
    )
    return Checkpoint(
        path=source.path,
        container=source.container.format,
        family=family.name,
        config=config,
        stored=stored,
        tied=config.tie_word_embeddings and _head_is_embedding(stored),
        ignored=tuple(one.file_name for one in tensors if matches(one.name, family.ignored)),
        quirks=(*_made_up(rules), *family.quirks(source, config)),
        files=tuple(sorted({tensor.path for tensor in source.container.tensors.values()})),
        read_tokenizer=partial(family.tokenizer, source),
        chat_options=family.chat_options(source),
        heads={one.name: one.tensor for one in tensors if matches(one.name, [OTHER_HEAD])},
        layout=family.layout,
    )


def by_own_names(source: Source) -> Source:
    """Apply TENSOR_NAMES. Raise CheckpointError if it does not fit the tensors."""
    if not (names := source.json(TENSOR_NAMES)):
        return source
    from .families.described import by_user

    return by_user(source, names)


class _NamedTensors:
    """The tensors that are not ignored, by their names in the family's rules and by parts."""

    def __init__(self, family: Family, tensors: list[NamedTensor]):
        self.num_parts = num_parts(tensors)
        self.twice: list[NamedTensor] = []
        self.tensors: dict[str, dict[int, NamedTensor]] = {}
        for one in tensors:
            if matches(one.name, family.ignored):
                continue
            if self.tensors.setdefault(one.name, {}).setdefault(one.part, one) is not one:
                self.twice.append(one)

    def has(self, names: tuple[str, ...]) -> bool:
        return all(name in self.tensors for name in names)

    def parameter(self, rule: TensorRule, shape: tuple[int, ...]) -> Tensor:
        if rule.default is not None:
            return DefaultTensor(shape, rule.default)
        parts = self._parts_of(rule)
        return rule.transform.of(
            tuple(self.tensors[name][part].tensor for name in rule.sources for part in parts)
        )

    def problems(self, rules: Mapping[str, TensorRule], shapes: Shapes, described_by: str) -> Problems:
        missing = []
        misshapen = []
        unreadable = []
        for name, part, wanted in self._wanted(rules, shapes):
            parts = self.tensors.get(name, {})
            if part not in parts:
                missing.append((name, f" (part {part})" if parts else ""))
                continue
            tensor = parts[part].tensor
            if not tensor.is_floating:
                unreadable.append((name, f" is {tensor.dtype}"))
            elif tensor.shape != wanted:
                misshapen.append((name, f" is {tensor.shape} and {described_by} asks for {wanted}"))
        known = {name for rule in rules.values() for name in rule.sources}
        unknown = [one for name, parts in self.tensors.items() if name not in known for one in parts.values()]
        unexpected = [(one.file_name, "") for one in unknown]
        unexpected += [(one.file_name, f" (a second {one.name})") for one in self.twice]
        copies = {name for rule in rules.values() if rule.transform.axis is None for name in rule.sources}
        return {
            "missing": missing,
            "unexpected": unexpected,
            "misshapen": misshapen,
            "of a dtype that is not implemented": unreadable,
            "not the same in all parts": [
                (name, f" (part {part})") for name in sorted(copies) for part in self._unlike(name)
            ],
        }

    def _wanted(
        self, rules: Mapping[str, TensorRule], shapes: Shapes
    ) -> Iterator[tuple[str, int, tuple[int, ...]]]:
        for parameter, rule in rules.items():
            parts = self._parts_of(rule)
            wanted = rule.transform.stored_shape(shapes[parameter], len(rule.sources) * len(parts))
            yield from ((name, part, wanted) for name in rule.sources for part in parts)

    def _unlike(self, name: str) -> list[int]:
        copies = {part: one.tensor for part, one in self.tensors.get(name, {}).items()}
        first = copies.pop(0, None)
        return [] if first is None else [part for part, copy in copies.items() if not _is_copy(first, copy)]

    def _parts_of(self, rule: TensorRule) -> range:
        """Return all parts of a divided parameter; of others, each part has a copy."""
        return range(self.num_parts if rule.transform.axis is not None else 1)


def _made_up(rules: Mapping[str, TensorRule]) -> list[str]:
    names = [name for name, rule in rules.items() if rule.default is not None]
    return [f"made up: {listed(names, 3)}, which the files leave out"] if names else []


def _head_is_embedding(stored: Mapping[str, Tensor]) -> bool:
    head = stored.get(HEAD)
    embedding = stored[EMBEDDING]
    # ==: the same bytes of a file.
    return head is None or head == embedding or have_equal_values(head, embedding)


def _is_copy(one: StoredTensor, other: StoredTensor) -> bool:
    if one.shape != other.shape or not (one.is_floating and other.is_floating):
        return False
    return one == other or have_equal_values(one, other)


def _explain(path: Path, family: Family, described_by: str, problems: Problems) -> str:
    lines = [f"  {kind}: {'; '.join(_grouped(names))}" for kind, names in problems.items() if names]
    return "\n".join(
        [
            f"{path} does not hold the {family.name} that {described_by} describes.",
            *lines,
            *filter(None, [family.advice]),
            f"Download the checkpoint again, all of one place; only a plain {family.name} can be loaded.",
        ]
    )


def _grouped(names_and_remarks: list[tuple[str, str]]) -> list[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name, remark in names_and_remarks:
        groups.setdefault((of_any_layer(name), remark), []).append(name)
    texts = [
        (", ".join(names) if len(names) <= 3 else f"{names[0]} to {names[-1]} ({len(names)} layers)") + remark
        for (_, remark), names in groups.items()
    ]
    return texts[:MAX_GROUPS] + [f"and {len(texts) - MAX_GROUPS} more"] * (len(texts) > MAX_GROUPS)
