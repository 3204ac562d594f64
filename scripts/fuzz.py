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
    args = parser.parse_args()
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
