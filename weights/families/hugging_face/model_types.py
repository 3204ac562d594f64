"""What families have in common whose config.json says their model_type, as transformers writes it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tinygpt.weights.config import ModelConfig
from tinygpt.weights.families.family import Family, Layout, Rule, Source, placed_by
from tinygpt.weights.families.hugging_face.gpt2 import is_ignored
from tinygpt.weights.parameters import HEAD

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class ModelType:
    """A model_type of transformers.

    family_name: for messages. model_config: from the fields of config.json, and of generation_config.json where there
    is one. rules: for every parameter, what it is made of, by the same fields; none: as the usual ones have it.
    wrappers: what may stand before the names in the rules, and `prefix` what transformers writes there. beside:
    names that have no prefix. ignored: those of tensors that are of no use here. is_in_out: whether matrices of layers
    are (in, out). quirks: what loading evens out. config_json: as Layout's, where other containers hold such models,
    too.
    """

    name: str
    family_name: str
    model_config: Callable[[Fields, Fields | None], ModelConfig]
    rules: Callable[[ModelConfig, Fields], dict[str, Rule]]
    prefix: str
    wrappers: str = "transformer|model|module|_orig_mod"
    beside: tuple[str, ...] = (HEAD,)
    ignored: tuple[str, ...] = ()
    is_in_out: bool = False
    quirks: tuple[str, ...] = ()
    config_json: Callable[[ModelConfig], dict[str, Any]] | None = None

    @property
    def layout(self) -> Layout:
        return Layout(
            lambda config: self.rules(config, {}),
            self._file_name,
            self._short_name,
            self.is_in_out,
            config_json=self.config_json,
        )

    @property
    def family(self) -> Family:
        return Family(
            name=self.family_name,
            described_by="config.json",
            detect=self._detect,
            config=lambda source: self.model_config(source.config_json or {}, source.json("generation_config.json")),
            rules=lambda source, config: self.rules(config, source.config_json or {}),
            place=partial(placed_by, self._short_name),
            is_ignored=lambda name: name in self.ignored or is_ignored(name),
            quirks=lambda source, config: self.quirks,
            layout=self.layout,
        )

    def _detect(self, source: Source) -> bool:
        return source.config_json is not None and source.config_json.get("model_type") == self.name

    def _short_name(self, name: str) -> str:
        return re.sub(rf"^(?:(?:{self.wrappers})\.)+", "", name)

    def _file_name(self, name: str) -> str:
        return name if name in self.beside else self.prefix + name
