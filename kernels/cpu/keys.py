"""The key of an object: a hash of the sources that reach its kernel, equal on all versions of Python.

A source is a statement at the left margin of a module, without comments and docstrings. It reaches all that its words
name in its module: a key may stand for too much, and never for too little. Sources are read as text: bytecode and `ast`
differ between versions of Python, and `ast` takes 0.4 s, in place of 0.03.
"""

import functools
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable
from importlib.util import resolve_name
from pathlib import Path

ROOM = "kernels"
LOADERS = {"kernels.cpu.compiler", "kernels.cpu.native"}
# What of these modules reaches machine code.
ASKED = [
    "compiler.KERNEL_OPTIONS",
    "compiler.PART_OPTIONS",
    "compiler.new_choice",
    "native.ENTRY",
    "native.words_of",
]
SHORT = """{q}[^{q}\\\\\n]*(?:\\\\.[^{q}\\\\\n]*)*{q}"""
LONG = """{q}{q}{q}[^{q}\\\\]*(?:(?:\\\\.|{q}(?!{q}{q}))[^{q}\\\\]*)*{q}{q}{q}"""
STRINGS = [kind.format(q=quote) for kind in (LONG, SHORT) for quote in "\"'"]
COMMENT_OR_STRING = re.compile("|".join([r"#[^\n]*", *STRINGS]), re.S)
DOCSTRING = re.compile(rf":\n\s*r?(?:{STRINGS[0]}|{STRINGS[1]})(?=\n)")
# A closing bracket goes on with a statement, and a definition with its decorators.
DECORATORS = r"(?:@.*\n(?:[ )].*\n)*)*"
STATEMENT = re.compile(rf"^{DECORATORS}[^\s@].*\n(?:[\s)\]}}].*\n)*", re.M)
IMPORT = re.compile(r"^\s*(?:from (\S+) )?import (\([^)]*\)|.*)", re.M)
DEFINITION = re.compile(rf"{DECORATORS}(?:def|class) (\w+)")
TARGETS = re.compile(r"(?:[\w, ]+(?:: [^=\n]+)? = )+")
NAME = re.compile(r"[a-z_]\w*", re.I | re.A)


def statements(source: str) -> list[str]:
    """Return the statements at the left margin, without comments, docstrings and blank lines."""

    def kept(match: re.Match) -> str:
        return (
            "" if match[0][0] == "#" else match[0].replace("\n", "\0")
        )  # a string's lines begin no statement

    code = COMMENT_OR_STRING.sub(kept, source)
    code = "\n".join(filter(None, map(str.rstrip, code.split("\n"))))
    code = DOCSTRING.sub(":", f":\n{code}\n")  # a module's docstring, too, follows a colon
    return STATEMENT.findall(code.removeprefix(":\n"))


class Module:
    """What the words of a module stand for: statements, and places, as "kernels.cpu.jit.kernel"."""

    def __init__(self, name: str, source: str):
        self.statements: dict[str, list[str]] = defaultdict(list)
        self.imports: dict[str, str] = {}
        package = name.rpartition(".")[0]
        for statement in statements(source):
            for match in IMPORT.finditer(statement) if "import " in statement else ():  # in a function, too
                origin = resolve_name(match[1] or "", package) if match[1] else ""
                for item in match[2].strip("()\n, ").split(","):
                    original, _, bound = item.strip().partition(" as ")
                    place = f"{origin}.{original}"
                    if not LOADERS & {origin, place}:
                        self.imports[bound or original] = place
            for bound in _bound_by(statement):
                self.statements[bound].append(statement)
        self.places = {word: f"{name}.{word}" for word in [*self.statements, *self.imports]}


def _bound_by(statement: str) -> list[str]:
    """Return the names that a statement binds or changes: all of its words, if its form is unknown."""
    if IMPORT.match(statement):
        return []
    if match := DEFINITION.match(statement):
        return [match[1]]
    match = TARGETS.match(statement)
    return NAME.findall(match[0] if match else statement)


class Sources:
    """The modules of kernels/, each read once it is reached."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._module = functools.cache(self._read)

    def key(self, kernel: str, asked: Iterable[str]) -> str:
        """Return 16 hex digits of a kernel, as "tinygpt.kernels.cpu.model.take_steps", for a target."""
        places = [kernel.removeprefix("tinygpt."), *(f"{ROOM}.cpu.{name}" for name in ASKED)]
        return hashlib.sha256(repr([*asked, *sorted(self._reached(places))]).encode()).hexdigest()[:16]

    def _reached(self, places: list[str]) -> set[tuple[str, str]]:
        """Return modules and statements, and the names of what other packages have."""
        seen: set[str] = set()
        reached: set[tuple[str, str]] = set()
        while places:
            place = places.pop()
            if place in seen:
                continue
            seen.add(place)
            name, _, word = place.rpartition(".")
            if whole := self._module(place):  # a statement may have any name of it
                places += whole.places.values()
            elif module := self._module(name):
                places += filter(None, [module.imports.get(word)])
                for statement in module.statements.get(word, ()):
                    reached.add((name, statement))
                    places += [
                        module.places[other] for other in module.places.keys() & NAME.findall(statement)
                    ]
            else:
                reached.add((name, word))
        return reached

    def _read(self, name: str) -> Module | None:
        """Return a module of kernels/, or None."""
        file = self._folder.joinpath(*name.split(".")[1:]).with_suffix(".py")
        is_ours = name.startswith(f"{ROOM}.") and file.is_file()
        return Module(name, file.read_text("utf-8")) if is_ours else None


def of_sources(members: Iterable[str], asked: Iterable[str], folder: Path) -> list[str]:
    """Return the objects, by their names in an archive, whose keys are those of the sources in kernels/."""
    key = functools.cache(Sources(folder).key)
    parts = {member: member.split("-") for member in members}
    return [member for member, (kernel, _, last) in parts.items() if key(kernel, tuple(asked)) == last]
