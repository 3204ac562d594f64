"""`tinygpt convert`: a checkpoint packed ahead of time, in another precision, instead of at every start."""

import argparse
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygpt.cli.flags import dtype
from tinygpt.cli.loading import set_thread_pools
from tinygpt.cli.messages import elapsed, say
from tinygpt.cli.model_flags import CHECKPOINT, add_flag, one_of_both
from tinygpt.config import DTYPES, STORAGE_DTYPE
from tinygpt.errors import RequestError, TinyGPTError

if TYPE_CHECKING:
    from tinygpt.evaluation.calibration import Calibration
    from tinygpt.execution.model_source import ModelSource
    from tinygpt.weights.checkpoint import Checkpoint

USAGE = "tinygpt convert [flags] SRC DST"
FOLDER = "./converted"
ALPHA = 0.5
CALIBRATED = ("int8", "int4")
SUMMARY = "pack a checkpoint ahead of time, as int8 or in another precision, for faster starts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="?", metavar="SRC", help=CHECKPOINT)
    parser.add_argument("target", nargs="?", metavar="DST", help="the folder to make, which --model then takes")
    add_flag(parser, "model", default=None, help="the same as SRC, as in all commands; DST is then the one argument")
    parser.add_argument(
        "--dtype",
        type=dtype,
        choices=(*DTYPES, STORAGE_DTYPE),
        default="int8",
        help="precision of the weights (default: %(default)s)",
    )
    parser.add_argument(
        "--calibrate",
        metavar="TEXT",
        type=Path,
        help="a file of text like what the model will read: channels are evened out by their sizes on it, where the "
        "default goes by the weights alone (int8, int4)",
    )
    parser.add_argument(
        "--act-scales",
        metavar="FILE",
        type=Path,
        help="the sizes, in place of a text, as SmoothQuant's generate_act_scales.py writes them",
    )
    parser.add_argument(
        "--smooth",
        metavar="ALPHA",
        type=float,
        help=f"with either: how much of a channel's size goes into the activations, 0 to 1 (default: {ALPHA})",
    )
    add_flag(parser, "threads")


def run(args: argparse.Namespace) -> None:
    """Write DST, whole or not at all. RequestError, before any work, where there is something already."""
    _settle_source(args)
    target = Path(args.target).expanduser().absolute()
    _check_target(target)
    _check_calibration(args)
    set_thread_pools(args.threads)
    with _becoming(target) as folder:
        before, after = _convert(args, folder)
    say(f"{target}: {after / 1e6:.1f} MB of {args.dtype}, made from {before / 1e6:.1f} MB; use it as --model {target}")


def _settle_source(args: argparse.Namespace) -> None:
    """Have SRC and DST where they belong: with --model, the one argument is DST."""
    if args.model is not None and args.target is None:
        args.source, args.target = None, args.source
    args.source = one_of_both("SRC", args.source, args.model)
    if args.source is None or args.target is None:
        raise RequestError(
            f"{USAGE} takes two arguments, a checkpoint and the folder to make: give them, as in tinygpt convert "
            f"{args.source or args.target or 'demo'} {FOLDER} --dtype int8."
        )


def _check_target(target: Path) -> None:
    if target.is_dir() and not any(target.iterdir()):
        return
    if os.path.lexists(target):
        raise RequestError(f"DST {target} is there already, and not an empty folder: remove it, or name another one.")
    if not target.parent.is_dir():
        raise RequestError(f"the folder of DST {target} does not exist: create it first.")


def _check_calibration(args: argparse.Namespace) -> None:
    given = [flag for flag in ("--calibrate", "--act-scales") if getattr(args, flag[2:].replace("-", "_")) is not None]
    flags = given + ["--smooth"] * (args.smooth is not None)
    if flags and args.dtype not in CALIBRATED:
        raise RequestError(
            f"dtype is {args.dtype!r}, whose activations are not quantised, and {flags[0]} is given: leave it out, or "
            f"give --dtype {' or '.join(CALIBRATED)}."
        )
    if len(given) > 1:
        raise RequestError("--calibrate and --act-scales are both given: give one, a text or sizes measured before.")
    if flags == ["--smooth"]:
        raise RequestError(
            f"--smooth {args.smooth} has nothing to go by: give --calibrate TEXT or --act-scales FILE too."
        )
    if args.smooth is not None and not 0 <= args.smooth <= 1:
        raise RequestError(f"--smooth is {args.smooth} and must be a number from 0 to 1: {ALPHA} is usual.")


@contextmanager
def _becoming(target: Path) -> Iterator[Path]:
    """A folder that becomes `target` once the block has succeeded: nobody ever sees half a checkpoint."""
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        if target.is_dir():
            target.rmdir()  # empty; Windows renames onto nothing that exists
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _written(target: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TinyGPTError(
            f"DST {target} cannot be written ({error.strerror or error}), and nothing is left of it: make room, or "
            "name another folder."
        ) from None


def _convert(args: argparse.Namespace, folder: Path) -> tuple[int, int]:
    """Fill the folder; the sizes of the weights' files in bytes, before and after."""
    from tinygpt.execution.model_source import ModelSource
    from tinygpt.weights.hub import CONFIG_FILES, TOKENIZER_FILES
    from tinygpt.weights.random_checkpoint import is_random
    from tinygpt.weights.stored.float8 import write_float8
    from tinygpt.weights.stored.packed import PackedCheckpoint, write_packed

    if is_random(args.source):
        raise RequestError(f"SRC {args.source} is drawn in memory and has no files: give a checkpoint that has.")
    source = ModelSource.open(args.source, "auto" if args.dtype == STORAGE_DTYPE else args.dtype)
    checkpoint = source.checkpoint
    if isinstance(checkpoint, PackedCheckpoint):
        raise RequestError(f"SRC {args.source} is converted already: give the checkpoint that it was made from.")
    if args.dtype == STORAGE_DTYPE:
        write = partial(write_float8, folder, checkpoint, args.source)
    else:
        write = partial(write_packed, folder, *_pack(args, source))
    with elapsed(f"writing {args.target}"), _written(args.target):
        after = write().stat().st_size
        for name in (*CONFIG_FILES, *TOKENIZER_FILES):
            if (checkpoint.folder / name).is_file():
                shutil.copyfile(checkpoint.folder / name, folder / name)
    return sum(file.stat().st_size for file in checkpoint.files), after


def _pack(args: argparse.Namespace, source: "ModelSource") -> tuple[dict[str, Any], dict[str, object]]:
    """The arrays to write, and what the file says of them."""
    from tinygpt.hardware.threads import thread_count
    from tinygpt.kernels.cpu import packed
    from tinygpt.kernels.cpu.params import load_calibrated

    checkpoint = source.checkpoint
    calibration = _calibration(args, checkpoint)
    with elapsed(f"packing {args.source} as {args.dtype}"):
        params = load_calibrated(checkpoint, args.dtype, thread_count(args.threads), calibration)
    metadata = {
        "dtype": args.dtype,
        "tied": str(checkpoint.tied).lower(),
        "vocab_size": checkpoint.config.vocab_size,
        "source": args.source,
        **packed.PACKING,
        **({} if calibration is None else calibration.about),
    }
    return packed.arrays_of(params), metadata


def _calibration(args: argparse.Namespace, checkpoint: "Checkpoint") -> "Calibration | None":
    """What --calibrate or --act-scales ask for."""
    from tinygpt.evaluation.calibration import calibrate, read_act_scales
    from tinygpt.evaluation.texts import read_text
    from tinygpt.execution.model_source import load_tokenizer

    share = ALPHA if args.smooth is None else args.smooth
    if args.act_scales is not None:
        return read_act_scales(args.act_scales, checkpoint, share)
    if args.calibrate is None:
        return None
    text = read_text("--calibrate", args.calibrate)
    token_ids = load_tokenizer(checkpoint).encode(text)
    with elapsed(f"calibrating on {args.calibrate}"):
        return calibrate(checkpoint, text, token_ids, args.dtype, share)
