"""Errors of checkpoints, checks of fields in their files, and the words of messages."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any


class TinyGPTError(ValueError):
    """Base of every deliberate error, which the command line prints without a traceback."""

    work_started = False  # True: the exit code is 1 instead of 2


# Control characters other than tabs and ends of lines, and characters that change the direction of text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str, quoted: Callable[[str], str] = repr) -> str:
    """Escape characters that steer a terminal, as a file's names may have. quoted: json.dumps in JSON."""
    return _CONTROL.sub(lambda match: quoted(match[0])[1:-1], text)


class CheckpointError(TinyGPTError):
    """A folder, file or Hub id that cannot be loaded: absent, damaged, incomplete or not implemented."""

    def __str__(self) -> str:
        return printable(super().__str__())


class NoTokenizerError(CheckpointError):
    """A checkpoint without a usable tokenizer: it takes token ids."""


class LostFileError(CheckpointError):
    """A file of a loaded checkpoint that was cut short during use."""

    work_started = True


def how_to_install(extra: str) -> str:
    return f'pip install "tinygpt[{extra}]"'


MAX_NAMED, MAX_SHOWN = 8, 200  # names, characters
NAMED = 12  # entries of a folder
# The number of a layer: h.3.ln_1, layers.3.mlp, blk.3.attn_qkv, model/h3/attn.
_LAYER = re.compile(r"\b(h\.|layers\.|blk\.|h)\d+(?=[./])")
# A test of a field's value, and the allowed values in words.
Check = tuple[Callable[[Any], bool], str]
Checks = Mapping[str, Check]
LARGEST = 2**31 - 1


def wrong_fields(values: Mapping[str, Any], checks: Checks) -> list[str]:
    return [
        f"{name} is {shown(values[name])} and must be {wanted}"
        for name, (is_possible, wanted) in checks.items()
        if name in values and not is_possible(values[name])
    ]


def is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def truth_of(value: Any) -> bool | None:
    """Return a boolean that a file may have as a text or 0 or 1, or None."""
    return {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower())


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not is_bool(value)


def is_number(value: Any) -> bool:
    return is_whole(value) or isinstance(value, float)


def only(allowed: Any, because: str) -> Check:
    written = {False: "false", True: "true", None: "null"}.get(allowed, allowed)
    return lambda value: value is None or value == allowed, f"{written}, because {because}"


def one_of(allowed: Collection[str]) -> Check:
    return lambda value: isinstance(value, str) and value in allowed, f"one of {', '.join(allowed)}"


def size_to(most: int, least: int = 1) -> Check:
    """Return the check of a size: beyond `most`, config.json is damaged or an attack on memory."""
    return lambda value: is_whole(value) and least <= value <= most, f"a whole number from {least} to {most}"


def or_null(check: Check) -> Check:
    return lambda value: value is None or check[0](value), f"{check[1]}, or null"


BOOLEAN: Check = (is_bool, "true or false")
TOKEN_ID: Check = (lambda value: value is None or is_whole(value), "a token id or null")


def of_any_layer(name: str) -> str:
    return _LAYER.sub(r"\1*", name)


def listed(names: Sequence[str], most: int = MAX_NAMED) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def describe(folder: Path) -> str:
    names = sorted(path.name + "/" * path.is_dir() for path in folder.glob("*"))
    return f"it holds {listed(names, NAMED)}" if names else "it is empty"


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
