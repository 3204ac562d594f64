"""/openapi.json."""

import asyncio
import functools

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tinygpt.server.openapi import document
from tinygpt.server.state import ServerState


def routes(state: ServerState) -> list[Route]:
    described = functools.cache(document)  # made once, when somebody asks

    async def openapi(request: Request) -> JSONResponse:
        return JSONResponse(await asyncio.to_thread(described, state))

    return [Route("/openapi.json", openapi)]
