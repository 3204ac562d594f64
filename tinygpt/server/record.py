"""Record: what is known of one HTTP request when it ends: for its line in the log, and for the metrics."""

from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Scope

from tinygpt.server.work.generation import Generation


@dataclass
class Record:
    """id: what client and log call the request. num_bytes: of its body.
    num_prompt_tokens: where nothing is generated.
    """

    id: str
    num_bytes: int = 0
    generation: Generation | None = None
    num_prompt_tokens: int = 0


def record_of(request: Request) -> Record:
    return request.state.record


def put_record(scope: Scope, record: Record) -> None:
    """Where `record_of` finds it."""
    scope["state"] = {**scope.get("state", {}), "record": record}
