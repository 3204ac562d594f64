"""LoraConfig: the fields of a LoRA's adapter_config.json that change the result, and which modules they name."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinygpt.weights.adapters.name_pattern import NamePatterns, TooMuchWork
from tinygpt.weights.checks import Checks, is_bool, is_number, is_whole, shown, wrong_fields
from tinygpt.weights.errors import CheckpointError

BIASES = ("none", "all", "lora_only")
# Ways to initialise that leave the base model's weights alone; all others come with a base model of their own.
INITIALISATIONS = ("gaussian", "eva", "orthogonal", "mica")
# Fields that matter while training alone, or say where an adapter comes from. PEFT itself decides about
# fan_in_fan_out by the type of each layer: the two factors are stored the same way for both values.
WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
# Fields for which null is no value: PEFT has no default of null for them, and fails on it.
NEVER_NULL = ("r", "lora_alpha", "bias", "rank_pattern", "alpha_pattern")


@dataclass(frozen=True)
class LoraConfig:
    """Which modules are adapted and by how much, with PEFT's names and defaults.

    Modules go by the names that they have in the adapted model, such as transformer.h.0.attn.c_attn. A list matches
    the ends of names, a string is a regular expression for the whole name. Source: PEFT's `LoraConfig`.

    What asks for a module raises CheckpointError if the expressions take too much work.
    """

    target_modules: frozenset[str] | str
    exclude_modules: frozenset[str] | str = frozenset()
    layers_to_transform: frozenset[int] = frozenset()
    layers_pattern: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    r: int = 8
    rank_pattern: dict[str, int] = field(default_factory=dict)
    lora_alpha: float = 8
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    bias: str = "none"
    patterns: NamePatterns = field(default_factory=NamePatterns, compare=False)

    @classmethod
    def from_dict(cls, path: Path, fields: dict[str, Any]) -> "LoraConfig":
        """Read the fields of `path`. Raises one CheckpointError naming all that are impossible or not implemented."""
        values = {name: value for name, value in fields.items() if value is not None or name in NEVER_NULL}
        for name in ("layers_to_transform", "layers_pattern"):
            if isinstance(values.get(name), (int, str)):  # PEFT takes one as well as a list of them
                values[name] = [values[name]]
        problems = [*_not_implemented(values), *_impossible(values, NamePatterns())]
        if problems:
            raise CheckpointError(f"{path} cannot be used: {'; '.join(problems)}.")
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        for name in known.keys() & {"target_modules", "exclude_modules", "layers_to_transform"}:
            if isinstance(known[name], list):
                known[name] = frozenset(known[name])
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in known.items()})

    def is_target(self, module: str) -> bool:
        """Whether `module` has two factors of its own."""
        excluded = self._is_selected(self.exclude_modules, module) or any(
            self.patterns.match(rf"(^|.*\.){saved}($|\..*)", module) for saved in self.modules_to_save
        )
        return not excluded and self._is_selected(self.target_modules, module) and self._is_in_layers(module)

    def is_saved(self, module: str) -> bool:
        """Whether `module`, or one that it is a part of, was trained as a whole."""
        parts = module.split(".")
        names = [".".join(parts[: i + 1]) for i in range(len(parts))]
        return any(name.endswith(self.modules_to_save) for name in names)

    def rank(self, module: str) -> int:
        return self._first_match(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """The factor on the product of the two factors of `module`."""
        alpha, rank = self._first_match(self.alpha_pattern, module, self.lora_alpha), self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def _is_in_layers(self, module: str) -> bool:
        """Whether the first number between dots, behind what `layers_pattern` matches, is a layer's that is wanted."""
        if not self.layers_to_transform:
            return True
        parts = module.split(".")
        for i in range(1, len(parts) - 1):
            if parts[i].isdecimal() and self._is_before_layers(".".join(parts[:i])):
                return int(parts[i]) in self.layers_to_transform
        return False

    def _is_before_layers(self, path: str) -> bool:
        if not self.layers_pattern:
            return "." in path
        return any(self.patterns.fullmatch(rf"(?:^|.*?\.)(?:{pattern})", path) for pattern in self.layers_pattern)

    def _is_selected(self, wanted: frozenset[str] | str, module: str) -> bool:
        if isinstance(wanted, str):
            return self.patterns.fullmatch(wanted, module)
        parts = module.split(".")
        return any(".".join(parts[i:]) in wanted for i in range(len(parts)))

    def _first_match(self, values: dict[str, Any], module: str, default: Any) -> Any:
        found = (value for key, value in values.items() if self.patterns.match(rf"(.*\.)?({key})$", module))
        return next(found, default)


def _not_implemented(values: dict[str, Any]) -> list[str]:
    """Whatever is not known is taken for something that changes the result, so that no new variant is misread."""
    known = WITHOUT_EFFECT | _checks(NamePatterns()).keys() | {"init_lora_weights"}
    problems = [
        f"{name} is {shown(value)} and not implemented" for name, value in values.items() if name not in known and value
    ]
    start = values.get("init_lora_weights", True)
    if not isinstance(start, bool) and start not in INITIALISATIONS:
        problems.append(
            f"init_lora_weights is {shown(start)}, which changes the base model's weights: save the adapter again with "
            "PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    return problems


def _impossible(values: dict[str, Any], patterns: NamePatterns) -> list[str]:
    problems = wrong_fields(values, _checks(patterns))
    if not values.get("target_modules"):
        problems.append("target_modules is empty and must name the modules that are adapted")
    if isinstance(values.get("target_modules"), str) and values.get("layers_to_transform"):
        problems.append("layers_to_transform needs a list of names as target_modules, and that is a regular expression")
    return problems


def _is_pattern(value: Any, patterns: NamePatterns) -> bool:
    try:
        return isinstance(value, str) and patterns.parse(value) is not None
    except TooMuchWork:
        raise
    except ValueError:
        return False


def _are_parts(values: Iterable[Any], patterns: NamePatterns) -> bool:
    """Whether each is an expression, and is one between parentheses as well."""
    return all(_is_pattern(value, patterns) and _is_pattern(f"({value})", patterns) for value in values)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_rank(value: Any) -> bool:
    return is_whole(value) and 0 < value < 2**31


def _is_number(value: Any) -> bool:
    return is_number(value) and abs(value) < 2**31  # and no NaN


def _checks(patterns: NamePatterns) -> Checks:
    """What each field may be, because adapter_config.json may come from anywhere."""
    expression = "regular expression, without flags, backreferences and possessive quantifiers"
    selection = (lambda value: _are_names(value) or _is_pattern(value, patterns), f"a list of names or a {expression}")

    def list_of(what: str) -> tuple[Callable[[Any], bool], str]:
        return lambda value: isinstance(value, list) and _are_parts(value, patterns), f"a list of {what}"

    def table_of(is_possible: Callable[[Any], bool], what: str) -> tuple[Callable[[Any], bool], str]:
        return (
            lambda value: (
                isinstance(value, dict) and all(map(is_possible, value.values())) and _are_parts(value, patterns)
            ),
            f"{what} by {expression}",
        )

    return {
        "target_modules": selection,
        "exclude_modules": selection,
        "layers_to_transform": (lambda value: isinstance(value, list) and all(map(is_whole, value)), "layers' numbers"),
        "layers_pattern": list_of(expression),
        "modules_to_save": list_of("names"),
        "r": (_is_rank, "a whole number from 1 up"),
        "rank_pattern": table_of(_is_rank, "whole numbers from 1 up"),
        "lora_alpha": (_is_number, "a number"),
        "alpha_pattern": table_of(_is_number, "numbers"),
        "use_rslora": (is_bool, "true or false"),
        "bias": (lambda value: value in BIASES, f"one of {', '.join(BIASES)}"),
    }
