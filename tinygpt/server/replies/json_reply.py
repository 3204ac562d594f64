"""Replies from the models that describe them."""

from pydantic import BaseModel
from starlette.responses import Response


def json_reply(reply: BaseModel) -> Response:
    """Fields that were not set are left out: those have them who ask for them."""
    return Response(reply.model_dump_json(exclude_unset=True), media_type="application/json")
