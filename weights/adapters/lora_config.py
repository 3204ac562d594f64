"""LoraConfig: the fields of a LoRA's adapter_config.json that change the result, and which modules they name."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinygpt.errors import CheckpointError
from tinygpt.weights.field_checks import is_bool, is_number, is_whole, wrong_fields

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


@dataclass(frozen=True)
class LoraConfig:
    """Which modules are adapted and by how much, with PEFT's names and defaults.

    Modules go by the names that they have in the adapted model, such as transformer.h.0.attn.c_attn. A tuple matches
    the ends of names, a string is a regular expression for the whole name. Source: PEFT's `LoraConfig`.
    """

    target_modules: tuple[str, ...] | str
    exclude_modules: tuple[str, ...] | str = ()
    layers_to_transform: tuple[int, ...] = ()
    layers_pattern: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    r: int = 8
    rank_pattern: dict[str, int] = field(default_factory=dict)
    lora_alpha: float = 8
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    bias: str = "none"

    @classmethod
    def from_dict(cls, path: Path, fields: dict[str, Any]) -> "LoraConfig":
        """Read the fields of `path`. Raises one CheckpointError naming all that are impossible or not implemented."""
        values = {name: value for name, value in fields.items() if value is not None}
        for name in ("layers_to_transform", "layers_pattern"):
            if isinstance(values.get(name), (int, str)):  # PEFT takes one as well as a list of them
                values[name] = [values[name]]
        problems = [*_not_implemented(values), *_impossible(values)]
        if problems:
            raise CheckpointError(f"{path} cannot be used: {'; '.join(problems)}.")
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in known.items()})

    def is_target(self, module: str) -> bool:
        """Whether `module` has two factors of its own."""
        excluded = _matches(self.exclude_modules, module) or any(
            re.match(rf"(^|.*\.){saved}($|\..*)", module) for saved in self.modules_to_save
        )
        return not excluded and _matches(self.target_modules, module) and self._is_in_layers(module)

    def is_saved(self, module: str) -> bool:
        """Whether `module`, or one that it is a part of, was trained as a whole."""
        parts = module.split(".")
        names = [".".join(parts[: i + 1]) for i in range(len(parts))]
        return any(name.endswith(self.modules_to_save) for name in names)

    def rank(self, module: str) -> int:
        return _first_match(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """The factor on the product of the two factors of `module`."""
        alpha, rank = _first_match(self.alpha_pattern, module, self.lora_alpha), self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def _is_in_layers(self, module: str) -> bool:
        if not self.layers_to_transform:
            return True
        patterns = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in self.layers_pattern] or [r".*?\.[^.]*\.(\d+)\."]
        found = next(filter(None, (re.match(pattern, module) for pattern in patterns)), None)
        return found is not None and int(found[1]) in self.layers_to_transform


def _matches(wanted: tuple[str, ...] | str, module: str) -> bool:
    if isinstance(wanted, str):
        return re.fullmatch(wanted, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in wanted)


def _first_match(values: dict[str, Any], module: str, default: Any) -> Any:
    return next((value for key, value in values.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _not_implemented(values: dict[str, Any]) -> list[str]:
    """Whatever is not known is taken for something that changes the result, so that no new variant is misread."""
    known = WITHOUT_EFFECT | LoraConfig.__dataclass_fields__.keys() | {"init_lora_weights"}
    problems = [
        f"{name} is {value!r} and not implemented" for name, value in values.items() if name not in known and value
    ]
    start = values.get("init_lora_weights", True)
    if not isinstance(start, bool) and start not in INITIALISATIONS:
        problems.append(
            f"init_lora_weights is {start!r}, which changes the base model's weights: save the adapter again with "
            "PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    return problems


def _impossible(values: dict[str, Any]) -> list[str]:
    problems = wrong_fields(values, CHECKS)
    if not values.get("target_modules"):
        problems.append("target_modules is empty and must name the modules that are adapted")
    if isinstance(values.get("target_modules"), str) and values.get("layers_to_transform"):
        problems.append("layers_to_transform needs a list of names as target_modules, and that is a regular expression")
    return problems


def _is_pattern(value: Any) -> bool:
    try:
        return isinstance(value, str) and re.compile(value) is not None
    except (re.error, RecursionError, OverflowError):
        return False


def _is_part_of_pattern(value: Any) -> bool:
    return _is_pattern(value) and _is_pattern(f"({value})")  # flags such as (?i) may only stand in front


def _are_patterns(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_part_of_pattern, value))


def _is_selection(value: Any) -> bool:
    return _is_pattern(value) or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _is_rank(value: Any) -> bool:
    return is_whole(value) and 0 < value < 2**31


def _is_number(value: Any) -> bool:
    return is_number(value) and abs(value) < 2**31  # and no NaN


def _is_table(value: Any, is_possible: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(_is_part_of_pattern, value)) and all(map(is_possible, value.values()))


# What each field may be, because adapter_config.json may come from anywhere.
CHECKS = {
    "target_modules": (_is_selection, "a list of names or a regular expression"),
    "exclude_modules": (_is_selection, "a list of names or a regular expression"),
    "layers_to_transform": (lambda value: isinstance(value, list) and all(map(is_whole, value)), "layers' numbers"),
    "layers_pattern": (_are_patterns, "a list of regular expressions"),
    "modules_to_save": (_are_patterns, "a list of names"),
    "r": (_is_rank, "a whole number from 1 up"),
    "rank_pattern": (lambda value: _is_table(value, _is_rank), "whole numbers from 1 up by regular expression"),
    "lora_alpha": (_is_number, "a number"),
    "alpha_pattern": (lambda value: _is_table(value, _is_number), "numbers by regular expression"),
    "use_rslora": (is_bool, "true or false"),
    "bias": (lambda value: value in BIASES, f"one of {', '.join(BIASES)}"),
}
