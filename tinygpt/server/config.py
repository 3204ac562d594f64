"""ServerConfig: what the operator of a server decides, beside the model and its engine."""

from dataclasses import dataclass

from tinygpt.server.chat.template import ChatTemplate


@dataclass(frozen=True)
class ServerConfig:
    """served_model_names: what clients may call the model; the first is what replies say.
    api_keys: one of them must come with each request; none: no key is asked for.
    allowed_hosts: names that a request's Host header may have; None is any.
    allowed_origins: web pages from elsewhere that may read replies.
    max_body_bytes, max_logprobs: the largest of each that a request may have.
    enable_log_requests: log each body that is read, and so its prompts.
    chat_template: how messages become a prompt; None: this model has no way for it.
    """

    served_model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    allowed_hosts: frozenset[str] | None = None
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 2**20
    max_logprobs: int = 20
    enable_log_requests: bool = False
    chat_template: ChatTemplate | None = None
