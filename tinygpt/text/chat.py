"""Conversations as token ids: the template of a model, and special tokens that only the template can write."""

import os
import re
import secrets
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args

from ..errors import CheckpointError, RequestError, how_to_install, invalid
from ..weights.files import read_json_object
from .files import content_of, read_text
from .tokenizer import Tokenizer

if TYPE_CHECKING:  # it needs Jinja
    from .chat_template import ChatTemplate

PLAIN = "plain"  # the name of PlainTemplate
MAX_CHARACTERS = 1_000_000  # of a prompt: the search for special tokens holds the GIL for up to a second
MAX_TEXTS = 10_000  # in chat_template_kwargs: each is searched for special tokens
Template = Union["ChatTemplate", "PlainTemplate"]
Role = Literal["system", "developer", "user", "assistant", "tool"]
ROLES = get_args(Role)
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class PlainTemplate:
    """The messages' texts, a line each, which the model continues: for models without a template."""

    source = (
        "{% for message in messages %}{{ '' if loop.first or message.role == 'assistant' else '\\n' }}"
        "{{ message.content }}{% endfor %}"
    )
    shows_tools = False

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        lines = (
            (i > 0 and message["role"] != "assistant", message["content"])
            for i, message in enumerate(messages)
        )
        return "".join("\n" * is_new + text for is_new, text in lines)


def open_template(
    chat_template: str | os.PathLike[str] | None, folder: Path, in_file: Mapping[str, Any] = NO_OPTIONS
) -> Template | None:
    """Return `chat_template`, PLAIN or a file; else the checkpoint's, as transformers finds it, or None.

    in_file: a template and its special tokens in the file of the weights, as in tokenizer_config.json.
    Raise RequestError if `chat_template` cannot be used, CheckpointError if the checkpoint's cannot.
    """
    if chat_template == PLAIN:
        return PlainTemplate()
    config = folder / "tokenizer_config.json"
    file = folder / "chat_template.jinja"
    options = {**(read_json_object(config) if config.exists() else {}), **in_file}
    if chat_template is not None:
        source = _source_of(chat_template)
    else:
        source = read_text(file) if file.exists() and not in_file else options.get("chat_template")
    if isinstance(source, list):  # several templates with names
        source = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = source[0].get("template") if source else None
    if not isinstance(source, str):
        return None
    try:
        from .chat_template import ChatTemplate
    except ImportError:
        raise RequestError(
            f"a chat template needs jinja2, which comes with: {how_to_install('serve')}."
        ) from None
    names = [
        name for name, value in options.items() if name.endswith("_token") and isinstance(value, (str, dict))
    ]
    try:
        return ChatTemplate(source, {name: content_of(options[name]) for name in names})
    except CheckpointError as error:
        if chat_template is None:
            raise
        raise RequestError(f"is {str(chat_template)!r}: {error}", "chat_template", chat_template) from None


def _source_of(path: str | os.PathLike[str]) -> str:
    if not isinstance(path, (str, os.PathLike)):
        raise invalid("chat_template", path, f"{PLAIN!r} or a file of Jinja's")
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: of other encodings
        why = getattr(error, "strerror", None) or error
        reason = f"is {str(path)!r}, which cannot be read ({why}): give a file, or {PLAIN!r}."
        raise RequestError(reason, "chat_template", path) from None


class SpelledTokenGuard:
    """Tells the template's special tokens from special tokens that a message spells, which stay plain text.

    A message that could write special tokens could speak in another role's name. `guard` inserts a random sign into
    each spelled token, and after a text that could become one with the text after it; `encode` removes the signs.
    """

    def __init__(self, special_tokens: Iterable[str]):
        """An object is for one conversation."""
        tokens = sorted(filter(None, special_tokens), key=len, reverse=True)  # the longest match counts
        self._pattern = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")
        self._tokens = sorted(tokens)
        self._longest = len(tokens[0]) if tokens else 0
        self._sign = secrets.token_hex(16)

    def guard(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.guard(part) for part in value]
        if isinstance(value, dict):
            return {self.guard(name): self.guard(part) for name, part in value.items()}
        if not isinstance(value, str):
            return value
        text = self._pattern.sub(lambda token: token[0][:1] + self._sign + token[0][1:], value)
        end = text.rstrip()
        sizes = range(1, min(self._longest, len(end) + 1))
        may_continue = any(self._is_beginning(end[-size:]) for size in sizes)
        return end + self._sign + text[len(end) :] if may_continue else text

    def _is_beginning(self, text: str) -> bool:
        """Return whether a special token begins with the text and goes on: then the next in order does."""
        i = bisect(self._tokens, text)
        return i < len(self._tokens) and self._tokens[i].startswith(text)

    def encode(self, text: str, encode: Callable[[str, bool], list[int]]) -> list[int]:
        """Return the token ids of a rendered text. encode(text, split_special_tokens)."""
        ids, start = [], 0
        for special in [*self._pattern.finditer(text), None]:
            plain = text[start : special.start() if special else None].replace(self._sign, "")
            ids += encode(plain, True) if plain else []
            if special:
                ids = ids + encode(special[0], False)
                start = special.end()
        return ids


def _texts(value: Any) -> list[str]:
    texts, left = [], [value]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            texts += value
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif isinstance(value, str):
            texts.append(value)
    return texts


def chat_ids(
    template: Template,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Return the token ids of messages with the fields role and content. Raise RequestError."""
    options = dict(options or {})
    if "messages" in options:
        raise RequestError("holds messages, which have a field of their own.", "chat_template_kwargs")
    texts = _texts(options)
    if len(texts) > MAX_TEXTS:
        raise RequestError(
            f"holds {len(texts)} texts; at most {MAX_TEXTS} are taken.", "chat_template_kwargs"
        )
    for field, its_texts in (
        (
            "messages",
            _texts([value for message in messages for name, value in message.items() if name != "role"]),
        ),
        ("chat_template_kwargs", texts),
    ):
        if (count := sum(map(len, its_texts))) > MAX_CHARACTERS:
            raise RequestError(f"holds {count} characters; at most {MAX_CHARACTERS} are taken.", field)
    if isinstance(template, PlainTemplate):
        return tokenizer.encode(template.render(messages), True)
    if tokenizer.encode(""):
        raise RequestError(
            "is not possible with a tokenizer that adds tokens to each text: use token ids.", "messages"
        )
    token_guard = SpelledTokenGuard(tokenizer.decode([token_id]) for token_id in tokenizer.special_ids)
    try:
        options = token_guard.guard(options) | {"add_generation_prompt": add_generation_prompt}
        guarded = [{**token_guard.guard(dict(message)), "role": message["role"]} for message in messages]
    except RecursionError:
        raise RequestError("is nested too deeply.", "chat_template_kwargs") from None
    text = template.render(guarded, options)
    if len(text) > MAX_CHARACTERS:
        most = f"at most {MAX_CHARACTERS} are taken"
        raise RequestError(f"is too long: the prompt would have {len(text)} characters; {most}.", "messages")
    return token_guard.encode(text, tokenizer.encode)


def conversations(messages: Any) -> list[list[Mapping[str, Any]]]:
    """Return one or several conversations as a list of them. Raise RequestError for anything else."""
    with suppress(TypeError, LookupError):  # of anything but lists
        items = [*messages]
        several = [items] if isinstance(items[0], Mapping) else [[*conversation] for conversation in items]
        if all(conversation and all(map(_is_message, conversation)) for conversation in several):
            return several
    raise invalid("messages", messages, f'a list of {{"role": ..., "content": text}}, with the roles {ROLES}')


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, Mapping)
        and message.get("role") in ROLES
        and isinstance(message.get("content"), str)
    )
