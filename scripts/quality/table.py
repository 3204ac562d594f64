"""What was measured, as one markdown table."""

from tinygpt.bench.formats import table

from .measure import Quality


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
