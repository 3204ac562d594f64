"""`tinygpt info --write-names`: a tensor_names.json for a GPT-2 of unknown names, if one answer is left."""

import argparse
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..errors import CheckpointError
from .streams import log

# Of every GPT-2, and of no name or shape.
CONDITIONS = (
    "compare it with the model's code. Names cannot show that each layer is x = x + attention(norm(x)), then x = x + "
    "mlp(norm(x)), that norms subtract the mean, with an epsilon of 1e-05, that attention is causal, and its scores "
    "divided once, by a root, that neither tables, scores, sums nor logits are scaled, capped or added to otherwise, "
    "which norm is the first, how square matrices lie, and that all of the file is used."
)
LAYOUTS = ("linear", "linear-qkv", "conv1d")


def add_layout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--write-names",
        choices=LAYOUTS,
        help="write a tensor_names.json next to a GPT-2 of unknown names, if words and shapes leave one answer by "
        "which it loads, and say what they cannot show: its matrices are (out, in), as torch's Linear, with -qkv if "
        "one matrix has all queries, then keys, then values, or (in, out), as transformers' Conv1D (default: off)",
    )


def write_names(path: Path, layout: str) -> None:
    """Raise CheckpointError for a model that loads, or without one answer, or next to an older file."""
    from ..weights.containers.formats import read_weights
    from ..weights.families.family import Source
    from ..weights.families.proposal import proposed_names
    from ..weights.files import TENSOR_NAMES
    from ..weights.matching import check_positions, family_of, match

    if (family := _family_by_own_names(path)) is not None:
        raise CheckpointError(f"{path} loads, as {family}: it needs no other names.")
    source = Source(path, read_weights(path))
    check_positions(source)
    source = replace(source, description=proposed_names(source, layout))
    family = family_of(source)
    match(source, family, family.config(source))
    place = source.folder / TENSOR_NAMES
    try:
        with place.open("x", encoding="utf-8") as file:
            json.dump(source.description, file, indent=1)
    except FileExistsError:
        raise CheckpointError(f"{place} is there already: move it to have another.") from None
    log(f"wrote {place}: {CONDITIONS}")


def _family_by_own_names(path: Path) -> str | None:
    from ..weights.matching import read_checkpoint

    with suppress(CheckpointError):
        return read_checkpoint(path).family
    return None
