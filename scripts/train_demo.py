"""Train the demo checkpoint: a small GPT-2 and its tokenizer, from a folder of texts, on a GPU where there is one.

    python scripts/train_demo.py --corpus FOLDER --corpus-note "a part of TinyStories" --out trained

trains on 500 million tokens, however long that takes; --minutes 9 ends it earlier, --resume goes on after a stop or for
longer, and --init MODEL begins with a checkpoint's weights.

The corpus is train.txt.xz and val.txt, documents set apart by <|endoftext|>. OUT becomes a checkpoint in Hugging Face's
layout, with a card that says what was measured; it always holds the weights that were best on val.txt so far. OUT/state
holds what --resume needs and can be deleted. Ctrl-C and SIGTERM end a run as --minutes does: it can be resumed. The
last line says how to embed the checkpoint as the demo. Needs torch, transformers and tokenizers.
"""

import argparse
import importlib.util
import sys
import time
from pathlib import Path

from train.corpus import CorpusError, check_folder
from train.start import sizes_of

START = time.monotonic()
# 7 layers and 7935 merges, a vocabulary of 8192, are what fits into 32 MB of bfloat16.
SIZES = {"merges": 7935, "layers": 7, "width": 384, "heads": 6, "positions": 1024}


def main() -> None:
    arguments = parse_arguments()
    missing = [name for name in ("torch", "transformers", "tokenizers") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"train_demo.py needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    from train.run import run

    try:
        run(arguments, START)
    except CorpusError as error:
        sys.exit(str(error))
    print(f"To embed it as the demo: python scripts/embed_demo.py {arguments.out}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--corpus", type=Path, required=True, metavar="DIR", help="train.txt.xz and val.txt")
    add("--corpus-note", required=True, metavar="TEXT", help="what the card says it is")
    add("--out", type=Path, required=True, metavar="DIR")
    add("--resume", action="store_true", help="go on with the run in OUT")
    add("--init", type=Path, metavar="DIR", help="a checkpoint to begin with: its sizes, tokenizer and weights")
    add("--tokens", type=_positive, default=500_000_000, help="to see, all runs together (default: 500 million)")
    add("--minutes", type=float, help="bound of this run, everything included")
    for name, default in SIZES.items():
        add(f"--{name}", type=_positive, help=f"default: that of --init or --resume, else {default}")
    add("--batch-tokens", type=_positive, default=65_536, help="of a step")
    add("--dropout", type=float, default=0.1)
    add("--learning-rate", type=float, default=1.5e-3)
    add("--warmup-steps", type=_positive, default=200)
    add("--weight-decay", type=float, default=0.1)
    add("--clip", type=float, default=1.0, help="the largest norm of all gradients together")
    add("--evaluations", type=_positive, default=20)
    add("--seed", type=int, default=0)
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    of_gpus = "(default: on a GPU)"
    add("--bfloat16", action=argparse.BooleanOptionalAction, help=f"multiply in bfloat16 {of_gpus}")
    add("--compile", action=argparse.BooleanOptionalAction, help=f"compile the model, which takes a minute {of_gpus}")
    arguments = parser.parse_args()
    try:
        take_sizes(arguments)
        check(arguments)
    except CorpusError as error:
        parser.error(str(error))
    return arguments


def _positive(text: str) -> int:
    number = int(text.replace("_", ""))
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} must be 1 or more")
    return number


def take_sizes(arguments: argparse.Namespace) -> None:
    """Fill in the sizes that were not given. CorpusError where they cannot be those of the checkpoint to begin with."""
    if arguments.init is not None and arguments.resume:
        raise CorpusError("--init begins a run and --resume goes on with one: give one of them.")
    given = arguments.out if arguments.resume and (arguments.out / "config.json").exists() else arguments.init
    sizes = SIZES if given is None else sizes_of(given)
    for name, size in sizes.items():
        wanted = getattr(arguments, name)
        if arguments.init is not None and wanted not in (None, size):
            raise CorpusError(f"--{name} is {wanted} and {arguments.init} has {size}: omit it.")
        setattr(arguments, name, size if wanted is None else wanted)


def check(arguments: argparse.Namespace) -> None:
    """Whatever can be refused before any work is: CorpusError."""
    check_folder(arguments.corpus)
    has_run = (arguments.out / "state" / "state.pt").exists()
    if has_run and not arguments.resume:
        raise CorpusError(f"{arguments.out} holds a run: add --resume to go on with it, or give another --out.")
    if arguments.resume and not has_run:
        raise CorpusError(f"{arguments.out} holds no run to resume: leave --resume out.")
    if arguments.width % arguments.heads:
        raise CorpusError(f"--width {arguments.width} cannot be divided into {arguments.heads} heads (--heads).")
    if arguments.batch_tokens % arguments.positions:
        raise CorpusError(
            f"--batch-tokens {arguments.batch_tokens} must be a multiple of --positions {arguments.positions}."
        )
    if not 0 <= arguments.dropout < 1:
        raise CorpusError(f"--dropout is {arguments.dropout} and must be from 0 up to below 1.")
    if arguments.minutes is not None and arguments.minutes <= 0:
        raise CorpusError(f"--minutes is {arguments.minutes} and must be more than 0.")


if __name__ == "__main__":
    main()
