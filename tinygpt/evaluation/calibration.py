"""The size of each input channel of linear layers, measured on a text or read from a file.

int8 uses the largest, as SmoothQuant (Xiao et al., 2022); int4 the mean, as AWQ (Lin et al., 2023).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.model_runner import load_backend
from ..errors import CheckpointError, RequestError
from ..kernels.backend import Batch
from ..outputs import UseTqdm, with_bar
from ..weights.checkpoint import Checkpoint
from ..weights.config import parameter_shapes
from ..weights.containers.torch import read_torch
from ..weights.convert.export import layout_of
from ..weights.files import followed

NUM_SAMPLES, SAMPLE_TOKENS = 32, 256  # at most
READ_BY = ("attn.c_attn", "mlp.c_fc", "attn.c_proj", "mlp.c_proj")


@dataclass(frozen=True)
class Calibration:
    """Sizes and means of input channels (K,), by layer name, such as "h.0.attn.c_attn"; none: left as it is."""

    share: float  # SmoothQuant's alpha
    sizes: Mapping[str, np.ndarray]
    means: Mapping[str, np.ndarray] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Statistics:
    """Largest |x|, sum of |x|, and sum of x, over the inputs of a linear layer: (K,) each."""

    largest: Any = 0.0
    size: Any = 0.0
    total: Any = 0.0
    count: int = 0

    def add(self, x: np.ndarray) -> None:  # (N, K)
        sizes = np.abs(x)
        self.largest = np.maximum(self.largest, sizes.max(axis=0))
        self.size = self.size + sizes.sum(axis=0)
        self.total = self.total + x.sum(axis=0)
        self.count += len(x)


def calibrate(
    checkpoint: Checkpoint,
    text: str,
    token_ids: list[int],
    dtype: str,
    share: float,
    use_tqdm: UseTqdm = None,
) -> Calibration:
    """Run samples of a text in float64. Raise RequestError if it has no token."""
    samples = samples_of(token_ids, min(SAMPLE_TOKENS, checkpoint.config.n_positions))
    statistics: dict[str, Statistics] = {}
    reference = load_backend("reference", "float32")
    params = reference.load_params(checkpoint)
    params = replace(params, watch=lambda name, x: statistics.setdefault(name, Statistics()).add(x))
    for sample in with_bar(samples, len(samples), use_tqdm, "samples"):
        cache = reference.new_kv_cache(checkpoint.config, 1, len(sample))
        reference.forward(params, Batch.of([sample], [0], [0]), cache)
    sizes = {
        name: one.largest if dtype == "int8" else one.size / one.count for name, one in statistics.items()
    }
    sizes = {name: size.astype(np.float32) for name, size in sizes.items()}  # as files keep them
    facts = {
        "smooth_text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "smooth_samples": str(len(samples)),
    }
    means = {name: one.total / one.count for name, one in statistics.items()}
    return Calibration(share, sizes, means, {"smooth": str(share), **facts})


def samples_of(token_ids: list[int], size: int) -> list[list[int]]:
    """Return up to NUM_SAMPLES runs of `size` tokens, spread over the text."""
    if not token_ids:
        raise RequestError("the text to calibrate on has no token.")
    starts = range(0, max(len(token_ids) - size, 0) + 1, size)
    kept = np.unique(np.linspace(0, len(starts) - 1, min(NUM_SAMPLES, len(starts))).round().astype(int))
    return [token_ids[starts[i] : starts[i] + size] for i in kept]


def read_act_scales(path: Path, checkpoint: Checkpoint, share: float) -> Calibration:
    """Read a file of SmoothQuant's generate_act_scales.py: names are transformers'. Raise CheckpointError."""
    tensors = read_torch(followed(path)).tensors
    layout = layout_of(checkpoint)
    shapes = parameter_shapes(checkpoint.config)
    names = {layout.short_name(f"{name}.weight"): name for name in tensors}
    rules = layout.rules(checkpoint.config)
    wanted = {f"h.{i}.{part}": part for i in range(checkpoint.config.n_layer) for part in READ_BY}
    # q_proj, k_proj and v_proj have one input.
    sources = {name: rules[f"{name}.weight"].sources[0] for name in wanted}
    sizes = {name: tensors[names[source]].float32() for name, source in sources.items() if source in names}
    missing = [name for name, part in wanted.items() if name not in sizes and part in READ_BY[:2]]
    if missing:
        sees = f": the tool sees nn.Linear alone, and a {checkpoint.family} has Conv1D; give --calibrate TEXT"
        why = sees if list(tensors) == ["lm_head"] else ""
        first = sources[missing[0]].removesuffix(".weight")
        raise CheckpointError(f"{path} has no scales of {first} ({len(missing)} linear layers in all){why}.")
    for name, size in sizes.items():
        _, width = shapes[f"{name}.weight"]  # (out, in)
        if size.shape != (width,) or not np.isfinite(size).all() or (size < 0).any():
            theirs = names[sources[name]]
            raise CheckpointError(f"{path} must hold {width} sizes, finite and none below 0, for {theirs}.")
    digest = hashlib.sha256(next(iter(tensors.values())).file.data).hexdigest()
    return Calibration(share, sizes, about={"smooth": str(share), "smooth_act_scales_sha256": digest})
