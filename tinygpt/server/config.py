"""ServerConfig: the settings of a server, each declared on one line, as in `llm_args.py`.

The checks and the flags of `tinygpt serve` derive from it. It imports nothing of the extra `serve`, which --help lacks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..fields import BOOLEAN, FieldRule, as_integer, number, optional, read_fields
from ..llm_args import UNCHECKED, argument, named_path

if TYPE_CHECKING:
    from ..look.edits import ControlVector
    from ..text.chat import Template

KEY_VARIABLE = "TINYGPT_API_KEY"


def _one_of(*names: str) -> FieldRule:
    return FieldRule(" or ".join(names), str, str.lower, choices=names)


PORT = FieldRule(f"from 0 to {2**16 - 1}", lambda value: as_integer(value, 0, 2**16 - 1), int)
AMOUNT = FieldRule("0 or more", lambda value: as_integer(value, 0), int)
SECONDS = number(lambda seconds: 0 <= seconds < float("inf"), "0 or more")
NAMES = FieldRule("a list of texts", lambda names: tuple(names or ()), nargs="+")
HOSTS = optional(FieldRule("a list of texts", lambda names: frozenset(map(str.lower, names)), nargs="+"))
VECTORS = FieldRule("a dict of control vectors", lambda value: dict(value or ()), named_path, repeats=True)


@dataclass(frozen=True)
class ServerConfig:
    """The settings of a server. Raise RequestError for an impossible one.

    served_model_names: replies use the first. allowed_hosts: values of the Host header; None is any.
    control_vectors: by the names in a request's `steer`.
    """

    host: str = argument(
        "127.0.0.1", UNCHECKED, "ADDRESS", "where to listen (default: 127.0.0.1, this machine)"
    )
    port: int = argument(8000, PORT, "N", "0 is any free one")
    api_keys: tuple[str, ...] = argument(
        None,
        replace(NAMES, nargs=None, repeats=True),
        "KEY",
        f"a key for clients, several may be given; {KEY_VARIABLE} hides it from process lists (default: none)",
        flag="api_key",
    )
    served_model_names: tuple[str, ...] = argument(
        None, NAMES, "NAME", "names of the model for clients (default: --model)", flag="served_model_name"
    )
    allowed_hosts: frozenset[str] | None = argument(
        None,
        HOSTS,
        "NAME",
        "names that requests may be sent to; * is any (default: this machine's names if --host is local, else any)",
    )
    allowed_origins: tuple[str, ...] = argument(
        None, NAMES, "URL", "web pages from elsewhere that may read replies (default: none)"
    )
    max_logprobs: int = argument(20, AMOUNT, "N", "most logprobs of a request")
    unknown_fields: str = argument(
        "refuse",
        _one_of("ignore", "refuse"),
        None,
        "fields of a request that the server does not know: ignore or refuse",
    )
    strict_tools: bool = argument(
        False,
        BOOLEAN,
        None,
        "refuse tools that tool_choice does not force, if the model's template shows none",
    )
    drain_seconds: float = argument(
        30.0, SECONDS, "SECONDS", "time for running requests after SIGTERM or Ctrl-C"
    )
    enable_log_requests: bool = argument(
        False, BOOLEAN, None, "log each body, and so its prompts (default: no text)"
    )
    look: bool = argument(
        False, BOOLEAN, None, "let requests capture and edit activations: fields capture and edits"
    )
    control_vectors: "Mapping[str, ControlVector]" = argument(
        None,
        VECTORS,
        "NAME=PATH",
        "a control vector in GGUF for the field steer of requests; several may be given (default: none)",
        flag="control_vector",
    )
    log_format: str = argument("text", _one_of("text", "json"), None, "form of the log on stderr")
    max_body_bytes: int = argument(4 * 2**20, AMOUNT, "N", "of a request", flag=None)
    chat_template: "Template | None" = argument(None, UNCHECKED, None, "in place of the LLM's", flag=None)

    def __post_init__(self):
        read_fields(self)

    @property
    def ignores_unknown_fields(self) -> bool:
        return self.unknown_fields == "ignore"
