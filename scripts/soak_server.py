"""Thousands of mixed requests of 64 clients to one server, a third of which leave early: nothing may be lost or grow.

    python scripts/soak_server.py                      # 10 000 requests to the demo checkpoint, some minutes
    python scripts/soak_server.py --requests 500

Requests differ in length, controls, number of samples and prompts, and in how they are answered: streamed or whole.
Some are impossible, some find the queue full and come again. Ends with exit code 1 if a request was not answered, a
sample still runs or waits at the end, a text is not what the library generates, or the server's memory grew by more
than 2 % after the first fifth. Memory is the server's own figure, from /metrics.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult

from tqdm import tqdm

# tinygpt lies beside scripts/, whether or not it is installed.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from serving.client import exchange
from serving.servers import ours, running

from tinygpt import LLM, SamplingParams

CLIENTS, MAX_QUEUE, MAX_NUM_SEQS = 64, 32, 24
ALLOWED_GROWTH = 1.02
SETTLED = 0.2  # of the requests, by when every buffer has reached its size
BEGINNINGS = ["Once upon a time", "The little dog", "Anna and Tom went to the", "In a deep dark wood there was"]
IMPOSSIBLE = [{"n": 0}, {"prompt": [10**6]}, {"max_tokens": 10**6}, {"nonsense": 1}, {"temperature": "hot"}]


@dataclass
class Report:
    ends: Counter = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)  # bytes, now and then


def known_requests(model: str) -> list[tuple[dict[str, Any], str]]:
    """Requests that come again and again, and the text that the library generates for each."""
    asked = [
        {"prompt": beginning, "max_tokens": count, "temperature": temperature, "seed": 5, "top_p": 0.9}
        for beginning in BEGINNINGS
        for count in (4, 24)
        for temperature in (0, 1.1)
    ]
    with LLM(model) as llm:
        params = [SamplingParams(**{k: v for k, v in body.items() if k != "prompt"}) for body in asked]
        outputs = llm.generate([body["prompt"] for body in asked], params, use_tqdm=False)
    return [(body, output.outputs[0].text) for body, output in zip(asked, outputs, strict=True)]


def random_body(generator: random.Random) -> dict[str, Any]:
    prompt = f"{generator.choice(BEGINNINGS)} {'and so ' * generator.randrange(40)}{generator.randrange(100)}"
    return {
        "prompt": generator.choice([prompt, [prompt, "The king"]]),
        "max_tokens": generator.randint(1, 60),
        "temperature": generator.choice([0, 0.7, 1.2]),
        "top_k": generator.choice([0, 5, 40]),
        "repetition_penalty": generator.choice([1, 1.2]),
        "n": generator.choice([1, 1, 1, 3]),
        "logprobs": generator.choice([None, None, 2]),
        "echo": generator.choice([None, None, True]),
        "stop": generator.choice([None, ".", ["the", "!"]]),
        "seed": generator.randrange(1000),
    }


async def ask(
    url: SplitResult, generator: random.Random, known: list[tuple[dict[str, Any], str]], report: Report
) -> str:
    """One request until the queue takes it; how it ended."""
    kind, is_streamed = generator.random(), generator.random() < 0.5
    body, text = generator.choice(known)
    if kind < 1 / 3:
        body, leave_after = {**body, "max_tokens": 300, "ignore_eos": True}, generator.uniform(0, 0.3)
        left = await exchange(url, "/v1/completions", {**body, "stream": is_streamed}, leave_after)
        return "left" if left.error == "left" else "too fast to leave"
    if kind < 0.37:
        found = await exchange(url, "/v1/completions", generator.choice(IMPOSSIBLE))
        return "refused" if found.status == 400 else f"impossible, status {found.status}"
    is_known = kind < 0.7
    sent = {**(body if is_known else random_body(generator)), "stream": is_streamed}
    while (found := await exchange(url, "/v1/completions", sent)).status == 429:
        report.ends["queue full, asked again"] += 1
        await asyncio.sleep(0.2)
    if found.status != 200 or found.error:
        return f"failed: {found.status} {found.error}"
    if is_known:
        got = found.text if is_streamed else json.loads(found.body)["choices"][0]["text"]
        if got != text:
            report.problems.append(f"{sent} gave {got!r} and not {text!r}")
    return "answered"


async def fill(url: SplitResult) -> None:
    """Have every slot of the KV cache used to its end: memory that is reserved counts only once it is written."""
    with urllib.request.urlopen(f"{url.geturl()}/v1/models") as reply:
        length = json.load(reply)["data"][0]["max_model_len"] - 1
    for first in range(1, 3 * MAX_NUM_SEQS, MAX_NUM_SEQS):
        prompts = [[first + i] * length for i in range(MAX_NUM_SEQS)]
        found = await exchange(url, "/v1/completions", {"prompt": prompts, "max_tokens": 1})
        assert found.status == 200, found.error


async def soak(url: SplitResult, count: int, known: list[tuple[dict[str, Any], str]]) -> Report:
    await fill(url)
    report, left = Report(), count
    with tqdm(total=count, disable=None) as bar:

        async def client(seed: int) -> None:
            nonlocal left
            generator = random.Random(seed)
            while left > 0:
                left -= 1
                report.ends[await ask(url, generator, known, report)] += 1
                bar.update()
                if left % max(count // 100, 1) == 0:
                    report.memory.append((await asyncio.to_thread(figures, url))["process_resident_memory_bytes"])

        await asyncio.gather(*(client(i) for i in range(CLIENTS)))
    for _ in range(100):  # what left last goes with the next step
        found = figures(url)
        if not found["tinygpt:num_requests_running"] + found["tinygpt:num_requests_waiting"]:
            break
        await asyncio.sleep(0.1)
    return report


def figures(url: SplitResult) -> dict[str, float]:
    with urllib.request.urlopen(f"{url.geturl()}/metrics") as reply:
        lines = re.findall(r"^([\w:]+)(?:\{[^}]*\})? (\S+)$", reply.read().decode(), re.MULTILINE)
    return {name: float(value) for name, value in lines}


def problems(report: Report, last: dict[str, float], count: int) -> list[str]:
    expected = {"answered", "left", "too fast to leave", "refused", "queue full, asked again"}
    ended = sum(number for end, number in report.ends.items() if end != "queue full, asked again")
    settled = max(report.memory[: max(int(len(report.memory) * SETTLED), 1)])
    found = {
        f"{ended} of {count} requests ended": ended != count,
        f"{last['tinygpt:num_requests_running']:.0f} samples still run": last["tinygpt:num_requests_running"] > 0,
        f"{last['tinygpt:num_requests_waiting']:.0f} samples still wait": last["tinygpt:num_requests_waiting"] > 0,
        f"memory grew from {settled / 2**20:.1f} to {report.memory[-1] / 2**20:.1f} MB": report.memory[-1]
        > ALLOWED_GROWTH * settled,
    }
    others = [f"{number} requests {end}" for end, number in report.ends.items() if end not in expected]
    return [sentence for sentence, is_wrong in found.items() if is_wrong] + others + report.problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=10_000)
    args = parser.parse_args()
    server, known, begun = ours(args.model, "auto", None), known_requests(args.model), time.perf_counter()
    sizes = ("--max-num-seqs", str(MAX_NUM_SEQS), "--max-queue", str(MAX_QUEUE))
    with (
        tempfile.TemporaryDirectory() as folder,
        running(replace(server, command=server.command + sizes), Path(folder, "log")) as url,
    ):
        report = asyncio.run(soak(url, args.requests, known))
        last = figures(url)
        found = problems(report, last, args.requests)
    ends = ", ".join(f"{number} {end}" for end, number in report.ends.most_common())
    fifth, end = report.memory[len(report.memory) // 5] / 2**20, report.memory[-1] / 2**20
    print(
        f"{args.requests} requests in {time.perf_counter() - begun:.0f} s: {ends}; {fifth:.0f} MB, "
        f"{end:.0f} MB at the end"
    )
    for sentence in found:
        print(f"WRONG: {sentence}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
