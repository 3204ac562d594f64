"""Sequence: who may write its fields, read from the source."""

import ast
from dataclasses import fields

from support.paths import ROOT
from tinygpt.request.sequence import Sequence

# The two that are written from outside, and by whom; all others change by methods of Sequence alone.
CHANGING = ("append", "extend", "insert", "pop", "clear")
WRITERS = {"sampling_state": "sampling/sampler.py", "beams": "engine/beams.py"}


def written(tree: ast.AST) -> set[str]:
    """The attributes of anything but `self` that a module assigns to, or whose lists it changes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in CHANGING and isinstance(node.value, ast.Attribute):
            found |= {node.value.attr} - ({node.value.attr} if ast.unparse(node.value.value) == "self" else set())
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for part in ast.walk(target) if isinstance(target, ast.AST) else ():
                is_own = (
                    isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self"
                )
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and not is_own:
                    found.add(part.attr)
    return found


def test_each_field_has_one_writer():
    names = {field.name for field in fields(Sequence)}
    for file in sorted((ROOT / "tinygpt").rglob("*.py")):
        place = file.relative_to(ROOT / "tinygpt").as_posix()
        found = names & written(ast.parse(file.read_text(encoding="utf-8")))
        assert found == {name for name, writer in WRITERS.items() if writer == place}, place
