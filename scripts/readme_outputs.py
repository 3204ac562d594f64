"""The outputs that READMEs show, made anew: python scripts/readme_outputs.py [--check]

Runs every shell session (a block whose first line begins with "$ ") but its `pip` lines, and every Python example but
those that need Ray, of README.md and tinygpt/README.md, and writes what they print: what follows a command, and the
block that follows an example, if one does. Kernels are compiled afresh, as they are for a newcomer. What asks a server
is given one, on the port 8000 that the examples name (extra `serve`; curl and the package openai for those that call
them; without, they are left as they are, and that is said). With --check nothing is written, and the exit code is 1 if
anything but times, rates, the number of kernels and line breaks differs.
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
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READMES = ("README.md", "tinygpt/README.md")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WIDTH = 120
MORE = "[...]"  # stands for the rest of a text
TEXT_LINES = 6  # of a paragraph that are shown
ABSENT = "import ray"  # what needs that is not run
ADDRESS = "http://127.0.0.1:8000"
SERVE = ("tinygpt", "serve", "--served-model-name", "demo")
REPLY_TEXT = re.compile(r'"text":"(?:[^"\\]|\\.)*"')  # all that is looked at in a reply of the server
MEASURED = re.compile(r"\d[\d,.]*(?= (tokens/s|ms|s|kernels compiled)\b)")


@dataclass(frozen=True)
class Place:
    """Where an output stands in a README, and what makes it."""

    start: int
    stop: int
    command: tuple[str, ...]

    @property
    def asks_server(self) -> bool:
        return any(ADDRESS in word for word in self.command)

    def lacks(self) -> str:
        """What it takes and this machine does not have, or nothing."""
        needed = {"uvicorn": self.asks_server, "openai": "from openai" in self.command[-1]}
        missing = [name for name, is_needed in needed.items() if is_needed and importlib.util.find_spec(name) is None]
        return " and ".join(missing + ["curl"] * (self.command[0] == "curl" and shutil.which("curl") is None))


def places(text: str) -> Iterator[Place]:
    """In order. A Python example without a block right after it prints nothing that is shown: its place is empty."""
    blocks = list(BLOCK.finditer(text))
    for i, block in enumerate(blocks):
        language, body = block.groups()
        if language == "python" and ABSENT not in body:
            after = blocks[i + 1] if i + 1 < len(blocks) else None
            is_output = after is not None and after[1] in ("", "console") and not after[2].startswith("$ ")
            is_shown = is_output and not text[block.end() : after.start()].strip()
            place = after.span(2) if is_shown else (block.end(), block.end())
            yield Place(*place, (sys.executable, "-c", body))
        elif language in ("", "console") and body.startswith("$ "):
            yield from _session(body, block.start(2))


def _session(body: str, offset: int) -> Iterator[Place]:
    commands = list(re.finditer(r"^\$ ((?:.*\\\n)*.*)\n", body, re.MULTILINE))
    ends = [command.start() for command in commands[1:]] + [len(body)]
    for command, end in zip(commands, ends, strict=True):
        words = shlex.split(command[1].replace("\\\n", " "))
        if words[:3] == ["python", "-m", "tinygpt"] or words[0] == "tinygpt":
            arguments = words[3:] if words[0] == "python" else words[1:]
            words = [sys.executable, "-m", "tinygpt", *arguments]
        if "pip" not in words and tuple(words[2:4]) != SERVE[:2]:
            yield Place(offset + command.end(), offset + end, tuple(words))


def outputs(text: str, folder: str) -> Iterator[tuple[Place, str]]:
    """What is to stand at each place. A server begins when one is asked, and compiles what no command has shown."""
    with ExitStack() as stack:
        is_served = False
        for place in places(text):
            if place.asks_server and not place.lacks() and not is_served:
                stack.enter_context(served(folder))
                is_served = True
            yield place, run(place, text[place.start : place.stop], folder)


def run(place: Place, shown: str, folder: str) -> str:
    """What is to stand at `place`. A file that `cat` shows is made of what is shown."""
    if place.command[0] == "cat":
        Path(folder, place.command[1]).write_text(shown, encoding="utf-8")
        return shown
    if lacking := place.lacks():
        print(f"left as it is, for want of {lacking}: {shlex.join(place.command)[:WIDTH]}", file=sys.stderr)
        return shown
    # A command shows what it says of itself; an example shows what it prints.
    stderr = subprocess.PIPE if place.command[1] == "-c" else subprocess.STDOUT
    result = subprocess.run(place.command, stdout=subprocess.PIPE, stderr=stderr, **options(folder))
    if result.returncode:
        said = result.stdout + (result.stderr or "")
        raise SystemExit(f"{shlex.join(place.command)} ended with {result.returncode}:\n{said}")
    if place.command[0] == "curl":
        (reply,) = REPLY_TEXT.findall(result.stdout)
        return REPLY_TEXT.sub(lambda _: reply, shown)
    return "".join(f"{line}\n" for part in result.stdout.splitlines() for line in _wrapped(part)) if shown else ""


def options(folder: str) -> dict:
    """For processes that find this checkout, and no compiled kernels: these may be kept among temporary files, too."""
    places = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(Path(folder, ".cache")), "TMPDIR": folder}
    environment = {**os.environ, **places}
    return {"cwd": folder, "env": environment, "text": True, "encoding": "utf-8"}


@contextmanager
def served(folder: str) -> Iterator[None]:
    """A server at ADDRESS, while the block runs."""
    command = [sys.executable, "-m", *SERVE]
    with subprocess.Popen(command, stderr=subprocess.PIPE, **options(folder)) as server:
        said = []
        for line in server.stderr:
            said.append(line)
            if ADDRESS in line:
                break
        else:
            raise SystemExit(f"{shlex.join(command)} does not serve:\n{''.join(said)}")
        threading.Thread(target=server.stderr.read).start()  # nobody waits for its log
        try:
            yield
        finally:
            server.terminate()


def _wrapped(line: str) -> list[str]:
    """Whole, if that is a few lines of WIDTH, else its beginning."""
    lines = textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False, drop_whitespace=False)
    lines = [line.strip() if i else line.rstrip() for i, line in enumerate(lines)] or [""]
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
