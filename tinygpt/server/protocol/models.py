"""/v1/models, /health and /version."""

from typing import Literal

from tinygpt.server.protocol.fields import Model


class ModelCard(Model):
    """The last two are what a request may ask for at most."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    max_logprobs: int


class ModelList(Model):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Deleted(Model):
    id: str
    object: Literal["model"] = "model"
    deleted: bool


class Health(Model):
    status: Literal["ok", "draining"]


class Version(Model):
    version: str
