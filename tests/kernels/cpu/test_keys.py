"""Keys of objects: an edit of what reaches a kernel changes its key, and no other edit does."""

import ast
import io
import shutil
import tokenize
from pathlib import Path

import pytest

from support.paths import ROOT
from tinygpt.kernels.cpu.keys import Sources, of_sources, statements

PREFIX = "tinygpt.kernels.cpu"
KERNELS = [
    *(
        f"{PREFIX}.{name}"
        for name in ("model.take_steps", "layers.activations.activate", "sampling._warp_rows")
    ),
    *(f"{PREFIX}.packing.pack_{dtype}" for dtype in ("float32", "int8")),
]
TARGET = ["AVX2", "x86-64-v3", "avx2", "fma"]
STEPS, ACTIVATE, WARP, *_ = KERNELS


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of kernels/ that may be edited."""
    copy = tmp_path / "kernels"
    shutil.copytree(ROOT / "kernels", copy, ignore=shutil.ignore_patterns("objects", "cuda", "__pycache__"))
    return copy


def changed_by(folder: Path, file: str, old: str, new: str, kernels=KERNELS) -> list[str]:
    """Edit a file, and return the kernels whose keys change."""
    before = [Sources(folder).key(kernel, TARGET) for kernel in kernels]
    text = (folder / file).read_text("utf-8")
    assert old in text
    (folder / file).write_text(text.replace(old, new, 1), "utf-8")
    after = [Sources(folder).key(kernel, TARGET) for kernel in kernels]
    return [kernel for kernel, one, other in zip(kernels, before, after, strict=True) if one != other]


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("cpu/load.py", "LEAST = 1e-6", "LEAST = 1e-6  # other words"),
        ("cpu/load.py", "LEAST = 1e-6", "LEAST = 1e-5"),
        ("cpu/layers/attention.py", "  # of a head: 4 to 128 KB", ""),
        ("cpu/layers/attention.py", "    rows = last - first\n", "    # A line.\n\n    rows = last - first  # more\n"),
        ("cpu/layers/attention.py", '"""Causal attention', '"""An attention'),
        ("cpu/layers/attention.py", '    """Compute out (N, C)', '    """Take # out:\n\n    "def" (N, C)'),
        ("cpu/layers/attention.py", "    newest = positions[last - 1]\n", "\n    newest = positions[last - 1]\n\n"),
        ("cpu/layers/attention.py", "total, weight_sum):\n", 'total, weight_sum):\n    """Say it."""\n'),
        ("cpu/model.py", "workspace.team.run(take_steps", "workspace.team.run(  take_steps"),
        ("cpu/native.py", "if target is None or", "if not target or"),
        ("cpu/compiler.py", "class DiskCache(FunctionCache):", "class DiskCache(FunctionCache):\n    size = 1\n"),
    ],
)  # fmt: skip
def test_keys_stay_with_an_edit_that_reaches_no_kernel(folder, file, old, new):
    assert changed_by(folder, file, old, new) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "changed"),
    [
        ("cpu/layers/attention.py", "rows = last - first", "rows = last - first + 0", [STEPS]),
        ("cpu/layers/attention.py", "NEAR_BLOCKS = 4", "NEAR_BLOCKS = 5", [STEPS]),
        ("cpu/layers/attention.py", "ENOUGH_ITEMS = 32", "NEAR_BLOCKS = 3\nENOUGH_ITEMS = 32", [STEPS]),
        ("cpu/simd/amx_tiles.py", "tdpbsud", "tdpbssd", [STEPS]),
        ("cpu/simd/tiles.py", "CHUNK_BYTES = 24576", "CHUNK_BYTES = 12288", [STEPS]),
        ("cpu/layers/activations.py", "def activate(", "@cached\ndef activate(", [ACTIVATE, STEPS]),
        ("cpu/dtypes.py", "DTYPES = {", "DTYPES: dict = {", [STEPS]),
        ("cpu/dtypes.py", "LEAST_AMX = 5", "LEAST_AMX = 6", [STEPS]),
        ("cpu/sampling_rows.py", "from numba import types\n", "from numba import types as types\n", [WARP]),
        ("cpu/compiler.py", '"fastmath": False', '"fastmath": True', KERNELS),
        ("cpu/native.py", "no_owner = (0, 0)", "no_owner = (0, 1)", KERNELS),
        ("cpu/jit.py", "_nrt=False", "_nrt=True", KERNELS),
    ],
)  # fmt: skip
def test_keys_change_with_what_reaches_a_kernel(folder, file, old, new, changed):
    assert set(changed_by(folder, file, old, new)) == {*changed}


def test_keys_change_with_a_statement_that_changes_a_constant(folder):
    """No name is bound by it."""
    attention = "cpu/layers/attention.py"
    edit = "ENOUGH_ITEMS = 32", "ENOUGH_ITEMS = 32\nglobals().update(NEAR_BLOCKS=5)"
    assert changed_by(folder, attention, *edit) == [STEPS]


def test_keys_change_with_what_a_module_is_called_for(folder):
    (folder / "cpu" / "helped.py").write_text(
        "from .. import numbers\n\n\ndef kernel(x):\n    return numbers.from_bfloat16(x)\n"
    )
    helped = [f"{PREFIX}.helped.kernel"]
    assert (
        changed_by(folder, "numbers.py", "def from_bfloat16(", "@cached\ndef from_bfloat16(", helped)
        == helped
    )


def test_keys_change_with_the_target():
    kernels = Sources(ROOT / "kernels")
    keys = {
        kernels.key(STEPS, asked)
        for asked in (TARGET, [*TARGET, "avxvnni"], ["AVX2", "znver2", "avx2", "fma"])
    }
    assert len(keys) == 3


def test_a_key_is_the_same_on_all_versions_of_python(tmp_path):
    """A literal, as each of CI's versions sees it: with an f-string, a long string and a decorator."""
    (tmp_path / "kernels" / "cpu").mkdir(parents=True)
    (tmp_path / "kernels" / "cpu" / "one.py").write_text(
        '"""Words."""\nimport numpy as np\nfrom .two import (\n    SIZE,  # words\n    other,\n)\n\n\n@other(1)\n'
        "def kernel(x: int | None):\n    '''Words,\n    # "
        and " more.'''\n    return f\"{x!r:>{SIZE}} # no\" + np.e\n"
    )
    (tmp_path / "kernels" / "cpu" / "two.py").write_text(
        'SIZE = 4\nTEXT = """\nother = 5\n"""\nother = print\n'
    )
    assert Sources(tmp_path / "kernels").key("tinygpt.kernels.cpu.one.kernel", ["AVX2"]) == "a3c8ab933d72d245"


def code_of(source: str) -> list[str]:
    """Return the tokens without comments, docstrings and layout, by Python's own tokenizer and parser."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            docstrings.add((node.body[0].lineno, node.body[0].col_offset))
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [t.string for t in tokens if t.type not in layout and t.start not in docstrings]


@pytest.mark.parametrize("file", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda file: file.stem)
def test_statements_have_the_tokens_of_a_file(file):
    source = file.read_text("utf-8")
    kept = "".join(statements(source)).replace("\0", "\n")
    assert code_of_text(kept) == code_of(source)


def code_of_text(code: str) -> list[str]:
    """Return the tokens of code that may lack a body, as of a class with a docstring alone."""
    layout = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    return [t.string for t in tokenize.generate_tokens(io.StringIO(code).readline) if t.type not in layout]


def test_of_sources_keeps_the_objects_whose_key_is_right():
    key = Sources(ROOT / "kernels").key(STEPS, TARGET)
    members = [f"{STEPS}-0123-{key}", f"{STEPS}-4567-0000", f"{ACTIVATE}-0123-{key}"]
    assert of_sources(members, TARGET, ROOT / "kernels") == members[:1]
