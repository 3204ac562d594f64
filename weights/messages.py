"""How messages name what files hold, of which there may be any number and any size."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_NAMED, MAX_SHOWN = 8, 200  # names, characters
NAMED = 12  # of what a folder holds
# The number of a layer, as families write it: h.3.ln_1, layers.3.mlp, blk.3.attn_qkv, model/h3/attn.
_LAYER = re.compile(r"\b(h\.|layers\.|blk\.|h)\d+(?=[./])")


def of_any_layer(name: str) -> str:
    """A tensor's name with * for the number of its layer, by which what layers share is brought together."""
    return _LAYER.sub(r"\1*", name)


def listed(names: Sequence[str], most: int = MAX_NAMED) -> str:
    """The first few of many names."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def describe(folder: Path) -> str:
    """What a folder holds, in a few words."""
    names = sorted(path.name + "/" * path.is_dir() for path in folder.glob("*"))
    return f"it holds {listed(names, NAMED)}" if names else "it is empty"


def shown(value: Any) -> str:
    """`value` as Python writes it, or its beginning: never with what a terminal would obey."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
