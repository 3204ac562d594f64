"""Thousands of mixed requests from many threads through one engine: nothing may be lost, leaked or grow.

    python scripts/soak.py                      # 10 000 requests of 64 threads to the demo checkpoint, some minutes
    python scripts/soak.py --requests 500
    mpiexec -n 2 python scripts/soak.py --requests 2000 --tensor-parallel 2     # over ranks of this machine

Requests differ in length, controls and number of samples; some are cancelled, some run out of time, and all of them
come through a bounded queue, which refuses what is too much. Ends with exit code 1 if a request did not end, a slot of
the KV cache was not released, the queue grew over its bound, a repeated request differed, or the memory of the process
grew by more than 2 % after the first fifth. Memory is read from /proc, so Linux only; it is that of all ranks.
"""

import argparse
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tinygpt import LLM, SamplingParams
from tinygpt.engine.engine import Engine
from tinygpt.errors import QueueFullError

THREADS, MAX_QUEUE, MAX_NUM_SEQS = 64, 32, 24
ALLOWED_GROWTH = 1.02
SETTLED = 0.2  # of the requests, by when every buffer has reached its size
BEGINNINGS = ["Once upon a time", "The little dog", "Anna and Tom went to the", "In a deep dark wood there was"]


@dataclass
class Report:
    """What happened; shared by all threads."""

    ends: Counter = field(default_factory=Counter)
    refusals: int = 0
    most_samples: int = 0  # running and waiting
    texts: dict[tuple[str, int], str] = field(default_factory=dict)  # of the requests that come again and again
    differing: int = 0
    memory: list[int] = field(default_factory=list)  # bytes, as requests end
    lock: threading.Lock = field(default_factory=threading.Lock)
    pids: Sequence[int] = (os.getpid(),)


def random_request(generator: random.Random) -> tuple[str, SamplingParams]:
    """A prompt and its parameters. One in four is greedy with few variations, so that it comes again."""
    beginning = generator.choice(BEGINNINGS)
    if generator.random() < 0.25:
        return beginning, SamplingParams(max_tokens=generator.choice([4, 8]))
    prompt = f"{beginning} {'and so ' * generator.randrange(40)}{generator.randrange(100)}"
    params = SamplingParams(
        max_tokens=generator.randint(1, 40),
        temperature=generator.choice([0.0, 0.7, 1.2]),
        top_k=generator.choice([0, 5, 40]),
        top_p=generator.choice([0.5, 0.9, 1.0]),
        repetition_penalty=generator.choice([1.0, 1.2]),
        no_repeat_ngram_size=generator.choice([0, 3]),
        n=generator.choice([1, 1, 1, 3]),
        logprobs=generator.choice([None, None, 2]),
        stop=generator.choice([None, ".", ["the", "!"]]),
        max_time=generator.choice([None, None, None, 0.05]),
        seed=generator.randrange(1000),
    )
    return prompt, params


def run_thread(llm: LLM, count: int, seed: int, report: Report, bar: tqdm) -> None:
    generator = random.Random(seed)
    for _ in range(count):
        prompt, params = random_request(generator)
        is_cancelled = generator.random() < 0.05
        end = run_request(llm, prompt, params, is_cancelled, report)
        with report.lock:
            report.ends[end] += 1
            report.memory.append(resident_bytes(report.pids))
            bar.update()


def run_request(llm: LLM, prompt: str, params: SamplingParams, is_cancelled: bool, report: Report) -> str:
    """Submit until the queue takes it; how it ended."""
    while True:
        try:
            future = llm.submit(prompt, params)
            break
        except QueueFullError:
            with report.lock:
                report.refusals += 1
            time.sleep(0.005)
    if is_cancelled:
        future.cancel()
    try:
        output = future.result(timeout=300)
    except CancelledError:
        return "cancelled"
    if prompt in BEGINNINGS:
        with report.lock:
            text = output.outputs[0].text
            report.differing += report.texts.setdefault((prompt, params.max_tokens), text) != text
    return str(output.outputs[0].finish_reason)


class CountingRunner:
    """A runner that counts the samples in each step, while none begins to run or ends: `Engine.wrapped` takes it."""

    def __init__(self, runner: Any, llm: LLM, report: Report):
        self._runner, self._engine, self._report = runner, llm.engine, report

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, batch: Any) -> Any:
        self._count()
        return self._runner.forward(batch)

    def multi_step(self, *arguments: Any) -> Any:
        self._count()
        return self._runner.multi_step(*arguments)

    def _count(self) -> None:
        self._report.most_samples = max(self._report.most_samples, num_samples(self._engine))


def num_samples(engine: Engine) -> int:
    """Samples that run or wait, within a step. Cancelled ones are none, which leave at its end: their places in the
    queue are free already. They are counted last, or one that is cancelled now would count beside its successor."""
    held = len(engine.scheduler.running) + len(engine.scheduler.waiting)
    return held - len(engine._removed)


def resident_bytes(pids: Sequence[int]) -> int:
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE")


def rank_pids(ranks: int) -> list[int]:
    """This process, and its siblings of the same mpiexec."""
    if ranks == 1:
        return [os.getpid()]
    task = Path(f"/proc/{os.getppid()}/task")
    found = [int(pid) for thread in task.iterdir() for pid in (thread / "children").read_text().split()]
    if len(found) != ranks:
        raise SystemExit(f"{len(found)} ranks of {ranks} are on this machine: start them all here.")
    return found


def problems(llm: LLM, report: Report, requests: int) -> list[str]:
    scheduler, memory = llm.engine.scheduler, report.memory
    settled, last = max(memory[: int(len(memory) * SETTLED)]), max(memory[-len(memory) // 10 :])
    found = {
        f"{report.ends.total()} of {requests} requests ended": report.ends.total() != requests,
        f"{len(scheduler.running)} still hold a slot": bool(scheduler.running),
        f"{len(scheduler.waiting)} still wait": bool(scheduler.waiting),
        f"{scheduler.slots.num_free} of {MAX_NUM_SEQS} slots are free": scheduler.slots.num_free != MAX_NUM_SEQS,
        f"{report.differing} repeated requests differed": bool(report.differing),
        f"memory grew from {settled / 2**20:.1f} to {last / 2**20:.1f} MB": last > ALLOWED_GROWTH * settled,
        f"{report.most_samples} samples ran and waited": report.most_samples > MAX_QUEUE + MAX_NUM_SEQS,
    }
    return [sentence for sentence, is_wrong in found.items() if is_wrong]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks that share each layer (default: 1)")
    args = parser.parse_args()
    report, each = Report(), -(-args.requests // THREADS)
    start = time.perf_counter()
    sizes = {"max_num_seqs": MAX_NUM_SEQS, "max_queue": MAX_QUEUE}
    with (
        LLM(args.model, args.dtype, **sizes, tensor_parallel_size=args.tensor_parallel) as llm,
        tqdm(total=each * THREADS, disable=None) as bar,
    ):
        report.pids = rank_pids(args.tensor_parallel)
        threads = [threading.Thread(target=run_thread, args=(llm, each, i, report, bar)) for i in range(THREADS)]
        with llm.engine.wrapped(partial(CountingRunner, llm=llm, report=report)):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        time.sleep(0.2)  # what was cancelled last leaves with the step
        found = problems(llm, report, each * THREADS)
    took = time.perf_counter() - start
    ends = ", ".join(f"{count} {end}" for end, count in report.ends.most_common())
    memory = f"{report.memory[len(report.memory) // 5] / 2**20:.0f} MB, {report.memory[-1] / 2**20:.0f} MB at the end"
    print(f"{report.ends.total()} requests in {took:.0f} s: {ends}; {report.refusals} refusals; {memory}")
    for sentence in found:
        print(f"WRONG: {sentence}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
