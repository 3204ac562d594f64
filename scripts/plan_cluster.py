"""Predict, before hosts are rented, what a model would do on them: memory, tokens per second, and what goes between.

    python scripts/plan_cluster.py openai-community/gpt2-xl --dtype bfloat16 --hosts 1 2 4 8 --latency 30 --bandwidth 10
    python scripts/plan_cluster.py random:124M --check 1 2 4    # predicted beside measured, with ranks of this machine
    python scripts/plan_cluster.py random:124M --overheads      # 2 ranks x 1 thread beside 1 rank x 2 threads

Each host is taken to be like this machine, whose memory bandwidth and tiles are measured, and runs one rank with all
its cores; --latency is that of a message in microseconds, --bandwidth what goes between two hosts in GBit/s. A step of
decoding reads its weights and its KV cache, or computes, whichever takes longer; --efficiency is the share of what the
machine could do that it reaches, as `tinygpt bench` shows it. Figures are predictions, and are called that; --check
ends with exit code 1 if one is off by more than a quarter. Memory is that of weights, and of the KV cache's positions
that are in use.

--overheads measures what it costs that ranks, and not threads, share a step: at batch 1 and 8, in turns, and bytes that
go over TCP in a step beside the formula's (Linux; the loopback device counts all traffic of this machine).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tinygpt.bench.machine_limits import MachineLimits, measure_limits
from tinygpt.bench.work import (
    BYTES,
    TILES,
    block_operations,
    head_operations,
    head_weights,
    kv_cache_bytes,
    model_bytes,
)
from tinygpt.config import ModelConfig
from tinygpt.errors import RequestError, TinyGPTError, how_to_install
from tinygpt.execution.model_source import ModelSource
from tinygpt.hardware.cpu import cpu_name
from tinygpt.hardware.threads import physical_cores
from tinygpt.parallel.cut import check_cut, part_of_rank
from tinygpt.parallel.launched import find_mpiexec
from tinygpt.parallel.layout import MAX_TENSOR_SIZE, Layout
from tinygpt.parallel.runner import GROUP_STEPS, LEAST_GROUP

FLOAT, GIB = 4, 2**30  # bytes
NEW_TOKENS = 64  # measured in a row, around the positions that are asked for
ALLOWED = 0.25  # of a measured step
# Ranks gather a row of GPT-2 XL from each other, as they do twice a layer; the median, in seconds.
GATHER = """
import statistics, time
import numpy as np
from mpi4py import MPI
ranks = MPI.COMM_WORLD
mine, all_rows, seconds = np.ones(1600, np.float32), np.empty(ranks.size * 1600, np.float32), []
for _ in range(2000):
    start = time.perf_counter()
    ranks.Allgather(mine, all_rows)
    seconds.append(time.perf_counter() - start)
if ranks.rank == 0:
    print(statistics.median(seconds))
"""
# A rank 0 that takes so many steps of one token, and so tells from two of them what a step sends.
STEPS = """
import sys
from tinygpt import LLM
model, dtype, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
with LLM(model, dtype, threads=1, tensor_parallel_size=2, max_num_seqs=1) as llm:
    llm.generate([[5, 6, 7]], max_tokens=steps, ignore_eos=True)
"""
TURNS = 5
HEADER = "| hosts | tensor x pipeline x replicas | GiB a host | ms a step | tokens/s | KB sent a step |"


@dataclass(frozen=True)
class Network:
    """seconds until a message arrives, and bytes a second."""

    latency: float
    bandwidth: float

    def seconds(self, messages: float, sent: float) -> float:
        return messages * self.latency + sent / self.bandwidth


@dataclass(frozen=True)
class Load:
    """Sequences that decode together on a replica, and the positions that each attends to."""

    batch_size: float
    context: int


@dataclass(frozen=True)
class Prediction:
    memory: float  # bytes of the rank that has most: weights, and positions in use
    seconds: float  # of a step
    sent: int  # bytes between ranks, in a step


def predict(
    config: ModelConfig, dtype: str, layout: Layout, load: Load, limits: MachineLimits, network: Network, share: float
) -> Prediction:
    """A step of decoding on one replica. share: of the limits that a step reaches."""
    stages = layout.pipeline_size
    seconds = sum(_first_rank(config, dtype, layout, i, load, limits) for i in range(stages)) / share
    memory = max(rank_bytes(config, dtype, layout, rank, load) for rank in range(layout.size))
    if stages > 1 and load.batch_size >= stages * LEAST_GROUP:  # each stage works on another group
        group = replace(load, batch_size=load.batch_size / stages)
        turn = max(_first_rank(config, dtype, layout, i, group, limits) for i in range(stages)) / share
        seconds = turn * (stages + (stages - 1) / GROUP_STEPS)
    between = _messages(config, layout, load.batch_size)
    return Prediction(memory, seconds + network.seconds(*between), sent_bytes(config, layout, load.batch_size))


def sent_bytes(config: ModelConfig, layout: Layout, rows: int) -> int:
    """Between all ranks, in a step of so many tokens whose logits are all wanted, but for the plan of the step.

    The embedding is one exchange among the ranks of a stage and each layer two, in which each rank sends its part to
    each other one.
    """
    width, tensor = rows * config.n_embd * FLOAT, layout.tensor_size
    exchanges = (2 * config.n_layer + 1) * tensor * (tensor - 1) * width
    hops = (layout.pipeline_size - 1) * tensor * width
    own = 0 if layout.pipeline_size > 1 else len(part_of_rank(layout, 0, config, "float32").vocab)
    logits = rows * (config.vocab_size - own) * FLOAT if layout.size > 1 else 0
    return exchanges + hops + logits


def _messages(config: ModelConfig, layout: Layout, rows: int) -> tuple[float, float]:
    """One after another: how many, and bytes that one link carries."""
    width = rows * config.n_embd * FLOAT
    others = layout.tensor_size - 1
    exchanges = (2 * config.n_layer + 1) * (others > 0)
    hops = layout.pipeline_size - 1
    logits = rows * config.vocab_size * FLOAT * (layout.size > 1)
    return exchanges + hops + 2 * (layout.size > 1), (exchanges * others + hops) * width + logits


def rank_bytes(config: ModelConfig, dtype: str, layout: Layout, rank: int, load: Load) -> float:
    """What a rank holds: its part of each matrix, and of the KV cache for the load; whole norms and biases of sums."""
    part, (in_block, in_head, in_cache) = part_of_rank(layout, rank, config, dtype), BYTES[dtype]
    C, Q, F = config.n_embd, part.n_head * part.head_size, len(part.inner)
    matrices = part.n_layer * (4 * C * Q + 2 * C * F)
    # A tied head that is in another stage than the embedding is held by both.
    tables = 2 if part.is_first and part.is_last and not config.tie_word_embeddings else part.is_first or part.is_last
    others = part.n_layer * (3 * Q + F + 2 * C)  # biases
    others += 2 * C * (2 * part.n_layer + config.final_norm * part.is_last + config.embed_norm * part.is_first)
    others += config.n_positions * C * (not config.has_alibi)
    cache = in_cache * 2 * part.n_layer * Q * load.batch_size * load.context
    return in_block * matrices + in_head * tables * len(part.vocab) * C + FLOAT * others + cache


def _first_rank(
    config: ModelConfig, dtype: str, layout: Layout, stage: int, load: Load, limits: MachineLimits
) -> float:
    """Seconds of the stage's largest rank, which is the first."""
    part = part_of_rank(layout, layout.rank_at(stage, 0), config, dtype)
    in_block, in_head, _ = BYTES[dtype]
    share = part.n_layer / config.n_layer * part.n_head / config.n_head
    rows = len(part.vocab) / config.vocab_size
    head, blocks = head_weights(config) * rows, _blocks(config) * share
    cache = kv_cache_bytes(config, dtype, load.batch_size * load.context) * share
    read = in_block * blocks + in_head * head * part.is_last + cache
    block_rate, head_rate = map(limits.tile_rates.get, TILES[dtype])
    compute = block_operations(config, load.batch_size, load.context) * share / block_rate
    compute += head_operations(config, load.batch_size) * rows * part.is_last / head_rate
    return max(read / limits.bandwidth, compute)


def _blocks(config: ModelConfig) -> int:
    return config.n_layer * (4 * config.n_embd**2 + 2 * config.n_embd * config.inner_size)


def layouts(config: ModelConfig, dtype: str, hosts: int) -> list[tuple[Layout, int]]:
    """Every layout of so many hosts that the model can be cut by, and its replicas."""
    sizes = [(t, p) for t in (1, 2, 3, 4) for p in range(1, config.n_layer + 1) if hosts % (t * p) == 0]
    return [(Layout(t, p), hosts // (t * p)) for t, p in sizes if can_be_cut(Layout(t, p), config, dtype)]


def can_be_cut(layout: Layout, config: ModelConfig, dtype: str) -> bool:
    with suppress(RequestError):
        check_cut(layout, config, dtype, "cpu")
        return True
    return layout.size == 1


def local_latency(ranks: int) -> float:
    """Seconds of a message between ranks of this machine."""
    return 0.0 if ranks == 1 else float(run_ranks(ranks, "-c", GATHER))


def run_ranks(ranks: int, *words: str, **environment: str) -> str:
    """What ranks of this machine print, which are Pythons with these arguments."""
    command = [find_mpiexec(), "-n", str(ranks), sys.executable, *words]
    there = {**os.environ, **environment}
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=there).stdout


def check(args: argparse.Namespace, config: ModelConfig, dtype: str, load: Load) -> bool:
    """Predicted beside measured: ranks of this machine, which share its cores and its memory's bandwidth. Whether all
    predictions are within ALLOWED.

    One rank says what share of the limits a step reaches, so its own prediction is none.
    """
    cores, is_right = physical_cores(), True
    limits = measure_limits(dtype, cores)
    print("\n| ranks of this machine | predicted ms | measured ms | off by |\n|---|---|---|---|")
    for ranks in args.check:
        if ranks > cores:
            print(f"| {ranks} | | | not tried: {ranks} ranks would wait for one another's turn on {cores} cores |")
            continue
        measured = seconds_of_ranks(args.model, dtype, load, ranks, cores // ranks)
        one = MachineLimits(limits.bandwidth / ranks, {kind: rate / ranks for kind, rate in limits.tile_rates.items()})
        network = Network(local_latency(ranks), limits.bandwidth / 8)
        if ranks == 1:
            share = predict(config, dtype, Layout(), load, one, network, 1.0).seconds / measured
            print(f"| 1 | | {measured * 1e3:.2f} | |")
            continue
        predicted = predict(config, dtype, Layout(ranks), load, one, network, share).seconds
        off = predicted / measured - 1
        is_right = is_right and abs(off) <= ALLOWED
        print(f"| {ranks} | {predicted * 1e3:.2f} | {measured * 1e3:.2f} | {off:+.0%} |")
    return is_right


def overheads(args: argparse.Namespace, config: ModelConfig, dtype: str) -> None:
    """Print them, measured in turns."""
    print(f"{args.model} in {dtype} on {cpu_name()}, {args.context} positions, medians of {TURNS} turns\n")
    print("| sequences | 1 rank x 2 threads, ms | 2 ranks x 1 thread, ms | overhead |\n|---|---|---|---|")
    for batch_size in (1, 8):
        found = {1: [], 2: []}
        for _ in range(TURNS):
            for ranks, seconds in found.items():
                load = Load(batch_size, args.context)
                seconds.append(seconds_of_ranks(args.model, dtype, load, ranks, 2 // ranks))
        one, two = (statistics.median(seconds) * 1e3 for seconds in found.values())
        print(f"| {batch_size} | {one:.2f} | {two:.2f} | {two / one - 1:+.1%} |")
    formula = sent_bytes(config, Layout(2), 1)
    print(
        f"\nbytes between 2 ranks in a step of 1 token: {formula} by the formula, {bytes_over_tcp(args.model, dtype)}"
    )
    print("over TCP, with its headers and the plan of the step")


def bytes_over_tcp(model: str, dtype: str) -> int:
    """That go through the loopback device in a step of one token on two ranks that use it."""
    received = []
    for steps in (9, 109):
        before = _loopback_bytes()
        # As if each rank had a host of its own: by TCP, and by no memory that both see.
        run_ranks(2, "-c", STEPS, model, dtype, str(steps), UCX_TLS="tcp,self", MPIR_CVAR_NOLOCAL="1")
        received.append(_loopback_bytes() - before)
    return (received[1] - received[0]) // 100


def _loopback_bytes() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[0])


def refuse(args: argparse.Namespace) -> None:
    """SystemExit for what is impossible, before any work."""
    at_least = {"hosts": 1, "batch_size": 1, "context": 1, "latency": 0}
    for name, least in at_least.items():
        given = getattr(args, name)
        if min(given if isinstance(given, list) else [given]) < least:
            raise SystemExit(f"{_flag(name)} is {_shown(given)}: give numbers of {least} or more.")
    for name in ("bandwidth", "efficiency", "memory_bandwidth"):
        given = getattr(args, name)
        if given is not None and not 0 < given < float("inf"):
            raise SystemExit(f"{_flag(name)} is {given:g}: give a number above 0.")
    if args.efficiency > 1:
        raise SystemExit(f"--efficiency is {args.efficiency:g}: give a share, of 1 at most.")
    if args.check or args.overheads:
        _refuse_what_cannot_be_measured(args)


def _refuse_what_cannot_be_measured(args: argparse.Namespace) -> None:
    flag, ranks = ("--overheads", [1, 2]) if args.overheads else ("--check", args.check)
    if args.overheads and args.check:
        raise SystemExit("--overheads and --check are two measurements: give one of them.")
    if ranks[0] != 1:
        raise SystemExit(f"--check begins with {ranks[0]}: begin with 1, by which the others are predicted.")
    if not all(1 <= each <= MAX_TENSOR_SIZE for each in ranks):
        raise SystemExit(f"--check has {_shown(ranks)}: give numbers from 1 to {MAX_TENSOR_SIZE}.")
    if max(ranks) > 1 and (find_spec("mpi4py") is None or find_mpiexec() is None):
        missing = "mpi4py" if find_spec("mpi4py") is None else "mpiexec"
        raise SystemExit(f"{flag} of several ranks needs {missing}, which comes with: {how_to_install('mpi')}.")
    if args.context <= NEW_TOKENS // 2:
        raise SystemExit(f"--context is {args.context}: what is measured takes more than {NEW_TOKENS // 2} positions.")
    if args.overheads and not Path("/proc/net/dev").exists():
        raise SystemExit("--overheads counts bytes as Linux shows them: run it there.")
    if args.overheads and physical_cores() < 2:
        raise SystemExit(f"--overheads compares two threads with two ranks, and there is {physical_cores()} core.")


def refuse_for(args: argparse.Namespace, config: ModelConfig, dtype: str) -> None:
    """SystemExit for what is impossible with a model, before any work."""
    if args.context > config.n_positions and not config.has_alibi:
        raise SystemExit(f"--context is {args.context} and {args.model} has {config.n_positions} positions.")
    for ranks in [2] * args.overheads + (args.check or []):
        if not can_be_cut(Layout(ranks), config, dtype):
            check_cut(Layout(ranks), config, dtype, "cpu")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _shown(given: Any) -> str:
    return " ".join(map(str, given)) if isinstance(given, list) else str(given)


def seconds_of_ranks(model: str, dtype: str, load: Load, ranks: int, threads: int) -> float:
    """Of a step of decoding, measured on ranks of this machine."""
    prompt = load.context - NEW_TOKENS // 2  # the context of a step, on average
    cases = {"--batch-sizes": load.batch_size, "--prompt-lengths": prompt, "--new-tokens": NEW_TOKENS}
    flags = [word for flag, value in cases.items() for word in (flag, str(value))]
    source = ["--random", model.removeprefix("random:")] if "random:" in model else ["-m", model]
    command = ["bench", *source, "--dtype", dtype, "-t", str(threads), "--tensor-parallel", str(ranks), *flags]
    found = subprocess.run(
        [sys.executable, "-m", "tinygpt", *command, "--json"], check=True, capture_output=True, text=True
    )
    record = next(record for record in json.loads(found.stdout) if record["n_gen"])
    return record["ms_per_token"] / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="as --model of `tinygpt generate`; random:1.5B needs no download")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--latency", type=float, default=30.0, help="microseconds (default: %(default)g)")
    parser.add_argument("--bandwidth", type=float, default=10.0, help="GBit/s (default: %(default)g)")
    parser.add_argument("--batch-size", type=int, default=1, help="of a replica (default: %(default)s)")
    parser.add_argument("--context", type=int, default=256, help="positions of each (default: %(default)s)")
    parser.add_argument("--efficiency", type=float, default=0.8, help="share of the limits (default: %(default)g)")
    parser.add_argument("--memory-bandwidth", type=float, help="of a host, GB/s (default: this machine's, measured)")
    parser.add_argument("--check", type=int, nargs="+", help="ranks of this machine to measure, 1 first")
    parser.add_argument("--overheads", action="store_true", help="measure two ranks beside two threads")
    args = parser.parse_args()
    refuse(args)
    try:
        source = ModelSource.open(args.model, args.dtype)
        config, dtype, load = source.config, source.dtype, Load(args.batch_size, args.context)
        refuse_for(args, config, dtype)
    except TinyGPTError as error:
        raise SystemExit(str(error)) from None
    if args.overheads:
        overheads(args, config, dtype)
        return 0
    if args.check:
        return int(not check(args, config, dtype, load))
    limits = measure_limits(dtype, physical_cores())
    if args.memory_bandwidth:
        limits = replace(limits, bandwidth=args.memory_bandwidth * 1e9)
    network = Network(args.latency * 1e-6, args.bandwidth * 1e9 / 8)
    size = f"{model_bytes(config, dtype) / GIB:.1f} GiB"
    print(f"{args.model} in {dtype}, {size}, batch {load.batch_size}: predicted for")
    print(f"hosts like this one ({cpu_name()}, {limits.bandwidth / 1e9:.0f} GB/s), {args.bandwidth:g} GBit/s between\n")
    print(f"{HEADER}\n|---|---|---|---|---|---|")
    for hosts in args.hosts:
        for layout, replicas in layouts(config, dtype, hosts):
            found = predict(config, dtype, layout, load, limits, network, args.efficiency)
            rate = replicas * load.batch_size / found.seconds
            name = f"{layout.tensor_size} x {layout.pipeline_size} x {replicas}"
            sizes = f"{found.memory / GIB:.2f} | {found.seconds * 1e3:.1f} | {rate:.1f} | {found.sent / 1e3:.0f}"
            print(f"| {hosts} | {name} | {sizes} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
