"""What is impossible, said before any work."""

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tinygpt.config import ModelConfig
from tinygpt.errors import how_to_install
from tinygpt.hardware.threads import physical_cores
from tinygpt.parallel.cut import check_cut
from tinygpt.parallel.launched import find_mpiexec
from tinygpt.parallel.layout import MAX_TENSOR_SIZE, Layout

from .measurement import NEW_TOKENS
from .prediction import can_be_cut


def refuse(args: argparse.Namespace) -> None:
    """SystemExit for what is impossible, before any work."""
    at_least = {"hosts": 1, "batch_size": 1, "context": 1, "latency": 0}
    for name, least in at_least.items():
        given = getattr(args, name)
        if min(given if isinstance(given, list) else [given]) < least:
            raise SystemExit(f"{_flag(name)} is {_shown(given)}: give numbers of {least} or more.")
    for name in ("bandwidth", "efficiency", "memory_bandwidth"):
        given = getattr(args, name)
        if given is not None and not 0 < given < float("inf"):
            raise SystemExit(f"{_flag(name)} is {given:g}: give a number above 0.")
    if args.efficiency > 1:
        raise SystemExit(f"--efficiency is {args.efficiency:g}: give a share, of 1 at most.")
    if args.check or args.overheads:
        _refuse_what_cannot_be_measured(args)


def _refuse_what_cannot_be_measured(args: argparse.Namespace) -> None:
    flag, ranks = ("--overheads", [1, 2]) if args.overheads else ("--check", args.check)
    if args.overheads and args.check:
        raise SystemExit("--overheads and --check are two measurements: give one of them.")
    if ranks[0] != 1:
        raise SystemExit(f"--check begins with {ranks[0]}: begin with 1, by which the others are predicted.")
    if not all(1 <= each <= MAX_TENSOR_SIZE for each in ranks):
        raise SystemExit(f"--check has {_shown(ranks)}: give numbers from 1 to {MAX_TENSOR_SIZE}.")
    if max(ranks) > 1 and (find_spec("mpi4py") is None or find_mpiexec() is None):
        missing = "mpi4py" if find_spec("mpi4py") is None else "mpiexec"
        raise SystemExit(f"{flag} of several ranks needs {missing}, which comes with: {how_to_install('mpi')}.")
    if args.context <= NEW_TOKENS // 2:
        raise SystemExit(f"--context is {args.context}: what is measured takes more than {NEW_TOKENS // 2} positions.")
    if args.overheads and not Path("/proc/net/dev").exists():
        raise SystemExit("--overheads counts bytes as Linux shows them: run it there.")
    if args.overheads and physical_cores() < 2:
        raise SystemExit(f"--overheads compares two threads with two ranks, and there is {physical_cores()} core.")


def refuse_for(args: argparse.Namespace, config: ModelConfig, dtype: str) -> None:
    """SystemExit for what is impossible with a model, before any work."""
    if args.context > config.n_positions and not config.has_alibi:
        raise SystemExit(f"--context is {args.context} and {args.model} has {config.n_positions} positions.")
    for ranks in [2] * args.overheads + (args.check or []):
        if not can_be_cut(Layout(ranks), config, dtype):
            check_cut(Layout(ranks), config, dtype, "cpu")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _shown(given: Any) -> str:
    return " ".join(map(str, given)) if isinstance(given, list) else str(given)
