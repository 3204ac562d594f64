"""What users rely on stays as it is written in contract.txt; support/contract.py says how to change that on purpose."""

import pytest

from support import contract
from support.paths import ROOT

SECTIONS = contract.sections()
FROZEN = contract.read((ROOT / "tests" / "contract.txt").read_text(encoding="utf-8"))


def test_every_section_is_frozen():
    assert list(FROZEN) == list(SECTIONS)


@pytest.mark.parametrize("title", SECTIONS)
def test_the_public_contract(title):
    assert list(SECTIONS[title]()) == FROZEN[title]
