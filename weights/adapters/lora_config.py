"""adapter_config.json of a LoRA: PEFT's fields, the modules that they select, and the size of their updates."""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import regex

from ..errors import BOOLEAN, CheckpointError, Checks, is_number, is_whole, one_of, shown, wrong_fields

BIASES = ("none", "all", "lora_only")
# Initializations that leave the base model's weights alone.
INITIALIZATIONS = ("gaussian", "eva", "orthogonal", "mica")
# Of training and origin. PEFT stores the factors in the same way for both values of fan_in_fan_out.
WITHOUT_EFFECT = {
    "base_model_name_or_path",
    "peft_type",
    "peft_version",
    "revision",
    "task_type",
    "auto_mapping",
    "corda_config",
    "eva_config",
    "loftq_config",
    "lora_ga_config",  # of initializations
    "lora_dropout",
    "inference_mode",
    "runtime_config",
    "megatron_core",
    "qalora_group_size",
    "fan_in_fan_out",
}
# Fields that PEFT fails on if they are null.
NEVER_NULL = ("r", "lora_alpha", "bias", "rank_pattern", "alpha_pattern")
MAX_SECONDS = 2.0  # for all regular expressions of a config: one such as (a+)+b can take for ever


@dataclass(frozen=True)
class LoraConfig:
    """The adapted modules and the size of their updates, with the names and defaults of PEFT's `LoraConfig`.

    A list matches the ends of modules' names, such as transformer.h.0.attn.c_attn. A string is a regular expression
    for the whole name. Methods raise CheckpointError if expressions take too long.
    """

    target_modules: frozenset[str] | str
    exclude_modules: frozenset[str] | str = frozenset()
    layers_to_transform: frozenset[int] = frozenset()
    layers_pattern: Sequence[str] = ()
    modules_to_save: Sequence[str] = ()
    r: int = 8
    rank_pattern: dict[str, int] = field(default_factory=dict)
    lora_alpha: float = 8
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    bias: str = "none"
    use_dora: bool = False
    lora_bias: bool = False
    trainable_token_indices: Sequence[int] | Mapping[str, Sequence[int]] = ()
    deadline: float = field(default_factory=lambda: time.monotonic() + MAX_SECONDS, compare=False)

    @classmethod
    def from_dict(cls, path: Path, fields: dict[str, Any]) -> "LoraConfig":
        """Raise one CheckpointError for all impossible or unknown fields of `path`."""
        values = {name: value for name, value in fields.items() if value is not None or name in NEVER_NULL}
        for name in ("layers_to_transform", "layers_pattern"):
            if isinstance(values.get(name), (int, str)):  # PEFT takes one as well as a list
                values[name] = [values[name]]
        problems = [*_not_implemented(values), *wrong_fields(values, CHECKS)]
        if not values.get("target_modules"):
            problems.append("target_modules is empty and must name the modules that are adapted")
        if isinstance(values.get("target_modules"), str) and values.get("layers_to_transform"):
            problems.append(
                "layers_to_transform needs a list of names as target_modules, not a regular expression"
            )
        if problems:
            raise CheckpointError(f"{path} cannot be used: {'; '.join(problems)}.")
        known: dict[str, Any] = {name: values[name] for name in CHECKS if name in values}
        for name in known.keys() & {"target_modules", "exclude_modules", "layers_to_transform"}:
            known[name] = known[name] if isinstance(known[name], str) else frozenset(known[name])
        return cls(**known)

    def is_target(self, module: str) -> bool:
        excluded = self._is_selected(self.exclude_modules, module) or any(
            self._matches(rf"(^|.*\.){saved}($|\..*)", module) for saved in self.modules_to_save
        )
        return not excluded and self._is_selected(self.target_modules, module) and self._is_in_layers(module)

    def is_saved(self, module: str) -> bool:
        """Return whether the module, or a parent, was trained as a whole."""
        saved = tuple(self.modules_to_save)
        return any(name.endswith(saved) for name in accumulate(module.split("."), "{}.{}".format))

    def rank(self, module: str) -> int:
        return self._first_match(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        alpha = self._first_match(self.alpha_pattern, module, self.lora_alpha)
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def _is_in_layers(self, module: str) -> bool:
        if not self.layers_to_transform:
            return True
        parts = module.split(".")
        for i in range(1, len(parts) - 1):
            path = ".".join(parts[:i])
            is_before_layers = "." in path
            if self.layers_pattern:
                patterns = (rf"(?:^|.*?\.)(?:{pattern})\Z" for pattern in self.layers_pattern)
                is_before_layers = any(self._matches(pattern, path) for pattern in patterns)
            if parts[i].isdecimal() and is_before_layers:
                return int(parts[i]) in self.layers_to_transform
        return False

    def _is_selected(self, wanted: frozenset[str] | str, module: str) -> bool:
        if isinstance(wanted, str):
            return self._matches(rf"(?:{wanted})\Z", module)
        parts = module.split(".")
        return any(".".join(parts[i:]) in wanted for i in range(len(parts)))

    def _first_match(self, values: dict[str, Any], module: str, default: Any) -> Any:
        matching = (value for key, value in values.items() if self._matches(rf"(.*\.)?({key})$", module))
        return next(matching, default)

    def _matches(self, pattern: str, name: str) -> bool:
        try:
            return regex.match(pattern, name, timeout=max(self.deadline - time.monotonic(), 1e-3)) is not None
        except TimeoutError:
            text = f"take more than {MAX_SECONDS:.0f} seconds: name the modules in lists."
            raise CheckpointError(f"the regular expressions in adapter_config.json {text}") from None


def _not_implemented(values: dict[str, Any]) -> list[str]:
    known = WITHOUT_EFFECT | CHECKS.keys() | {"init_lora_weights"}
    problems = [
        f"{name} is {shown(value)} and not implemented"
        for name, value in values.items()
        if name not in known and value
    ]
    start = values.get("init_lora_weights", True)
    if not isinstance(start, bool) and start not in INITIALIZATIONS:
        problems.append(
            f"init_lora_weights is {shown(start)}, which changes the base model's weights: save the adapter again with "
            "PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    return problems


def _is_pattern(value: Any) -> bool:
    """Refuse flags, which cannot stand within an expression."""
    try:
        return isinstance(value, str) and all(re.compile(pattern) for pattern in (value, f"({value})"))
    except (re.error, RecursionError, OverflowError):
        return False


def _is_list_of(is_possible: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_possible, value))


def _is_rank(value: Any) -> bool:
    return is_whole(value) and 0 < value < 2**31


def _is_number(value: Any) -> bool:
    return is_number(value) and abs(value) < 2**31  # and no NaN


def _table_of(is_possible: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, dict) and all(map(is_possible, value.values())) and all(map(_is_pattern, value))
    )


def _are_tokens(value: Any) -> bool:
    lists = value.values() if isinstance(value, dict) else [value]
    are_ids = _is_list_of(lambda one: is_whole(one) and 0 <= one < 2**31)
    return all(are_ids(ids) and len({*ids}) == len(ids) for ids in lists)


_are_patterns = _is_list_of(_is_pattern)
_SELECTION = (
    lambda value: _is_pattern(value) or _is_list_of(lambda name: isinstance(name, str))(value),
    "a list of names or a regular expression without flags",
)
CHECKS: Checks = {
    "target_modules": _SELECTION,
    "exclude_modules": _SELECTION,
    "layers_to_transform": (_is_list_of(is_whole), "layers' numbers"),
    "layers_pattern": (_are_patterns, "a list of regular expressions"),
    "modules_to_save": (_are_patterns, "a list of names"),
    "r": (_is_rank, "a whole number from 1 up"),
    "rank_pattern": (_table_of(_is_rank), "whole numbers from 1 up by regular expressions"),
    "lora_alpha": (_is_number, "a number"),
    "alpha_pattern": (_table_of(_is_number), "numbers by regular expressions"),
    "use_rslora": BOOLEAN,
    "bias": one_of(BIASES),
    **dict.fromkeys(("use_dora", "lora_bias"), BOOLEAN),
    "trainable_token_indices": (_are_tokens, "token ids, each once, or token ids by names of modules"),
}
