"""What users rely on stays as it is written in contract.txt; support/contract.py says how to change that on purpose."""

import pytest

from support import contract
from support.paths import ROOT
from support.recorded import needs_transformers

SECTIONS = contract.sections()
FROZEN = contract.read((ROOT / "tests" / "contract.txt").read_text(encoding="utf-8"))


def test_every_section_is_frozen():
    assert list(FROZEN) == list(SECTIONS)


@pytest.mark.parametrize(
    "title",
    [pytest.param(title, marks=needs_transformers if title.startswith("parity") else ()) for title in SECTIONS],
)
def test_the_public_contract(title):
    assert list(SECTIONS[title]()) == FROZEN[title]
