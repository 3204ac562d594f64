"""Many requests at once in one LLM, and each of them alone in another: both must answer alike, to the last bit."""

import asyncio
import ctypes
import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tinygpt import LLM, AsyncLLM, SamplingParams
from tinygpt.errors import TinyGPTError
from tinygpt.outputs import StreamChunk

from .random_requests import Asked, World, request_of

THREADS = 8
BATCH = 200  # requests in company, before the same ones alone
MAX_NUM_SEQS = 8
ALLOWED_GROWTH = 1.02
SHOWN = 5


@dataclass(frozen=True)
class Memory:
    """After so many requests: the process's own bytes, and Python's blocks that are in use."""

    requests: int
    resident: int
    blocks: int


@dataclass
class Comparison:
    """`ends` are how many requests were answered or refused; `memory` is as it was after each batch."""

    ends: Counter = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)

    def growth(self) -> float:
        """The last tenth's memory over what it was before, by whichever grew more; 1 for less than 2000 requests.

        Blocks are counted to one, so the least that are in use tell what is never given back: from the second thousand
        on. Resident memory grows on for some thousands, while the allocator meets ever larger requests: from half on.
        """
        total = self.ends.total()
        second = [memory.blocks for memory in self.memory if 1000 < memory.requests <= 2000]
        half = [memory.resident for memory in self.memory if memory.requests <= total / 2]
        last = [memory for memory in self.memory if memory.requests > 0.9 * total]
        if total < 2000:
            return 1.0
        resident = max(memory.resident for memory in last) / max(half)
        return max(resident, min(memory.blocks for memory in last) / min(second))

    def memory_text(self) -> str:
        """Every so often."""
        every = max(len(self.memory) // 6, 1)
        marks = self.memory[every - 1 :: every]
        return "; ".join(f"{m.resident / 2**20:.1f} MB, {m.blocks} blocks after {m.requests}" for m in marks)


def compare(model: str, seed: int, numbers: range, on_batch: Callable[[int], None], **options: Any) -> Comparison:
    """Requests `numbers` of a seed, in company in an LLM of these options and alone in a plain one of its dtype."""
    plain = {name: value for name, value in options.items() if name in ("dtype", "soft_prompts", "kv_cache_dtype")}
    comparison = Comparison()
    with (
        LLM(model, max_num_seqs=MAX_NUM_SEQS, **options) as shared,
        LLM(model, max_num_seqs=MAX_NUM_SEQS, prefix_cache_seqs=0, threads=1, **plain) as alone,
    ):
        config = shared.config
        world = World(config.vocab_size, shared.max_model_len, config.n_embd, tuple(options.get("soft_prompts") or ()))
        for first in range(numbers.start, numbers.stop, BATCH):
            batch = range(first, min(first + BATCH, numbers.stop))
            asked = {number: request_of(seed, number, world) for number in batch}
            _compare_batch(asked, shared, alone, comparison)
            on_batch(len(batch))
    return comparison


def _compare_batch(asked: dict[int, Asked], shared: LLM, alone: LLM, comparison: Comparison) -> None:
    together = answers_together(shared, asked)
    for number, request in asked.items():
        expected = answer(alone, request)
        comparison.ends[
            expected.partition(":")[0] if expected.startswith(("RequestError", "UNEXPECTED")) else "answered"
        ] += 1
        if together[number] != expected or expected.startswith("UNEXPECTED"):
            comparison.differences.append(
                f"request {number}, {request}\n  alone   {expected}\n  company {together[number]}"
            )
    scheduler = shared.engine.scheduler
    if scheduler.running or scheduler.waiting or scheduler.slots.num_free != MAX_NUM_SEQS:
        comparison.differences.append(f"after request {number}: {len(scheduler.running)} sequences still run")
    gc.collect()
    comparison.memory.append(Memory(comparison.ends.total(), _resident_bytes(), sys.getallocatedblocks()))


def answers_together(llm: LLM, asked: dict[int, Asked]) -> dict[int, str]:
    """The answers of requests that THREADS threads ask for, beside others that are cancelled."""
    waiting, answers = iter(asked.items()), {}
    lock = threading.Lock()

    def ask() -> None:
        while True:
            with lock:
                number, request = next(waiting, (None, None))
            if request is None:
                return
            if number % 10 == 0:
                llm.submit([1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True)).cancel()
            answers[number] = answer(llm, request)

    threads = [threading.Thread(target=ask) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(0.02)  # what was cancelled last leaves with the step
    return answers


def answer(llm: LLM, request: Asked) -> str:
    """All that the request gives but times and what others had computed, as text; or how it was refused."""
    try:
        return repr(ASK[request.entry](llm, request))
    except TinyGPTError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # nobody expects one: it is a difference even where both have it
        return f"UNEXPECTED {type(error).__name__}: {error}"


def _params(request: Asked) -> SamplingParams:
    return SamplingParams(**request.fields)


def _told(output: Any) -> tuple:
    return (
        output.prompt_token_ids,
        output.outputs,
        output.prompt_logprobs,
        output.prompt_cumulative_logprob,
        output.num_truncated_tokens,
    )


def _by_sample(chunks: Iterable[StreamChunk]) -> list[StreamChunk]:
    """Which sample comes first in a step depends on when each got a slot."""
    return sorted(chunks, key=lambda chunk: chunk.index)


def _generate(llm: LLM, request: Asked) -> Any:
    return [_told(output) for output in llm.generate(request.prompt, _params(request), use_tqdm=False)]


def _stream(llm: LLM, request: Asked) -> Any:
    return _by_sample(llm.stream(request.prompt, _params(request)))


def _submit(llm: LLM, request: Asked) -> Any:
    chunks = []
    output = llm.submit(request.prompt, _params(request), chunks.append).result(timeout=300)
    return _told(output), _by_sample(chunks)


def _async(llm: LLM, request: Asked) -> Any:
    return _told(asyncio.run(AsyncLLM(llm).generate(request.prompt, _params(request))))


def _async_stream(llm: LLM, request: Asked) -> Any:
    async def chunks() -> list:
        return [chunk async for chunk in AsyncLLM(llm).stream(request.prompt, _params(request))]

    return _by_sample(asyncio.run(chunks()))


def _session(llm: LLM, request: Asked) -> Any:
    session, params = llm.session(), _params(request)
    session.extend(request.prompt)
    told = [session.generate(params).outputs]
    for action, ids, place in request.more:
        if action == "extend":
            session.extend(ids)
        elif action == "rewind":
            session.rewind(round(place * len(session)))
        elif action == "fork":
            session = session.fork()
        else:
            told.append(session.generate(params).outputs if action == "generate" else list(session.stream(params)))
    return told, session.token_ids


def _score(llm: LLM, request: Asked) -> Any:
    return llm.score(request.prompt, request.more, request.fields.get("soft_prompt"))


def _embed(llm: LLM, request: Asked) -> Any:
    return llm.embed([request.prompt], request.more).tolist()


def _look(llm: LLM, request: Asked) -> Any:
    looks = (llm.logits, llm.hidden_states, llm.attentions)
    array = looks[int(3 * request.more)](request.prompt)
    return array.shape, np.ascontiguousarray(array).view(np.uint32).sum(dtype=np.uint64)


ASK: dict[str, Callable[[LLM, Asked], Any]] = {
    "generate": _generate,
    "stream": _stream,
    "submit": _submit,
    "async": _async,
    "async-stream": _async_stream,
    "session": _session,
    "score": _score,
    "embed": _embed,
    "look": _look,
}


def _resident_bytes() -> int:
    """Without what the allocator keeps for later, where it is glibc's."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settings(folder: Path) -> Iterator[tuple[str, dict[str, Any], float]]:
    """Name of the model, options of the LLM that is shared, and its share of the requests."""
    soft_prompts = {"soft": folder / "soft"}
    tiny = str(folder)
    yield tiny, {"soft_prompts": soft_prompts, "threads": 2}, 0.5
    yield tiny, {"soft_prompts": soft_prompts, "max_num_batched_tokens": 8, "threads": 1}, 0.15
    yield tiny, {"draft_model": str(folder / "draft"), "num_speculative_tokens": 3, "threads": 1}, 0.15
    yield tiny, {"dtype": "int8", "threads": 2}, 0.1
    yield tiny, {"dtype": "bfloat16", "max_num_batched_tokens": 16, "threads": 1}, 0.08
    yield "demo", {"threads": 2}, 0.02
