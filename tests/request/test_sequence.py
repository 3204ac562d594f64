"""Sequence: who may write its fields, read from the source."""

import ast
from dataclasses import fields

from support.paths import ROOT
from tinygpt.request.sequence import Sequence

# The two that are written from outside, and by whom; all others change by methods of Sequence alone.
WRITERS = {"sampling_state": "sampling/sampler.py", "beams": "engine/beams.py"}


def assigned(tree: ast.AST) -> set[str]:
    """The attributes that a module assigns to, on anything but `self`."""
    found = set()
    for node in ast.walk(tree):
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
        written = names & assigned(ast.parse(file.read_text(encoding="utf-8")))
        assert written == {name for name, writer in WRITERS.items() if writer == place}, place
