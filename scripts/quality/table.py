"""What was measured, as one markdown table, or as the figures of the tables in kernels/README.md."""

from collections.abc import Callable, Sequence

from tinygpt.bench.report import table

from .checkpoints import EXTREMES, OUTLIERS
from .measure import Quality

Results = dict[str, dict[str, Quality]]  # by checkpoint, and by dtype


def quality_table(results: Results, has_text: bool) -> str:
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


def fill_tables(text: str, results: Results, model: str) -> str:
    """A README with new figures in its tables of dtypes: one of the model and its outliers, one of its extremes.

    ValueError names a table that is not there.
    """

    def dtype_figures(dtype: str) -> list[str]:
        own = results[model][dtype]
        share = f"{100 * own.agreements / own.positions:.1f} %"
        return [change(results, name, dtype) for name in (model, *OUTLIERS)] + [share, f"{own.largest:.2g}"]

    def extreme_figures(dtype: str) -> list[str]:
        return [change(results, name, dtype) for name in EXTREMES]

    text = fill_table(text, "| `dtype` | a weight | activations | demo |", 3, dtype_figures)
    return fill_table(text, "| `dtype` | values x 100 |", 1, extreme_figures)


def fill_table(text: str, header: str, num_kept: int, figures: Callable[[str], Sequence[str]]) -> str:
    """New cells behind the first `num_kept` of each row but float32's, which is named by its first."""
    lines = text.splitlines(keepends=True)
    first = next((i for i, line in enumerate(lines) if line.startswith(header)), None)
    if first is None:
        raise ValueError(f"there is no table that begins with {header}")
    for i in range(first + 2, len(lines)):
        cells = lines[i].strip().strip("|").split("|")
        if not lines[i].startswith("|"):
            break
        dtype = cells[0].strip()
        if dtype != "float32":
            kept = [cell.strip() for cell in cells[:num_kept]]
            lines[i] = f"| {' | '.join([*kept, *figures(dtype)])} |\n"
    return "".join(lines)


def change(results: Results, name: str, dtype: str) -> str:
    """Of perplexity beside float32."""
    percent = 100 * (results[name][dtype].perplexity / results[name]["float32"].perplexity - 1)
    figure = f"{percent:+.2f}" if abs(percent) < 1 else f"{percent:+.1f}"
    return f"{figure.replace('+0.00', '0.00').replace('-0.00', '0.00')} %"
