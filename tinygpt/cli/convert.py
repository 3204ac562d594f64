"""`tinygpt convert` packs a checkpoint ahead of time; `tinygpt warmup` compiles the kernels ahead of time."""

import argparse
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import NoTokenizerError, RequestError, TinyGPTError, invalid
from ..llm_args import CHECKPOINT
from ..weights.config import DTYPES, PRECISIONS
from .flags import CPU_FLAGS, Command, add_flag, add_group, set_thread_pools
from .streams import log, progress, read_plain_text

if TYPE_CHECKING:
    from ..weights.checkpoint import Checkpoint
    from ..weights.files import StoredTokenizer

ALPHA = 0.5
FORMATS = {  # -> dtypes; None is tinygpt's own format
    None: DTYPES,
    "safetensors": ("float32", "float16", "bfloat16"),
    "gguf": ("float32", "float16", "bfloat16", "int8", "int4"),
    "npz": ("float32", "float16"),
}
OTHERS = tuple(filter(None, FORMATS))
ONE_FILE = ("gguf", "npz")  # readers are given the file, and not its folder
CALIBRATED = tuple(name for name, precision in PRECISIONS.items() if precision.activations == "int8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", nargs="?", metavar="SRC", help=CHECKPOINT)
    add("target", nargs="?", metavar="DST", help="the folder to make, which --model then takes")
    add_flag(
        parser,
        "model",
        default=None,
        help="the same as SRC, as in all commands; DST is then the one argument",
    )
    add(
        "--to",
        type=str.lower,
        choices=OTHERS,
        help="a format for others to read, in Hugging Face's names or llama.cpp's (default: tinygpt's own)",
    )
    by_format = "; ".join(
        f"{f'with --to {to}, ' if to else ''}{', '.join(dtypes)}" for to, dtypes in FORMATS.items()
    )
    add_flag(
        parser,
        "dtype",
        default=None,
        metavar="DTYPE",
        help=f"precision of the weights: {by_format}; GGUF's int8 is Q8_0 and its int4 Q4_0 (default: int8, and "
        "float32 with --to)",
    )
    add(
        "--calibrate",
        metavar="TEXT",
        type=Path,
        help="a text like the model's input, to smooth channels by their activations on it (int8, int4; default: by "
        "the weights alone)",
    )
    add(
        "--act-scales",
        metavar="FILE",
        type=Path,
        help="in place of a text, activation scales as SmoothQuant's generate_act_scales.py writes them",
    )
    add(
        "--smooth",
        metavar="ALPHA",
        type=float,
        help=f"with either: share of a channel's size that goes into the activations, 0 to 1 (default: {ALPHA})",
    )
    add_flag(parser, "threads")


def run(args: argparse.Namespace) -> None:
    """Write DST, complete or not at all. Raise RequestError, before any work, if it exists."""
    if args.model is not None and args.target is None:
        args.source, args.target = None, args.source
    elif args.model is not None:
        raise RequestError(f"SRC is {args.source} and --model is {args.model}: give one of them.")
    args.source = args.source or args.model
    if args.source is None or args.target is None:
        raise RequestError("a checkpoint and the folder to make are needed: tinygpt convert [flags] SRC DST.")
    target = Path(args.target).expanduser().absolute()
    args.dtype = args.dtype or ("float32" if args.to else "int8")
    _check(args, target)
    set_thread_pools(args.threads)
    with _becoming(target) as folder:
        before, file = _convert(args, folder)
        after = file.stat().st_size
    made = target / file.name if args.to in ONE_FILE else target
    use = "" if args.to == "npz" else f"; use it as --model {made}"
    log(f"{made}: {after / 1e6:.1f} MB of {args.dtype}, made from {before / 1e6:.1f} MB{use}")


def _check(args: argparse.Namespace, target: Path) -> None:
    if Path.cwd() == Path(os.path.normpath(target)):
        raise RequestError(f"DST {args.target} is the working folder: name a new folder.")
    is_empty = target.is_dir() and not any(target.iterdir())
    if os.path.lexists(target) and not is_empty:
        raise RequestError(f"DST {args.target} is there already, and not an empty folder: name a new folder.")
    if not target.parent.is_dir():
        raise RequestError(f"the folder of DST {target} does not exist: create it first.")
    ending = target.suffix.lower().removeprefix(".")
    if ending in OTHERS and ending != args.to:
        raise RequestError(f"DST {args.target} is named as a file of another format: give --to {ending}.")
    if args.dtype not in FORMATS[args.to]:
        raise invalid("--dtype", args.dtype, f"one of {', '.join(FORMATS[args.to])}")
    flags = {"--calibrate": args.calibrate, "--act-scales": args.act_scales, "--smooth": args.smooth}
    named = [flag for flag, value in flags.items() if value is not None]
    if named and (args.to or args.dtype not in CALIBRATED):
        raise RequestError(
            f"{named[0]} is for tinygpt's own format in {' or '.join(CALIBRATED)}: leave it out."
        )
    if named and (args.calibrate is None) == (args.act_scales is None):
        raise RequestError("give --calibrate TEXT or --act-scales FILE, one of them.")
    if args.smooth is not None and not 0 <= args.smooth <= 1:
        raise invalid("--smooth", args.smooth, "a number from 0 to 1")


@contextmanager
def _becoming(target: Path) -> Iterator[Path]:
    """Yield a folder that is renamed to `target` after the block, so that no reader sees half a checkpoint."""
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        if target.is_dir():
            target.rmdir()  # empty; Windows renames onto nothing that exists
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(args: argparse.Namespace, folder: Path) -> tuple[int, Path]:
    """Fill the folder. Return the size of the weights' files before, in bytes, and the file of the weights now."""
    from ..engine.model_runner import check_tokenizer
    from ..text.gpt2_bpe import write_prepared
    from ..weights.checkpoint import write_packed
    from ..weights.convert import export, gguf
    from ..weights.open import open_checkpoint

    checkpoint = open_checkpoint(args.source)
    if checkpoint.converted_to:
        raise RequestError(
            f"SRC {args.source} is converted already: give the checkpoint that it was made from."
        )
    export.layout_of(checkpoint)  # raises before any work
    check_tokenizer(checkpoint)
    if args.to == "gguf":
        gguf.check_gguf(checkpoint, args.dtype)
        write = partial(_write, gguf.write_gguf, folder, checkpoint, args.dtype, _byte_level(checkpoint))
    elif args.to:
        writer = export.write_npz if args.to == "npz" else export.write_safetensors
        write = partial(_write, writer, folder, checkpoint, args.dtype)
    else:
        write = partial(write_packed, folder, *_pack(args, checkpoint))
    if checkpoint.heads:
        log(f"left out, as no text is made with them: {', '.join(checkpoint.heads)}")
    log(f"writing {args.target}")
    try:
        file = write()
        export.write_sidecar_files(folder, checkpoint, _tokenizer_json(checkpoint))
        if not args.to:
            write_prepared(folder)
    except OSError as error:
        raise TinyGPTError(f"DST {args.target} cannot be written: {error.strerror or error}.") from None
    return sum(file.stat().st_size for file in checkpoint.files), file


def _write(writer: Callable[..., Path], folder: Path, checkpoint: "Checkpoint", *options: Any) -> Path:
    from ..engine.model_runner import reading

    with reading(checkpoint, "writing") as watched:
        return writer(folder, watched, *options)


def _tokenizer_json(checkpoint: "Checkpoint") -> dict[str, Any] | None:
    """Return the tokenizer in the weights' files, if one is there that runs: token ids work without it."""
    from ..text.files import spec_of

    with suppress(NoTokenizerError):
        if stored := checkpoint.read_tokenizer():
            return spec_of(stored)
    return None


def _byte_level(checkpoint: "Checkpoint") -> "StoredTokenizer | None":
    """Return the tokenizer if it is GPT-2's kind or BLOOM's, or log why not."""
    from ..engine.model_runner import read_spec
    from ..text.files import is_blooms_kind, stored_tokenizer
    from ..text.gpt2_bpe import ByteLevelBPE, UnlikeGPT2

    try:
        spec = read_spec(checkpoint)
        bare, whole = [], []  # a text without and with the tokens around it
        if not is_blooms_kind(spec):
            bare = ByteLevelBPE({**spec, "post_processor": None}).encode("a", split_special_tokens=False)
            whole = ByteLevelBPE(spec).encode("a", split_special_tokens=False)
        adds_bos = whole == [checkpoint.config.bos_token_id, *bare]
        if (whole != bare and not adds_bos) or spec["pre_tokenizer"].get("add_prefix_space"):
            raise UnlikeGPT2("it puts more around a text than the token that begins one")
    except (TinyGPTError, UnlikeGPT2) as error:
        log(f"the file will have no tokenizer: {error}")
        return None
    return stored_tokenizer(spec, checkpoint.config.bos_token_id if adds_bos else None)


def _pack(args: argparse.Namespace, checkpoint: "Checkpoint") -> tuple[dict[str, Any], dict[str, object]]:
    from ..engine.model_runner import load_backend, load_tokenizer, reading
    from ..engine.prompts import encode
    from ..evaluation.calibration import calibrate, read_act_scales
    from ..hardware import thread_count
    from ..kernels.backend import WeightError
    from ..kernels.cpu.arrays import PACKING, to_file
    from ..kernels.cpu.load import load_arrays

    load_backend("cpu", "auto")  # refuse what it cannot run with
    share = ALPHA if args.smooth is None else args.smooth
    calibration = None
    if args.act_scales is not None:
        calibration = read_act_scales(args.act_scales, checkpoint, share)
    elif args.calibrate is not None:
        text = read_plain_text("--calibrate", args.calibrate)
        token_ids = encode(text, load_tokenizer(checkpoint), checkpoint.config.vocab_size)
        log(f"calibrating on {args.calibrate}")
        calibration = calibrate(checkpoint, text, token_ids, args.dtype, share, progress("sample"))
    log(f"packing {args.source} as {args.dtype}")
    try:
        with reading(checkpoint, "packing") as watched:
            arrays = load_arrays(watched, args.dtype, thread_count(args.threads), calibration)
    except WeightError as error:
        raise RequestError(str(error), "dtype") from None
    facts = {
        "dtype": args.dtype,
        "tied": str(checkpoint.tied).lower(),
        "vocab_size": checkpoint.config.vocab_size,
        "source": args.source,
    }
    return to_file(arrays), {**facts, **PACKING, **(calibration.about if calibration else {})}


def _warm_up(args: argparse.Namespace) -> None:
    set_thread_pools(args.threads)
    from ..llm import warmup

    if not warmup(args.model, args.dtype, args.kv_cache_dtype, args.threads):
        log("nothing was left to compile")
        return
    from ..kernels.cpu.compiler import kernel_cache

    log(f"the kernels are kept in {kernel_cache().folder}")


CONVERT = Command(
    add_arguments,
    run,
    "[flags] SRC DST",
)


WARMUP = Command(partial(add_group, names=CPU_FLAGS), _warm_up, "[flags] [MODEL]")
