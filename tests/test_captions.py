"""Figures of speed in READMEs: each has a caption, and ratios in the text are those of the tables.

A caption: "Measured at COMMIT on DATE, CPU: NAME, by `COMMAND`." In a table with a column "measured at" each row has
its own, and the text around it the command. COMMIT is the state that was measured, or that published the figures.
"""

import re
import subprocess
import sys

import pytest

from support.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from peers.setup import caption

README = (ROOT / "README.md").read_text(encoding="utf-8")
READMES = [
    *(ROOT / "README.md", ROOT / "scripts" / "README.md"),
    *(
        path
        for room in ("tinygpt", "kernels", "weights")
        for path in sorted((ROOT / room).rglob("README.md"))
    ),
]
ORIGIN = r"([0-9a-f]{8}) on (\d{4}-\d\d-\d\d), [CG]PU: \w[^`]*"
CAPTION = re.compile(rf"Measured at {ORIGIN}, by `(?:python|tinygpt) [^`]+`")
REPEATABLE = re.compile(r"Figures: `python [^`]+`")  # no times: a command repeats them on any CPU
PREDICTED = "Predicted, not measured"  # in front of a table
NUMBER = r"\**[\d.]+\**"
# Alone, with another engine's, or with a median, as bench_peers.py prints it.
FIGURE = re.compile(rf"[+-]?{NUMBER}(?: %)?(?:, [\w.-]+ {NUMBER}| \([\d.]+\)\**)?")
MACHINE = re.compile(r"Zen \d|EPYC|Xeon|Emerald Rapids|H200")
TIME = re.compile(r"\d (?:ms|s|times)\b|\d tokens/s|'s time\b|of the time\b")
RATIO = re.compile(r"\d times as (?:long|fast)\b")
LINK_TO_TABLE = "([table]("


def blocks(text: str) -> list[str]:
    """Return paragraphs, lists and tables, without code."""
    return re.split(r"\n{2,}", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL))


def cells_of(table: str) -> list[list[str]]:
    """Return each row's cells, with the titles first and without the line below them."""
    lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()]
    return [lines[0], *lines[2:]]


def without_caption(text: str) -> list[str]:
    """Return the beginnings of tables, rows and paragraphs whose figures lack a caption."""
    parts = [block if block.startswith("|") else " ".join(block.split()) for block in blocks(text)]
    lacking = []
    for before, part, after in zip(["", *parts], parts, [*parts[1:], ""], strict=False):
        if not part.startswith("|"):
            is_measured = RATIO.search(part) or (MACHINE.search(part) and TIME.search(part))
            has_source = CAPTION.search(part) or LINK_TO_TABLE in part
            lacking += [part[:60]] * bool(is_measured and not has_source)
            continue
        titles, *rows = cells_of(part)
        if titles[-1] == "measured at":
            lacking += [row[0] for row in rows if not re.fullmatch(ORIGIN, row[-1])]
            continue
        values = [cell for row in rows for cell in row[1:] if cell]
        is_figures = 2 * sum(FIGURE.fullmatch(cell) is not None for cell in values) > len(values)
        around = f"{before} {after}"
        has_source = CAPTION.search(around) or REPEATABLE.search(around) or PREDICTED in before
        lacking += [part[:60]] * bool(is_figures and not has_source)
    return lacking


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_figures_of_speed_have_captions(path):
    assert without_caption(path.read_text(encoding="utf-8")) == []


def test_the_scripts_print_such_a_caption(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scripts/bench_peers.py", "--dtypes", "int8"])
    printed = caption("CPU: Intel(R) Xeon(R) Processor")
    assert CAPTION.fullmatch(
        re.sub("at ([0-9a-f]{8}-dirty|no commit)", "at 0123abcd", printed).removesuffix(".")
    )
    assert printed.endswith("by `python scripts/bench_peers.py --dtypes int8`.")


TABLE = "| | float32 |\n|---|---|\n| decode | **1.5**, peer 3.0 |\n\n"
RIGHT = "Measured at 0123abcd on 2026-11-26, CPU: Intel Xeon (with AMX), by `python x.py`."


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (TABLE + RIGHT, 0),
        (RIGHT + "\n\n" + TABLE, 0),
        (TABLE + "A text.", 1),
        (TABLE + "A text.\n\n" + RIGHT, 1),
        ("| case | tinygpt |\n|---|---|\n| decode | **1.50 (1.52)** |", 1),
        (TABLE + RIGHT.replace("0123abcd", "HEAD"), 1),
        (TABLE + RIGHT.replace("on 2026-11-26", "in November"), 1),
        (TABLE + RIGHT.replace("CPU: Intel Xeon (with AMX)", "CPU:"), 1),
        (TABLE + RIGHT.replace(", by `python x.py`", ""), 1),
        ("Predicted, not measured.\n\n" + TABLE, 0),
        (TABLE + "Predicted, not measured, of the table below.", 1),
        ("A step takes 45 ms on Zen 4.", 1),
        (f"A step takes 45 ms on Zen 4. {RIGHT}", 0),
        ("The peer takes\n1.2 times as long.", 1),
        ("| a | measured at |\n|---|---|\n| b | 0123abcd on 2026-11-26, CPU: Zen 4 |\n| c | Zen 4 |", 1),
        ("| tile | ops |\n|---|---|\n| AVX-512, Zen 4 and 5 | `vdpbf16ps` |", 0),
    ],
)
def test_a_lacking_or_damaged_caption_is_noticed(text, count):
    assert len(without_caption(text)) == count


def test_no_figure_is_older_than_the_commit_that_it_names():
    """Of commits that this clone has: an archive has none."""
    pages = [" ".join(path.read_text(encoding="utf-8").split()) for path in READMES]
    origins = {
        match
        for page in pages
        for match in re.findall(r"\b([0-9a-f]{8}) on (\d{4}-\d\d-\d\d), [CG]PU:", page)
    }
    assert len(origins) > 5
    for commit, day in origins:
        command = ["git", "show", "--no-patch", "--format=%cs", commit]
        known = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert known.returncode or known.stdout.strip() <= day, commit


def ratios(text: str) -> dict[str, list[float]]:
    """Return the next engine's times over ours, by dtype, of the table of decode steps and prefills."""
    (table,) = [block for block in blocks(text) if block.startswith("| | float32 |")]
    (_, *dtypes), *rows = cells_of(table)
    columns = zip(*(row[1:] for row in rows), strict=True)
    return {dtype: [ratio(cell) for cell in column] for dtype, column in zip(dtypes, columns, strict=True)}


def ratio(cell: str) -> float:
    ours, theirs = (
        float(number) for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?", cell.replace("*", " "))
    )
    return theirs / ours


def sentence(text: str) -> str:
    """Return what the text says about its table, as a whole."""
    spans = {dtype: f"{min(of):.1f} to {max(of):.1f}" for dtype, of in ratios(text).items()}
    (first, span), *others = spans.items()
    return ", ".join(
        [f"The other engine takes {span} times as long in {first}"]
        + [f"{span} in {dtype}" for dtype, span in others]
    )


def test_the_readmes_ratios_are_those_of_its_table():
    assert sentence(README) in " ".join(README.split())
    slower = README.replace("**10.9**", "**21.9**", 1)
    assert sentence(slower) not in " ".join(slower.split())


def claim(text: str) -> str:
    """Return the README's first claim by its table: times within 2 % are equal."""
    all_ratios = [ratio for of_dtype in ratios(text).values() for ratio in of_dtype]
    assert min(all_ratios) > 0.98
    num_faster = sum(ratio > 1.02 for ratio in all_ratios)
    assert num_faster == len(all_ratios) - 1
    return f"is faster than any other engine in {num_faster} of the {len(all_ratios)} cells of"


def test_we_are_as_fast_as_the_readme_begins_with():
    assert claim(README) in " ".join(README.split())
    for mutant in (README.replace("**17.8**", "28.6", 1), README.replace("| 532,", "| 560,", 1)):
        assert mutant != README
        with pytest.raises(AssertionError):
            claim(mutant)


@pytest.mark.parametrize("path", READMES[:2], ids=lambda path: path.parent.name)
def test_no_slower_engine_of_a_cell_is_in_bold(path):
    cells = [
        cell
        for block in blocks(path.read_text(encoding="utf-8"))
        if block.startswith("|")
        for row in cells_of(block)
        for cell in row[1:]
        if re.fullmatch(rf"{NUMBER}, [\w.-]+ {NUMBER}", cell)
    ]
    assert len(cells) > 10
    for cell in cells:
        ours, theirs = re.findall(r"\*\*[\d.]+\*\*|(?<![\w.])\d[\d.]*", cell)
        by_time = sorted((ours, theirs), key=lambda number: float(number.strip("*")))
        assert not by_time[1].startswith("**"), cell


def test_the_readmes_figures_of_a_gpu_are_its_tables():
    ours, torch = re.search(
        r"of 124M in bfloat16 takes ([\d.]+) ms, compiled torch ([\d.]+)", README
    ).groups()
    page = (ROOT / "scripts" / "README.md").read_text(encoding="utf-8")
    assert f"| decode, batch 1 | **{ours}**, torch {torch} |" in page
