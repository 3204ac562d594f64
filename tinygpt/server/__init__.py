"""The engine over HTTP: OpenAI's and vLLM's routes on FastAPI, served by uvicorn from one process.

Belongs here: whatever reads or writes HTTP. Requests run in the engine's thread, everything else in one event loop.
"""
