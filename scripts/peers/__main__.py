"""The process of one engine, in the engine's own environment: `python -m peers`, started by bench_peers.py.

    python -m peers make MODULE CHECKPOINT FOLDER DTYPE    write the peer's form of a checkpoint
    python -m peers serve MODULE FOLDER DTYPE THREADS [KV_CACHE_DTYPE]
                                                           answer requests, a JSON object a line, until stdin ends

A request {"call": NAME, ...} is a call of the engine's method; the answer is {"result": ...} or {"error": ...}.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO


def main(job: str, module: str, *arguments: str) -> None:
    peer = importlib.import_module(f"peers.{module}")
    if job == "make":
        checkpoint, folder, dtype = arguments
        peer.make(Path(checkpoint), Path(folder), dtype)
        return
    folder, dtype, threads, *kv_cache_dtype = arguments
    answers = claim_stdout()
    engine = peer.Engine(Path(folder), dtype, int(threads), *kv_cache_dtype)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=answers, flush=True)


def claim_stdout() -> TextIO:
    """The real stdout; whatever the engine prints goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def answer(engine: Any, request: dict) -> dict:
    try:
        return {"result": getattr(engine, request.pop("call"))(**request)}
    except Exception as error:  # whatever went wrong there is this engine's answer, and the others go on
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main(*sys.argv[1:])
