"""Serving an app from this process: uvicorn, until a signal ends it."""

import socket

import uvicorn
from starlette.applications import Starlette


def serve(app: Starlette, listener: socket.socket) -> None:
    config = uvicorn.Config(
        app, http="h11", log_level="warning", access_log=False, timeout_keep_alive=30, lifespan="off"
    )
    uvicorn.Server(config).run(sockets=[listener])
