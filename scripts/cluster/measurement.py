"""Ranks of this machine, measured: beside what was predicted of them, and beside threads."""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from tinygpt.bench.machine_limits import MachineLimits, measure_limits
from tinygpt.config import ModelConfig
from tinygpt.hardware.cpu import cpu_name
from tinygpt.hardware.threads import physical_cores
from tinygpt.parallel.launched import find_mpiexec
from tinygpt.parallel.layout import Layout

from .prediction import Load, Network, predict, sent_bytes

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


def local_latency(ranks: int) -> float:
    """Seconds of a message between ranks of this machine."""
    return 0.0 if ranks == 1 else float(run_ranks(ranks, "-c", GATHER))


def run_ranks(ranks: int, *words: str, **environment: str) -> str:
    """What ranks of this machine print, which are Pythons with these arguments."""
    command = [find_mpiexec(), "-n", str(ranks), sys.executable, *words]
    there = {**os.environ, **environment}
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=there).stdout


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
