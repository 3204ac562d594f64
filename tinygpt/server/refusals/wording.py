"""The engine's sentences for those who ask over HTTP: they set the fields of a request, and nothing else.

A sentence that names a field begins with it, as in "max_tokens=0 is not possible" or "num_beams is 5 and ...".
"""

import re

from tinygpt.server.protocol.fields import Strict

_FIELD = re.compile(r"(?:the )?([a-z_.]+)(?==| is | has | holds | needs? )")
# What a program could do -> what a client can do.
_ADVICE = (
    ("none was loaded: load it with LLM(soft_prompts={name: path})", "this server has none: leave it out"),
    (": load it with LLM(soft_prompts={name: path})", ": take one of them, or leave it out"),
    (", so lower the one or raise the other.", ", so lower it."),
    (": submit again later, or raise max_queue.", ": ask again later."),
    (", and it can be raised to that", ""),
    ("a JSON schema: a dict, or the same as JSON text, or None", "a JSON schema, or the same as a text"),
)
_ASSIGNED = re.compile(r"(\w+)='(\w+)'")
# A value as Python writes it, which the client knows, and what is said of it.
_REFUSED = re.compile(r"=[^;]*?( is not possible: )(?:it( must be ))?")
# Fields that a form may have under another name -> how sentences write them.
_RENAMED = {"prompt": "the prompt", "max_tokens": "max_tokens"}


def in_words(sentence: str, form: Strict) -> str:
    """Advice by the names that the form has, and in no language's spelling: overflow='slide' is "overflow to slide"."""
    for field, written in _RENAMED.items():
        if (name := form.name_of(field)) not in (field, None):
            sentence = sentence.replace(written, name)
    return _ASSIGNED.sub(r"\1 to \2", sentence)


def for_client(sentence: str, form: Strict) -> tuple[str, str | None]:
    """The sentence; and the field that it is about, by the name that the request has for it, if any."""
    found = _FIELD.match(sentence)
    name = None if found is None else form.name_of(found[1])
    if form.IS_LIBRARYS:
        return sentence, name
    if name == "use_beam_search":  # which is no number
        sentence = f"use_beam_search searches with n beams, and {sentence}"
    elif name is not None and found.start(1) == 0:
        sentence = name + _REFUSED.sub(lambda refused: refused[2] or refused[1], sentence[found.end(1) :])
    for advice, others in _ADVICE:
        sentence = sentence.replace(advice, others)
    return sentence, name
