"""tinygpt beside torch on one GPU, on random checkpoints: decoding and prefill, and whether the results agree.

    python scripts/bench_gpu.py --all                       # four sizes, every batch and engine, in nine minutes
    python scripts/bench_gpu.py --models 124M --batches 1   # a part of it
    python scripts/bench_gpu.py --models tiny --device cpu  # a rehearsal without a GPU

The engines are ours, as `tinygpt bench --device cuda` measures it; transformers eager; transformers compiled with
mode="reduce-overhead" and a static cache; and torch's own operations with transformers' weights in a CUDA graph that is
captured by hand. Decoding is timed at batch 1 around position 160, and at all other batches around position 512; a
prefill is 1023 tokens and the first new one. Medians of the repeats are shown, the best in brackets. The first
model's float32 logits and 200 greedy tokens are compared with transformers'. Each model and dtype of a side runs in a
process of its own, and one that fails says why. Needs torch and transformers for all but our own engine.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path

from gpu.cases import MODELS
from gpu.plan import DTYPES, ENGINES, Choice, plan
from gpu.report import Results, Row, closing, opening, table_head, table_line
from gpu.run import run_jobs

from tinygpt.weights.random_checkpoint import SHAPES

BATCHES = (1, 8, 32, 128)
SECONDS_TO_FINISH = 3
MAX_STEPS = 256  # more would begin before the first position


def main() -> int:
    start = time.time()
    arguments = parse_arguments()
    values = vars(arguments) | {"models": MODELS if arguments.all else arguments.models}
    choice = Choice(**{field.name: values[field.name] for field in fields(Choice)})
    results = Results()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        log = arguments.log or scratch / "log"
        for row in run_jobs(plan(choice, scratch), start + arguments.seconds - SECONDS_TO_FINISH, log, results):
            if row is not None:
                show(row, results)
            if arguments.json:
                arguments.json.write_text(json.dumps(results.as_json(), indent=1), encoding="utf-8")
        if results.failed and arguments.log is None:  # else the reason would go with the folder
            print(log.read_text(errors="replace"), file=sys.stderr, flush=True)
    print(f"\n{closing(results)}\n\n{time.time() - start:.0f} s in all.", flush=True)
    return 0 if results.rows else 1


def show(row: Row, results: Results) -> None:
    """The row's line, before the first of them the table's head."""
    if len(results.rows) == 1:
        print(f"{opening(results)}\n\n{table_head()}")
    print(table_line(row, results), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--all", action="store_true", help=f"--models {' '.join(MODELS)}")
    sizes.add_argument("--models", nargs="+", choices=SHAPES, default=["124M"], help="default: 124M")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="default: 1 8 32 128")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES, help="default: all of them")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="default: all; int8 is ours alone")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=128, help="timed at once (default: 128)")
    parser.add_argument("--repeats", type=int, default=9, help="of each case, at the most (default: 9)")
    parser.add_argument("--seconds", type=float, default=540, help="of the whole run (default: 540)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here, anew after each case")
    parser.add_argument("--log", type=Path, metavar="FILE", help="append the engines' stderr; else a failure shows it")
    arguments = parser.parse_args()
    for name in ("batches", "steps", "repeats"):
        least = min(arguments.batches) if name == "batches" else getattr(arguments, name)
        if least < 1:
            parser.error(f"--{name} {least}: it must be 1 or more.")
    if arguments.steps > MAX_STEPS:
        parser.error(f"--steps {arguments.steps}: at batch 1 and its context, {MAX_STEPS} is the most.")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
