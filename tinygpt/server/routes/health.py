"""/health and /version."""

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import tinygpt
from tinygpt.server.state import ServerState


def routes(state: ServerState) -> list[Route]:
    async def health(request: Request) -> JSONResponse:
        if state.is_draining:
            return JSONResponse({"status": "draining"}, 503)
        return JSONResponse({"status": "ok"})

    async def version(request: Request) -> JSONResponse:
        return JSONResponse({"version": tinygpt.__version__})

    return [Route("/health", health), Route("/version", version)]
