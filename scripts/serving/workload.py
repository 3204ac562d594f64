"""What is asked of a server, and when: requests that clients send one after another, or that arrive by chance."""

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult

from .client import Client, Exchange, Sockets, record

PATH = "/v1/completions"


@dataclass(frozen=True)
class Workload:
    """Prompts of words by chance, some one or two tokens each, continued greedily by `new_tokens`.

    model: what the server calls its model. more: fields that it needs besides, as those that keep it from ending early.
    """

    model: str
    prompt_words: int
    new_tokens: int
    more: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    vocab_size: int | None = None  # prompts are of token ids below it, as models without a tokenizer need them

    def prompts(self) -> Iterator[str | list[int]]:
        """Without end; the same for every server."""
        generator = random.Random(self.seed)
        while self.vocab_size is not None:
            yield [generator.randrange(self.vocab_size) for _ in range(self.prompt_words)]
        while True:
            yield " ".join(generator.choice(WORDS) for _ in range(self.prompt_words))

    def bodies(self) -> Iterator[dict[str, Any]]:
        fixed = {"model": self.model, "max_tokens": self.new_tokens, "temperature": 0, "stream": True, **self.more}
        return ({"prompt": prompt, **fixed} for prompt in self.prompts())


WORDS = ("time", "way", "day", "man", "thing", "woman", "life", "child", "world", "hand", "part", "place", "case")


@dataclass(frozen=True)
class Run:
    """How a workload went."""

    exchanges: list[Exchange]
    seconds: float


async def closed_loop(url: SplitResult, work: Workload, clients: int, count: int) -> Run:
    """So many clients, each of which asks again when it has its answer, until `count` requests were sent."""
    bodies, recordings, left = work.bodies(), [], count

    async def ask_again() -> None:
        nonlocal left
        with closing(Client(url, sockets)) as client:
            while left > 0:
                left -= 1
                recordings.append(await client.record(PATH, next(bodies)))

    begun = time.perf_counter()
    with Sockets() as sockets:
        await asyncio.gather(*(ask_again() for _ in range(clients)))
    seconds = time.perf_counter() - begun
    return Run([recording.read() for recording in recordings], seconds)


async def open_loop(url: SplitResult, work: Workload, rate: float, count: int) -> Run:
    """Requests arrive at `rate` a second on average, whether or not others have been answered (Poisson)."""
    bodies, generator, tasks = work.bodies(), random.Random(work.seed), []
    begun = arrival = time.perf_counter()
    for _ in range(count):
        await asyncio.sleep(max(arrival - time.perf_counter(), 0))
        tasks.append(asyncio.ensure_future(record(url, PATH, next(bodies))))
        arrival += generator.expovariate(rate)
    recordings = await asyncio.gather(*tasks)
    seconds = time.perf_counter() - begun
    return Run([recording.read() for recording in recordings], seconds)
