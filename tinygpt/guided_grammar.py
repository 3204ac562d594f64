"""What a request's guided fields allow, as one grammar of llguidance, the optional package that follows it."""

import json
import re
import reprlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tinygpt.errors import RequestError, how_to_install

FIELDS = ("guided_choice", "guided_regex", "guided_json", "guided_grammar")
# 20 000 alternatives compile in a second, and in the square of their number from there on.
MAX_CHARACTERS = 2**16
# Rules of a grammar, or objects of a schema. Where each refers to the next, two or three times as many overrun a stack
# of 8 MB in the package, and end the process.
MAX_PARTS = 1000
# As json.dumps writes, or less and more. A small model that may write any white space often writes nothing else.
SPACES = {"whitespace_pattern": "[ ]?"}
# A token may come exactly if some text that is allowed goes on with it. By default the package forces the tokens that
# what is certain would be encoded in, so that nothing would be left where one of them may not come.
OPTIONS = '\n%llguidance {"no_forcing": true}\n'


def load_llguidance(field: str) -> ModuleType:
    """The package; RequestError where it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise RequestError(
            f"{field} needs the package llguidance, which is not installed: {how_to_install('guided')}."
        ) from None
    return llguidance


def check_grammar(field: str, value: Any) -> None:
    """Refuse what is no grammar; RequestError says why. What only a model can tell is left to it."""
    grammar = grammar_of(field, value)
    refuse(field, value, load_llguidance(field).LLMatcher.validate_grammar(grammar))


def text_check(field: str, value: Any) -> Callable[[str], bool]:
    """Tells of a whole text whether it is allowed, by its characters: no model is asked."""
    llguidance = load_llguidance(field)
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar_of(field, value), log_level=0)

    def is_allowed(text: str) -> bool:
        walk = matcher.deep_copy()
        return walk.consume_tokens([*text.encode()]) and walk.is_accepting()

    return is_allowed


def grammar_of(field: str, value: Any) -> str:
    """The grammar of one of FIELDS, as SamplingParams keeps its value. RequestError if it is too large, or none."""
    llguidance = load_llguidance(field)
    num_characters = sum(map(len, value))  # of a text, or of all choices
    if num_characters > MAX_CHARACTERS:
        refuse(field, value, f"it has {num_characters} characters, and at most {MAX_CHARACTERS} are taken")
    try:
        grammar = _written(llguidance, field, value)
    except (ValueError, RecursionError) as error:
        refuse(field, value, str(error))
    num_parts = grammar.count("{") + (grammar.count(":") if field == "guided_grammar" else 0)
    if field in ("guided_json", "guided_grammar") and num_parts > MAX_PARTS:
        refuse(field, value, f"it has more than {MAX_PARTS} rules and objects")
    return grammar + OPTIONS


def refuse(field: str, value: Any, problem: str) -> None:
    """RequestError if the package has found a problem."""
    if problem:
        shown = reprlib.repr(list(value)) if field == "guided_choice" else reprlib.repr(value)
        reason = in_short(problem, field == "guided_grammar")
        raise RequestError(f"is {shown}, which is not possible: {reason}.", field, value)


def in_short(problem: str, is_of_lines: bool = False) -> str:
    """The package's message in one line: its last reason, without the grammar that it quotes.

    is_of_lines: whether the user has written the lines that it counts.
    """
    message = re.split(r"\n +1 \| |\n<", problem)[0]
    reason = message.rpartition("error: ")[2]
    reason = re.sub(r"^(?:at )?(\d+)\(\d+\): ", r"line \1: " if is_of_lines else "", reason)
    readable = "".join(c if c.isprintable() else " " for c in reason)
    return " ".join(readable.split())[:300].rstrip(".")


def _written(llguidance: ModuleType, field: str, value: Any) -> str:
    if field == "guided_choice":
        return llguidance.grammar_from("choice", json.dumps(value))
    if field == "guided_regex":
        return f"start: /{llguidance.regex_to_lark(value)}/"
    if field == "guided_json":
        schema = json.loads(value)
        return f"start: %json {json.dumps({'x-guidance': SPACES, **schema})}"
    return llguidance.grammar_from("grammar", value)
