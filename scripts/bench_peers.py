"""tinygpt next to other engines, in one run, on the same checkpoint and token ids.

    python scripts/bench_peers.py                          # random weights of GPT-2 124M's shape
    python scripts/bench_peers.py --model random:355M --long
    python scripts/bench_peers.py --model FOLDER           # a checkpoint, "demo", or a Hub id
    python scripts/bench_peers.py --look                   # activations, steering and traces, next to TransformerLens
    python scripts/bench_peers.py --isa avx2               # as on a CPU without AVX-512
    python scripts/bench_peers.py --device cuda --dtypes float32 bfloat16    # next to torch, with CUDA graphs

Each peer is installed into a virtual environment of its own, 8 GB in all, and has files of its own, 7 GB for 124M;
`--peers` without names leaves them out. Engines run in processes of their own, and take turns. The table has
milliseconds for each decode step, or for a prefill: the best of the repeats, and the median; the ratio of the best
times; and why a peer is absent.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from peers.setup import (
    AVX2,
    DTYPES,
    LENS,
    OUR_LOOK,
    OURS,
    PEERS,
    PeerError,
    Setup,
    Worker,
    caption,
    held_to_avx2,
    prepare,
    say,
)

from tinygpt.bench import roofline
from tinygpt.bench.report import table, threads_text
from tinygpt.bench.roofline import Run
from tinygpt.hardware import cpu_name
from tinygpt.weights.config import PRECISIONS
from tinygpt.weights.families.gpt2 import model_config

PAUSE = 0.3  # seconds: OpenMP threads without work spin for 0.2 s
TOO_SLOW = 20  # times our milliseconds
AGREEMENT_PROMPT = 50


@dataclass(frozen=True)
class Case:
    """`new` tokens for each of `batch` prompts of `prompt` tokens; new = 1 is a prefill. look: an engine's method."""

    name: str
    batch: int
    prompt: int
    new: int
    look: str = ""

    @property
    def is_prefill(self) -> bool:
        return self.new == 1

    @property
    def call(self) -> str:
        return self.look or ("prefill_ms" if self.is_prefill else "step_ms")


CASES = (
    Case("decode, batch 1", 1, 50, 100),
    Case("decode, batch 8", 8, 32, 64),
    Case("decode, batch 32", 32, 32, 64),
    Case("prefill 512", 1, 512, 1),
)
LOOK_CASES = (
    Case("all arrays of 128 tokens", 1, 128, 1, "read_ms"),
    Case("32 steered tokens", 1, 16, 32, "steer_ms"),
    Case("32 steered tokens, batch 8", 8, 16, 32, "steer_ms"),
    Case("causal trace of 16 positions", 2, 16, 1, "trace_ms"),
)
LONG_CASES = (
    Case("decode at 277, batch 5", 5, 277, 24),
    Case("decode at 1000, batch 1", 1, 1000, 24),
    Case("decode at 1000, batch 8", 8, 1000, 24),
)


@dataclass
class Row:
    """One case in one dtype: milliseconds of every repeat by engine, and the machine's limit."""

    case: str
    dtype: str
    batch: int
    is_prefill: bool
    ms: dict[str, list[float]]
    floor_ms: float | None = None
    limit: str | None = None

    @property
    def best_peer(self) -> str | None:
        peers = {name: min(times) for name, times in self.ms.items() if name != OURS.name and times}
        return min(peers, key=peers.__getitem__) if peers else None

    @property
    def ratio(self) -> float | None:
        """Above 1, tinygpt is faster."""
        ours = self.ms.get(OURS.name)
        return min(self.ms[self.best_peer]) / min(ours) if ours and self.best_peer else None


@dataclass
class Results:
    rows: list[Row] = field(default_factory=list)
    agreement: dict[str, dict[str, str]] = field(default_factory=dict)  # dtype, engine -> distance of logits
    limits: dict[str, dict[str, float]] = field(default_factory=dict)  # dtype -> the best of each
    reference: list[float] | None = None  # logits of the first engine in the first dtype


def floor(
    case: Case, config: dict, dtype: str, limits: dict[str, float], cache: str | None, device: str = "cpu"
) -> tuple[float, str]:
    """Return the least milliseconds of a pass and its limit: memory, or the peak of multiplying."""
    block_rate, head_rate = (limits[kind] for kind in roofline.tiles_of(dtype, device))
    one_pass = Run(num_steps=1, num_prompt_steps=1, num_together=1)
    of_pass = roofline.Case(case.batch, (case.prompt,), 0 if case.is_prefill else case.new)
    cache = cache or PRECISIONS[dtype].kv_cache
    work = roofline.work_of(of_pass, one_pass, model_config(config), dtype, cache)
    seconds = {
        "bandwidth": work.bytes_read / limits["bandwidth"],
        "tile peak": work.in_blocks / block_rate + work.in_head / head_rate,
    }
    limit = max(seconds, key=seconds.__getitem__)
    return 1e3 * seconds[limit], limit


class Engines:
    """The processes of one dtype. An engine that fails, or is far slower than ours, is absent from then on."""

    def __init__(self, setup: Setup, dtype: str, threads: int, logs: Path, cache: str | None = None):
        logs.mkdir(parents=True, exist_ok=True)
        self.setup = setup
        self.dtype = dtype
        self.limits = {}
        places = {name: place for (name, kind), place in setup.places.items() if kind == dtype}
        self.workers = {
            name: Worker(at, dtype, threads, logs / f"{name}.log", cache) for name, at in places.items()
        }

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()

    def last_logits(self) -> dict[str, list[float]]:
        (ids,) = self._token_ids(1, AGREEMENT_PROMPT)
        logits_of = {name: self._call(name, "last_logits", ids=ids) for name in list(self.workers)}
        return {name: logits for name, logits in logits_of.items() if logits is not None}

    def measure(self, case: Case, repeats: int) -> Row:
        """Time each engine in turn, `repeats` times after a warm-up."""
        row = Row(case.name, self.dtype, case.batch, case.is_prefill, {name: [] for name in self.workers})
        ids = self._token_ids(case.batch, case.prompt)
        arguments = {} if case.is_prefill else {"new": case.new}
        for turn in range(1 + repeats):
            for name in list(self.workers):
                ms = self._call(name, case.call, ids=ids, **arguments)
                row.ms[name] += [ms] * (turn > 0 and ms is not None)
            self._leave_out_slow(row)
            if OURS.name in self.workers:
                now = self._call(OURS.name, "limits") or {}
                self.limits |= {kind: max(rate, self.limits.get(kind, 0)) for kind, rate in now.items()}
        return row

    def _call(self, name: str, method: str, **arguments: Any) -> Any:
        """Return the result of an engine's method, or None if it fails."""
        time.sleep(PAUSE)
        try:
            return self.workers[name].call(method, **arguments)
        except PeerError as error:
            self._leave_out(name, str(error))

    def _leave_out_slow(self, row: Row) -> None:
        """Judge measured turns alone: some engines compile during the warm-up."""
        ours = row.ms.get(OURS.name)
        for name in list(self.workers):
            times = row.ms[name]
            if ours and times and min(times) > TOO_SLOW * min(ours):
                text = (
                    f"{row.case} took {min(times):.0f} ms, over {TOO_SLOW} times ours of {min(ours):.1f} ms"
                )
                self._leave_out(name, text)

    def _leave_out(self, name: str, why: str) -> None:
        self.setup.absent[name, self.dtype] = why
        say(f"{name} {self.dtype} is absent: {why}")
        self.workers.pop(name).close()

    def _token_ids(self, batch: int, prompt: int) -> list[list[int]]:
        return (
            np.random.default_rng(0).integers(self.setup.config["vocab_size"], size=(batch, prompt)).tolist()
        )


def agreement(logits: list[float], reference: list[float]) -> str:
    top = "the same" if np.argmax(logits) == np.argmax(reference) else "another"
    largest = np.abs(np.subtract(logits, reference)).max()
    return f"{top} top-1, largest difference {largest:.2g} (logits' std {np.std(reference):.2g})"


def markdown(rows: Iterable[Row], engines: list[str], absent: dict[tuple[str, str], str]) -> str:
    """Return the table, with medians in brackets and the best peer's time in bold."""
    lines = []
    for row in rows:
        cells = []
        for engine in engines:
            times = row.ms.get(engine)
            text = "absent" if (engine, row.dtype) in absent else "-"
            text = f"{min(times):.2f} ({statistics.median(times):.2f})" if times else text
            cells.append(f"**{text}**" if engine == row.best_peer else text)
        ours = row.ms.get(OURS.name)
        share = f"{row.floor_ms / min(ours):.0%} ({row.limit})" if ours and row.floor_ms else "-"
        lines.append([row.case, row.dtype, *cells, f"**{row.ratio:.2f}**" if row.ratio else "-", share])
    return table(["case", "dtype", *engines, "best peer / ours", "of the limit"], lines)


def report(setup: Setup, results: Results, engines: list[str], threads: int) -> str:
    sizes = ", ".join(f"{name} {setup.config[name]}" for name in ("n_layer", "n_embd", "vocab_size"))
    lines = [
        f"{sizes}; {threads_text(threads)}; ms, best (median). The ratio is that of the best times.\n",
        markdown(results.rows, engines, setup.absent) + "\n",
    ]
    lines += [f"- {engine} {dtype} is absent: {why}" for (engine, dtype), why in setup.absent.items()]
    for dtype, limits in results.limits.items():
        rates = [
            f"{kind} tile {rate / 1e9:.0f} Gop/s" for kind, rate in limits.items() if kind != "bandwidth"
        ]
        lines.append(f"- {dtype} limits: reading {limits['bandwidth'] / 1e9:.1f} GB/s, {', '.join(rates)}")
    for dtype, distances in results.agreement.items():
        lines += [
            f"- {engine} {dtype} compared with the first engine: {text}" for engine, text in distances.items()
        ]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    source = "a folder, demo, a Hub id, or random:SHAPE (%(default)s)"
    add("--model", default="random:124M", help=source)
    add("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    add("--peers", nargs="*", choices=[peer.name for peer in PEERS], help="default: all of them")
    add("--batch-sizes", nargs="+", type=int, metavar="N", help="decode at these, in place of all")
    add("--kv-cache-dtype", choices=roofline.CACHE_BYTES, help="of tinygpt and llama.cpp")
    add("--isa", choices=["avx2"], help="hold every engine to these instructions")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: of tinygpt and torch alone")
    add("--look", action="store_true", help="activations, steering and traces, next to TransformerLens alone")
    add("--long", action="store_true", help="also decode from positions 277 and 1000, two repeats")
    add("--threads", type=int, default=2, help="of every engine (default: 2)")
    add("--repeats", type=int, default=5)
    cache = Path.home() / ".cache" / "tinygpt" / "peers"
    add("--work", type=Path, default=cache, help="environments and files of the peers (%(default)s)")
    add("--json", type=Path, help="every time measured; default: results.json in the work folder")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    folder = arguments.work.resolve()
    ours = OURS
    peers = [peer for peer in PEERS if arguments.peers is None or peer.name in arguments.peers]
    if arguments.look:
        ours, peers, arguments.dtypes = OUR_LOOK, [LENS], ["float32"]
    if arguments.isa == "avx2":
        os.environ.update(AVX2)  # for every process that is started
        peers = held_to_avx2(peers)
    if arguments.device == "cuda":
        os.environ["BENCH_DEVICE"] = "cuda"
        peers = [peer for peer in peers if peer.has_gpu]
    setup = prepare(folder, arguments.model, [ours, *peers], arguments.dtypes)
    results = Results()
    kept = arguments.json or folder / "results.json"
    for dtype in arguments.dtypes:
        run(setup, dtype, arguments, folder / "logs", results, kept)
    print(report(setup, results, [ours.name, *(peer.name for peer in peers)], arguments.threads))
    if arguments.device == "cpu":
        print("\n" + caption(f"CPU: {cpu_name()}"))
    say(f"every time is in {kept}")


def run(
    setup: Setup, dtype: str, arguments: argparse.Namespace, logs: Path, results: Results, kept: Path
) -> None:
    """Measure every case in one dtype, and write all results after each."""
    cases = [Case(f"decode, batch {n}", n, 32, 64) for n in arguments.batch_sizes or ()] or CASES
    cases = LOOK_CASES if arguments.look else cases
    repeats = dict.fromkeys(cases, arguments.repeats) | (
        dict.fromkeys(LONG_CASES, 2) if arguments.long else {}
    )
    engines = Engines(setup, dtype, arguments.threads, logs, arguments.kv_cache_dtype)
    try:
        logits = engines.last_logits()
        results.reference = results.reference or next(iter(logits.values()), None)
        results.agreement[dtype] = {name: agreement(body, results.reference) for name, body in logits.items()}
        for case, count in repeats.items():
            if case.prompt + case.new > setup.config["n_positions"]:
                say(f"{case.name} is left out: the model has {setup.config['n_positions']} positions")
                continue
            say(f"measuring {case.name}, {dtype}")
            row = engines.measure(case, count)
            if engines.limits and not case.look:
                results.limits[dtype] = engines.limits
                known = setup.config, dtype, engines.limits, arguments.kv_cache_dtype, arguments.device
                row.floor_ms, row.limit = floor(case, *known)
            results.rows.append(row)
            head = {
                "command": sys.argv,
                "cpu": cpu_name(),
                "threads": arguments.threads,
                "config": setup.config,
            }
            absent = [
                {"engine": name, "dtype": dtype, "why": why} for (name, dtype), why in setup.absent.items()
            ]
            rows = [{**asdict(row), "best_peer": row.best_peer, "ratio": row.ratio} for row in results.rows]
            body = {"rows": rows, "limits": results.limits, "absent": absent, "agreement": results.agreement}
            kept.write_text(json.dumps({**head, **body}, indent=1))
    finally:
        engines.close()


if __name__ == "__main__":
    main()
