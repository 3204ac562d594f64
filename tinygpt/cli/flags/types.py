"""Types of flags: they read a flag's text, and say what is allowed where argparse would name a Python function."""

import argparse
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tinygpt.cli.output.messages import say
from tinygpt.suggestions import nearest_choice, nearest_dtype
from tinygpt.weights.config import DTYPES, STORAGE_DTYPE


class Once(argparse.Action):
    """Keep a value, and refuse a second one, which argparse would take in place of the first."""

    def __call__(self, parser, namespace, values, option_string=None):
        if getattr(namespace, self.dest) != self.default:
            raise argparse.ArgumentError(
                self, "given twice, and there is one of it in a run; several prompts go into a file for --input."
            )
        setattr(namespace, self.dest, values)


def reader(read: Callable[[str], Any], allowed: str) -> Callable[[str], Any]:
    """A type for argparse. `read` raises ValueError or KeyError for what is not `allowed`, which ends a sentence."""

    def parse(text: str) -> Any:
        try:
            return read(text)
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"it is {text!r} and must be {allowed}.") from None

    return parse


def utf8_text(word: str) -> str:
    """A word that is read as text: what was typed in UTF-8 is that, whatever the locale says."""
    try:
        return os.fsencode(word).decode("utf-8") if _is_undecoded(word) else word
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise argparse.ArgumentTypeError(
            f"it is {word!a}, whose byte {byte:#04x} is no UTF-8: set the terminal to UTF-8, or convert the text, as "
            "by `iconv -t UTF-8`."
        ) from None


def _is_undecoded(word: str) -> bool:
    """Whether Python has kept bytes of it that the locale has no character for."""
    return any("\udc80" <= character <= "\udcff" for character in word)


def one_of(*allowed: str) -> Callable[[str], str]:
    """A reader of one of these words, in capitals or not."""

    def parse(word: str) -> str:
        found = word.strip().lower()
        if found in allowed:
            return found
        nearest = nearest_choice(word, allowed)
        hint = f": did you mean {nearest}?" if nearest else "."
        raise argparse.ArgumentTypeError(f"it is {word!r} and must be one of {', '.join(allowed)}{hint}")

    return parse


def lowered(*allowed: str) -> Callable[[str], str]:
    """A reader of one of these words, in capitals or not. Another stays as it is, and `choices` refuse it."""
    return lambda text: text.strip().lower() if text.strip().lower() in allowed else text


def dtype_of(
    names: tuple[str, ...], meanings: Mapping[str, str] = MappingProxyType({}), others: tuple[str, ...] = ()
) -> Callable[[str], str]:
    """Reads one of `names` of a precision, or what other programs call it, and says what that means here. `others` are
    read too: who knows the model refuses them with more reason."""
    return reader(_name_of(names, meanings, others), f"one of {', '.join(names)}")


def any_dtype(names: tuple[str, ...], meanings: Mapping[str, str]) -> Callable[[str], str]:
    """The same, where only other arguments tell which of `names` are possible: what is none of them stays as it is."""
    return lambda text: _told(text, _own_name(text), meanings) if _own_name(text) in names else text


def _own_name(text: str) -> str:
    name = text.strip().lower()
    return ALIASES.get(name, name)


def _told(text: str, found: str, meanings: Mapping[str, str]) -> str:
    """`found`, after what it means has been said where another name was typed."""
    if found in meanings and found != text.strip().lower():
        say(f"{text} is taken for {found}: {meanings[found]}")
    return found


def _name_of(names: tuple[str, ...], meanings: Mapping[str, str], others: tuple[str, ...]) -> Callable[[str], str]:
    """The same, with a ValueError for what is no precision at all."""
    listed = ", ".join(names)

    def read(text: str) -> str:
        found = _own_name(text)
        if found == HALF and HALF not in names:
            raise argparse.ArgumentTypeError(
                f"it is {text!r}, a precision that is not here: give bfloat16, which is as small, or one of {listed}."
            )
        if found not in (*names, *others):
            if nearest := nearest_dtype(text, names):
                raise argparse.ArgumentTypeError(f"it is {text!r} and must be one of {listed}: did you mean {nearest}?")
            raise ValueError
        return _told(text, found, meanings)

    return read


def _dtypes(text: str) -> tuple[str, ...]:
    names = tuple(map(_dtype, text.split(",")))
    if STORAGE_DTYPE in names:
        raise ValueError
    return names


ALL_DTYPES = ("auto", *DTYPES)
CACHE_DTYPES = ("auto", "float32", "bfloat16", "int8")
HALF = "float16"
# What other programs call our precisions; `q8_0` and `q4_0` are llama.cpp's.
ALIASES = {
    **dict.fromkeys(("f32", "fp32", "float", "single"), "float32"),
    **dict.fromkeys(("bf16", "bfp16"), "bfloat16"),
    **dict.fromkeys(("fp16", "f16", "half"), HALF),
    **dict.fromkeys(("q8_0", "q8", "i8", "8bit"), "int8"),
    **dict.fromkeys(("q4_0", "q4_1", "q4", "i4", "4bit"), "int4"),
    **dict.fromkeys(("fp8", "f8"), "float8"),
}
MEANINGS = {
    "int8": "a byte a weight with a scale for each column, and activations in 8 bits too",
    "int4": "half a byte a weight with a scale and an offset for each column and 32 channels, activations in 8 "
    "bits, and embedding and head as int8",
}
CACHE_MEANINGS = {"int8": "a byte for each number of keys and values, with a scale for each head and position"}
whole_number = reader(int, "a whole number")
number = reader(float, "a number")
whole_numbers = reader(lambda text: tuple(map(int, text.split(","))), "a whole number, or several separated by commas")
_dtype = _name_of(ALL_DTYPES, MEANINGS, (STORAGE_DTYPE,))
dtype = reader(_dtype, f"one of {', '.join(ALL_DTYPES)}")
dtypes = reader(_dtypes, f"one of {', '.join(ALL_DTYPES)}, or several separated by commas")
kv_cache_dtype = dtype_of(CACHE_DTYPES, CACHE_MEANINGS, others=("int4",))
