"""The outputs that READMEs show, made anew: python scripts/readme_outputs.py [--check]

Runs every shell session (a block whose first line begins with "$ ") but its `pip` lines, and every Python example but
those that ask a server or need Ray, of README.md and tinygpt/README.md, and writes what they print: what follows a
command, and the block that follows an example, if one does. Kernels are compiled afresh, as they are for a newcomer.
With --check nothing is written, and the exit code is 1 if anything but times, rates, the number of kernels and line
breaks differs.
"""

import argparse
import difflib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READMES = ("README.md", "tinygpt/README.md")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WIDTH = 120
MORE = "[...]"  # stands for the rest of a text
TEXT_LINES = 3  # of a generated text that are shown
ABSENT = ("http://", "import ray")  # a server's address, and what needs an extra: such examples are not run
MEASURED = re.compile(r"\d[\d,.]*(?= (tokens/s|ms|s|kernels compiled)\b)")


@dataclass(frozen=True)
class Place:
    """Where an output stands in a README, and what makes it."""

    start: int
    stop: int
    command: tuple[str, ...]


def places(text: str) -> Iterator[Place]:
    """In order. A Python example without a block right after it prints nothing that is shown: its place is empty."""
    blocks = list(BLOCK.finditer(text))
    for i, block in enumerate(blocks):
        language, body = block.groups()
        if language == "python" and not any(words in body for words in ABSENT):
            after = blocks[i + 1] if i + 1 < len(blocks) else None
            is_shown = after is not None and not after[1] and not text[block.end() : after.start()].strip()
            place = after.span(2) if is_shown else (block.end(), block.end())
            yield Place(*place, (sys.executable, "-c", body))
        elif not language and body.startswith("$ "):
            yield from _session(body, block.start(2))


def _session(body: str, offset: int) -> Iterator[Place]:
    commands = list(re.finditer(r"^\$ (.*)\n", body, re.MULTILINE))
    ends = [command.start() for command in commands[1:]] + [len(body)]
    for command, end in zip(commands, ends, strict=True):
        words = shlex.split(command[1])
        if words[:3] == ["python", "-m", "tinygpt"] or words[0] == "tinygpt":
            arguments = words[3:] if words[0] == "python" else words[1:]
            words = [sys.executable, "-m", "tinygpt", *arguments]
        if "pip" not in words:
            yield Place(offset + command.end(), offset + end, tuple(words))


def run(place: Place, shown: str, folder: str) -> str:
    """What is to stand at `place`. A file that `cat` shows is made of what is shown."""
    if place.command[0] == "cat":
        Path(folder, place.command[1]).write_text(shown, encoding="utf-8")
        return shown
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(Path(folder, ".cache"))}
    # A command shows what it says of itself; an example shows what it prints.
    stderr = subprocess.PIPE if place.command[1] == "-c" else subprocess.STDOUT
    options = {"cwd": folder, "env": environment, "text": True, "encoding": "utf-8"}
    result = subprocess.run(place.command, stdout=subprocess.PIPE, stderr=stderr, **options)
    if result.returncode:
        said = result.stdout + (result.stderr or "")
        raise SystemExit(f"{shlex.join(place.command)} ended with {result.returncode}:\n{said}")
    return "".join(f"{line}\n" for part in result.stdout.splitlines() for line in _wrapped(part)) if shown else ""


def _wrapped(line: str) -> list[str]:
    """Whole, if that is a few lines of WIDTH, else its beginning."""
    lines = textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False, drop_whitespace=False)
    lines = [part.rstrip() for part in lines] or [""]
    if len(lines) <= TEXT_LINES:
        return lines
    last = lines[TEXT_LINES - 1][: WIDTH - len(MORE) - 1].rsplit(" ", 1)[0]
    return [*lines[: TEXT_LINES - 1], f"{last} {MORE}"]


def without_measured(text: str) -> str:
    return MEASURED.sub("#", " ".join(text.split()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    is_check, differing = parser.parse_args().check, 0
    with tempfile.TemporaryDirectory() as folder:
        for name in READMES:
            text = old = (ROOT / name).read_text(encoding="utf-8")
            found = [(place, run(place, old[place.start : place.stop], folder)) for place in places(old)]
            for place, output in reversed(found):
                shown = old[place.start : place.stop]
                if without_measured(shown) != without_measured(output):
                    differing += 1
                    print(f"{name}: {shlex.join(place.command)[:WIDTH]}")
                    print("\n".join(difflib.ndiff(shown.splitlines(), output.splitlines())))
                text = text[: place.start] + output + text[place.stop :]
            if not is_check:
                (ROOT / name).write_text(text, encoding="utf-8")
    return int(is_check and differing > 0)


if __name__ == "__main__":
    raise SystemExit(main())
