"""The engine over HTTP, for OpenAI's and vLLM's clients: an ASGI app, and the process that serves it.

`protocol` says what requests and replies look like, `routes` answers them, and what both stand on lies here. All of it
needs the extra `serve`, and may import everything below the command line. The model is computed by the engine's own
thread; here is one event loop, which no step ever waits for.
"""
