"""The process of one engine, in the engine's environment; bench_peers.py starts it.

    python -m peers make MODULE CLASS SOURCE FOLDER DTYPE     write the peer's form of a checkpoint
    python -m peers serve MODULE CLASS FOLDER DTYPE THREADS [KV_CACHE_DTYPE]

`serve` answers requests, a JSON object a line: {"call": METHOD, ...} gets {"result": ...} or {"error": ...}.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any


def main(job: str, module: str, name: str, *arguments: str) -> None:
    engine_class = getattr(importlib.import_module(f"peers.{module}"), name)
    if job == "make":
        source, folder, dtype = arguments
        engine_class.make(Path(source), Path(folder), dtype)
        return
    folder, dtype, threads, *kv_cache_dtype = arguments
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints of the engine go to stderr
    engine = engine_class(Path(folder), dtype, int(threads), *kv_cache_dtype)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=answers, flush=True)


def answer(engine: Any, request: dict) -> dict:
    try:
        return {"result": getattr(engine, request.pop("call"))(**request)}
    except Exception as error:  # of any library: this engine is absent, and the others go on
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main(*sys.argv[1:])
