"""/health, /metrics and /version."""

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import tinygpt
from tinygpt.server.state import CLOSES, ServerState


def routes(state: ServerState) -> list[Route]:
    async def health(request: Request) -> JSONResponse:
        if state.is_draining:
            return JSONResponse({"status": "draining"}, 503, CLOSES)
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return Response(state.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def version(request: Request) -> JSONResponse:
        return JSONResponse({"version": tinygpt.__version__})

    return [Route("/health", health), Route("/metrics", metrics), Route("/version", version)]
