"""scripts/pictures.py: the bars are the README's numbers, and the moving terminal shows a run."""

import math
import re
import sys
from xml.etree import ElementTree

from support.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import pictures

SVG = "{http://www.w3.org/2000/svg}"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_bars_are_those_of_the_readmes_table():
    """Drawn anew, they are the file's: neither is changed without the other."""
    kept = (ROOT / "scripts" / "tokens_per_second.svg").read_text(encoding="utf-8")
    assert kept == pictures.bars(README)


def test_tokens_of_the_terminal_come_one_after_the_other_in_their_colors():
    tokens = (
        [("Once", 0.0), (" <b>", -4.0), (" word" * 3, -2.0)]
        + [(" more", -0.1)] * 40
        + [("\n", -0.1), ("End.", -5.0)]
    )
    drawn = ElementTree.fromstring(pictures.stream((*each, i / 8) for i, each in enumerate(tokens)))
    lines = ["".join(line.itertext()) for line in drawn.find(f"{SVG}g")]
    assert "\n".join(lines).split() == "".join(text for text, _ in tokens).split()
    assert len(lines) > 3
    assert max(map(len, lines)) <= pictures.COLUMNS
    assert lines[-1] == "End."
    spans = [*drawn.find(f"{SVG}g").iter(f"{SVG}tspan")]
    times = [float(span.get("style").removeprefix("--at: ")) for span in spans]
    assert times == [pictures.START + i / 8 for i in range(len(tokens))]
    assert [span.get("fill") is not None for span in spans] == [-p / math.log(2) >= 1 for _, p in tokens]
    assert spans[1].get("fill") == f"rgb{pictures.color(4 / math.log(2))}"


def test_the_kept_terminal_has_the_text_of_the_readme():
    """The run is the README's first, with --echo and --color."""
    drawn = ElementTree.parse(ROOT / "scripts" / "stream.svg").getroot()
    shown = " ".join("".join(line.itertext()) for line in drawn.find(f"{SVG}g"))
    said = re.search(rf"--seed {pictures.SEED}\n(.*?)\n\ntinygpt: prompt", README, re.DOTALL)[1]
    assert shown.split() == (pictures.PROMPT + said).split()
