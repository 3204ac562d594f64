"""Work in a process of its own that has the libraries already: forked from one that has imported them.

A new interpreter takes half a second to import Numba and NumPy. What is about a process's beginning or end, its streams
or its environment begins a real one.
"""

import contextlib
import io
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

IMPORTED = ("tinygpt.llm", "tinygpt.kernels.cpu", "tinygpt.weights.open", "tinygpt.weights.adapters.lora")


def told(work: Callable[..., None], *arguments: Any, patience: float) -> list[Any]:
    """All that work(tell, *arguments) tells there; the process may be silent for so many seconds, and ends well."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, work, arguments), daemon=True)
    process.start()
    theirs.close()
    heard = []
    try:
        while ours.poll(patience):
            heard.append(ours.recv())
    except EOFError:
        pass
    else:
        process.kill()
    process.join()
    assert process.exitcode == 0, f"ended by {process.exitcode} after {heard}"
    return heard


def _work(pipe: Connection, work: Callable[..., None], arguments: tuple) -> None:
    work(pipe.send, *arguments)
    os._exit(0)  # no thread that it leaves behind is waited for


def printed(program: str, *arguments: str, patience: float) -> str:
    """What the program prints, which finds its arguments in sys.argv as after `python -c`; a traceback at its end."""
    return "".join(told(_run, program, arguments, patience=patience))


def _run(tell: Callable[[str], None], program: str, arguments: tuple[str, ...]) -> None:
    sys.argv = ["-c", *arguments]
    warnings.simplefilter("ignore", DeprecationWarning)  # later Pythons warn of each fork
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(program, {"__name__": "__main__"})
        except Exception:
            traceback.print_exc(file=out)
    tell(out.getvalue())
