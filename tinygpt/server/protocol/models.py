"""/v1/models, /health and /version."""

from typing import Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    """The last two are what a request may ask for at most."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    max_logprobs: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Deleted(BaseModel):
    id: str
    object: Literal["model"] = "model"
    deleted: bool


class Health(BaseModel):
    status: Literal["ok", "draining"]


class Version(BaseModel):
    version: str
