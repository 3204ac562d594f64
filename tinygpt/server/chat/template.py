"""ChatTemplate: a checkpoint's own way to write a conversation as one text, in Jinja's sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from tinygpt.errors import CheckpointError, RequestError, how_to_install
from tinygpt.tokenizer.added_token_files import content_of
from tinygpt.tokenizer.text_files import read_json
from tinygpt.weights.files import read_regular_text

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
MAX_CHARACTERS = 1_000_000  # of a prompt


class ChatTemplate:
    """source: Jinja as transformers runs it. special_tokens: what templates call them -> how they are written.

    Raises CheckpointError for a template that is none. The sandbox keeps it from all but its own text, though not from
    taking time: it is a program of the checkpoint's author.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self.source, self._special_tokens = source, dict(special_tokens)
        self._jinja2 = _jinja2()
        environment = self._jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            self._template = environment.from_string(source)
        except (self._jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError(f"the checkpoint's chat template cannot be read: {error}.") from None

    @classmethod
    def from_folder(cls, folder: Path) -> "ChatTemplate | None":
        """The template that transformers would take; None where there is none. Raises CheckpointError."""
        options = read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).exists() else {}
        source = _source(folder, options)
        names = [name for name, value in options.items() if name.endswith("_token") and isinstance(value, (str, dict))]
        return None if source is None else cls(source, {name: content_of(options[name]) for name in names})

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None) -> str:
        """The conversation as one text. RequestError if the template refuses it."""
        wrong = TypeError, ValueError, LookupError, ArithmeticError, RecursionError, self._jinja2.TemplateError
        try:
            text = self._template.render({**self._special_tokens, **(options or {}), "messages": messages})
        except wrong as error:
            raise RequestError(f"messages is not what this model's chat template takes: {error}.") from None
        if len(text) > MAX_CHARACTERS:
            raise RequestError(f"messages is too long: the prompt would have {len(text)} characters.")
        return text


def _source(folder: Path, options: Mapping[str, Any]) -> str | None:
    if (folder / TEMPLATE_FILE).exists():
        return read_regular_text(folder / TEMPLATE_FILE)
    found = options.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = next((entry.get("template") for entry in found if entry.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _refuse(message: str) -> None:
    raise _jinja2().TemplateError(message)


def _jinja2() -> ModuleType:
    """For those models that have a template: it is a fiftieth of a server's start."""
    try:
        import jinja2.sandbox
    except ImportError:
        raise CheckpointError(
            f"the checkpoint's chat template needs jinja2, which comes with: {how_to_install('serve')}."
        ) from None
    return jinja2
