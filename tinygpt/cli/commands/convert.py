"""`tinygpt convert`: a checkpoint packed ahead of time, in another precision, instead of at every start."""

import argparse
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygpt.cli.flags.model import CHECKPOINT, add_flag, one_of_both
from tinygpt.cli.flags.types import MEANINGS, any_dtype, lowered
from tinygpt.cli.loading import set_thread_pools
from tinygpt.cli.output.messages import elapsed, progress, say
from tinygpt.disk import free_path
from tinygpt.errors import RequestError, TinyGPTError
from tinygpt.suggestions import nearest_dtype
from tinygpt.weights.config import DTYPES, STORAGE_DTYPE

if TYPE_CHECKING:
    from tinygpt.evaluation.calibration import Calibration
    from tinygpt.execution.model_source import ModelSource
    from tinygpt.weights.checkpoint import Checkpoint
    from tinygpt.weights.stored.packed import PackedCheckpoint

USAGE = "tinygpt convert [flags] SRC DST"
FOLDER = "./converted"
ALPHA = 0.5
FORMATS = {  # the dtypes that each can have; None is tinygpt's own
    None: (*DTYPES, STORAGE_DTYPE),
    "safetensors": ("float32", "float16", "bfloat16"),
    "gguf": ("float32", "float16", "bfloat16", "int8", "int4"),
    "npz": ("float32", "float16"),
}
OTHERS = tuple(filter(None, FORMATS))
ALL_DTYPES = tuple(dict.fromkeys(chain(*FORMATS.values())))
ONE_FILE = ("gguf", "npz")  # whose readers are given the file, and not its folder
CALIBRATED = ("int8", "int4")
SUMMARY = "pack a checkpoint ahead of time, as int8 or in another precision, for faster starts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="?", metavar="SRC", help=CHECKPOINT)
    parser.add_argument("target", nargs="?", metavar="DST", help="the folder to make, which --model then takes")
    add_flag(parser, "model", default=None, help="the same as SRC, as in all commands; DST is then the one argument")
    parser.add_argument(
        "--to",
        type=lowered(*OTHERS),
        choices=OTHERS,
        help="a format for others to read, in Hugging Face's names or llama.cpp's (default: tinygpt's own)",
    )
    parser.add_argument(
        "--dtype",
        type=any_dtype(ALL_DTYPES, MEANINGS),
        metavar="DTYPE",
        help=f"precision of the weights: {_dtypes_by_format()}; GGUF's int8 is Q8_0 and its int4 Q4_0 (default: int8, "
        "and float32 with --to)",
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


def _dtypes_by_format() -> str:
    return "; ".join(f"{f'with --to {to}, ' if to else ''}{', '.join(dtypes)}" for to, dtypes in FORMATS.items())


def run(args: argparse.Namespace) -> None:
    """Write DST, whole or not at all. RequestError, before any work, where there is something already."""
    _settle_source(args)
    target = Path(args.target).expanduser().absolute()
    args.dtype = args.dtype or ("float32" if args.to else "int8")
    _check_name(args, target)
    _check_target(args.target, target)
    _check_format(args)
    _check_calibration(args)
    set_thread_pools(args.threads)
    with _becoming(target) as folder:
        before, file = _convert(args, folder)
        after = file.stat().st_size
    made = target / file.name if args.to in ONE_FILE else target
    say(f"{made}: {after / 1e6:.1f} MB of {args.dtype}, made from {before / 1e6:.1f} MB{_use(args, made)}")


def _use(args: argparse.Namespace, made: Path) -> str:
    if args.to == "npz":  # which nothing here reads
        return ""
    how = ", and leave --dtype out: it computes in bfloat16" if args.dtype == STORAGE_DTYPE else ""
    return f"; use it as --model {made}{how}"


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


def _check_name(args: argparse.Namespace, target: Path) -> None:
    """A folder that is named as the file of a format is in that format."""
    ending = target.suffix.lower().removeprefix(".")
    if ending in OTHERS and ending != args.to:
        asked = "there is no --to" if args.to is None else f"--to is {args.to}"
        raise RequestError(
            f"DST {args.target} is named as a file of the format {ending}, and {asked}: give --to {ending}, which "
            "makes a folder of this name with the file in it, or name the folder otherwise."
        )


def _check_target(given: str, target: Path) -> None:
    """`given` is how the target was typed."""
    if Path.cwd().is_relative_to(os.path.normpath(target)):
        raise RequestError(f"DST {given} is the folder that this runs in, or one around it: {_name_new(FOLDER)}.")
    if target.is_dir() and not any(target.iterdir()):
        return
    if os.path.lexists(target):
        raise RequestError(f"DST {given} is there already, and not an empty folder: {_name_new(given)}.")
    if not target.parent.is_dir():
        raise RequestError(f"the folder of DST {target} does not exist: create it first.")


def _name_new(path: str) -> str:
    return f"name a new folder, such as {shlex.quote(str(free_path(Path(path).expanduser())))}"


def _check_format(args: argparse.Namespace) -> None:
    allowed = FORMATS[args.to]
    if args.dtype not in allowed:
        raise RequestError(
            f"dtype is {args.dtype!r} and must be one of {', '.join(allowed)}"
            f"{f' with --to {args.to}' if args.to else ''}{_advice_for_dtype(args.dtype, args.to)}"
        )


def _advice_for_dtype(dtype: str, to: str | None) -> str:
    """For one that the format does not have: the formats that do, or what may have been meant."""
    having = [other for other in OTHERS if dtype in FORMATS[other]]
    ways = ["leave out --to"] * (dtype in FORMATS[None]) + [f"give --to {' or '.join(having)}"] * bool(having)
    if ways:
        return f": choose one, or {', or '.join(ways)}."
    nearest = nearest_dtype(dtype, FORMATS[to])
    return f": did you mean {nearest}?" if nearest else "."


def _check_calibration(args: argparse.Namespace) -> None:
    given = [flag for flag in ("--calibrate", "--act-scales") if getattr(args, flag[2:].replace("-", "_")) is not None]
    flags = given + ["--smooth"] * (args.smooth is not None)
    if flags and args.to:
        raise RequestError(f"{flags[0]} is for tinygpt's own format, and --to {args.to} is given: leave one out.")
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


def _convert(args: argparse.Namespace, folder: Path) -> tuple[int, Path]:
    """Fill the folder; the size of the weights' files before, in bytes, and the file of the weights now."""
    from tinygpt.tokenizer.prepared import write_prepared
    from tinygpt.weights.random_checkpoint import is_random
    from tinygpt.weights.stored.companions import write_companions

    if is_random(args.source):
        raise RequestError(f"SRC {args.source} is drawn in memory and has no files: give a checkpoint that has.")
    checkpoint, write = (_in_other_format if args.to else _in_own_format)(args, folder)
    with elapsed(f"writing {args.target}"), _written(args.target):
        file = write()
        write_companions(folder, checkpoint)
        if not args.to:
            write_prepared(folder)
    return sum(file.stat().st_size for file in checkpoint.files), file


def _in_own_format(args: argparse.Namespace, folder: Path) -> "tuple[Checkpoint, Callable[[], Path]]":
    """The checkpoint, and what writes its weights."""
    from tinygpt.execution.model_source import ModelSource
    from tinygpt.weights.stored.float8 import write_float8
    from tinygpt.weights.stored.packed import write_packed

    source = ModelSource.open(args.source, "auto" if args.dtype == STORAGE_DTYPE else args.dtype)
    checkpoint = _unpacked(args, source.checkpoint)
    if args.dtype == STORAGE_DTYPE:
        return checkpoint, partial(write_float8, folder, checkpoint, args.source)
    return checkpoint, partial(write_packed, folder, *_pack(args, source))


def _in_other_format(args: argparse.Namespace, folder: Path) -> "tuple[Checkpoint, Callable[[], Path]]":
    from tinygpt.weights.open import open_checkpoint
    from tinygpt.weights.stored.gguf_out import check_gguf, write_gguf
    from tinygpt.weights.stored.plain import write_npz, write_safetensors

    checkpoint = _unpacked(args, open_checkpoint(args.source))
    if args.to == "gguf":
        check_gguf(checkpoint, args.dtype)
        return checkpoint, partial(write_gguf, folder, checkpoint, args.dtype, _byte_level_spec(checkpoint))
    write = write_npz if args.to == "npz" else write_safetensors
    return checkpoint, partial(write, folder, checkpoint, args.dtype)


def _unpacked(args: argparse.Namespace, checkpoint: "Checkpoint | PackedCheckpoint") -> "Checkpoint":
    from tinygpt.execution.model_source import check_tokenizer
    from tinygpt.weights.stored.packed import PackedCheckpoint
    from tinygpt.weights.stored.plain import layout_of

    if isinstance(checkpoint, PackedCheckpoint):
        raise RequestError(f"SRC {args.source} is converted already: give the checkpoint that it was made from.")
    layout_of(checkpoint)  # before any work, as all that may be refused
    check_tokenizer(checkpoint)
    return checkpoint


def _byte_level_spec(checkpoint: "Checkpoint") -> dict[str, Any] | None:
    """The tokenizer in the form of a tokenizer.json, where it is GPT-2's kind or BLOOM's. What is left out is said."""
    from tinygpt.execution.model_source import read_spec
    from tinygpt.tokenizer.byte_level_bpe import UnlikeGPT2
    from tinygpt.weights.families.byte_level import is_blooms_kind

    try:
        spec = read_spec(checkpoint)
        around, is_behind = ([], False) if is_blooms_kind(spec) else _put_around(spec)
        is_more = is_behind or around not in ([], [checkpoint.config.bos_token_id])
        if is_more or spec["pre_tokenizer"].get("add_prefix_space"):
            raise UnlikeGPT2("it puts more around a text than the token that begins one")
    except (TinyGPTError, UnlikeGPT2) as error:
        say(f"the file will have no tokenizer: {error}")
        return None
    return {**spec, "add_bos_token": bool(around)}


def _put_around(spec: dict[str, Any]) -> tuple[list[int], bool]:
    """What a tokenizer of GPT-2's kind puts before a text, and whether it puts anything behind it."""
    from tinygpt.tokenizer.byte_level_bpe import ByteLevelBPE

    bare, whole = (
        ByteLevelBPE(one).encode("a", split_special_tokens=False) for one in ({**spec, "post_processor": None}, spec)
    )
    before = whole[: len(whole) - len(bare)]
    return before, before + bare != whole


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
    from tinygpt.request.prompts import encode

    share = ALPHA if args.smooth is None else args.smooth
    if args.act_scales is not None:
        return read_act_scales(args.act_scales, checkpoint, share)
    if args.calibrate is None:
        return None
    text = read_text("--calibrate", args.calibrate)
    token_ids = encode(text, load_tokenizer(checkpoint), checkpoint.config.vocab_size)
    say(f"calibrating on {args.calibrate}")
    return calibrate(checkpoint, text, token_ids, args.dtype, share, progress("sample"))
