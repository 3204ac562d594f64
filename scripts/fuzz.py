"""Damaged files through every loader, and random requests through every entry: nothing may break.

    python scripts/fuzz.py files --inputs 100000 --seed 1       # or --minutes 10
    python scripts/fuzz.py files --formats lora torch-zip
    python scripts/fuzz.py replay findings/lora-1               # a finding again
    python scripts/fuzz.py requests --requests 20000 --seed 1
    python scripts/fuzz.py coverage --minutes 5                 # guided by atheris, where that is installed

`files` damages every kind of file that tinygpt reads, where it hurts and at random, and loads it in a process with
limits of time and memory. A load must be right, as independent readers see the file, or end in one of tinygpt's own
errors; reach for no file outside its folder; and run nothing. Anything else is a finding: it is shrunk and written to
`--findings`, and the exit code is 1. An input follows from the seed and its number alone.
"""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

# tinygpt lies beside scripts/, whether or not it is installed.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))


def fuzz_files(args: argparse.Namespace) -> int:
    from fuzzing.findings import keep
    from fuzzing.formats import FORMATS
    from fuzzing.supervisor import Campaign

    formats = tuple(args.formats or FORMATS)
    if unknown := [name for name in formats if name not in FORMATS]:
        sys.exit(f"fuzz.py: no format {', '.join(unknown)}: give some of {', '.join(FORMATS)}")
    seconds = None if args.minutes is None else 60 * args.minutes
    inputs = args.inputs or (10_000 if seconds is None else None)
    print(f"seed {args.seed}, {inputs or 'endless'} inputs, {args.workers} workers", flush=True)
    campaign = Campaign(args.seed, formats, inputs, seconds, args.workers)
    report = campaign.run(lambda case, outcome: print(f"FOUND {outcome.what}\n  {case}", flush=True))
    print(table(report.counts))
    for folder in keep(report, args.findings):
        print(f"kept in {folder}")
    return int(bool(report.findings))


def table(counts: Counter) -> str:
    kinds = ("right", "refused", "unjudged", "finding")
    names = sorted({name for name, _ in counts})
    rows = [[name, *(str(counts[name, kind]) for kind in kinds)] for name in names]
    rows.append(["all", *(str(sum(counts[name, kind] for name in names)) for kind in kinds)])
    return "\n".join(
        ["| format | " + " | ".join(kinds) + " |", "|---" * 5 + "|", *("| " + " | ".join(r) + " |" for r in rows)]
    )


def replay(args: argparse.Namespace) -> int:
    from fuzzing.findings import read
    from fuzzing.supervisor import Judge
    from fuzzing.worker import Limits

    judge = Judge(Limits())
    outcome = judge.outcome(read(args.folder))
    judge.close()
    print(f"{outcome.kind}: {outcome.what}\n{outcome.detail}")
    return int(outcome.kind == "finding")


def fuzz_requests(args: argparse.Namespace) -> int:
    from fuzzing.company import ALLOWED_GROWTH, SHOWN, compare, settings
    from fuzzing.seeds import write_world
    from tqdm import tqdm

    wrong, first, ends = [], 0, Counter()
    print(f"seed {args.seed}, {args.requests} requests", flush=True)
    with TemporaryDirectory() as folder, tqdm(total=args.requests, disable=None) as bar:
        write_world(Path(folder))
        for model, options, share in settings(Path(folder)):
            numbers = range(first, min(first + round(share * args.requests), args.requests))
            first = numbers.stop
            comparison = compare(model, args.seed, numbers, bar.update, **options)
            name = ", ".join([Path(model).name if model == "demo" else "tiny", *options])
            counts = ", ".join(f"{count} {end}" for end, count in comparison.ends.most_common())
            print(
                f"{name}: {counts}; {len(comparison.differences)} differ; {comparison.memory_text()}",
                flush=True,
            )
            for difference in comparison.differences[:SHOWN]:
                print(f"WRONG: {difference}", flush=True)
            wrong += comparison.differences
            if comparison.growth() > ALLOWED_GROWTH:
                wrong.append(f"memory grew {comparison.growth():.3f} times")
                print(f"WRONG: {wrong[-1]}", flush=True)
            ends += comparison.ends
    print(f"{ends.total()} requests: {dict(ends)}; {len(wrong)} wrong")
    return int(bool(wrong))


def fuzz_guided(args: argparse.Namespace) -> int:
    from fuzzing.guided import run

    run(args.format, args.file, round(60 * args.minutes), args.seed, args.findings)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    files = commands.add_parser("files", help="damaged files")
    files.add_argument("--inputs", type=int, help="how many (default: 10000, or what --minutes allows)")
    files.add_argument("--minutes", type=float)
    files.add_argument("--seed", type=int, default=1)
    files.add_argument("--formats", nargs="*", help="some alone (default: all)")
    files.add_argument("--workers", type=int, default=os.cpu_count())
    files.add_argument("--findings", type=Path, default=Path("findings"), help="folder for what is found")
    files.set_defaults(run=fuzz_files)
    again = commands.add_parser("replay", help="a finding again")
    again.add_argument("folder", type=Path)
    again.set_defaults(run=replay)
    requests = commands.add_parser("requests", help="random requests")
    requests.add_argument("--requests", type=int, default=1000)
    requests.add_argument("--seed", type=int, default=1)
    requests.set_defaults(run=fuzz_requests)
    guided = commands.add_parser("coverage", help="damaged files, guided by coverage (pip install atheris)")
    guided.add_argument("--format", default="torch-legacy")
    guided.add_argument("--file", help="of the format (default: its first)")
    guided.add_argument("--minutes", type=float, default=1)
    guided.add_argument("--seed", type=int, default=1)
    guided.add_argument("--findings", type=Path, default=Path("findings"))
    guided.set_defaults(run=fuzz_guided)
    args = parser.parse_args()
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
