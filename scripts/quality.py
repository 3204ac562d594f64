"""What each dtype costs: perplexity, logits and greedy choices beside float32's, as one markdown table.

    python scripts/quality.py TEXT                    # the demo checkpoint on a text, in windows of its n_positions
    python scripts/quality.py TEXT --outliers         # and two versions of it with channels far larger than the rest
    python scripts/quality.py TEXT --model FOLDER --windows 8
    python scripts/quality.py --random 124M           # random weights on random tokens: logits only

The perplexity is that of the tokens of each window after its first, over whole windows. KL is the mean over all
positions of the Kullback-Leibler divergence of the dtype's next-token distribution from float32's, in nats.
"""

import argparse
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tqdm import tqdm

from tinygpt import LLM
from tinygpt.bench.formats import table
from tinygpt.config import DTYPES, ModelConfig
from tinygpt.errors import RequestError
from tinygpt.evaluation.texts import read_text
from tinygpt.execution.batch import Batch
from tinygpt.kernels import reference
from tinygpt.kernels.reference.model import attention_block, mlp_block
from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.open import open_checkpoint
from tinygpt.weights.random_checkpoint import SHAPES

RANDOM_WINDOWS = 2
NORM_OUTLIER = 30
RESIDUAL_OUTLIER = 10  # with 30, float32 itself does badly: a layer norm hardly sees the other channels


@dataclass
class Quality:
    """One dtype beside float32, summed up over windows."""

    loss: float = 0.0  # nats, over `predictions`
    predictions: int = 0
    kl: float = 0.0
    difference: float = 0.0  # of logits, over all positions and the vocabulary
    largest: float = 0.0
    agreements: int = 0
    positions: int = 0

    def add(self, logits: np.ndarray, exact: np.ndarray, token_ids: list[int]) -> None:
        """logits and float32's (T, V), of the tokens (T,) of one window."""
        shares, exact_shares = log_softmax(logits), log_softmax(exact)  # (T, V)
        self.loss -= shares[np.arange(len(token_ids) - 1), token_ids[1:]].sum(dtype=float)
        self.predictions += len(token_ids) - 1
        self.kl += (np.exp(exact_shares) * (exact_shares - shares)).sum(dtype=float)
        difference = np.abs(logits - exact)
        self.difference += difference.mean(axis=1, dtype=float).sum()
        self.largest = max(self.largest, float(difference.max()))
        self.agreements += int((logits.argmax(axis=1) == exact.argmax(axis=1)).sum())
        self.positions += len(token_ids)

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.loss / self.predictions))

    @property
    def mean_kl(self) -> float:
        return self.kl / self.positions


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64, a row at a time: (T, V)."""
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def measure(model: str, windows: list[list[int]], dtypes: Iterable[str] = DTYPES) -> dict[str, Quality]:
    """Each dtype of a checkpoint, all beside float32, which is among the results."""
    results = {dtype: Quality() for dtype in dict.fromkeys(("float32", *dtypes))}
    llms = {dtype: LLM(model, dtype=dtype, max_num_seqs=1) for dtype in results}
    for token_ids in tqdm(windows, desc=Path(model).name, unit="window"):
        exact = llms["float32"].logits(token_ids)  # (T, V)
        for dtype, quality in results.items():
            quality.add(exact if dtype == "float32" else llms[dtype].logits(token_ids), exact, token_ids)
    return results


def text_windows(model: str, text: str, count: int | None) -> list[list[int]]:
    """The first `count` whole windows of n_positions tokens, or all; what is left over at the end is not used."""
    with LLM(model, max_num_seqs=1) as llm:
        token_ids, size = llm.tokenizer.encode(text), llm.config.n_positions
    starts = range(0, len(token_ids) - size + 1, size)[:count]
    return [token_ids[start : start + size] for start in starts]


def random_windows(model: str, count: int) -> list[list[int]]:
    config = open_checkpoint(model).config
    return np.random.default_rng(0).integers(config.vocab_size, size=(count, config.n_positions)).tolist()


# Outliers.


def outlier_channels(config: ModelConfig) -> np.ndarray:
    return np.array([1, 2, 3]) * config.n_embd // 4


def amplify_norms(tensors: dict[str, np.ndarray], checkpoint: Checkpoint, token_ids: list[int]) -> None:
    """Three channels of every ln_1 and ln_2 NORM_OUTLIER times larger, weight and bias, and the matching rows of the
    matrix after it as much smaller: the same function, of activations with outliers."""
    channels = outlier_channels(checkpoint.config)
    for layer in range(checkpoint.config.n_layer):
        for norm, matrix in (("ln_1", "attn.c_attn"), ("ln_2", "mlp.c_fc")):
            tensors[f"h.{layer}.{norm}.weight"][channels] *= NORM_OUTLIER
            tensors[f"h.{layer}.{norm}.bias"][channels] *= NORM_OUTLIER
            tensors[f"h.{layer}.{matrix}.weight"][channels] /= NORM_OUTLIER  # Conv1D: (in, out)


def raise_residual(tensors: dict[str, np.ndarray], checkpoint: Checkpoint, token_ids: list[int]) -> None:
    """Add d, -d/2 and -d/2 to three channels of wpe, d being RESIDUAL_OUTLIER times the residual stream's std, its
    mean over the model's layer norms. So the stream holds them in every layer, as trained GPT-2s do.

    Each layer norm would now divide by a larger std: its weights grow by what that is on average, and the biases of the
    three channels take out the constant. The function changes a little, by how the tokens' stds differ.
    """
    stds = residual_stds(checkpoint, token_ids)
    channels = outlier_channels(checkpoint.config)
    offsets = RESIDUAL_OUTLIER * np.mean([std.mean() for std in stds.values()]) * np.array([1, -0.5, -0.5])
    tensors["wpe.weight"][:, channels] += offsets.astype(np.float32)
    for norm, std in stds.items():
        new = np.sqrt(std**2 + (offsets**2).sum() / checkpoint.config.n_embd).mean()
        tensors[f"{norm}.weight"] *= np.float32(new / std.mean())
        tensors[f"{norm}.bias"][channels] -= (tensors[f"{norm}.weight"][channels] * offsets / new).astype(np.float32)


def residual_stds(checkpoint: Checkpoint, token_ids: list[int]) -> dict[str, np.ndarray]:
    """The residual stream's std over channels in front of each layer norm, for every token (T,)."""
    params, batch = reference.load_params(checkpoint), Batch.of([token_ids], [0], [0])
    cache, stds = reference.new_kv_cache(checkpoint.config, 1, len(token_ids)), {}
    x = params["wte.weight"][token_ids].astype(np.float64) + params["wpe.weight"][: len(token_ids)]  # (T, C)
    for layer in range(checkpoint.config.n_layer):
        stds[f"h.{layer}.ln_1"] = x.std(axis=1)
        attention_block(params, layer, x, batch, cache)  # x: (T, C)
        stds[f"h.{layer}.ln_2"] = x.std(axis=1)
        mlp_block(params, layer, x)
    return {**stds, "ln_f": x.std(axis=1)}


OUTLIERS: dict[str, Callable] = {"large norm weights": amplify_norms, "large residual": raise_residual}


def write_outliers(model: str, change: Callable, token_ids: list[int], folder: Path) -> str:
    """A copy of a checkpoint, changed, in a folder that does not exist yet; token_ids are what it may measure with."""
    checkpoint = open_checkpoint(model)
    shutil.copytree(checkpoint.path, folder, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin*"))
    tensors = {name: np.array(stored.float32()) for name, stored in checkpoint.stored.items()}
    change(tensors, checkpoint, token_ids)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


# The table.


def quality_table(results: dict[str, dict[str, Quality]], has_text: bool) -> str:
    """results[checkpoint][dtype] as markdown."""
    texts = ["perplexity", "change"] if has_text else []
    header = ["checkpoint", "dtype", *texts, "KL", "logits: mean difference", "largest", "same greedy token"]
    return table(
        header,
        (
            [name, dtype, *cells(quality, qualities["float32"], has_text)]
            for name, qualities in results.items()
            for dtype, quality in qualities.items()
        ),
    )


def cells(quality: Quality, exact: Quality, has_text: bool) -> list[str]:
    texts = []
    if has_text:
        texts = [f"{quality.perplexity:.3f}", f"{100 * (quality.perplexity / exact.perplexity - 1):+.3f} %"]
    return [
        *texts,
        f"{quality.mean_kl:.6f}",
        f"{quality.difference / quality.positions:.4f}",
        f"{quality.largest:.3f}",
        f"{100 * quality.agreements / quality.positions:.2f} %",
    ]


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
    arguments = parser.parse_args()
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
        for name, change in OUTLIERS.items() if arguments.outliers else ():
            models[name] = write_outliers(model, change, windows[0], folder / name)
        results = {name: measure(model, windows) for name, model in models.items()}
    print(quality_table(results, has_text=not arguments.random))


if __name__ == "__main__":
    main()
