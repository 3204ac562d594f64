"""`python -m tinygpt convert`: a checkpoint packed ahead of time, in another precision, instead of at every start."""

import argparse
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinygpt.cli.loading import set_thread_pools
from tinygpt.cli.messages import elapsed, say
from tinygpt.cli.model_flags import CHECKPOINT, add_flag
from tinygpt.config import DTYPES
from tinygpt.errors import RequestError, TinyGPTError

SUMMARY = "pack a checkpoint ahead of time, as int8 or in another precision, for faster starts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help=CHECKPOINT)
    parser.add_argument("target", metavar="DST", help="the folder to make, which --model then takes")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="int8", help="precision of the weights (default: %(default)s)"
    )
    add_flag(parser, "threads")


def run(args: argparse.Namespace) -> None:
    """Write DST, whole or not at all. RequestError, before any work, where there is something already."""
    target = Path(args.target).expanduser().absolute()
    _check_target(target)
    set_thread_pools(args.threads)
    with _becoming(target) as folder:
        before, after = _convert(args, folder)
    say(f"{target}: {after / 1e6:.1f} MB of {args.dtype}, made from {before / 1e6:.1f} MB; use it as --model {target}")


def _check_target(target: Path) -> None:
    if target.is_dir() and not any(target.iterdir()):
        return
    if os.path.lexists(target):
        raise RequestError(f"DST {target} is there already, and not an empty folder: remove it, or name another one.")
    if not target.parent.is_dir():
        raise RequestError(f"the folder of DST {target} does not exist: create it first.")


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
    from tinygpt.hardware.threads import thread_count
    from tinygpt.kernels.cpu import packed
    from tinygpt.weights.hub import CONFIG_FILES, TOKENIZER_FILES
    from tinygpt.weights.random_checkpoint import is_random
    from tinygpt.weights.stored.packed import PackedCheckpoint, write_packed

    if is_random(args.source):
        raise RequestError(f"SRC {args.source} is drawn in memory and has no files: give a checkpoint that has.")
    source = ModelSource.open(args.source, args.dtype)
    checkpoint = source.checkpoint
    if isinstance(checkpoint, PackedCheckpoint):
        raise RequestError(f"SRC {args.source} is converted already: give the checkpoint that it was made from.")
    with elapsed(f"packing {args.source} as {args.dtype}"):
        params = source.load_params(thread_count(args.threads))
    metadata = {
        "dtype": args.dtype,
        "tied": str(checkpoint.tied).lower(),
        "vocab_size": checkpoint.config.vocab_size,
        "source": args.source,
        **packed.PACKING,
    }
    with elapsed(f"writing {args.target}"), _written(args.target):
        after = write_packed(folder, packed.arrays_of(params), metadata).stat().st_size
        for name in (*CONFIG_FILES, *TOKENIZER_FILES):
            if (checkpoint.path / name).is_file():
                shutil.copyfile(checkpoint.path / name, folder / name)
    files = {tensor.path for tensor in checkpoint.stored.values()}
    return sum(file.stat().st_size for file in files), after
