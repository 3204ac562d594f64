"""What the READMEs point at is there: links, headings, files and folders."""

import re
import subprocess
from pathlib import Path

import pytest

from support.paths import ROOT

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"(?<![\w/.-])(?:[\w.-]+/)*[\w-]+\.(?:py|md|toml|cfg)\b")
FOLDER = re.compile(r"`((?:[\w.-]+/)+)`")


def tracked() -> list[str]:
    """All files of the repository; of an unpacked archive, all files."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode == 0:
        return [line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]
    return [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file()]


PATHS = tracked()
ENDINGS = {"/".join(path.split("/")[i:]) for path in PATHS for i in range(path.count("/") + 1)}
FOLDERS = {ending.rsplit("/", i)[0] + "/" for ending in ENDINGS for i in range(1, ending.count("/") + 1)}
READMES = [path for path in PATHS if path.endswith(("README.md", "CHANGELOG.md"))]


@pytest.mark.parametrize("readme", READMES)
def test_links_lead_somewhere(readme):
    for link in LINK.findall((ROOT / readme).read_text(encoding="utf-8")):
        target, _, heading = link.partition("#")
        if "://" not in target:
            file = (ROOT / readme).parent / target if target else ROOT / readme
            assert file.exists(), link
            assert not heading or heading in headings(file), link


@pytest.mark.parametrize("readme", READMES)
def test_lines_of_text_are_no_longer_than_those_of_code(readme):
    """But for tables, blocks of code, and a link or a picture by itself."""
    text = re.sub(
        r"^ *```.*?^ *```$", "", (ROOT / readme).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    long = [line for line in text.splitlines() if len(line) > 120 and not line.lstrip().startswith("|")]
    assert [line for line in long if not re.fullmatch(r"!?\[.*\]\(\S+\)", line)] == []


def headings(file: Path) -> set[str]:
    """As GitHub names them in an address."""
    titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("readme", READMES)
def test_files_and_folders_that_are_named_exist(readme):
    """By their whole path or by the end of it, such as `linear.py` or `layers/`; NAME stands for any."""
    text = (ROOT / readme).read_text(encoding="utf-8")
    absent = {name for name in FILE.findall(text) if name not in ENDINGS}
    absent |= {name for name in FOLDER.findall(text) if name not in FOLDERS}
    assert not {
        name for name in absent if "NAME" not in name and not ((ROOT / readme).parent / name).exists()
    }
