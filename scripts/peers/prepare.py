"""Before anything is measured: the checkpoint, every peer's environment, and every peer's form of the checkpoint."""

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .catalogue import MACHINE, OURS, Peer
from .checkpoints import make_random
from .processes import PeerError, make_form, provide_folder, provide_python
from .progress import say


@dataclass(frozen=True)
class Place:
    """Where an engine runs, and the files that it reads."""

    peer: Peer
    python: Path
    folder: Path


@dataclass
class Setup:
    checkpoint: Path
    config: dict
    places: dict[tuple[str, str], Place] = field(default_factory=dict)  # (engine, dtype)
    absent: dict[tuple[str, str], str] = field(default_factory=dict)  # (engine, dtype) -> why


def prepare(work: Path, model: str | None, shape: str, peers: Iterable[Peer], dtypes: Iterable[str]) -> Setup:
    """Everything under `work`, where it is not there yet. A peer that cannot be had is named in `absent`."""
    checkpoint = random_checkpoint(work, shape) if model is None else plain_checkpoint(work, model)
    setup = Setup(checkpoint, json.loads((checkpoint / "config.json").read_text()))
    for peer in [OURS, MACHINE, *peers]:
        say(f"preparing {peer.name}")
        for dtype in dtypes:
            if dtype not in peer.forms:
                continue
            try:
                setup.places[peer.name, dtype] = place(peer, dtype, work, checkpoint)
            except (PeerError, OSError) as error:
                setup.absent[peer.name, dtype] = str(error)
                say(f"{peer.name} {dtype} is absent: {error}")
    return setup


def random_checkpoint(work: Path, shape: str) -> Path:
    return provide_folder(work / "models" / f"random-{shape}" / "checkpoint", lambda to: make_random(shape, to))


def plain_checkpoint(work: Path, model: str) -> Path:
    """Any checkpoint that tinygpt reads, in the form that every peer reads."""
    source = str(Path(model).resolve()) if Path(model).exists() else model
    folder = work / "models" / re.sub(r"\W+", "-", source).strip("-") / "checkpoint"
    return provide_folder(folder, lambda to: make_form(Path(sys.executable), "checkpoints", source, to, "float32"))


def place(peer: Peer, dtype: str, work: Path, checkpoint: Path) -> Place:
    """PeerError if the peer cannot be installed, or cannot make its form of the checkpoint."""
    python = provide_python(peer, work)
    if not peer.makes_files:
        return Place(peer, python, checkpoint)
    folder = checkpoint.parent / f"{peer.module}-{dtype}"
    return Place(peer, python, provide_folder(folder, lambda to: make_form(python, peer.module, checkpoint, to, dtype)))
