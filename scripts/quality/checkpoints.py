"""Versions of a checkpoint with outliers, by name, and writing them."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.open import open_checkpoint

from .gpt2_like import make_gpt2_like
from .outliers import Tensors, amplify_norms, amplify_values, raise_neurons, raise_residual

Edit = Callable[[Tensors, Checkpoint, list[int]], None]


def of_weights(edit: Callable, size: float) -> Edit:
    """An edit that needs to run no text."""
    return lambda tensors, checkpoint, token_ids: edit(tensors, checkpoint.config, size)


# Of the residual stream's std. With 30 float32 itself does badly: a layer norm hardly sees the other channels.
RESIDUAL = (10, -5, -5)
OUTLIERS: dict[str, Edit] = {
    "layer norms x 30": of_weights(amplify_norms, 30),
    "residual stream + 10": partial(raise_residual, sizes=RESIDUAL),
    "values x 30": of_weights(amplify_values, 30),
    "neurons at 20": of_weights(raise_neurons, 20),
    "like GPT-2": make_gpt2_like,
}
# What weights alone do not protect as well, and a calibration does.
EXTREMES: dict[str, Edit] = {
    "values x 100": of_weights(amplify_values, 100),
    "neurons at 50": of_weights(raise_neurons, 50),
    "neurons at 100": of_weights(raise_neurons, 100),
}


def write_outliers(model: str, edit: Edit, token_ids: list[int], folder: Path) -> str:
    """A copy of a checkpoint, edited, in a folder that does not exist yet; token_ids are what it may measure with."""
    checkpoint = open_checkpoint(model)
    shutil.copytree(checkpoint.path, folder, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin*"))
    tensors = {name: np.array(stored.float32()) for name, stored in checkpoint.stored.items()}
    edit(tensors, checkpoint, token_ids)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)
