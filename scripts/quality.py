"""What each dtype costs: perplexity, logits and greedy choices beside float32's, as one markdown table.

    python scripts/quality.py TEXT                    # the demo checkpoint on a text, in windows of its n_positions
    python scripts/quality.py TEXT --outliers         # and versions of it with channels far larger than the rest
    python scripts/quality.py TEXT --extremes --calibrate TEXT2   # and of it with larger ones yet, calibrated, too
    python scripts/quality.py TEXT --model FOLDER --windows 8
    python scripts/quality.py --random 124M           # random weights on random tokens: logits only

The perplexity is that of the tokens of each window after its first, over whole windows. KL is the mean over all
positions of the Kullback-Leibler divergence of the dtype's next-token distribution from float32's, in nats.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from quality.checkpoints import EXTREMES, OUTLIERS, write_outliers
from quality.measure import measure
from quality.table import fill_tables, quality_table

from tinygpt import LLM
from tinygpt.cli import main as cli
from tinygpt.errors import RequestError
from tinygpt.evaluation.texts import read_text
from tinygpt.weights.open import open_checkpoint
from tinygpt.weights.random_checkpoint import SHAPES

RANDOM_WINDOWS = 2


def text_windows(model: str, text: str, count: int | None) -> list[list[int]]:
    """The first `count` whole windows of n_positions tokens, or all; what is left over at the end is not used."""
    with LLM(model, max_num_seqs=1) as llm:
        token_ids, size = llm.tokenizer.encode(text), llm.config.n_positions
    starts = range(0, len(token_ids) - size + 1, size)[:count]
    return [token_ids[start : start + size] for start in starts]


def random_windows(model: str, count: int) -> list[list[int]]:
    config = open_checkpoint(model).config
    return np.random.default_rng(0).integers(config.vocab_size, size=(count, config.n_positions)).tolist()


def convert(model: str, folder: Path, text: Path | None) -> dict[str, str]:
    """Folders with what only `tinygpt convert` makes of a checkpoint, by the name of their rows."""
    folder.mkdir()
    wanted = {"float8": ["--dtype", "float8"]}
    if text is not None:
        wanted |= {f"{dtype}, calibrated": ["--dtype", dtype, "--calibrate", str(text)] for dtype in ("int8", "int4")}
    for name, options in wanted.items():
        if cli.main(["convert", model, str(folder / name), *options]):
            raise SystemExit(1)
    return {name: str(folder / name) for name in wanted}


def text_of(file: Path, parser: argparse.ArgumentParser) -> str:
    """The file's text; the parser ends the program where there is none."""
    try:
        return read_text("TEXT", file)
    except RequestError as error:
        parser.error(str(error))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", metavar="TEXT", type=Path, nargs="?", help="a file in UTF-8")
    models = parser.add_mutually_exclusive_group()
    models.add_argument("--model", default="demo", help="a local folder or a Hub id; default: %(default)s")
    models.add_argument("--random", choices=SHAPES, help="a checkpoint of this shape with random weights, and no TEXT")
    parser.add_argument("--windows", type=int, help=f"default: all; with --random, {RANDOM_WINDOWS}")
    parser.add_argument("--outliers", action="store_true", help="the checkpoint's versions with outliers, too")
    parser.add_argument(
        "--extremes", action="store_true", help="and those with outliers that weights alone may not tame"
    )
    parser.add_argument("--calibrate", metavar="TEXT2", type=Path, help="int8 and int4 calibrated on this text, too")
    parser.add_argument("--write", metavar="README", type=Path, help="put the figures into its tables, too")
    arguments = parser.parse_args()
    if arguments.write and not (arguments.text and arguments.outliers and arguments.extremes and arguments.calibrate):
        parser.error("--write needs a TEXT, --outliers, --extremes and --calibrate: the tables have figures of each.")
    if (arguments.text is None) == (arguments.random is None):
        parser.error("give either a TEXT to measure on, or --random and a shape.")
    with tempfile.TemporaryDirectory() as scratch:
        model, folder = arguments.model, Path(scratch)
        if arguments.random:
            from peers.checkpoints import make_random

            make_random(arguments.random, folder)
            model, windows = str(folder), random_windows(str(folder), arguments.windows or RANDOM_WINDOWS)
        else:
            windows = text_windows(model, text_of(arguments.text, parser), arguments.windows)
        if not windows:
            parser.error("nothing to measure on: give a TEXT of more tokens than the model has positions.")
        models = {f"random {arguments.random}" if arguments.random else model: model}
        for name, edit in ((OUTLIERS if arguments.outliers else {}) | (EXTREMES if arguments.extremes else {})).items():
            models[name] = write_outliers(model, edit, windows[0], folder / name)
        results = {
            name: measure(model, windows, converted=convert(model, folder / f"{name} converted", arguments.calibrate))
            for name, model in models.items()
        }
    print(quality_table(results, has_text=not arguments.random))
    if arguments.write:
        readme = arguments.write.read_text(encoding="utf-8")
        arguments.write.write_text(fill_tables(readme, results, next(iter(models))), encoding="utf-8")


if __name__ == "__main__":
    main()
