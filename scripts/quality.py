"""The cost of each dtype: perplexity, logits and greedy tokens compared with float32's, as one markdown table.

    python scripts/quality.py TEXT                    # the demo on a text, in windows of its n_positions
    python scripts/quality.py TEXT --outliers --calibrate TEXT2    # and versions of it with outliers, and calibrated
    python scripts/quality.py TEXT --model FOLDER --windows 8

KL is the mean Kullback-Leibler divergence of next-token distributions from float32's, in nats. A version with outliers
has a few far larger channels or neurons, as trained models have; an edit reverts its effect elsewhere, so that the
function stays nearly the same. Matrices are (in, out), as in Conv1D. Sources of "like GPT-2": Timkey and van Schijndel
(EMNLP 2021), Kovaleva et al. (BERT Busters, 2021), Dettmers et al. (LLM.int8(), 2022), Sun et al. (COLM 2024).
"""

import argparse
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tqdm import tqdm

from tinygpt import LLM
from tinygpt.bench.report import table
from tinygpt.cli import main as cli
from tinygpt.cli.streams import read_plain_text
from tinygpt.kernels import reference
from tinygpt.kernels.backend import Batch
from tinygpt.kernels.numbers import log_softmax
from tinygpt.kernels.reference.model import attention_block, mlp_block
from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.config import DTYPES
from tinygpt.weights.convert.export import parts_of
from tinygpt.weights.open import open_checkpoint

INT8_CACHE = "int8 KV cache"  # with float32 weights: the name of its results
Tensors = dict[str, np.ndarray]
Edit = Callable[[Tensors, Checkpoint, list[int]], None]


@dataclass(frozen=True)
class Quality:
    perplexity: float
    mean_kl: float  # nats
    mean_difference: float
    largest_difference: float
    agreement: float  # share of positions


def figures_of(logits: np.ndarray, exact: np.ndarray, token_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return losses of the next token (T - 1,), and (4, T): KL, mean and largest difference, and agreement.

    logits, exact: (T, V).
    """
    shares = log_softmax(logits.astype(np.float64))
    exact_shares = log_softmax(exact.astype(np.float64))  # (T, V)
    losses = -shares[np.arange(len(token_ids) - 1), token_ids[1:]]
    kl = (np.exp(exact_shares) * (exact_shares - shares)).sum(axis=1)
    difference = np.abs(logits - exact)
    same = logits.argmax(axis=1) == exact.argmax(axis=1)
    return losses, np.array([kl, difference.mean(axis=1, dtype=float), difference.max(axis=1), same])


def measure(
    model: str,
    windows: list[list[int]],
    dtypes: Iterable[str] = (*DTYPES, INT8_CACHE),
    converted: dict[str, str] | None = None,
) -> dict[str, Quality]:
    """Compare each dtype of a checkpoint, and its converted folders, with float32."""
    kinds = {dtype: {"dtype": dtype} for dtype in ("float32", *dtypes)}
    kinds |= {INT8_CACHE: {"kv_cache_dtype": "int8"}} if INT8_CACHE in kinds else {}
    llms = {name: LLM(model, max_num_seqs=1, **kind) for name, kind in kinds.items()}
    llms |= {name: LLM(folder, max_num_seqs=1) for name, folder in (converted or {}).items()}
    pairs_of: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in llms}
    for token_ids in tqdm(windows, desc=Path(model).name, unit="window"):
        exact = llms["float32"].logits(token_ids)  # (T, V)
        for name, llm in llms.items():
            logits = exact if name == "float32" else llm.logits(token_ids)
            pairs_of[name].append(figures_of(logits, exact, token_ids))
    return {name: summary(figures) for name, figures in pairs_of.items()}


def summary(windows: list[tuple[np.ndarray, np.ndarray]]) -> Quality:
    losses, figures = (np.concatenate(parts, axis=-1) for parts in zip(*windows, strict=True))
    kl, difference, _, agreement = figures.mean(axis=1).tolist()
    return Quality(float(np.exp(losses.mean())), kl, difference, float(figures[2].max()), agreement)


def outlier_channels(size: int) -> np.ndarray:
    return np.array([1, 2, 3]) * size // 4


def amplify_norms(tensors: Tensors, checkpoint: Checkpoint, token_ids: list[int], scale: float) -> None:
    """Scale three channels of every ln_1 and ln_2, and divide the rows of the next matrix."""
    channels = outlier_channels(checkpoint.config.n_embd)
    for layer in range(checkpoint.config.n_layer):
        for norm, matrix in (("ln_1", "attn.c_attn"), ("ln_2", "mlp.c_fc")):
            tensors[f"h.{layer}.{norm}.weight"][channels] *= scale
            tensors[f"h.{layer}.{norm}.bias"][channels] *= scale
            tensors[f"h.{layer}.{matrix}.weight"][channels] /= scale


def amplify_values(tensors: Tensors, checkpoint: Checkpoint, token_ids: list[int], scale: float) -> None:
    """Scale three channels of the values in every layer, and divide the rows of attn.c_proj."""
    n_embd = checkpoint.config.n_embd
    channels = outlier_channels(n_embd)
    for layer in range(checkpoint.config.n_layer):
        for kind in ("weight", "bias"):
            tensors[f"h.{layer}.attn.c_attn.{kind}"][..., 2 * n_embd + channels] *= scale
        tensors[f"h.{layer}.attn.c_proj.weight"][channels] /= scale


def raise_neurons(tensors: Tensors, checkpoint: Checkpoint, token_ids: list[int], level: float) -> None:
    """Move three neurons in every layer to around `level`, far above the bend of GELU.

    gelu(h) = gelu(-h) + gelu(level + h) - level: the neuron, a spare one of the least weight, and c_proj's bias.
    """
    for layer in range(checkpoint.config.n_layer):
        name = f"h.{layer}.mlp"
        c_fc, bias, c_proj = (
            tensors[f"{name}.{part}"] for part in ("c_fc.weight", "c_fc.bias", "c_proj.weight")
        )
        kept = outlier_channels(checkpoint.config.inner_size)
        use = np.linalg.norm(c_fc, axis=0) * np.linalg.norm(c_proj, axis=1)  # (F,)
        use[kept] = np.inf
        spare = np.argsort(use)[: kept.size]
        c_fc[:, spare] = c_fc[:, kept]
        bias[spare] = bias[kept] + level
        c_proj[spare] = c_proj[kept]
        c_fc[:, kept] = -c_fc[:, kept]
        bias[kept] = -bias[kept]
        tensors[f"{name}.c_proj.bias"] -= level * c_proj[kept].sum(axis=0)


def raise_residual(
    tensors: Tensors, checkpoint: Checkpoint, token_ids: list[int], offsets, embedding="wpe"
) -> None:
    """Move three channels of the residual stream by `offsets`; layer norms grow by the ratio of the stds."""
    channels = outlier_channels(checkpoint.config.n_embd)
    stds = residual_stds(checkpoint, token_ids)
    tensors[f"{embedding}.weight"][:, channels] += offsets.astype(np.float32)
    for norm, std in stds.items():
        new = np.sqrt(std**2 + (offsets**2).sum() / checkpoint.config.n_embd).mean()
        tensors[f"{norm}.weight"] *= np.float32(new / std.mean())
        tensors[f"{norm}.bias"][channels] -= (tensors[f"{norm}.weight"][channels] * offsets / new).astype(
            np.float32
        )


def residual_stds(checkpoint: Checkpoint, token_ids: list[int]) -> dict[str, np.ndarray]:
    """Return the residual stream's std over channels (T,) before each layer norm."""
    params = reference.load_params(checkpoint)
    batch = Batch.of([token_ids], [0], [0])
    cache = reference.new_kv_cache(checkpoint.config, 1, len(token_ids))
    stds = {}
    x = params["wte.weight"][token_ids].astype(np.float64) + params["wpe.weight"][: len(token_ids)]  # (T, C)
    for layer in range(checkpoint.config.n_layer):
        stds[f"h.{layer}.ln_1"] = x.std(axis=1)
        attention_block(params, layer, x, batch, cache)
        stds[f"h.{layer}.ln_2"] = x.std(axis=1)
        mlp_block(params, layer, x)
    return {**stds, "ln_f": x.std(axis=1)}


def typical_std(checkpoint: Checkpoint, token_ids: list[int]) -> float:
    return float(np.mean([std.mean() for std in residual_stds(checkpoint, token_ids).values()]))


def shift_residual(tensors: Tensors, checkpoint: Checkpoint, token_ids: list[int]) -> None:
    """Move three channels by 10, -5 and -5 stds. At 30, float32 itself does badly."""
    raise_residual(
        tensors, checkpoint, token_ids, typical_std(checkpoint, token_ids) * np.array([10, -5, -5])
    )


def make_gpt2_like(tensors: Tensors, checkpoint: Checkpoint, token_ids: list[int]) -> None:
    """Apply the published outliers of GPT-2. The demo's perplexity rises by two thirds."""
    size = typical_std(checkpoint, token_ids)
    rogue = np.array([8, -4, -4]) * tensors["wte.weight"].std()
    raise_residual(tensors, checkpoint, token_ids, rogue, "wte")
    massive = (np.array([100, -50, -50]) * size).astype(np.float32)
    tensors["wpe.weight"][0, outlier_channels(checkpoint.config.n_embd)] += massive
    amplify_norms(tensors, checkpoint, token_ids, 30)
    amplify_values(tensors, checkpoint, token_ids, 4)
    raise_neurons(tensors, checkpoint, token_ids, 10)


OUTLIERS: dict[str, Edit] = {
    "layer norms x 30": partial(amplify_norms, scale=30),
    "residual stream + 10": shift_residual,
    "values x 30": partial(amplify_values, scale=30),
    "neurons at 20": partial(raise_neurons, level=20),
    "like GPT-2": make_gpt2_like,
}
# Outliers that need a calibration.
EXTREMES: dict[str, Edit] = {
    "values x 100": partial(amplify_values, scale=100),
    "neurons at 50": partial(raise_neurons, level=50),
    "neurons at 100": partial(raise_neurons, level=100),
}


def write_outliers(model: str, edit: Edit, token_ids: list[int], folder: Path) -> str:
    checkpoint = open_checkpoint(model)
    shutil.copytree(checkpoint.path, folder, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin*"))
    tensors = {part.short_name: np.array(part.array()) for part in parts_of(checkpoint)}
    edit(tensors, checkpoint, token_ids)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def convert(model: str, folder: Path, text: Path) -> dict[str, str]:
    """Make the dtypes that a text calibrates."""
    folder.mkdir()
    converted = {}
    for dtype in ("int8", "int4"):
        name = f"{dtype}, calibrated"
        converted[name] = str(folder / name)
        if cli.main(["convert", model, converted[name], "--dtype", dtype, "--calibrate", str(text)]):
            raise SystemExit(1)
    return converted


def quality_table(results: dict[str, dict[str, Quality]]) -> str:
    header = ["checkpoint", "dtype", "perplexity", "change", "KL"]
    header += ["logits: mean difference", "largest", "same greedy token"]
    rows = []
    for name, qualities in results.items():
        for dtype, q in qualities.items():
            change = f"{100 * (q.perplexity / qualities['float32'].perplexity - 1):+.3f} %"
            cells = [f"{q.perplexity:.3f}", change, f"{q.mean_kl:.6f}", f"{q.mean_difference:.4f}"]
            rows.append([name, dtype, *cells, f"{q.largest_difference:.3f}", f"{100 * q.agreement:.2f} %"])
    return table(header, rows, header[2:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("text", metavar="TEXT", type=Path, help="a file in UTF-8")
    add("--model", default="demo", help="a local folder or a Hub id; default: %(default)s")
    add("--windows", type=int, help="default: all")
    add("--outliers", action="store_true", help="also versions of the checkpoint with outliers")
    add("--calibrate", metavar="TEXT2", type=Path, help="also int8 and int4 calibrated on this text")
    arguments = parser.parse_args()
    with LLM(arguments.model, max_num_seqs=1) as llm:
        token_ids = llm.tokenizer.encode(read_plain_text("TEXT", arguments.text))
        size = llm.config.n_positions
    starts = range(0, len(token_ids) - size + 1, size)[: arguments.windows]
    windows = [token_ids[start : start + size] for start in starts]
    if not windows:
        parser.error("nothing to measure on: give a TEXT of more tokens than the model has positions.")
    with tempfile.TemporaryDirectory() as scratch:
        models = {arguments.model: arguments.model}
        folder = Path(scratch)
        for name, edit in {**OUTLIERS, **EXTREMES}.items() if arguments.outliers else ():
            models[name] = write_outliers(arguments.model, edit, windows[0], folder / name)
        results = {}
        for name, model in models.items():
            converted = {}
            if arguments.calibrate:
                converted = convert(model, folder / f"{Path(name).name} converted", arguments.calibrate)
            results[name] = measure(model, windows, converted=converted)
    print(quality_table(results))


if __name__ == "__main__":
    main()
