"""tinygpt beside the engines a user would pick instead, in one run, on the same checkpoint and token ids.

    python scripts/bench_peers.py                          # random weights of GPT-2 124M's shape
    python scripts/bench_peers.py --shape 355M --long      # and of the next size, deep in the context too
    python scripts/bench_peers.py --model FOLDER           # a checkpoint of your own, "demo", or a Hub id
    python scripts/bench_peers.py --isa avx2               # as on a CPU without AVX-512
    python scripts/bench_peers.py --batch-sizes 1 2 4 8 16 32 --json FILE    # for plot_peers.py to draw

Each peer is installed into a virtual environment of its own, and each engine and dtype runs in a process of its own.
They take turns, so that a slow moment of the machine hits all. The table has milliseconds per decode step, without the
prompt pass, or per prefill: the best of the repeats, and the median. The ratio is the best peer's best time over ours.
The machine's limits are measured in the same turns. A peer that cannot be installed or fails is named, with the reason.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

# tinygpt lies beside scripts/, whether or not it is installed.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from peers.cases import CASES, LONG_CASES, Case, decode_cases, floor
from peers.catalogue import AVX2, DTYPES, OURS, PEERS, held_to_avx2
from peers.measure import Engines
from peers.prepare import Setup, prepare
from peers.progress import say
from peers.table import Agreement, Row, markdown

from tinygpt.bench.work import CACHE_BYTES
from tinygpt.hardware.cpu import cpu_name
from tinygpt.weights.random_checkpoint import SHAPES


@dataclass
class Results:
    """What a run has found so far."""

    rows: list[Row] = field(default_factory=list)
    agreements: dict[str, dict[str, Agreement]] = field(default_factory=dict)  # dtype, engine
    limits: dict[str, dict[str, float]] = field(default_factory=dict)  # dtype -> the best of each
    reference: list[float] | None = None  # logits of the first engine and dtype: ours, in float32, if it is asked for


def main() -> None:
    arguments = parse_arguments()
    work = arguments.work.resolve()
    peers = [peer for peer in PEERS if arguments.peers is None or peer.name in arguments.peers]
    if arguments.isa == "avx2":
        os.environ.update(AVX2)  # for every process that is started from here
        peers = held_to_avx2(peers)
    setup = prepare(work, arguments.model, arguments.shape, peers, arguments.dtypes)
    if arguments.prepare_only:
        return
    results, kept = Results(), arguments.json or work / "results.json"
    for dtype in arguments.dtypes:
        for _ in run(setup, dtype, arguments, work / "logs", results):
            write_json(kept, setup, results, arguments)  # a run that is cut off keeps what it has found
        complete(setup, results, dtype, arguments.kv_cache_dtype)
    print(report(setup, results, arguments.threads))
    write_json(kept, setup, results, arguments)
    say(f"every time is in {kept}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a local folder, demo, or a Hub id; default: random weights of --shape")
    parser.add_argument("--shape", choices=SHAPES, default="124M")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--peers", nargs="*", choices=[peer.name for peer in PEERS], help="default: all of them")
    parser.add_argument(
        "--batch-sizes", nargs="+", type=int, metavar="N", help="decode alike at these, in place of all"
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=CACHE_BYTES,
        help="of tinygpt and llama.cpp; the others have one of their own (default: each engine's own)",
    )
    parser.add_argument(
        "--isa",
        choices=["avx2"],
        help="hold every engine to these instructions (not onnxruntime, which has no switch, nor transformers in"
        " bfloat16, which would take half an hour)",
    )
    parser.add_argument("--long", action="store_true", help="also decode from position 1000 of 1024")
    parser.add_argument("--threads", type=int, default=2, help="of every engine (default: 2)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--long-repeats", type=int, default=2, help="of --long, whose prompts take their time")
    cache = Path.home() / ".cache" / "tinygpt" / "peers"
    parser.add_argument("--work", type=Path, default=cache, help="environments and files of the peers (%(default)s)")
    parser.add_argument("--json", type=Path, help="every time measured; default: results.json in the work folder")
    parser.add_argument("--prepare-only", action="store_true", help="install and convert everything, measure nothing")
    return parser.parse_args()


def run(setup: Setup, dtype: str, arguments: argparse.Namespace, logs: Path, results: Results) -> Iterator[Row]:
    """Every case in one dtype; each row when it has been measured."""
    cases = decode_cases(arguments.batch_sizes) if arguments.batch_sizes else CASES
    repeats = dict.fromkeys(cases, arguments.repeats)
    if arguments.long:
        repeats |= dict.fromkeys(LONG_CASES, arguments.long_repeats)
    with Engines(setup, dtype, arguments.threads, logs, arguments.kv_cache_dtype) as engines:
        agreements = results.agreements.setdefault(dtype, {})
        for engine, logits in engines.last_logits():
            results.reference = results.reference or logits
            agreements[engine] = Agreement.of(logits, results.reference)
            say(f"{engine} {dtype}: {agreements[engine]}")
        for case, count in repeats.items():
            if fits(case, setup.config):
                say(f"measuring {case.name}, {dtype}")
                results.rows.append(engines.measure(case, count))
                yield results.rows[-1]
        limits = engines.limits
    if limits:
        results.limits[dtype] = {name: max(turn[name] for turn in limits) for name in limits[0]}


def fits(case: Case, config: dict) -> bool:
    has_room = case.prompt + case.new <= config["n_positions"]
    if not has_room:
        say(f"{case.name} is left out: the model has {config['n_positions']} positions")
    return has_room


def complete(setup: Setup, results: Results, dtype: str, kv_cache_dtype: str | None) -> None:
    """Add to the rows of a dtype what its last turn tells: the machine's limit, and which engines are absent."""
    for row in results.rows:
        if row.dtype == dtype:
            if dtype in results.limits:
                row.floor = floor(row.case, setup.config, dtype, results.limits[dtype], kv_cache_dtype)
            row.absent = [engine for engine, absent_dtype in setup.absent if absent_dtype == dtype]


def report(setup: Setup, results: Results, threads: int) -> str:
    c = setup.config
    lines = [
        f"n_layer {c['n_layer']}, n_embd {c['n_embd']}, vocab_size {c['vocab_size']}; {threads} threads; ms, best "
        "(median). The ratio is that of the best times.",
        "",
        markdown(results.rows, [OURS.name, *(peer.name for peer in PEERS)]),
        "",
    ]
    lines += [f"- {engine} {dtype} is absent: {why}" for (engine, dtype), why in setup.absent.items()]
    lines += [f"- {dtype} limits: {describe(limits)}" for dtype, limits in results.limits.items()]
    for dtype, agreements in results.agreements.items():
        lines += [f"- {engine} {dtype} beside the first engine: {text}" for engine, text in agreements.items()]
    return "\n".join(lines)


def describe(limits: dict[str, float]) -> str:
    rates = [f"{kind} tile {rate / 1e9:.0f} Gop/s" for kind, rate in limits.items() if kind != "bandwidth"]
    return ", ".join([f"reading {limits['bandwidth'] / 1e9:.1f} GB/s", *rates])


def write_json(path: Path, setup: Setup, results: Results, arguments: argparse.Namespace) -> None:
    content = {
        "command": sys.argv,
        "cpu": cpu_name(),
        "threads": arguments.threads,
        "config": setup.config,
        "peers": {peer.name: {"requirements": peer.requirements, "forms": peer.forms} for peer in PEERS},
        "rows": [row.as_json() for row in results.rows],
        "limits": results.limits,
        "absent": [{"engine": e, "dtype": d, "why": why} for (e, d), why in setup.absent.items()],
        "agreement": {
            dtype: {engine: asdict(a) for engine, a in of_dtype.items()}
            for dtype, of_dtype in results.agreements.items()
        },
    }
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1))
    partial.replace(path)


if __name__ == "__main__":
    main()
