"""What our own server has for an app beyond ASGI, which has no words for it. Behind any other, there is none of it."""

from typing import TYPE_CHECKING

from starlette.types import Scope

if TYPE_CHECKING:
    from tinygpt.server.transport.connection import Connection

CONNECTION = "tinygpt.connection"  # in the scope's state, where our own server puts it


def connection_of(scope: Scope) -> "Connection | None":
    """The connection that the request has come by; None: another server has it."""
    return scope.get("state", {}).get(CONNECTION)
