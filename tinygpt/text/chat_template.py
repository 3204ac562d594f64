"""ChatTemplate: a Jinja template for conversations, run as transformers runs it, in Jinja's sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, pass_context
from jinja2.ext import Extension
from jinja2.nodes import Name
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import CheckpointError, RequestError

MAX_SIZE = 1_000_000  # of a product: characters, items, or the number itself


class Generation(Extension):
    """TRL's `{% generation %}`, which marks the assistant's texts for a loss: its body is rendered."""

    tags = {"generation"}  # noqa: RUF012, the base class has a set

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox without numbers and texts that take hours to compute, such as 10**10**9.

    Nothing is computed when a template is read: neither Jinja's optimizer nor its constant outputs are in use.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", Generation],
            optimized=False,
            # It needs a context, so Jinja computes no output early.
            finalize=pass_context(lambda _, value: value),
        )
        self.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        self.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(value) if isinstance(value, (str, Sequence)) else abs(value) for value in (left, right)]
        if operator == "**" or sizes[0] * sizes[1] > MAX_SIZE:
            raise TemplateError(f"the result of {operator} may be too large")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """A template and its special tokens, {their names in the template: their texts}.

    Raise CheckpointError for a damaged template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            sandbox = Sandbox()
            self._template = sandbox.from_string(source)
            self.shows_tools = any(node.name == "tools" for node in sandbox.parse(source).find_all(Name))
        except Exception as error:  # also SyntaxError and ValueError of the Python code that Jinja makes
            raise CheckpointError(f"the chat template cannot be read: {error}.") from None

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None) -> str:
        """Return the conversation as one text. Raise RequestError if the template refuses it."""
        try:
            return self._template.render({**self._special_tokens, **(options or {}), "messages": messages})
        except Exception as error:  # of any kind: the checkpoint's file is the program
            why = str(error) or repr(error)
            raise RequestError(f"is refused by this model's chat template: {why}.", "messages") from None


def _refuse(message: str) -> None:
    raise TemplateError(message)
