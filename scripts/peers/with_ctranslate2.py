"""ctranslate2, whose generation loop is its own: a callback tells when each token came."""

import json
import time
from pathlib import Path

import ctranslate2
import numpy as np
from ctranslate2.specs import Activation, TransformerDecoderModelSpec
from safetensors.numpy import load_file

from .engine import milliseconds

ACTIVATIONS = {
    "gelu_new": Activation.GELUTanh,
    "gelu_pytorch_tanh": Activation.GELUTanh,
    "gelu": Activation.GELU,
    "relu": Activation.RELU,
}


def make(checkpoint: Path, folder: Path, dtype: str) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    spec = TransformerDecoderModelSpec.from_config(
        config["n_layer"],
        config["n_head"],
        pre_norm=True,
        activation=ACTIVATIONS[config["activation_function"]],
    )
    fill(spec, load_file(checkpoint / "model.safetensors"))
    spec.register_vocabulary([str(i) for i in range(config["vocab_size"])])
    for role in ("bos_token", "eos_token", "unk_token"):
        setattr(spec.config, role, "0")
    spec.validate()
    spec.optimize(quantization=dtype)
    spec.save(str(folder))


def fill(spec: TransformerDecoderModelSpec, tensors: dict[str, np.ndarray]) -> None:
    """Hugging Face's tensors, whose matrices of a block are (in, out), into the decoder, which has (out, in)."""

    def norm(target, name: str) -> None:
        target.gamma, target.beta = tensors[f"{name}.weight"], tensors[f"{name}.bias"]

    def linear(target, name: str) -> None:
        target.weight = np.ascontiguousarray(tensors[f"{name}.weight"].T)
        target.bias = tensors[f"{name}.bias"]

    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = tensors["transformer.wte.weight"]
    decoder.position_encodings.encodings = tensors["transformer.wpe.weight"]
    decoder.projection.weight = tensors.get("lm_head.weight", tensors["transformer.wte.weight"])
    norm(decoder.layer_norm, "transformer.ln_f")
    for i, layer in enumerate(decoder.layer):
        name = f"transformer.h.{i}"
        norm(layer.self_attention.layer_norm, f"{name}.ln_1")
        linear(layer.self_attention.linear[0], f"{name}.attn.c_attn")
        linear(layer.self_attention.linear[1], f"{name}.attn.c_proj")
        norm(layer.ffn.layer_norm, f"{name}.ln_2")
        linear(layer.ffn.linear_0, f"{name}.mlp.c_fc")
        linear(layer.ffn.linear_1, f"{name}.mlp.c_proj")


class Engine:
    def __init__(self, folder: Path, dtype: str, threads: int):
        self.generator = ctranslate2.Generator(str(folder), compute_type=dtype, inter_threads=1, intra_threads=threads)

    def prefill_ms(self, ids: list[list[int]]) -> float:
        return milliseconds(lambda: self._generate(ids, 1))

    def step_ms(self, ids: list[list[int]], new: int) -> float:
        """Between the last sequence's first token and its last one."""
        stamps: list[float] = []
        self._generate(ids, new, callback=lambda result: stamps.append(time.perf_counter()))
        if len(stamps) != new * len(ids):
            raise RuntimeError(f"{len(stamps)} tokens were made and {new} x {len(ids)} were asked for")
        return 1e3 * (stamps[-1] - stamps[len(ids) - 1]) / (new - 1)

    def last_logits(self, ids: list[int]) -> list[float]:
        return np.array(self.generator.forward_batch([ids]))[0, -1].tolist()

    def _generate(self, ids: list[list[int]], new: int, **options) -> None:
        tokens = [[str(i) for i in row] for row in ids]
        lengths = {"min_length": new, "max_length": new}
        self.generator.generate_batch(tokens, **lengths, include_prompt_in_result=False, **options)
