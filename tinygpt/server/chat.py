"""Chat completions: the checkpoint's template in Jinja's sandbox, and its special tokens."""

import json
import re
import secrets
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tinygpt.errors import CheckpointError, RequestError
from tinygpt.server.protocol import ChatRequest
from tinygpt.tokenizer.added_tokens import content_of
from tinygpt.tokenizer.files import read_text
from tinygpt.tokenizer.tokenizer import Tokenizer
from tinygpt.weights.files import read_json_object

MAX_CHARACTERS = 1_000_000  # of a prompt: the search for special tokens holds the GIL for up to a second
MAX_TEXTS = 10_000  # in chat_template_kwargs: each is searched for special tokens


class ChatTemplate:
    """A checkpoint's Jinja template for conversations, run as transformers runs it, in Jinja's sandbox.

    special_tokens: the template's names for them -> their texts. Raises CheckpointError for a damaged template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self.source, self._special_tokens = source, dict(special_tokens)
        options = {"trim_blocks": True, "lstrip_blocks": True, "extensions": ["jinja2.ext.loopcontrols"]}
        environment = ImmutableSandboxedEnvironment(**options)
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # Jinja raises also SyntaxError and ValueError of the Python code that it makes
            raise CheckpointError(f"the checkpoint's chat template cannot be read: {error}.") from None

    @classmethod
    def from_folder(cls, folder: Path) -> "ChatTemplate | None":
        """Return the template that transformers would take, or None. Raises CheckpointError."""
        config, file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        options = read_json_object(config) if config.exists() else {}
        source = read_text(file) if file.exists() else options.get("chat_template")
        if isinstance(source, list):  # several templates with names
            source = [each for each in source if isinstance(each, dict) and each.get("name") == "default"]
            source = source[0].get("template") if source else None
        names = [name for name, value in options.items() if name.endswith("_token") and isinstance(value, (str, dict))]
        return cls(source, {name: content_of(options[name]) for name in names}) if isinstance(source, str) else None

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None) -> str:
        """Return the conversation as one text. RequestError if the template refuses it."""
        try:
            text = self._template.render({**self._special_tokens, **(options or {}), "messages": messages})
        except Exception as error:  # of any kind: the checkpoint's file is the program
            why = str(error) or repr(error)
            raise RequestError(f"is refused by this model's chat template: {why}.", "messages") from None
        if len(text) > MAX_CHARACTERS:
            most = f"at most {MAX_CHARACTERS} are taken"
            raise RequestError(f"is too long: the prompt would have {len(text)} characters; {most}.", "messages")
        return text


def _refuse(message: str) -> None:
    raise TemplateError(message)


class Marks:
    """Tells the template's special tokens from special tokens that a message spells, which stay plain text.

    A message that could write special tokens could speak in another role's name. `guard` inserts a random sign into
    each spelled token, and after a text that could become one with the text after it; `encode` removes the signs.
    """

    def __init__(self, special_tokens: Iterable[str]):
        """special_tokens: their texts. An object is for one conversation."""
        tokens = sorted(filter(None, special_tokens), key=len, reverse=True)  # the longest match counts
        self._pattern = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")
        self._tokens, self._longest = sorted(tokens), len(tokens[0]) if tokens else 0
        self._sign = secrets.token_hex(16)

    def guard(self, value: Any) -> Any:
        """Return a JSON value with all its texts guarded."""
        if isinstance(value, list):
            return [self.guard(each) for each in value]
        if isinstance(value, dict):
            return {self.guard(name): self.guard(each) for name, each in value.items()}
        if not isinstance(value, str):
            return value
        text = self._pattern.sub(lambda found: found[0][:1] + self._sign + found[0][1:], value)
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
        for found in [*self._pattern.finditer(text), None]:
            plain = text[start : found.start() if found else None].replace(self._sign, "")
            ids += encode(plain, True) if plain else []
            if found:
                ids, start = ids + encode(found[0], False), found.end()
        return ids


def _texts(value: Any) -> list[str]:
    """Return all texts and names of a JSON value."""
    found, left = [], [value]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            found += value
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif isinstance(value, str):
            found.append(value)
    return found


def chat_ids(template: ChatTemplate, tokenizer: Tokenizer, form: ChatRequest) -> list[int]:
    if "messages" in (form.chat_template_kwargs or {}):
        raise RequestError("holds messages, which have a field of their own.", "chat_template_kwargs")
    texts = _texts(form.chat_template_kwargs)
    if len(texts) > MAX_TEXTS:
        raise RequestError(f"holds {len(texts)} texts; at most {MAX_TEXTS} are taken.", "chat_template_kwargs")
    for field, given in (("messages", [each.text for each in form.messages]), ("chat_template_kwargs", texts)):
        if (count := sum(map(len, given))) > MAX_CHARACTERS:
            raise RequestError(f"holds {count} characters; at most {MAX_CHARACTERS} are taken.", field)
    marks = Marks(tokenizer.decode([token_id]) for token_id in tokenizer.special_ids)
    try:
        options = marks.guard(form.chat_template_kwargs or {}) | {"add_generation_prompt": form.add_generation_prompt}
    except RecursionError:
        raise RequestError("is nested too deeply.", "chat_template_kwargs") from None
    messages = [
        {"role": each.role} | marks.guard({"content": each.text} | ({} if each.name is None else {"name": each.name}))
        for each in form.messages
    ]
    return marks.encode(template.render(messages, options), tokenizer.encode)
