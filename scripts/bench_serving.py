"""The HTTP server under load, next to the library and to other servers, in turns.

    python scripts/bench_serving.py                                   # the demo: 1, 8 and 32 clients
    python scripts/bench_serving.py --model gpt2 --dtype int8 --rates 2 8
    python scripts/bench_serving.py --model FOLDER --dtype float32 --rates 4 --vllm PYTHON
    python scripts/bench_serving.py --other llama.cpp http://127.0.0.1:8080 '{"ignore_eos": true}'

`tinygpt serve` is started for the measurement; --other names running servers with OpenAI's /v1/completions, and the
fields that keep a text from ending early. --vllm starts vLLM's server, too, with the Python of the environment that
bench_peers.py has made for it: environments/vllm/bin/python in its work folder. Every load goes to each server in turn,
with the same prompts: closed loops (each client sends its next request after a reply) and open loops (requests arrive
at random, at a rate). Client and servers share this machine. The table has medians of the repeats.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from peers.setup import VLLM, caption, preloaded

from tinygpt import LLM, SamplingParams
from tinygpt.bench.report import table, threads_text
from tinygpt.bench.sweep import served
from tinygpt.hardware import cpu_name, thread_count

WORDS = (
    "time",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "hand",
    "part",
    "place",
    "case",
)
OURS, LIBRARY = "tinygpt serve", "LLM.generate"
OUR_FIELDS = {"ignore_eos": True, "stream_options": {"include_usage": True}}  # and vLLM's


@dataclass
class Reply:
    """A streamed reply, with times of time.perf_counter()."""

    sent: float
    status: int = 0
    token_times: list[float] = field(default_factory=list)  # of events with text
    num_tokens: int = 0  # the server's count: some tokens have no text, and so no event
    error: str = ""

    @property
    def is_complete(self) -> bool:
        return self.status == 200 and not self.error and bool(self.token_times)

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.sent

    @property
    def tpot(self) -> float:
        return (self.token_times[-1] - self.token_times[0]) / max(self.num_tokens - 1, 1)


async def ask(url: str, body: dict[str, Any]) -> tuple[float, list[tuple[float, bytes]]]:
    """Send a completion request. Return the time of sending and all received pieces with their times, not parsed.

    With HTTP/1.0 the end of the body is the end of the connection.
    """
    address = urlsplit(url)
    content = json.dumps(body).encode()
    head = f"POST {address.path}/v1/completions HTTP/1.0\r\nhost: {address.netloc}\r\ncontent-type: application/json"
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        sent, pieces = time.perf_counter(), []
        writer.write(f"{head}\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
        while piece := await reader.read(2**16):
            pieces.append((time.perf_counter(), piece))
        return sent, pieces
    finally:
        writer.close()


def parse(sent: float, pieces: list[tuple[float, bytes]]) -> Reply:
    """Parse a reply after the measurement: parsing takes as long as some steps of a small model."""
    reply = Reply(sent)
    waiting = b""
    is_body = False
    for arrived, piece in pieces:
        waiting += piece.replace(b"\r\n", b"\n")
        if not is_body and b"\n\n" in waiting:
            head, _, waiting = waiting.partition(b"\n\n")
            reply.status = int(head.split()[1])
            is_body = True
        if not is_body or reply.status != 200:
            continue
        *events, waiting = waiting.split(b"\n\n")
        for event in events:
            _, is_event, text = event.partition(b"data: {")  # a chunk's size may be in front
            if is_event:
                read_event(json.loads(b"{" + text), arrived, reply)
    if reply.status != 200:
        reply.error = waiting.decode(errors="replace")[:200] or "no reply"
    return reply


def read_event(event: dict[str, Any], arrived: float, reply: Reply) -> None:
    reply.error = str(event.get("error", ""))[:200] or reply.error
    for choice in event.get("choices", ()):
        if choice.get("text") or choice.get("token_ids"):
            reply.token_times.append(arrived)
    usage = event.get("usage") or {}
    reply.num_tokens = usage.get("completion_tokens") or max(reply.num_tokens, len(reply.token_times))


def random_prompts(num_words: int) -> Iterator[str]:
    """Yield the same prompts of random words for every server."""
    generator = random.Random(0)
    while True:
        yield " ".join(generator.choices(WORDS, k=num_words))


async def closed_loop(url: str, bodies: Iterator[dict[str, Any]], clients: int, count: int) -> list[Reply]:
    """Run clients that each send the next request after a reply, until `count` requests were sent."""
    answers, left = [], iter(range(count))

    async def ask_again() -> None:
        for _ in left:
            answers.append(await ask(url, next(bodies)))

    await asyncio.gather(*(ask_again() for _ in range(clients)))
    return [parse(*reply) for reply in answers]


async def open_loop(url: str, bodies: Iterator[dict[str, Any]], rate: float, count: int) -> list[Reply]:
    """Send requests at `rate` a second on average (Poisson)."""
    generator = random.Random(0)
    tasks = []
    arrival = time.perf_counter()
    for _ in range(count):
        await asyncio.sleep(max(arrival - time.perf_counter(), 0))
        tasks.append(asyncio.ensure_future(ask(url, next(bodies))))
        arrival += generator.expovariate(rate)
    return [parse(*reply) for reply in await asyncio.gather(*tasks)]


def figures(replies: list[Reply], ttft: float, tpot: float) -> dict[str, float]:
    """Return rates a second, medians and 99th percentiles in ms. Goodput: requests within both limits."""
    done = [reply for reply in replies if reply.is_complete]
    seconds = max((r.token_times[-1] for r in done), default=0.0) - min(r.sent for r in replies)
    good = sum(reply.ttft <= ttft and reply.tpot <= tpot for reply in done)
    rates = {
        "failed": len(replies) - len(done),
        "tokens/s": sum(r.num_tokens for r in done) / seconds,
        "goodput/s": good / seconds,
    }
    for name, values in (("TTFT", [r.ttft for r in done]), ("TPOT", [r.tpot for r in done])):
        ordered = sorted(values) or [float("nan")]
        for percent in (50, 99):
            rates[f"{name} p{percent}, ms"] = (
                1e3 * ordered[min(len(ordered) * percent // 100, len(ordered) - 1)]
            )
    return rates


def library_figures(llm: LLM, args: argparse.Namespace, clients: int) -> dict[str, float]:
    """Return tokens/s of LLM.generate with as many prompts at once as there are clients."""
    prompts = random_prompts(args.prompt_words)
    start = time.perf_counter()
    params = SamplingParams(max_tokens=args.new_tokens, temperature=0.0, ignore_eos=True)
    for _ in range(args.each):
        llm.generate([next(prompts) for _ in range(clients)], params, use_tqdm=False)
    return {"failed": 0, "tokens/s": args.each * clients * args.new_tokens / (time.perf_counter() - start)}


@contextmanager
def vllm_served(args: argparse.Namespace, slots: int) -> Iterator[str]:
    """Yield the URL of vLLM's server, whose output goes to stderr."""
    with reserved_port() as port:
        # `vllm serve` asks for a distribution of the name vllm, and the one for CPUs has another.
        command = [args.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", args.dtype]
        command += ["--no-enable-prefix-caching", "--max-num-seqs", str(slots)]
        threads = str(thread_count(args.threads))
        variables = {
            "OMP_NUM_THREADS": threads,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
        }
        variables |= preloaded(VLLM, Path(args.vllm))
        process = subprocess.Popen(command, stdout=sys.stderr, env=os.environ | variables)
        try:
            url = f"http://127.0.0.1:{port}"
            while not answers(f"{url}/health"):
                if process.poll() is not None:
                    raise SystemExit("vLLM did not start: its output says why")
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()
            process.wait()


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port that a server with SO_REUSEADDR can take, and that the system gives to no other program."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def answers(url: str) -> bool:
    try:
        return urlopen(url, timeout=5).status == 200
    except OSError:
        return False


def compare(
    args: argparse.Namespace, llm: LLM, servers: dict[str, tuple[str, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return a row for each load and server, after a warm-up."""
    rows = []
    fixed = {"max_tokens": args.new_tokens, "temperature": 0, "stream": True}
    loads = [(f"{n} clients", closed_loop, n, n * args.each) for n in args.clients]
    loads += [
        (f"{rate:g} requests/s", open_loop, rate, max(int(rate * args.seconds), 1)) for rate in args.rates
    ]
    for name, run, size, count in loads:
        runs_of: dict[str, list[dict[str, float]]] = {}
        for turn in range(1 + args.repeats):
            for server, (url, fields) in servers.items():
                bodies = (
                    {"prompt": prompt, **fixed, **fields} for prompt in random_prompts(args.prompt_words)
                )
                replies = asyncio.run(run(url, bodies, size, count))
                runs_of.setdefault(server, []).extend([figures(replies, args.ttft, args.tpot)] * (turn > 0))
            if run is closed_loop:
                runs_of.setdefault(LIBRARY, []).extend([library_figures(llm, args, size)] * (turn > 0))
        for server, runs in runs_of.items():
            medians = {key: statistics.median(values[key] for values in runs) for key in runs[0]}
            rows.append({"load": name, "server": server, **medians})
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    titles = list(max(rows, key=len))
    values = [[row.get(title, "") for title in titles] for row in rows]
    cells = [
        [f"{value:.4g}" if isinstance(value, float) else str(value) for value in line] for line in values
    ]
    return table(titles, cells, titles[2:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="demo")
    add("--dtype", default="auto")
    add("--threads", type=int)
    add("--other", nargs=3, action="append", default=[], metavar=("NAME", "URL", "FIELDS"))
    add("--vllm", metavar="PYTHON", help="start vLLM's server with this Python")
    add("--clients", type=int, nargs="*", default=[1, 8, 32], help="of closed loops")
    add("--rates", type=float, nargs="*", default=[], help="requests a second, of open loops")
    add("--seconds", type=float, default=10.0, help="of an open loop")
    add("--each", type=int, default=4, help="requests of each client")
    add("--prompt-words", type=int, default=32)
    add("--new-tokens", type=int, default=64)
    add("--ttft", type=float, default=0.5, help="limit of goodput, seconds to the first token")
    add("--tpot", type=float, default=0.05, help="limit of goodput, seconds a token after it")
    add("--repeats", type=int, default=3)
    add("--json", type=Path, help="also write the figures into this file")
    args = parser.parse_args()
    slots = max([*args.clients, 8]) + 4
    print(f"{cpu_name()}, {threads_text(thread_count(args.threads))}, {args.model} {args.dtype}\n")
    with ExitStack() as stack:
        sizes = {"max_num_seqs": slots, "prefix_cache_seqs": 0}
        llm = stack.enter_context(LLM(args.model, args.dtype, threads=args.threads, **sizes))
        starts = time.perf_counter()
        url, _ = stack.enter_context(served(args.model, args.dtype, {**sizes, "threads": args.threads}))
        print(f"{OURS} serves after {time.perf_counter() - starts:.1f} s")
        servers = {OURS: (url, OUR_FIELDS)}
        if args.vllm:
            starts = time.perf_counter()
            servers["vLLM"] = (
                stack.enter_context(vllm_served(args, slots)),
                {**OUR_FIELDS, "model": args.model},
            )
            print(f"vLLM serves after {time.perf_counter() - starts:.1f} s")
        servers |= {name: (url.rstrip("/"), json.loads(fields)) for name, url, fields in args.other}
        rows = compare(args, llm, servers)
    print(markdown(rows), caption(f"CPU: {cpu_name()}"), sep="\n\n")
    if args.json:
        args.json.write_text(json.dumps({"cpu": cpu_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
