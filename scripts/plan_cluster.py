"""Predict, before hosts are rented, what a model would do on them: memory, tokens per second, and what goes between.

    python scripts/plan_cluster.py openai-community/gpt2-xl --dtype bfloat16 --hosts 1 2 4 8 --latency 30 --bandwidth 10
    python scripts/plan_cluster.py random:124M --check 1 2 4    # predicted beside measured, with ranks of this machine

Each host is taken to be like this machine, whose memory bandwidth and tiles are measured, and runs one rank with all
its cores; --latency is that of a message in microseconds, --bandwidth what goes between two hosts in GBit/s. A step of
decoding reads its weights and its KV cache, or computes, whichever takes longer; --efficiency is the share of what the
machine could do that it reaches, as `tinygpt bench` shows it. Figures are predictions, and are called that; --check
ends with exit code 1 if one is off by more than a quarter.
"""

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

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
from tinygpt.errors import how_to_install
from tinygpt.execution.model_source import ModelSource
from tinygpt.hardware.cpu import cpu_name
from tinygpt.hardware.threads import physical_cores
from tinygpt.parallel.cut import part_of_rank
from tinygpt.parallel.layout import MAX_TENSOR_SIZE, Layout
from tinygpt.parallel.runner import GROUP_STEPS, LEAST_GROUP

FLOAT, GIB = 4, 2**30  # bytes
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
    memory: float  # bytes of the rank that has most
    seconds: float  # of a step
    sent: int  # bytes between ranks, in a step


def predict(
    config: ModelConfig, dtype: str, layout: Layout, load: Load, limits: MachineLimits, network: Network, share: float
) -> Prediction:
    """A step of decoding on one replica. share: of the limits that a step reaches."""
    stages = layout.pipeline_size
    seconds, memory = zip(*(_first_rank(config, dtype, layout, i, load, limits) for i in range(stages)), strict=True)
    seconds, memory = sum(seconds) / share, max(memory)
    if stages > 1 and load.batch_size >= stages * LEAST_GROUP:  # each stage works on another group
        group = replace(load, batch_size=load.batch_size / stages)
        turn = max(_first_rank(config, dtype, layout, i, group, limits)[0] for i in range(stages)) / share
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


def _first_rank(
    config: ModelConfig, dtype: str, layout: Layout, stage: int, load: Load, limits: MachineLimits
) -> tuple[float, float]:
    """Seconds of the stage's largest rank, which is the first, and its bytes."""
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
    # A tied head that is in another stage than the embedding is held by both.
    embedding = in_head * head * (part.is_first or part.is_last)
    if part.is_first and part.is_last and not config.tie_word_embeddings:
        embedding *= 2
    positions = FLOAT * config.n_positions * config.n_embd
    return max(read / limits.bandwidth, compute), in_block * blocks + embedding + positions + cache


def _blocks(config: ModelConfig) -> int:
    return config.n_layer * (4 * config.n_embd**2 + 2 * config.n_embd * config.inner_size)


def layouts(config: ModelConfig, hosts: int) -> list[tuple[Layout, int]]:
    """Every layout of so many hosts, and its replicas."""
    sizes = [(t, p) for t in (1, 2, 3, 4) for p in range(1, config.n_layer + 1) if hosts % (t * p) == 0]
    return [(Layout(t, p), hosts // (t * p)) for t, p in sizes]


def local_latency(ranks: int) -> float:
    """Seconds of a message between ranks of this machine."""
    if ranks == 1:
        return 0.0
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or "mpiexec"
    command = [mpiexec, "-n", str(ranks), sys.executable, "-c", GATHER]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def check(args: argparse.Namespace, config: ModelConfig, dtype: str, load: Load) -> bool:
    """Predicted beside measured: ranks of this machine, which share its cores and its memory's bandwidth. Whether all
    predictions are within ALLOWED.

    One rank says what share of the limits a step reaches, so its own prediction is none.
    """
    cores, is_right = physical_cores(), True
    _refuse_what_cannot_be_checked(args.check)
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


def _refuse_what_cannot_be_checked(ranks: list[int]) -> None:
    """Before any work."""
    if ranks[0] != 1:
        raise SystemExit(f"--check begins with {ranks[0]}: begin with 1, by which the others are predicted.")
    if not all(1 <= each <= MAX_TENSOR_SIZE for each in ranks):
        raise SystemExit(f"--check has {' '.join(map(str, ranks))}: give numbers from 1 to {MAX_TENSOR_SIZE}.")
    if max(ranks) > 1 and find_spec("mpi4py") is None:
        raise SystemExit(f"--check of several ranks needs mpi4py, which comes with: {how_to_install('mpi')}.")


def seconds_of_ranks(model: str, dtype: str, load: Load, ranks: int, threads: int) -> float:
    """Of a step of decoding, measured on ranks of this machine."""
    cases = {"--batch-sizes": load.batch_size, "--prompt-lengths": load.context - 32, "--new-tokens": 64}
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
    args = parser.parse_args()
    source = ModelSource.open(args.model, args.dtype)
    config, dtype, load = source.config, source.dtype, Load(args.batch_size, args.context)
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
        for layout, replicas in layouts(config, hosts):
            found = predict(config, dtype, layout, load, limits, network, args.efficiency)
            rate = replicas * load.batch_size / found.seconds
            name = f"{layout.tensor_size} x {layout.pipeline_size} x {replicas}"
            sizes = f"{found.memory / GIB:.2f} | {found.seconds * 1e3:.1f} | {rate:.1f} | {found.sent / 1e3:.0f}"
            print(f"| {hosts} | {name} | {sizes} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
