"""What continuous batching brings, and what it costs.

    python scripts/bench_serving.py                       # the demo checkpoint
    python scripts/bench_serving.py --model FOLDER --dtype int8
    python scripts/bench_serving.py --server              # the HTTP server under load, beside the library

The mixed workload is 64 requests that arrive at once, prompts of 16 to 512 tokens, outputs of 8 to 128: all of them
submitted to the engine, against static batches of 8 in the order of arrival, in two forms. A rectangular batch computes
its longest prompt and its longest output for every row, as padded batches do; a ragged one only waits for its longest.
All three run on this engine and take turns, and the table has medians of the new tokens asked for a second.

The overhead is the part of a decode step at batch 32 that is spent outside the backend, in scheduling, in Python around
sampling and in detokenising: all greedy, and with every control in use.

--server starts `tinygpt serve` and sends it streamed requests: of clients that ask again as soon as they are answered
(--clients), of strangers who arrive by chance (--rates), and of newcomers beside the most clients (--newcomers). The
library takes its turn with the same prompts. The same is asked of the servers of others that --llama-server,
--llama-cpp and --transformers name. Client and servers share this machine.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

# tinygpt lies beside scripts/, whether or not it is installed.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from serving.compare import Plan, compare, markdown, of_clients, picture_of
from serving.figures import ServiceLevel
from serving.servers import Server, llama_cpp, llama_server, ours, transformers

from tinygpt import LLM, SamplingParams
from tinygpt.bench.plot import save
from tinygpt.bench.report import table
from tinygpt.hardware.cpu import cpu_name
from tinygpt.hardware.threads import thread_count
from tinygpt.weights.open import open_checkpoint

STATIC_BATCH = 8
BATCH = 32
SPARE_SLOTS = 4  # for newcomers
GREEDY = SamplingParams(max_tokens=100, ignore_eos=True)
EVERY_CONTROL = SamplingParams(
    max_tokens=100,
    temperature=0.9,
    top_k=200,
    top_p=0.95,
    min_p=0.001,
    typical_p=0.98,
    epsilon_cutoff=1e-5,
    eta_cutoff=1e-4,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    no_repeat_ngram_size=4,
    min_tokens=5,
    bad_words_ids=[[5, 6], [7]],
    logit_bias={9: -1.0},
    suppress_tokens=[11],
    seed=0,
    ignore_eos=True,
    logprobs=2,
)


@dataclass(frozen=True)
class Workload:
    """Prompts of token ids, and how many tokens each request asks for."""

    prompts: list[list[int]]
    params: list[SamplingParams]

    @classmethod
    def mixed(cls, count: int, vocab_size: int, n_positions: int) -> "Workload":
        """Prompts of 16 to 512 tokens and 8 to 128 new ones, shorter where the model has fewer positions."""
        generator = random.Random(0)
        new = [generator.randint(8, 128) for _ in range(count)]
        longest = min(512, n_positions - 128)
        prompts = [[generator.randrange(vocab_size) for _ in range(generator.randint(16, longest))] for _ in new]
        return cls(prompts, [SamplingParams(max_tokens=n, ignore_eos=True) for n in new])

    @property
    def num_new_tokens(self) -> int:
        return sum(p.max_tokens for p in self.params)


class TimedRunner:
    """A runner whose methods add up the seconds spent in them, and so takes one step at a time."""

    def __init__(self, runner: object):
        self.seconds, self._runner = 0.0, runner

    def steps_at_once(self, num_sequences: int, num_in_time: int) -> int:
        return 1  # where several draw tokens, time is spent in reading what `multi_step` returned

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._runner, name)
        if not callable(function):
            return function

        def timed(*arguments):
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def continuous(llm: LLM, work: Workload) -> None:
    futures = [llm.submit(prompt, params) for prompt, params in zip(work.prompts, work.params, strict=True)]
    for future in futures:
        future.result()


def ragged(llm: LLM, work: Workload) -> None:
    for prompts, params in batches(work):
        llm.generate(prompts, params, use_tqdm=False)


def rectangular(llm: LLM, work: Workload) -> None:
    for prompts, params in batches(work):
        longest, new = max(map(len, prompts)), max(p.max_tokens for p in params)
        padded = [[i] * (longest - len(prompt)) + prompt for i, prompt in enumerate(prompts)]  # nothing to share
        llm.generate(padded, SamplingParams(max_tokens=new, ignore_eos=True), use_tqdm=False)


def batches(work: Workload) -> Iterator[tuple[list[list[int]], list[SamplingParams]]]:
    for start in range(0, len(work.prompts), STATIC_BATCH):
        part = slice(start, start + STATIC_BATCH)
        yield work.prompts[part], work.params[part]


def seconds_of(call: Callable, *arguments) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def throughput(llm: LLM, requests: int, repeats: int) -> dict[str, float]:
    """New tokens a second of each way, medians of runs that alternate."""
    work = Workload.mixed(requests, llm.config.vocab_size, llm.max_model_len)
    runs = {"continuous": continuous, "static, rectangular": rectangular, "static, ragged": ragged}
    seconds = {name: [] for name in runs}
    for turn in tqdm(range(1 + repeats), desc="throughput", disable=None):
        for name, run in runs.items():
            took = seconds_of(run, llm, work)
            if turn:  # the first compiles and touches memory
                seconds[name].append(took)
    return {name: work.num_new_tokens / statistics.median(took) for name, took in seconds.items()}


def overhead(llm: LLM, params: SamplingParams, repeats: int) -> float:
    """The share of the engine's steps at batch 32 that is spent outside the backend; the median of the repeats."""
    generator, shares = random.Random(0), []
    prompts = [[generator.randrange(llm.config.vocab_size) for _ in range(8)] for _ in range(BATCH)]
    for turn in range(1 + repeats):
        with llm.engine.wrapped(TimedRunner) as runner:
            seconds = seconds_of(partial(llm.generate, prompts, params, use_tqdm=False))
        shares += [1 - runner.seconds / seconds] * (turn > 0)
    return statistics.median(shares)


def add_server_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--clients", type=int, nargs="*", default=[1, 8, 32], help="at once, in closed loops")
    group.add_argument("--rates", type=float, nargs="*", default=[2.0, 8.0], help="requests a second, in open loops")
    group.add_argument("--seconds", type=float, default=10.0, help="of an open loop")
    group.add_argument("--prompt-words", type=int, default=32)
    group.add_argument("--token-ids", action="store_true", help="as prompts, for models without a tokenizer")
    group.add_argument("--new-tokens", type=int, default=64)
    group.add_argument("--each", type=int, default=2, help="requests of each client")
    group.add_argument("--ttft", type=float, default=0.5, help="seconds to the first token that are good service")
    group.add_argument("--tpot", type=float, default=0.05, help="and for each token after it")
    group.add_argument("--newcomers", type=int, default=20, help="that come beside the most clients, one at a time")
    group.add_argument("--llama-server", nargs=2, metavar=("COMMAND", "GGUF"), help="llama.cpp's own, and the model")
    group.add_argument("--llama-cpp", nargs=2, metavar=("PYTHON", "GGUF"), help="llama-cpp-python's, and the model")
    group.add_argument("--transformers", nargs=2, metavar=("COMMAND", "FOLDER"), help="its command, and the model")
    group.add_argument("--plot", type=Path, help="also draw tokens/s against clients, as .svg or .png")


def servers_of(args: argparse.Namespace, llm: LLM, slots: int) -> list[Server]:
    threads = thread_count(args.threads)
    servers = [ours(args.model, args.dtype, args.threads, slots)]
    if args.token_ids:
        servers[0].more["return_token_ids"] = True  # or a token would have no event
    if args.llama_server:
        command, gguf = args.llama_server
        servers.append(llama_server(command, Path(gguf), threads, slots, llm.max_model_len))
    if args.llama_cpp:
        python, gguf = args.llama_cpp
        servers.append(llama_cpp(python, Path(gguf), threads, llm.max_model_len, llm.config.eos_token_ids))
    if args.transformers:
        servers.append(transformers(args.transformers[0], Path(args.transformers[1])))
    return servers


def measure_server(args: argparse.Namespace) -> None:
    """Everything takes turns, and the table has the medians of the repeats."""
    level = ServiceLevel(args.ttft, args.tpot)
    sizes = args.prompt_words, args.new_tokens, args.each, args.seconds, args.repeats
    vocab_size = open_checkpoint(args.model).config.vocab_size if args.token_ids else None
    plan = Plan(tuple(args.clients), tuple(args.rates), *sizes, level, vocab_size, args.newcomers)
    slots = max(args.clients) + SPARE_SLOTS
    with LLM(args.model, args.dtype, threads=args.threads, max_num_seqs=slots) as llm:
        rows = compare(servers_of(args, llm, slots), plan, llm)
    print(f"{cpu_name()}, {thread_count(args.threads)} threads, {args.model} {args.dtype}\n")
    print(markdown(rows))
    if args.clients:
        print(f"\n{of_clients(rows)}")
    if args.json:
        args.json.write_text(json.dumps({"cpu": cpu_name(), "rows": rows}, indent=1))
    if args.plot:
        save(picture_of(rows, f"{cpu_name()}, {thread_count(args.threads)} threads"), args.plot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--server", action="store_true", help="measure the HTTP server instead")
    add_server_arguments(parser.add_argument_group("with --server"))
    args = parser.parse_args()
    if args.server:
        measure_server(args)
        return
    with LLM(args.model, args.dtype, threads=args.threads, max_num_seqs=BATCH, prefix_cache_seqs=0) as llm:
        rates = throughput(llm, args.requests, args.repeats)
        shares = {name: overhead(llm, p, args.repeats) for name, p in (("greedy", GREEDY), ("all", EVERY_CONTROL))}
    speeds = [(name, f"{rate:.0f}", f"{rates['continuous'] / rate:.2f}") for name, rate in rates.items()]
    print(table(["mixed workload", "new tokens/s", "continuous is faster by"], speeds))
    print()
    outside = [(name, f"{share:.1%}") for name, share in shares.items()]
    print(table(["controls at batch 32", "of a step outside the backend"], outside))
    if args.json:
        args.json.write_text(json.dumps({"tokens_per_second": rates, "outside_backend": shares}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
