"""Faults, one after another: whatever happens, the answer is right, or one sentence.

    python scripts/faults.py                             # ten minutes, of Linux alone; as root, all of them
    python scripts/faults.py --minutes 60 --seed 7
    python scripts/faults.py --list
    python scripts/faults.py --only full_output --seed 1234567

Processes are killed and continued, disks become full at any byte, single calls fail, engines are forked within a step,
clocks jump, a thousand threads ask at once. Each trial has a seed of its own, which is printed with what was wrong;
--only and that seed, and --trials 1, repeat it. Scenarios that compile kernels anew take most of a minute each, and run
once for every twenty others (--slow: as often as they come). Ends with exit code 1 if anything was wrong.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from scenarios import disks, engine, injected, signals
from scenarios.lab import Lab, Skipped

MODULES = (signals, disks, injected, engine)
QUICK = {scenario: weight for module in MODULES for scenario, weight in module.SCENARIOS.items()}
SLOW = {scenario: weight for module in MODULES for scenario, weight in module.SLOW.items()}
BY_NAME = {scenario.__name__: scenario for scenario in (*QUICK, *SLOW)}
SLOW_SHARE = 0.05


def choose(generator: Random, slow_share: float):
    """A scenario, by its weight."""
    choices = SLOW if generator.random() < slow_share else QUICK
    return generator.choices(list(choices), list(choices.values()))[0]


def campaign(lab: Lab, args: argparse.Namespace) -> tuple[Counter, list[str], dict[str, str]]:
    """How often each scenario was tried, what was found, and which could not be tried."""
    tried, found, skipped = Counter(), [], {}
    end, seed = time.monotonic() + 60 * args.minutes, args.seed
    names = args.only or []
    while time.monotonic() < end and (args.trials is None or tried.total() < args.trials):
        generator = Random(seed)
        chosen = choose(generator, 0.5 if args.slow else SLOW_SHARE)
        scenario = BY_NAME[names[tried.total() % len(names)]] if names else chosen
        try:
            problem = scenario(lab, generator)
        except Skipped as reason:
            skipped[scenario.__name__], problem = str(reason), None
        tried[scenario.__name__] += 1
        if problem:
            found.append(f"{scenario.__name__} --seed {seed}: {problem}")
            print(f"WRONG: {found[-1]}\n", flush=True)
        seed += 1
    return tried, found, skipped


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--trials", type=int, help="at most so many (default: any number)")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; the next ones count up from it")
    parser.add_argument("--only", nargs="+", choices=BY_NAME, metavar="NAME", help="these scenarios, in turns")
    parser.add_argument("--slow", action="store_true", help="half of the trials compile kernels anew")
    parser.add_argument("--list", action="store_true", help="name the scenarios")
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(BY_NAME))
        return 0
    with tempfile.TemporaryDirectory(prefix="tinygpt-faults-") as folder:
        lab = Lab(Path(folder))
        tried, found, skipped = campaign(lab, args)
    for name, count in sorted(tried.items()):
        through = f", {lab.rounds[name]} times through all calls" if lab.rounds[name] else ""
        print(f"{count:6} {name}{through}{f' (skipped: {skipped[name]})' if name in skipped else ''}")
    print(f"{tried.total():6} trials, {len(found)} wrong")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
