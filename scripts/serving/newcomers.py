"""What a request waits for that comes while others run: its time to the first token, over HTTP and in the library."""

import asyncio
import random
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any
from urllib.parse import SplitResult

from tinygpt import LLM, SamplingParams

from .client import Client, Sockets, record
from .figures import percentiles
from .workload import PATH, Workload

TOKENS = 2  # of a newcomer, which leaves the streams that run to themselves again
PAUSE = 0.05  # seconds between two newcomers, at most


def to_server(url: SplitResult, work: Workload, streams: int, count: int) -> dict[str, Any]:
    """Figures of `count` newcomers, one after another, beside `streams` clients that ask again and again."""
    return asyncio.run(_to_server(url, work, streams, count))


async def _to_server(url: SplitResult, work: Workload, streams: int, count: int) -> dict[str, Any]:
    with Sockets() as sockets:
        return await _beside_streams(url, work, streams, count, sockets)


async def _beside_streams(
    url: SplitResult, work: Workload, streams: int, count: int, sockets: Sockets
) -> dict[str, Any]:
    bodies, generator, ended = work.bodies(), random.Random(work.seed), []

    async def ask_again() -> None:
        with closing(Client(url, sockets)) as client:
            while True:
                ended.append(await client.record(PATH, next(bodies)))

    running = [asyncio.ensure_future(ask_again()) for _ in range(streams)]
    try:
        while len(ended) < streams and not any(task.done() for task in running):
            await asyncio.sleep(PAUSE)
        found = []
        for _ in range(count):
            await asyncio.sleep(generator.uniform(0, PAUSE))
            found.append(await record(url, PATH, {**next(bodies), "max_tokens": TOKENS}))
    finally:
        for task in running:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*running)
    newcomers, streams_read = ([recording.read() for recording in each] for each in (found, ended))
    firsts = [newcomer.time_to_first_token for newcomer in newcomers if newcomer.is_complete]
    gaps = [gap for done in streams_read if done.is_complete for gap in done.inter_token_latencies]
    return _figures(firsts, gaps, count)


def to_library(llm: LLM, work: Workload, streams: int, count: int) -> dict[str, Any]:
    """The same through LLM.submit."""
    prompts, generator, gaps = work.prompts(), random.Random(work.seed), []
    params, brief = (SamplingParams(max_tokens=n, ignore_eos=True) for n in (work.new_tokens, TOKENS))
    lock, is_over, num_ended = threading.Lock(), threading.Event(), 0

    def times_of(params: SamplingParams) -> list[float]:
        with lock:
            prompt = next(prompts)
        times = [time.perf_counter()]
        llm.submit(prompt, params, lambda chunk: times.append(time.perf_counter())).result()
        return times

    def ask_again() -> None:
        nonlocal num_ended
        while not is_over.is_set():
            times = times_of(params)
            with lock:
                if len(times) > 2:  # the steps of one call give their tokens together: on average
                    gaps.append((times[-1] - times[1]) / (len(times) - 2))
                num_ended += 1

    with _threads(ask_again, streams, is_over):
        while num_ended < streams:
            time.sleep(PAUSE)
        firsts = []
        for _ in range(count):
            time.sleep(generator.uniform(0, PAUSE))
            asked, first, *_ = times_of(brief)
            firsts.append(first - asked)
    return _figures(firsts, gaps, count)


def sentence(rows: list[dict[str, Any]], server: str, library: str) -> str:
    """How many steps later a newcomer has its first token from the server than from the library."""
    waits = {name: [row["ttft_ms"]["p50"] for row in rows if row["server"] == name] for name in (server, library)}
    step = statistics.median(row["itl_ms"]["p50"] for row in rows if row["server"] == library)
    late = statistics.median(waits[server]) - statistics.median(waits[library])
    return f"A newcomer's first token comes {late / step:.1f} steps of {step:.1f} ms later than from LLM.submit."


@contextmanager
def _threads(run: Any, count: int, is_over: threading.Event) -> Iterator[None]:
    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def _figures(firsts: list[float], gaps: list[float], count: int) -> dict[str, Any]:
    waits, steps = percentiles(firsts), percentiles(gaps)
    return {"requests": count, "failed": count - len(firsts), "ttft_ms": waits, "itl_ms": steps}
