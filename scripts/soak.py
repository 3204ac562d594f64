"""Thousands of mixed requests of 64 threads to one engine: nothing may be lost, leaked or grow.

    python scripts/soak.py                      # 10 000 requests to the demo in this process, some minutes
    python scripts/soak.py --server             # to `tinygpt serve` in another process, through RemoteLLM
    python scripts/soak.py --alone 200          # 200 random batches, and each request of them alone
    mpiexec -n 2 python scripts/soak.py --requests 2000 --tensor-parallel 2     # over ranks of this machine

A sixth of the requests are cancelled, some run out of time, some are impossible, and all come through a bounded queue.
Exits with 1 if a request was not answered, a sample still runs or waits at the end, a repeated request differed, or the
memory of the engine's processes grew by more than 2 % after the first fifth. Needs Linux's /proc.

--alone draws batches of requests with any fields (extra `test`): each result equals that of the request alone, to the
last bit. hypothesis shrinks a failure and prints how to reproduce it.
"""

import argparse
import os
import random
import re
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

# tinygpt and scripts are next to each other, installed or not.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from scripts.fuzz import run_settings
from tinygpt import LLM, RemoteLLM, SamplingParams
from tinygpt.bench.sweep import served
from tinygpt.errors import QueueFullError, RequestError, TinyGPTError

THREADS = 64
MAX_QUEUE = 32
MAX_NUM_SEQS = 24
ALLOWED_GROWTH = 1.02
SETTLED = 0.2  # of the requests: by then every buffer has its size
BEGINNINGS = (
    "Once upon a time",
    "The little dog",
    "Anna and Tom went to the",
    "In a deep dark wood there was",
)
IMPOSSIBLE = ({"n": 0}, {"temperature": -1.0}, {"max_tokens": 10**6}, {"top_p": 2.0})
FIELDS = {
    "max_tokens": range(1, 41),
    "temperature": [0.0, 0.7, 1.2],
    "top_k": [0, 5, 40],
    "top_p": [0.5, 0.9, 1.0],
    "repetition_penalty": [1.0, 1.2],
    "no_repeat_ngram_size": [0, 3],
    "n": [1, 1, 1, 3],
    "logprobs": [None, None, 2],
    "stop": [None, ".", ["the", "!"]],
    "max_time": [None, None, None, 0.05],
    "seed": range(1000),
}


@dataclass
class Report:
    """Ends of the requests, texts of repeated ones, and bytes of memory; shared by all threads."""

    ends: Counter = field(default_factory=Counter)
    refusals: int = 0
    texts: dict[tuple, str] = field(default_factory=dict)
    differing: int = 0
    memory: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def problems(self, requests: int) -> list[str]:
        settled = max(self.memory[: int(len(self.memory) * SETTLED)])
        last = max(self.memory[-len(self.memory) // 10 :])
        is_wrong_of = {
            f"{self.ends.total()} of {requests} requests ended": self.ends.total() != requests,
            f"{self.differing} repeated requests differed": self.differing > 0,
            f"ends: {dict(self.ends)}": not {*self.ends}
            <= {"cancelled", "refused", "length", "stop", "timeout"},
            f"memory grew from {settled / 2**20:.1f} to {last / 2**20:.1f} MB": last
            > ALLOWED_GROWTH * settled,
        }
        return [sentence for sentence, is_wrong in is_wrong_of.items() if is_wrong]


def run_thread(
    llm: LLM | RemoteLLM, count: int, seed: int, pids: list[int], report: Report, bar: tqdm
) -> None:
    generator = random.Random(seed)
    for _ in range(count):
        try:
            end = run_request(llm, generator, report)
        except Exception as error:  # else lost with its thread
            end = f"{type(error).__name__}: {error}"
        with report.lock:
            report.ends[end] += 1
            report.memory.append(resident_bytes(pids))
            bar.update()


def run_request(llm: LLM | RemoteLLM, generator: random.Random, report: Report) -> str:
    """Submit a random request until the queue takes it, and return how it ended."""
    kind = generator.random()
    prompt = generator.choice(BEGINNINGS)
    if kind < 0.25:  # requests that are repeated
        fields = {
            "max_tokens": generator.choice([4, 8]),
            "temperature": generator.choice([0.0, 1.1]),
            "seed": 5,
        }
    else:
        prompt += f" {'and so ' * generator.randrange(40)}{generator.randrange(100)}"
        fields = {name: generator.choice(values) for name, values in FIELDS.items()}
        fields |= generator.choice(IMPOSSIBLE) if kind > 0.96 else {}
    while True:
        try:
            future = llm.submit(prompt, **fields)
            if 0.25 < kind < 0.42:
                time.sleep(generator.uniform(0, 0.05))
                future.cancel()
            output = future.result(timeout=300).outputs[0]
            break
        except QueueFullError:
            with report.lock:
                report.refusals += 1
            time.sleep(0.005)
        except CancelledError:
            return "cancelled"
        except RequestError:
            return "refused" if kind > 0.96 else "refused by mistake"
    if kind < 0.25:
        with report.lock:
            key = (prompt, *fields.values())
            report.differing += report.texts.setdefault(key, output.text) != output.text
    return str(output.finish_reason)


def resident_bytes(pids: list[int]) -> int:
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE")


def num_left(llm: LLM | RemoteLLM, url: str | None) -> int:
    time.sleep(0.5)  # cancelled samples leave after their step
    if url is None:
        return len(llm.engine.scheduler.running) + len(llm.engine.scheduler.waiting)
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    return sum(
        int(float(n))
        for n in re.findall(r"^\S*num_requests_(?:running|waiting)\S* (\S+)$", text, re.MULTILINE)
    )


VALUES_OF = {
    "max_tokens": [1, 5, 9, 16],
    "stop": ["e", ["th", "re"], "\n"],
    "bad_words": ["the", ["th", " of"]],
    "bad_words_ids": [[[5, 6], [7]]],
    "logit_bias": [{5: -100.0, 9: 2.5}],
    "repetition_detection": [{"max_pattern_size": 3, "min_count": 2}],
    "guided_choice": [["the", "then"]],
    "guided_regex": ["[a-z ]{1,9}", "("],
    "guided_json": [{"type": "integer"}],
    "guided_grammar": ['start: "the" | "of"'],
    "overflow": ["refuse", "truncate", "slide"],
    "max_time": [3600],  # a shorter one depends on the clock
    **{f"{name}_ids": [[5], [*range(40)]] for name in ("stop_token", "allowed_token", "top_p_reset")},
}
NUMBERS = [
    0,
    1,
    2,
    5,
    0.0,
    0.3,
    0.5,
    0.9,
    1.0,
    1.5,
    -1,
    100,
    True,
    "raw",
    "openai",
    "never",
    None,
    float("nan"),
    "x",
]


@cache
def possible_values(name: str) -> list[Any]:
    values = []
    for value in VALUES_OF.get(name, NUMBERS):
        with suppress(TinyGPTError):
            SamplingParams(**{name: value})
            values.append(value)
    return values or NUMBERS


@st.composite
def requests(draw: Callable, vocab_size: int) -> tuple[list[int], dict[str, Any]]:
    """Return token ids, often with a common beginning, and a few fields of SamplingParams, some impossible."""
    shared = draw(st.sampled_from([[], [1, 2, 3], list(range(20))]))
    prompt = [*shared, *draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=5))]
    names = [
        f.name for f in fields(SamplingParams) if f.name not in ("seed", "logits_processors", "prompt_embeds")
    ]
    chosen = draw(st.lists(st.sampled_from(names), max_size=6, unique=True))
    is_possible = draw(st.integers(0, 9)) > 0
    values = {
        name: draw(st.sampled_from(possible_values(name) if is_possible else NUMBERS)) for name in chosen
    }
    return prompt, {"max_tokens": 8, "seed": draw(st.integers(0, 999)), **values}


def submit(llm: LLM, prompt: list[int], values: dict[str, Any]) -> Future | TinyGPTError:
    try:
        return llm.submit(prompt, SamplingParams(**values))
    except TinyGPTError as error:
        return error


def answer(submitted: Future | TinyGPTError) -> str:
    """Return the result without times, or the refusal, as text."""
    try:
        return (
            repr(submitted.result(timeout=300).outputs) if isinstance(submitted, Future) else str(submitted)
        )
    except TinyGPTError as error:
        return str(error)


def compare_alone(examples: int, seed_number: int, model: str = "demo") -> None:
    """Raise AssertionError for the smallest batch with a request whose result depends on the others."""
    with (
        LLM(model, max_num_seqs=6) as shared,
        LLM(model, max_num_seqs=6, prefix_cache_seqs=0, threads=1) as alone,
    ):

        @run_settings(examples, seed_number)
        @given(st.lists(requests(shared.config.vocab_size), min_size=2, max_size=8))
        def run(batch: list[tuple[list[int], dict[str, Any]]]) -> None:
            for submitted, request in zip(
                [submit(shared, *request) for request in batch], batch, strict=True
            ):
                assert answer(submitted) == answer(submit(alone, *request)), request

        run()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="demo")
    add("--dtype", default="auto")
    add("--requests", type=int, default=10_000)
    add("--server", action="store_true", help="ask a server in another process")
    add("--tensor-parallel", type=int, default=1, help="ranks that share each layer (default: 1)")
    add("--alone", type=int, metavar="N", help="compare the requests of N batches with each alone")
    add("--seed", type=int, default=1, help="of --alone (default: 1)")
    args = parser.parse_args()
    if args.alone is not None:
        compare_alone(args.alone, args.seed, args.model)
        return 0
    report = Report()
    share = -(-args.requests // THREADS)
    start = time.perf_counter()
    url = None
    sizes = {"max_num_seqs": MAX_NUM_SEQS, "max_queue": MAX_QUEUE}
    with ExitStack() as stack:
        if args.server:
            url, pid = stack.enter_context(served(args.model, args.dtype, sizes))
            llm = stack.enter_context(RemoteLLM(url, max_connections=THREADS))
            pids = [pid]
        else:
            ranks = args.tensor_parallel
            llm = stack.enter_context(LLM(args.model, args.dtype, **sizes, tensor_parallel_size=ranks))
            pids = [os.getpid()]
            if ranks > 1:  # and its siblings of the same mpiexec
                threads = Path(f"/proc/{os.getppid()}/task").iterdir()
                pids = [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]
        bar = stack.enter_context(tqdm(total=share * THREADS, disable=None))
        with ThreadPoolExecutor(THREADS) as pool:
            for i in range(THREADS):
                pool.submit(run_thread, llm, share, i, pids, report, bar)
        left = num_left(llm, url)
    sentences = report.problems(share * THREADS) + [f"{left} samples still run or wait"] * (left > 0)
    ends = ", ".join(f"{count} {end}" for end, count in report.ends.most_common())
    memory = f"{report.memory[len(report.memory) // 5] / 2**20:.0f} MB, {report.memory[-1] / 2**20:.0f} MB at the end"
    took = f"{report.ends.total()} requests in {time.perf_counter() - start:.0f} s"
    print(f"{took}: {ends}; {report.refusals} refusals; {memory}")
    for sentence in sentences:
        print(f"WRONG: {sentence}")
    return int(bool(sentences))


if __name__ == "__main__":
    sys.exit(main())
