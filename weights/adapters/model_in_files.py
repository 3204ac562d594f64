"""A model as transformers keeps it in files, whatever it was opened from: what the names in an adapter stand for."""

from collections.abc import Iterable
from dataclasses import dataclass

from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.families.family import AS_IS, Layout, Rule
from tinygpt.weights.parameters import EMBEDDING, POSITIONS, is_transposed, parameter_shapes
from tinygpt.weights.stored.export import layout_of
from tinygpt.weights.tensor import DefaultTensor

EMBEDDINGS = (EMBEDDING, POSITIONS)


@dataclass(frozen=True)
class ModelInFiles:
    """`rules` are those of parameters, by their names. All else goes by the names of tensors in the files, without what
    the model was wrapped in: `parameters` are what they are a part of, `shapes` their own."""

    layout: Layout
    rules: dict[str, Rule]
    parameters: dict[str, str]
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "ModelInFiles":
        layout, shapes = layout_of(checkpoint), parameter_shapes(checkpoint.config)
        rules = {
            name: rule
            for name, rule in layout.rules(checkpoint.config).items()
            if not (layout.has_defaults and isinstance(checkpoint.stored.get(name), DefaultTensor))
        }
        parameters = {source: name for name, rule in rules.items() for source in rule.sources}
        stored_shapes = {
            source: rules[name].transform.stored_shape(shapes[name], len(rules[name].sources))
            for source, name in parameters.items()
        }
        return cls(layout, rules, parameters, stored_shapes)

    def is_in_out(self, name: str) -> bool:
        return self.layout.is_in_out and is_transposed(self.parameters[name])

    def is_embedding(self, name: str) -> bool:
        return self.parameters[name] in EMBEDDINGS

    def has_own_positions(self, name: str) -> bool:
        """Whether it is a table of positions that finds its rows in a way of its own."""
        parameter = self.parameters[name]
        return parameter == POSITIONS and self.rules[parameter].transform is not AS_IS

    def modules(self, stored: Iterable[str]) -> dict[str, str]:
        """The names that modules have in an adapted model whose tensors are `stored`. With a head, it has its layers in
        `transformer`, say; without, it may have them at the top."""
        root = max((name.removesuffix(self.layout.short_name(name)) for name in stored), key=len, default="")
        return {name: self._prefix(name, root) + name.rpartition(".")[0] for name in self.shapes}

    def _prefix(self, name: str, root: str) -> str:
        return "" if self.layout.file_name(name) == name else root
