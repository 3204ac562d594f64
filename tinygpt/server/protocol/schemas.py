"""JSON schemas of what clients send and get, as this server's model has it: for /openapi.json, and for refusals."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

Schema = dict[str, Any]
REF = "#/components/schemas/{model}"


@dataclass(frozen=True)
class ModelLimits:
    """What the types of `fields` that have a name leave to be known when a server starts."""

    model_names: tuple[str, ...]
    max_token_id: int
    max_logprobs: int

    def fill_in(self, schemas: dict[str, Schema]) -> None:
        for name, known in (
            ("ModelName", {"enum": list(self.model_names)}),
            ("TokenId", {"maximum": self.max_token_id}),
            ("NumLogprobs", {"maximum": self.max_logprobs}),
        ):
            if name in schemas:
                schemas[name] |= known


def schemas_of(models: Iterable[type[BaseModel]], limits: ModelLimits) -> dict[str, Schema]:
    """Each model's schema by its name, and those that it refers to."""
    _, found = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    limits.fill_in(found["$defs"])
    return found["$defs"]
