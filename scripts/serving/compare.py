"""A server under load beside the library itself and beside other servers, in turns."""

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult

from tinygpt import LLM, SamplingParams
from tinygpt.bench.formats import table
from tinygpt.bench.picture import Line, Panel, Picture, Point

from .figures import ServiceLevel, figures
from .servers import Server, running
from .workload import Workload, closed_loop, open_loop

LIBRARY = "LLM.generate"
COLUMNS = ("server", "load", "tokens/s", "goodput/s", "TTFT p50", "p90", "p99", "TPOT p50", "ITL p50", "p99", "failed")


@dataclass(frozen=True)
class Plan:
    """clients: of closed loops, each client with `each` requests. rates: of open loops, for `seconds` each."""

    clients: tuple[int, ...]
    rates: tuple[float, ...]
    prompt_words: int
    new_tokens: int
    each: int
    seconds: float
    repeats: int
    level: ServiceLevel
    vocab_size: int | None = None


def compare(servers: list[Server], plan: Plan, llm: LLM | None) -> list[dict[str, Any]]:
    """The figures of each server and load, a dict for each repeat. llm: whose generate takes its turn too."""
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack, tempfile.TemporaryDirectory() as logs:
        addresses = {}
        for i, server in enumerate(servers):
            try:
                addresses[server.name] = stack.enter_context(running(server, Path(logs, f"{i}.log")))
            except (RuntimeError, OSError) as error:
                rows.append({"server": server.name, "load": "-", "error": str(error)})
        for repeat in range(plan.repeats + 1):  # the first touches memory, and compiles
            for load, run in loads(plan):
                for server in servers:
                    if server.name in addresses:
                        work = Workload(
                            server.model, plan.prompt_words, plan.new_tokens, server.more, repeat, plan.vocab_size
                        )
                        found = figures(asyncio.run(run(addresses[server.name], work)), plan.level)
                        rows += [{"server": server.name, "load": load, **found}] if repeat else []
                if llm is not None and load.endswith("clients"):
                    found = generate(llm, plan, int(load.split()[0]), repeat)
                    rows += [{"server": LIBRARY, "load": load, **found}] if repeat else []
    return rows


def loads(plan: Plan) -> Iterator[tuple[str, Callable[[SplitResult, Workload], Any]]]:
    for clients in plan.clients:
        yield f"{clients} clients", lambda url, work, n=clients: closed_loop(url, work, n, n * plan.each)
    for rate in plan.rates:
        count = max(round(rate * plan.seconds), 1)
        yield f"{rate:g} requests/s", lambda url, work, r=rate, n=count: open_loop(url, work, r, n)


def generate(llm: LLM, plan: Plan, clients: int, seed: int) -> dict[str, Any]:
    """The same prompts in one call, without a server: `each` times as many as there are clients."""
    work = Workload("", plan.prompt_words, plan.new_tokens, seed=seed, vocab_size=plan.vocab_size)
    prompts = list(itertools.islice(work.prompts(), clients * plan.each))
    params = SamplingParams(max_tokens=plan.new_tokens, ignore_eos=True)
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
    return table(COLUMNS, cells, COLUMNS[2:])


def picture_of(rows: list[dict[str, Any]], note: str) -> Picture:
    """Tokens a second against clients, a line for each server."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if row["load"].endswith("clients"):
            clients = int(row["load"].split()[0])
            found.setdefault(row["server"], {}).setdefault(clients, []).append(row["tokens_per_second"])
    lines = [
        Line(name, tuple(Point.of(clients, rates) for clients, rates in by_clients.items()))
        for name, by_clients in found.items()
    ]
    return Picture("Streams over HTTP", (Panel("", "clients at once", "tokens/s", tuple(lines)),), note)


def _cells(group: list[dict[str, Any]]) -> list[str]:
    if "error" in group[0]:
        return [group[0]["error"].splitlines()[-1]] + ["-"] * 8
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
