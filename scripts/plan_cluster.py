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
import sys
from dataclasses import replace
from pathlib import Path

# tinygpt lies beside scripts/, whether or not it is installed.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from cluster.measurement import check, overheads
from cluster.prediction import Load, Network, layouts, predict
from cluster.refusals import refuse, refuse_for

from tinygpt.bench.machine_limits import measure_limits
from tinygpt.bench.work import model_bytes
from tinygpt.config import ModelConfig
from tinygpt.errors import TinyGPTError
from tinygpt.execution.model_source import ModelSource
from tinygpt.hardware.cpu import cpu_name
from tinygpt.hardware.threads import physical_cores

GIB = 2**30  # bytes
HEADER = "| hosts | tensor x pipeline x replicas | GiB a host | ms a step | tokens/s | KB sent a step |"


def main() -> int:
    args = parse_arguments()
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
    print_predictions(args, config, dtype, load)
    return 0


def parse_arguments() -> argparse.Namespace:
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
    return parser.parse_args()


def print_predictions(args: argparse.Namespace, config: ModelConfig, dtype: str, load: Load) -> None:
    """A row for each layout of each number of hosts."""
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


if __name__ == "__main__":
    sys.exit(main())
