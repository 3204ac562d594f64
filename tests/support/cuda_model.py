"""A small random model, and one backend that runs it: what tests of the CUDA backend's steps share."""

import numpy as np

from tinygpt.kernels.batch import Batch
from tinygpt.weights.config import ModelConfig

V, T, SLOTS = 29, 140, 4


class Random:
    """A checkpoint of a small model whose every parameter matters."""

    tied = False

    def __init__(self, **fields):
        sizes = {"vocab_size": V, "n_positions": T, "n_embd": 16, "n_layer": 2, "n_head": 2, **fields}
        self.config = ModelConfig(**sizes)
        c, f = self.config.n_embd, self.config.inner_size
        shapes = {"wte.weight": (V, c), "wpe.weight": (T, c), "lm_head.weight": (V, c)}
        shapes |= {f"ln_f.{kind}": (c,) for kind in ("weight", "bias")}
        for i in range(self.config.n_layer):
            linears = {"attn.c_attn": (3 * c, c), "attn.c_proj": (c, c), "mlp.c_fc": (f, c), "mlp.c_proj": (c, f)}
            for name, shape in {**linears, "ln_1": (c,), "ln_2": (c,)}.items():
                shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[:1]}
        generator = np.random.default_rng(0)
        self.tensors = {name: generator.standard_normal(s, np.float32) * 0.3 for name, s in shapes.items()}

    def tensor(self, name: str) -> np.ndarray:
        return self.tensors[name].astype(np.float32)

    def release(self, name: str) -> None:
        pass


class Model:
    """One backend with a model, a cache and buffers."""

    def __init__(self, backend, checkpoint: Random, dtype: str = "float32", num_tokens: int = 150):
        self.backend, config = backend, checkpoint.config
        self.params = backend.load_params(checkpoint, dtype)
        self.cache = backend.new_kv_cache(config, SLOTS, T, "float32" if dtype == "float32" else "bfloat16")
        self.workspace = backend.new_workspace(config, num_tokens, 80, 1, dtype)

    def forward(self, *batch) -> np.ndarray:
        return self.backend.forward(self.params, Batch.of(*batch), self.cache, self.workspace).copy()
