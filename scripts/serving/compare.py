"""A server under load beside the library itself and beside other servers, in turns."""

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult

from tinygpt import LLM, SamplingParams
from tinygpt.bench.picture import Line, Panel, Picture, Point
from tinygpt.bench.report import table

from . import newcomers
from .figures import ServiceLevel, figures
from .servers import OURS, Server, running
from .workload import Run, Workload, closed_loop, open_loop

LIBRARY, SUBMIT = "LLM.generate", "LLM.submit"
COLUMNS = ("server", "load", "tokens/s", "goodput/s", "TTFT p50", "p90", "p99", "TPOT p50", "ITL p50", "p99", "failed")


@dataclass(frozen=True)
class Plan:
    """clients: of closed loops, each client with `each` requests. rates: of open loops, for `seconds` each.

    newcomers: how many come beside the most clients, one after another.
    """

    clients: tuple[int, ...]
    rates: tuple[float, ...]
    prompt_words: int
    new_tokens: int
    each: int
    seconds: float
    repeats: int
    level: ServiceLevel
    vocab_size: int | None = None
    newcomers: int = 0


@dataclass(frozen=True)
class Load:
    """What is asked, of a server and of the library, each of which gives figures. call: the library's."""

    name: str
    of_server: Callable[[SplitResult, Workload], dict[str, Any]]
    of_library: Callable[[LLM, Workload], dict[str, Any]] | None = None
    call: str = LIBRARY


def compare(servers: list[Server], plan: Plan, llm: LLM | None) -> list[dict[str, Any]]:
    """The figures of each server and load, a dict for each repeat. llm: the library, which takes its turn too."""
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack, tempfile.TemporaryDirectory() as logs:
        addresses: dict[Server, SplitResult] = {}
        for i, server in enumerate(servers):
            try:
                addresses[server] = stack.enter_context(running(server, Path(logs, f"{i}.log")))
            except (RuntimeError, OSError) as error:
                rows.append({"server": server.name, "load": "-", "error": str(error)})
        for repeat in range(plan.repeats + 1):  # the first touches memory, and compiles
            for load in loads(plan):
                work = Workload("", plan.prompt_words, plan.new_tokens, seed=repeat, vocab_size=plan.vocab_size)
                measured = _ask(load, work, addresses)
                if llm is not None and load.of_library is not None:
                    measured[load.call] = load.of_library(llm, work)
                rows += [
                    {"server": name, "load": load.name, **found}
                    for name, found in measured.items()
                    if repeat or "error" in found
                ]
    return rows


def _ask(load: Load, work: Workload, addresses: dict[Server, SplitResult]) -> dict[str, dict[str, Any]]:
    """The figures of each server. One that has crashed gets an error, and loses its address: the others go on."""
    measured: dict[str, dict[str, Any]] = {}
    for server, url in [*addresses.items()]:
        try:
            measured[server.name] = load.of_server(url, replace(work, model=server.model, more=server.more))
        except OSError as error:
            measured[server.name] = {"error": f"it has ended: {error}"}
            del addresses[server]
    return measured


def loads(plan: Plan) -> Iterator[Load]:
    def loop(ask: Callable[..., Coroutine[Any, Any, Run]], *sizes: float) -> Callable[..., dict[str, Any]]:
        return lambda url, work: figures(asyncio.run(ask(url, work, *sizes)), plan.level)

    for clients in plan.clients:
        sizes = clients, clients * plan.each
        yield Load(f"{clients} clients", loop(closed_loop, *sizes), partial(generate, clients=clients, each=plan.each))
    for rate in plan.rates:
        yield Load(f"{rate:g} requests/s", loop(open_loop, rate, max(round(rate * plan.seconds), 1)))
    if plan.newcomers:
        sizes = {"streams": max(plan.clients), "count": plan.newcomers}
        of_server, of_library = (partial(ask, **sizes) for ask in (newcomers.to_server, newcomers.to_library))
        yield Load(f"newcomers beside {max(plan.clients)}", of_server, of_library, SUBMIT)


def generate(llm: LLM, work: Workload, clients: int, each: int) -> dict[str, Any]:
    """The same prompts in one call, without a server: `each` times as many as there are clients."""
    prompts = list(itertools.islice(work.prompts(), clients * each))
    params = SamplingParams(max_tokens=work.new_tokens, ignore_eos=True)
    begun, count = time.perf_counter(), 0
    for start in range(0, len(prompts), clients):
        outputs = llm.generate(prompts[start : start + clients], params, use_tqdm=False)
        count += sum(len(output.outputs[0].token_ids) for output in outputs)
    seconds = time.perf_counter() - begun
    return {"requests": len(prompts), "failed": 0, "seconds": seconds, "tokens_per_second": count / seconds}


def markdown(rows: list[dict[str, Any]]) -> str:
    """Medians of the repeats; latencies in milliseconds."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["load"], row["server"]), []).append(row)
    cells = [[server, load, *_cells(group)] for (load, server), group in groups.items()]
    parts = [table(COLUMNS, cells, COLUMNS[2:])]
    waits = [row for row in rows if row["load"].startswith("newcomers") and "error" not in row]
    if {row["server"] for row in waits} >= {SUBMIT, OURS}:
        parts.append(newcomers.sentence(waits, OURS, SUBMIT))
    return "\n\n".join(parts)


def of_clients(rows: list[dict[str, Any]]) -> str:
    """Tokens a second alone, medians: a row for each number of clients, a column for each server."""
    rates = _rates(rows)
    cells = [
        [
            str(clients),
            *(f"{statistics.median(rates[name][clients]):.0f}" if clients in rates[name] else "-" for name in rates),
        ]
        for clients in sorted({clients for of_server in rates.values() for clients in of_server})
    ]
    header = ["clients at once", *(f"`{name}`" for name in rates)]
    return table(header, cells, header[1:])


def picture_of(rows: list[dict[str, Any]], note: str) -> Picture:
    """Tokens a second against clients, a line for each server."""
    lines = [
        Line(name, tuple(Point.of(clients, rates) for clients, rates in by_clients.items()))
        for name, by_clients in _rates(rows).items()
    ]
    return Picture("Streams over HTTP", (Panel("", "clients at once", "tokens/s", tuple(lines)),), note)


def _rates(rows: list[dict[str, Any]]) -> dict[str, dict[int, list[float]]]:
    """Tokens a second of the closed loops, by server and number of clients."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if row["load"].endswith("clients") and "error" not in row:
            clients = int(row["load"].split()[0])
            found.setdefault(row["server"], {}).setdefault(clients, []).append(row["tokens_per_second"])
    return found


def _cells(group: list[dict[str, Any]]) -> list[str]:
    for row in group:
        if "error" in row:
            return [row["error"].splitlines()[-1]] + ["-"] * 8
    paths = [("tokens_per_second",), ("goodput",)]
    paths += [("ttft_ms", p) for p in ("p50", "p90", "p99")] + [
        ("tpot_ms", "p50"),
        ("itl_ms", "p50"),
        ("itl_ms", "p99"),
    ]
    return [_median(group, path) for path in paths] + [str(sum(row["failed"] for row in group))]


def _median(group: list[dict[str, Any]], path: tuple[str, ...]) -> str:
    values = []
    for row in group:
        value: Any = row
        for name in path:
            value = value.get(name, {}) if isinstance(value, dict) else {}
        if value != {}:
            values.append(value)
    return f"{statistics.median(values):.1f}" if values else "-"
