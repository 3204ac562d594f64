"""/openapi.json."""

import asyncio
import functools
from collections import deque
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tinygpt.server.state import ServerState


def routes(state: ServerState) -> list[Route]:
    @functools.cache
    def described() -> dict[str, Any]:
        """Made once, when somebody asks."""
        from tinygpt.server.openapi import document

        return document(state)

    async def openapi(request: Request) -> JSONResponse:
        deque(state.unbuilt_models, maxlen=0)
        return JSONResponse(await asyncio.to_thread(described))

    return [Route("/openapi.json", openapi)]
