"""Predict what it costs many threads to share a step, where no machine at hand has them.

    python scripts/many_threads.py random:124M --dtype int8 --threads 1 2 16 64 128

A step is a row of phases (kernels/README.md). Here every item of them, and every atomic operation by which threads
claim items and count those that are done, takes its time in turn, in a simulation of each phase, event by event:

- An item takes as long as its bytes at a thread's share of the memory's bandwidth, or its operations at its tiles'
  rate, whichever is longer. Rates of one thread are measured here; --memory-bandwidth is that of all.
- An atomic operation on a cache line that another core wrote last takes --transfer, and the line is nobody else's
  meanwhile; one on a line of the core's own takes what it takes here, measured. A compare-and-exchange before which
  another one has come fails, and its thread goes to the end of the queue: so much contention is more than is real.
- --one-counter is how it would be if all threads claimed items from one word and counted them in another.
- --nodes counts, byte by byte, what threads read from their own memory nodes: of weights that one thread has touched
  first, of weights as they are placed, of the KV cache. The calling thread is bound to no node: what it reads counts as
  another's.

--transfer is 50 ns by default: core-to-core-latency (https://github.com/nviennot/core-to-core-latency) has 46 ns for
Graviton3 and 51 for an Ice Lake Xeon, 23 within and 107 between an EPYC Milan's groups of 8 cores, and 108 to 197
between two sockets. All figures but those of one thread are predictions.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from scripts.sharing.nodes import HUGE_PAGE, ONE_PAGE, near_cache, near_weights, node_of_thread
from scripts.sharing.phases import Load, Phase, phases_of
from scripts.sharing.simulation import Outcome, run_phase
from tinygpt.bench.machine_limits import measure_limits
from tinygpt.config import ModelConfig
from tinygpt.errors import TinyGPTError
from tinygpt.execution.model_source import ModelSource
from tinygpt.hardware.cpu import cpu_name
from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.runtime.team import begin_step, claim, complete, new_teams

ROW_SECONDS = 0.5e-6  # of a layer norm or a conversion of a row of GPT-2 124M: see ROWS_PER_ITEM in team.py
CLAIMS = 200_000  # measured


@dataclass(frozen=True)
class Machine:
    """Seconds, and bytes and operations a second."""

    claim: float  # of an atomic operation on a line of one's own
    transfer: float  # of one on a line that another core has
    thread_bandwidth: float
    bandwidth: float
    tile_rates: dict[str, float]  # of one thread


def seconds_of_item(phase: Phase, threads: int, machine: Machine) -> float:
    """Of one, while as many threads as can work on the phase."""
    share = min(machine.thread_bandwidth, machine.bandwidth / min(threads, phase.items))
    reading = phase.bytes / share
    computing = phase.operations / machine.tile_rates[phase.tiles] if phase.tiles else 0.0
    return max(reading, computing) + phase.rows * ROW_SECONDS


def run_step(phases: list[Phase], threads: int, machine: Machine, has_one_counter: bool = False) -> Outcome:
    costs = threads, machine.claim, machine.transfer, has_one_counter
    outcomes = [run_phase(phase.items, seconds_of_item(phase, threads, machine), *costs) for phase in phases]
    return Outcome(*(sum(getattr(outcome, field.name) for outcome in outcomes) for field in fields(Outcome)))


# This machine.


@jit
def claim_all(team, items):
    begin_step(team)
    for _ in range(items):
        claim(team, items)
        complete(team, items)


def seconds_of_claim() -> float:
    """Of an item's claim on a line that no other thread has, the best of some runs."""
    times = []
    for _ in range(6):  # the first compiles
        (team,) = new_teams(np.zeros((1, 16), np.float32))
        start = time.perf_counter()
        claim_all(team, CLAIMS)
        times.append(time.perf_counter() - start)
    return min(times) / CLAIMS


def this_machine(phases: list[Phase], args: argparse.Namespace) -> Machine:
    limits = [measure_limits(kind, 1) for kind in sorted({phase.tiles for phase in phases if phase.tiles})]
    rates = {kind: rate for found in limits for kind, rate in found.tile_rates.items()}
    own = max(found.bandwidth for found in limits)
    return Machine(seconds_of_claim(), args.transfer * 1e-9, own, args.memory_bandwidth * 1e9, rates)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="random:124M", help="(default: %(default)s)")
    parser.add_argument("--dtype", default="int8", help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 16, 64, 128])
    parser.add_argument("--sequences", type=int, default=1, help="in the step (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1, help="new ones of each (default: %(default)s)")
    parser.add_argument("--context", type=int, default=256, help="positions attended to (default: %(default)s)")
    parser.add_argument("--transfer", type=float, default=50.0, help="nanoseconds (default: %(default)g)")
    parser.add_argument("--memory-bandwidth", type=float, default=300.0, help="GB/s of all (default: %(default)g)")
    parser.add_argument("--one-counter", action="store_true", help="show what one would cost, too")
    parser.add_argument("--nodes", type=int, nargs="+", default=[], help="of memory: count what lies on a thread's own")
    args = parser.parse_args()
    for name in ("threads", "sequences", "tokens", "context", "transfer", "memory_bandwidth", "nodes"):
        given = getattr(args, name)
        if min(given if isinstance(given, list) else [given], default=1) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, not {given}")
    try:
        source = ModelSource.open(args.model, args.dtype)
        load = Load(args.sequences, args.tokens, args.context)
        phases = phases_of(source.config, source.dtype, load)
    except (TinyGPTError, ValueError) as error:
        raise SystemExit(f"{args.model}: {error}") from None
    if args.nodes:
        print_nodes(source.config, source.dtype, load, args)
    else:
        print_table(phases, args, source.dtype, this_machine(phases, args))
    return 0


def print_nodes(config: ModelConfig, dtype: str, load: Load, args: argparse.Namespace) -> None:
    print(f"{args.model} in {dtype}, {load.sequences} sequences, {load.tokens} new tokens each:")
    print("bytes that a thread reads from its own node\n")
    print("| nodes | threads | weights that one touched | weights as placed | all in pages of 2 MB | KV cache |")
    print("|---|---|---|---|---|---|")
    for nodes in args.nodes:
        for threads in args.threads:
            node = node_of_thread(threads, nodes)
            shares = [near_weights(config, dtype, node, page) for page in (ONE_PAGE, None, HUGE_PAGE)]
            shares.append(near_cache(config, load, node))
            print(f"| {nodes} | {threads} | " + " | ".join(f"{share:.0%}" for share in shares) + " |")


def print_table(phases: list[Phase], args: argparse.Namespace, dtype: str, machine: Machine) -> None:
    items = [phase.items for phase in phases]
    print(f"{args.model} in {dtype}, {args.sequences} sequences, {args.tokens} new tokens each: {len(phases)} phases,")
    print(f"{min(items)} to {max(items)} items, {statistics.median(items):g} in the median, {sum(items)} claims a step")
    print(f"a thread of {cpu_name()}: {machine.thread_bandwidth / 1e9:.1f} GB/s, {machine.claim * 1e9:.1f} ns a claim;")
    print(f"predicted with {args.memory_bandwidth:g} GB/s, {args.transfer:g} ns for a line of another core:\n")
    print("| threads | ms a step | speedup | claims a second | on the busiest line | lost to claims | to uneven ends |")
    print("|---|---|---|---|---|---|---|")
    alone = run_step(phases, 1, machine)
    for has_one_counter in (False, True)[: 1 + args.one_counter]:
        for threads in args.threads:
            found = run_step(phases, threads, machine, has_one_counter)
            name = f"{threads}, one counter" if has_one_counter else f"{threads}"
            rates = f"{sum(items) / found.seconds / 1e6:.1f} M | {found.busiest / found.seconds / 1e6:.1f} M"
            shares = f"{found.claiming / found.seconds:.0%} | {found.uneven / found.seconds:.0%}"
            print(f"| {name} | {found.seconds * 1e3:.2f} | {alone.seconds / found.seconds:.1f} | {rates} | {shares} |")


if __name__ == "__main__":
    sys.exit(main())
