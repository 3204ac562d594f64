"""Make the outputs that READMEs show: python scripts/readme_outputs.py [--check]

Runs the shell sessions (blocks that begin with "$ ") but `pip`, and the Python examples without Ray, of README.md and
tinygpt/README.md. Kernels compile anew. Examples that ask a server get one on port 8000 (extra `serve`); an example
whose program is missing stays as it is. --check writes nothing; the exit code is 1 if anything but times, rates,
numbers of kernels and line breaks differs.
"""

import argparse
import difflib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tinygpt.bench.sweep import started

ROOT = Path(__file__).resolve().parents[1]
READMES = ("README.md", "tinygpt/README.md")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# of a paragraph; MORE stands for its rest
WIDTH = 120
TEXT_LINES = 6
MORE = "[...]"
ADDRESS = "http://127.0.0.1:8000"
SERVE = ("tinygpt", "serve", "--served-model-name", "demo")
REPLY_TEXT = re.compile(r'"text":"(?:[^"\\]|\\.)*"')  # compared, of a server's reply
# Said if the package has no object code for this CPU.
COMPILING = re.compile(r"tinygpt: compiling kernels [^)]*\)\s+|; compiling \d+ kernels? [\d.]+ s")
MEASURED = re.compile(r"\d[\d,.]*(?= (tokens/s|ms|s|kernels compiled)\b)")


@dataclass(frozen=True)
class Place:
    start: int
    stop: int
    command: tuple[str, ...]

    @property
    def asks_server(self) -> bool:
        return any(ADDRESS in word for word in self.command)

    def missing(self) -> str:
        """Return the programs that the command needs and this machine lacks."""
        needed = {"uvicorn": self.asks_server, "openai": "from openai" in self.command[-1]}
        missing = [
            name for name, is_needed in needed.items() if is_needed and importlib.util.find_spec(name) is None
        ]
        return " and ".join(missing + ["curl"] * (self.command[0] == "curl" and shutil.which("curl") is None))


def places(text: str) -> Iterator[Place]:
    """Yield places in order. The place of a Python example without a block after it is empty."""
    blocks = list(BLOCK.finditer(text))
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        language, body = block.groups()
        if language == "python" and "import ray" not in body:
            is_output = after is not None and after[1] in ("", "console") and not after[2].startswith("$ ")
            is_shown = is_output and not text[block.end() : after.start()].strip()
            yield Place(*(after.span(2) if is_shown else (block.end(),) * 2), (sys.executable, "-c", body))
        elif language in ("", "console") and body.startswith("$ "):
            commands = list(re.finditer(r"^\$ ((?:.*\\\n)*.*)\n", body, re.MULTILINE))
            ends = [command.start() for command in commands[1:]] + [len(body)]
            for command, end in zip(commands, ends, strict=True):
                words = shlex.split(command[1].replace("\\\n", " "))
                if words[:3] == ["python", "-m", "tinygpt"] or words[0] == "tinygpt":
                    words = [sys.executable, "-m", "tinygpt", *words[3 if words[0] == "python" else 1 :]]
                if "pip" not in words and tuple(words[2:4]) != SERVE[:2]:
                    yield Place(block.start(2) + command.end(), block.start(2) + end, tuple(words))


def outputs(text: str, folder: str) -> Iterator[tuple[Place, str]]:
    """Yield each place and its output; a server runs from the first place that asks it."""
    with ExitStack() as stack:
        is_served = False
        for place in places(text):
            if place.asks_server and not place.missing() and not is_served:
                stack.enter_context(started([sys.executable, "-m", *SERVE], **options(folder)))
                is_served = True
            yield place, run(place, text[place.start : place.stop], folder)


def run(place: Place, shown: str, folder: str) -> str:
    """Return the output of a place. `cat` writes the shown file."""
    if place.command[0] == "cat":
        Path(folder, place.command[1]).write_text(shown, encoding="utf-8")
        return shown
    if missing := place.missing():
        print(f"not run, {missing} is missing: {shlex.join(place.command)[:WIDTH]}", file=sys.stderr)
        return shown
    # An example shows only its prints.
    stderr = subprocess.PIPE if place.command[1] == "-c" else subprocess.STDOUT
    done = subprocess.run(place.command, stdout=subprocess.PIPE, stderr=stderr, **options(folder))
    if done.returncode:
        raise SystemExit(
            f"{shlex.join(place.command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    if place.command[0] == "curl":
        (reply,) = REPLY_TEXT.findall(done.stdout)
        return REPLY_TEXT.sub(lambda _: reply, shown)
    return (
        "".join(f"{line}\n" for part in done.stdout.splitlines() for line in wrapped(part)) if shown else ""
    )


def options(folder: str) -> dict:
    """Return subprocess options: this checkout, no compiled kernels."""
    places = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(Path(folder, ".cache")), "TMPDIR": folder}
    return {"cwd": folder, "env": {**os.environ, **places}, "text": True, "encoding": "utf-8"}


def wrapped(line: str) -> list[str]:
    """Return the lines of a paragraph, or its first TEXT_LINES."""
    how = {"max_lines": TEXT_LINES, "placeholder": f" {MORE}", "drop_whitespace": False}
    first, *rest = textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False, **how) or [""]
    return [first.rstrip(), *(line.strip() for line in rest)]


def without_measured(text: str) -> str:
    return MEASURED.sub("#", " ".join(COMPILING.sub("", text).split()))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    is_check = parser.parse_args().check
    differing = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in READMES:
            text = old = (ROOT / name).read_text(encoding="utf-8")
            for place, output in reversed([*outputs(old, folder)]):
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
