"""Sentences of the library in the words of the shell, and of JSON: it names fields, which users of both know otherwise.

A sentence names a field and its value as Python does, `top_k=-2`, or as "max_tokens is 600", and what else it may be
ends in "or None".
"""

import ast
import json
import re
from collections.abc import Iterable, Mapping

from tinygpt.errors import RequestError


class Worded(RequestError):
    """One whose sentence is in the words of those who read it already."""


_NONE = re.compile(r"[,;]? or None\b")
_POWER = re.compile(r"2\*\*(\d{1,2}) - 1")
_JSON = {"True": "true", "False": "false", "None": "null", "a dict": "an object"}
_PYTHON = re.compile(r"\b(?:True|False|None|a dict)\b")
_TEXT = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_PLAIN = rf"(?:{_TEXT}|[^\[\]{{}}()'\"])*"
_LIST = rf"\[(?:{_TEXT}|\[{_PLAIN}\]|\({_PLAIN}\)|[^\[\]{{}}()'\"])*\]"
_VALUE = rf"(?:{_TEXT}|{_LIST}|\{{{_PLAIN}\}}|[^\s,;:)]*[^\s,;:).])"
# What a program may do -> what the command line may.
_SHELLS = {"LLM(soft_prompts={name: path})": "--soft-prompt NAME=PATH"}
# What a field may be -> what its flag may be, where that is something else.
_FLAGS = {
    "a dict from token ids to numbers": "token ids and numbers",
    "a JSON schema: a dict, or the same as JSON text": 'a JSON schema, such as \'{"type": "object"}\' or "$(cat FILE)"',
    "a RepetitionDetection or a dict of its fields: max_pattern_size, 1 or more, min_count, 2 or more, and "
    "min_pattern_size, 1 to max_pattern_size": "SIZE,COUNT,MIN: a SIZE of 1 or more, a COUNT of 2 or more, a MIN of 1 "
    "to SIZE",
}


def for_shell(sentence: str, flags: Mapping[str, str]) -> str:
    """The sentence with flags; `flags` maps the names of fields to them. `top_k=-2` is `--top-k -2`."""
    if not flags:
        return sentence
    sentence = _POWER.sub(lambda found: str(2 ** int(found[1]) - 1), _NONE.sub("", sentence))
    for field, flag in _FLAGS.items():
        sentence = sentence.replace(field, flag)
    assigned = re.compile(rf"(?<![\w./'\"-])({_any_of(flags)})=({_VALUE})")
    sentence = assigned.sub(lambda found: f"{flags[found[1]]} {_typed(found[2])}", sentence)
    # A name in two words is a name wherever it stands; "seed" is one only where a sentence begins with its value.
    compound = re.compile(rf"(?<![\w./'\"-])({_any_of(n for n in flags if '_' in n)})(?![\w/'\"-]|\.\w)")
    simple = re.compile(
        rf"(?:^|(?<=; )|(?<=and ))({_any_of(n for n in flags if '_' not in n)})(?= is \S+ (?:and|in)\b)"
    )
    for pattern in (compound, simple):
        sentence = pattern.sub(lambda found: flags[found[1]], sentence)
    return sentence


def for_json(sentence: str, names: Iterable[str]) -> str:
    """The sentence as one who writes JSON would have it; `names` are those of fields. `top_k=-2` is `"top_k": -2`."""
    assigned = re.compile(rf"(?<![\w./'\"-])({_any_of(names)})=({_VALUE})")
    sentence = assigned.sub(lambda found: f'"{found[1]}": {_as_json(found[2])}', sentence)
    for call, flag in _SHELLS.items():
        sentence = sentence.replace(call, flag)
    return _PYTHON.sub(lambda found: _JSON[found[0]], sentence)


def _any_of(names: Iterable[str]) -> str:
    return "|".join(sorted(map(re.escape, names), key=len, reverse=True)) or r"(?!)"


def _typed(value: str) -> str:
    """A value as one types it: without what Python puts around it."""
    if value in ("True", "False"):
        return value.lower()
    if value[0] in "[{":
        pairs = re.sub(r"\((\d+), ([^()]*)\)", r"\1=\2", value[1:-1])  # of --logit-bias
        return re.sub(r"'\w+': ", "", pairs).replace("], [", " ").strip("[]").replace(", ", ",")
    return value[1:-1] if re.fullmatch(r"'[\w.]+'", value) else value


def _as_json(value: str) -> str:
    """A text or a list as JSON writes it; as it is, where it is a number, or was cut short within an escape."""
    if value in ("nan", "inf", "-inf"):
        return json.dumps(float(value))
    if value[0] not in "'\"[{" or "\\..." in value:
        return value
    try:
        return json.dumps(ast.literal_eval(value), ensure_ascii=False)
    except (SyntaxError, TypeError, ValueError):
        return value
