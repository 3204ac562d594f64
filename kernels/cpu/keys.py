"""The key of an object: a hash of the sources that reach its kernel, equal on all versions of Python.

A source is a statement at the left margin of a module, without comments and docstrings. It reaches all that its words
name in its module: a key may stand for too much, and never for too little. Sources are read as text: bytecode and `ast`
differ between versions of Python, and `ast` takes 0.4 s, in place of 0.03.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable
from importlib.util import resolve_name
from pathlib import Path

ROOM = "kernels"
COMPILER, LOADER = (f"{ROOM}.cpu.compiler", f"{ROOM}.cpu.native")
# Of the modules that compile and load, this alone reaches machine code.
ASKED = [(COMPILER, name) for name in ("KERNEL_OPTIONS", "PART_OPTIONS", "new_choice")]
ASKED += [(LOADER, name) for name in ("ENTRY", "words_of")]
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
    """What the words of a module stand for: statements, and words of other modules."""

    def __init__(self, name: str, source: str):
        self.name = name
        self.statements: dict[str, list[str]] = defaultdict(list)
        self.imports: dict[str, tuple[str, str]] = {}
        package = name.rpartition(".")[0]
        for statement in statements(source):
            for match in IMPORT.finditer(statement) if "import " in statement else ():  # in a function, too
                origin = resolve_name(match[1] or "", package) if match[1] else ""
                for item in match[2].strip("()\n, ").split(","):
                    original, _, bound = item.strip().partition(" as ")
                    if not {origin, f"{origin}.{original}"} & {COMPILER, LOADER}:
                        self.imports[bound or original] = origin, original
            for bound in _bound_by(statement):
                self.statements[bound].append(statement)
        self.words = self.statements.keys() | self.imports.keys()


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
        self._modules: dict[str, Module | None] = {}

    def key(self, kernel: str, asked: Iterable[str]) -> str:
        """Return 16 hex digits of a kernel, named as tinygpt.kernels.cpu.model.take_steps, for a target."""
        module, _, word = kernel[kernel.index(ROOM) :].rpartition(".")
        reached = self._reached([(module, word), *ASKED])
        return hashlib.sha256(repr([*asked, *sorted(reached)]).encode()).hexdigest()[:16]

    def _reached(self, places: list[tuple[str, str]]) -> set[tuple[str, str]]:
        """Return module and statement, or module and word of another package, from modules and words on."""
        seen: set[tuple[str, str]] = set()
        reached: set[tuple[str, str]] = set()
        while places:
            place = places.pop()
            if place in seen:
                continue
            seen.add(place)
            name, word = place
            module = self._module(name)
            if module is None:
                reached.add(place)
                continue
            if word in module.imports:
                places.append(module.imports[word])
            for statement in module.statements.get(word, ()):
                reached.add((name, statement))
                words = set(NAME.findall(statement))
                for home in self._homes(module, words):
                    places += [(home.name, other) for other in words & home.words]
        return reached

    def _homes(self, module: Module, words: set[str]) -> list[Module]:
        """Return the modules whose names a statement may have: its own, and those that its words name."""
        origins = [module.imports[word] for word in words & module.imports.keys()]
        named = [".".join(origin) for origin in origins if self._module(origin[0]) is None]
        return [module, *filter(None, map(self._module, named))]

    def _module(self, name: str) -> Module | None:
        """Return a module of kernels/, or None."""
        if name not in self._modules:
            room, *parts = name.split(".")
            file = self._folder.joinpath(*parts).with_suffix(".py")
            is_ours = room == ROOM and file.is_file()
            self._modules[name] = Module(name, file.read_text("utf-8")) if is_ours else None
        return self._modules[name]


def of_sources(members: Iterable[str], asked: Iterable[str], folder: Path) -> list[str]:
    """Return the objects, by their names in an archive, whose keys are those of the sources in kernels/."""
    sources = Sources(folder)
    parts = {member: member.split("-") for member in members}
    keys = {kernel: sources.key(kernel, asked) for kernel, *_ in parts.values()}
    return [member for member, (kernel, *_, key) in parts.items() if keys[kernel] == key]
