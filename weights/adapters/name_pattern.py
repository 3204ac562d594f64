"""Regular expressions for the names of modules, matched in work that is bounded.

An adapter_config.json may come from anywhere, and the standard library's `re` tries the ways in which an expression may
match one after the other: `(a+)+b` takes longer than anyone waits. Here a set of places stands for all ways at once, as
in Thompson's construction: each part of an expression takes the places where it may begin to those where it may end. A
set is an int, whose bit i is the place before character i. `re` parses; what depends on how a part has matched (a
backreference, a possessive quantifier) is refused by name, and so are flags.
"""

import re
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from tinygpt.weights.errors import CheckpointError

try:
    from re import _parser as sre_parse
except ImportError:  # Python 3.10
    import sre_parse

MAX_CHARACTERS = 100_000  # of all expressions of a config; one for each matrix of GPT-2 1.5B has some 6 000
OVERHEAD = 20  # characters that take as long as an expression of none
MAX_STEPS = 5_000_000  # some seconds


class TooMuchWork(CheckpointError):
    """The expressions of a config are too many, too long or nested too deeply."""

    def __init__(self):
        super().__init__(
            "the regular expressions in the adapter's adapter_config.json are too many, too long or nested too deeply: "
            "name the modules in lists."
        )


class NamePatterns:
    """The expressions of one config, each parsed once, and the work that all of them together may still take.

    Both functions raise ValueError for an expression that is none or not implemented, and TooMuchWork.
    """

    def __init__(self, max_steps: int = MAX_STEPS):
        self._characters = MAX_CHARACTERS
        self._work = _Work(max_steps)
        self._parts: dict[str, Part] = {}
        self._names: dict[str, _Name] = {}

    def fullmatch(self, pattern: str, text: str) -> bool:
        """Whether re.fullmatch finds the whole of `text`."""
        return bool(self._ends(pattern, text) >> len(text) & 1)

    def match(self, pattern: str, text: str) -> bool:
        """Whether re.match finds a beginning of `text`."""
        return bool(self._ends(pattern, text))

    def parse(self, pattern: str) -> "Part":
        if pattern not in self._parts:
            self._characters -= len(pattern) + OVERHEAD
            if self._characters < 0:
                raise TooMuchWork
            self._parts[pattern] = _parse(pattern)
        return self._parts[pattern]

    def _ends(self, pattern: str, text: str) -> int:
        if text not in self._names:
            self._names[text] = _Name(text, self._work)
        return self.parse(pattern)(self._names[text], 1)


class _Work:
    def __init__(self, steps: int):
        self.left = steps

    def take(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise TooMuchWork


class _Name:
    """A text, and the places before each of its characters."""

    def __init__(self, text: str, work: _Work):
        self.text, self.work = text, work
        self.everywhere = (2 << len(text)) - 1
        self.before: dict[str, int] = {}
        for i, character in enumerate(text):
            self.before[character] = self.before.get(character, 0) | 1 << i

    @cached_property
    def boundaries(self) -> int:
        words = [False, *map(_is_word, self.text), False]
        return sum(1 << i for i in range(len(words) - 1) if words[i] != words[i + 1])


# The places where a part ends in a name, if it begins at any of the given ones.
Part = Callable[[_Name, int], int]


def _parse(pattern: str) -> Part:
    try:
        tree = sre_parse.parse(pattern)
        if tree.state.flags & ~re.UNICODE.value:
            raise ValueError("flags such as (?i) are not implemented")
        return _sequence(tree)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None


def _sequence(tree: Iterable[tuple[Any, Any]]) -> Part:
    parts = [_part(str(kind), argument) for kind, argument in tree]

    def ends(name: _Name, places: int) -> int:
        for part in parts:
            name.work.take(1)
            if not places:
                break
            places = part(name, places)
        return places

    return ends


def _part(kind: str, argument: Any) -> Part:
    if kind not in _PARTS:
        raise ValueError(f"{kind} is not implemented")
    return _PARTS[kind](argument)


def _literal(code: int) -> Part:
    return lambda name, places: (places & name.before.get(chr(code), 0)) << 1


def _one_of(items: list[tuple[Any, Any]]) -> Part:
    """A character of a class, such as [a-z_] or [^.]."""
    kinds = [(str(kind), argument) for kind, argument in items]
    negated = ("NEGATE", None) in kinds
    literals = {chr(argument) for kind, argument in kinds if kind == "LITERAL"}
    ranges = [argument for kind, argument in kinds if kind == "RANGE"]
    categories = [_CATEGORIES[str(argument)] for kind, argument in kinds if kind == "CATEGORY"]

    def is_in(character: str) -> bool:
        found = character in literals or any(low <= ord(character) <= high for low, high in ranges)
        return (found or any(is_of(character) for is_of in categories)) != negated

    def ends(name: _Name, places: int) -> int:
        name.work.take(len(name.before) * (1 + len(ranges) + len(categories)))
        return (places & sum(before for character, before in name.before.items() if is_in(character))) << 1

    return ends


def _branches(argument: tuple[None, list[Any]]) -> Part:
    branches = [_sequence(branch) for branch in argument[1]]

    def ends(name: _Name, places: int) -> int:
        found = 0
        for branch in branches:
            name.work.take(1)
            found |= branch(name, places)
        return found

    return ends


def _group(argument: tuple[int | None, int, int, Any]) -> Part:
    _, added_flags, deleted_flags, tree = argument
    if added_flags or deleted_flags:
        raise ValueError("flags such as (?i:...) are not implemented")
    return _sequence(tree)


def _repeated(argument: tuple[int, int, Any]) -> Part:
    least, most, tree = int(argument[0]), int(argument[1]), argument[2]
    body = _sequence(tree)

    def ends(name: _Name, places: int) -> int:
        longest = len(name.text) + 1  # more repetitions than characters only repeat what is empty
        for _ in range(min(least, longest)):
            name.work.take(1)
            places = body(name, places)
        found = new = places
        for _ in range(min(most - least, longest)):
            name.work.take(1)
            new = body(name, new) & ~found
            if not new:
                break
            found |= new
        return found

    return ends


def _look(argument: tuple[int, Any]) -> Part:
    direction, tree = argument
    body = _sequence(tree)

    def ends(name: _Name, places: int) -> int:
        name.work.take(places.bit_length())
        if direction < 0:
            return places & body(name, name.everywhere)
        return sum(1 << i for i in range(places.bit_length()) if places >> i & 1 and body(name, 1 << i))

    return ends


def _look_for_none(argument: tuple[int, Any]) -> Part:
    look = _look(argument)
    return lambda name, places: places & ~look(name, places)


def _at(where: Any) -> Part:
    find = _PLACES[str(where)]
    return lambda name, places: places & find(name)


def _end(name: _Name) -> int:
    length = len(name.text)
    return 1 << length | (1 << length >> 1 if name.text.endswith("\n") else 0)


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


_PARTS: dict[str, Callable[[Any], Part]] = {
    "LITERAL": _literal,
    "NOT_LITERAL": lambda code: _one_of([("NEGATE", None), ("LITERAL", code)]),
    "ANY": lambda _: _one_of([("NEGATE", None), ("LITERAL", ord("\n"))]),
    "IN": _one_of,
    "BRANCH": _branches,
    "SUBPATTERN": _group,
    "MAX_REPEAT": _repeated,
    "MIN_REPEAT": _repeated,  # lazy: it prefers another way, and has the same ones
    "ASSERT": _look,
    "ASSERT_NOT": _look_for_none,
    "FAILURE": lambda _: lambda name, places: 0,
    "AT": _at,
}
_PLACES: dict[str, Callable[[_Name], int]] = {
    "AT_BEGINNING": lambda name: 1,
    "AT_BEGINNING_STRING": lambda name: 1,
    "AT_END": _end,
    "AT_END_STRING": lambda name: 1 << len(name.text),
    "AT_BOUNDARY": lambda name: name.boundaries,
    "AT_NON_BOUNDARY": lambda name: name.everywhere & ~name.boundaries,
}
_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_NOT_DIGIT": lambda character: not character.isdecimal(),
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_NOT_SPACE": lambda character: not character.isspace(),
    "CATEGORY_WORD": _is_word,
    "CATEGORY_NOT_WORD": lambda character: not _is_word(character),
}
