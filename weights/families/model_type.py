"""ModelType, a family whose config.json says its model_type."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..config import HEAD, ModelConfig, parameter_shapes
from ..errors import Checks
from .family import (
    NONE,
    Family,
    Layout,
    Names,
    TensorRule,
    checked_config,
    named_by,
    renamed,
    rule_in_out,
)
from .gpt2 import IGNORED

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class ModelType:
    """A model_type of transformers.

    defaults: of config.json's fields; aliases: other names of fields; fields: ModelConfig's names of them; computed:
    other fields of ModelConfig; structure: of STRUCTURE. rule: of a parameter, from the rule by `names` alone.
    wrappers: prefixes of names in files, and `prefix` transformers' own. beside: names without a prefix. ignored:
    patterns of unused names. is_in_out: matrices of layers are (in, out).
    """

    name: str
    family_name: str
    prefix: str
    names: Names
    defaults: Fields
    fields: Mapping[str, str]
    structure: Callable[[Fields], dict[str, Any]]
    rule: Callable[[str, TensorRule, ModelConfig, Fields], TensorRule] = (
        lambda parameter, usual, config, fields: usual
    )
    aliases: Mapping[str, str] = field(default_factory=dict)
    computed: Callable[[Fields], dict[str, Any]] = lambda fields: {}
    checks: Checks = field(default_factory=dict)
    wrappers: str = "transformer|model|module|_orig_mod"
    beside: tuple[str, ...] = (HEAD,)
    ignored: tuple[str, ...] = IGNORED
    is_in_out: bool = False
    quirks: tuple[str, ...] = ()

    def model_config(self, fields: Fields, generation: Fields | None = None) -> ModelConfig:
        """Raise one CheckpointError for all impossible or unknown fields."""
        aliased = {ours: value for ours, value in renamed(fields, self.aliases).items() if value is not None}
        fields = {**self.defaults, **fields, **aliased}
        inner = {
            f"{k}.{name}": v
            for k, one in fields.items()
            if isinstance(one, Mapping)
            for name, v in one.items()
        }
        values = {**fields, **inner, **self.computed(fields), **renamed(fields, self.fields)}
        return checked_config(values, generation, self.checks, structure=self.structure(fields))

    def rules(self, config: ModelConfig, fields: Fields = NONE) -> dict[str, TensorRule]:
        fields, rules = {**self.defaults, **fields}, {}
        for parameter in parameter_shapes(config):
            name = self.names.of(parameter)
            usual = rule_in_out(parameter, name) if self.is_in_out else TensorRule((name,))
            rules[parameter] = self.rule(parameter, usual, config, fields)
        return rules

    @property
    def layout(self) -> Layout:
        return Layout(
            self.rules,
            lambda name: name if name in self.beside else self.prefix + name,
            self._short_name,
        )

    @property
    def family(self) -> Family:
        return Family(
            name=self.family_name,
            described_by="config.json",
            adds=lambda source: (
                ", with transformers' defaults,"
                if self.defaults.keys() - {*source.beside, *renamed(source.beside, self.aliases)}
                else ""
            ),
            config=lambda source: self.model_config(source.beside, source.generation_json),
            rules=lambda source, config: self.rules(config, source.beside),
            named=partial(named_by, self._short_name),
            ignored=self.ignored,
            quirks=lambda source, config: self.quirks,
            layout=self.layout,
        )

    def _short_name(self, name: str) -> str:
        return re.sub(rf"^(?:(?:{self.wrappers})\.)+", "", name)
