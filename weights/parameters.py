"""Names, which are Hugging Face's for GPT-2, and shapes of the parameters to which every family is brought.

Matrices of layers are (in, out), as in Hugging Face's files; all others are (out, in).
"""

import re
from collections.abc import Mapping

from tinygpt.weights.config import ModelConfig

EMBEDDING, POSITIONS, HEAD = "wte.weight", "wpe.weight", "lm_head.weight"
PROJECT_IN, PROJECT_OUT = "project_in.weight", "project_out.weight"
_PARAMETER = re.compile(r"h\.(\d+)\.(.+)\.(\w+)")  # of a layer


def is_transposed(name: str) -> bool:
    return name.startswith("h.") and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    C, E, V = config.n_embd, config.embedding_size, config.vocab_size
    learned = {POSITIONS: (config.n_positions, C)} if config.positions == "learned" else {}
    project_in = {PROJECT_IN: (C, E)} if config.embed_dim else {}
    project_out = {PROJECT_OUT: (E, C)} if config.embed_dim else {}
    return {
        EMBEDDING: (V, E),
        **project_in,
        **learned,
        **(_norm("ln_e", C) if config.embed_norm else {}),
        **{f"h.{i}.{name}": shape for i in range(config.n_layer) for name, shape in _layer(config, i).items()},
        **(_norm("ln_f", C) if config.final_norm else {}),
        **project_out,
        HEAD: (V, E),
    }


def _layer(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    C = config.n_embd
    attention = {
        **_norm("ln_1", C),
        **_linear("attn.c_attn", C, 3 * C),
        **_linear("attn.c_proj", C, C),
        **_norm("ln_2", C),
    }
    if layer not in config.expert_layers:
        return attention | _mlp("mlp", config)
    experts = [_mlp(f"mlp.experts.{e}", config) for e in range(config.num_experts)]
    return attention | {"mlp.gate.weight": (config.num_experts, C)} | {k: v for one in experts for k, v in one.items()}


def _mlp(name: str, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    C, F = config.n_embd, config.inner_size
    return _linear(f"{name}.c_fc", C, F) | _linear(f"{name}.c_proj", F, C)


def _linear(name: str, k: int, n: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (k, n), f"{name}.bias": (n,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def split_name(parameter: str) -> tuple[int | None, str, str]:
    """Return the layer of a parameter or None, its module, and "weight" or "bias"."""
    found = _PARAMETER.fullmatch(parameter)
    if found is None:
        module, kind = parameter.rsplit(".", 1)
        return None, module, kind
    return int(found[1]), found[2], found[3]


def name_in_tables(parameter: str, top: Mapping[str, str], layers: str, modules: Mapping[str, str]) -> str:
    """Return a parameter's name in `top`, or that of a module in a layer, such as `layers`.3."""
    if parameter in top:
        return top[parameter]
    layer, module, kind = split_name(parameter)
    return f"{layers}.{layer}.{modules[module]}.{kind}"
