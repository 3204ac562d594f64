"""ModelConfig, which describes a model's arithmetic, dtypes of weights, and names and shapes of parameters.

Names of parameters are Hugging Face's for GPT-2. Matrices of layers are (in, out), all others (out, in).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPES = ("float32", "bfloat16", "int8", "int4")
STORAGE_DTYPE = "float8"  # `convert` writes it, and loading expands it to bfloat16
# Every spelling of an implemented function, and the function.
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
# Fields of ModelConfig that have one value in every GPT-2.
STRUCTURE = (
    "norm_placement",
    "positions",
    "embed_norm",
    "final_norm",
    "embed_dim",
    "embed_scale",
    "expert_layers",
    "num_experts",
    "experts_per_token",
    "norm_topk_prob",
)


@dataclass(frozen=True)
class ModelConfig:
    """All that the arithmetic must know of a model besides its parameters.

    Names and defaults are Hugging Face's for GPT-2; `n_inner=None` means 4 * n_embd. The fields of STRUCTURE tell other
    architectures from GPT-2: no code outside weights/families asks for a model by its name.

    norm_placement: "pre", layer norms before the blocks, or "post", after their residuals.
    positions: "learned" embeddings, or "alibi", a bias on scores (Press et al., 2022).
    embed_norm: a layer norm follows the embeddings. final_norm: one precedes the head.
    embed_dim: the width of token embeddings if two matrices lead from them to n_embd and back; None: n_embd.
    embed_scale: the factor on token embeddings, not on the head.
    expert_layers: layers, from 0, whose MLP is num_experts experts; each token has experts_per_token, weighted by their
        probabilities. norm_topk_prob: scaled so that these sum to 1.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False  # matters in float16 training alone; attention is float32 here
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 50256
    eos_token_ids: tuple[int, ...] = (50256,)
    norm_placement: str = "pre"
    positions: str = "learned"
    embed_norm: bool = False
    final_norm: bool = True
    embed_dim: int | None = None
    embed_scale: float = 1.0
    expert_layers: tuple[int, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 1
    norm_topk_prob: bool = False

    @property
    def structure(self) -> dict[str, Any]:
        """The fields of STRUCTURE that differ from GPT-2's."""
        return {name: value for name in STRUCTURE if (value := getattr(self, name)) != getattr(ModelConfig, name)}

    @property
    def has_alibi(self) -> bool:
        return self.positions == "alibi"

    @property
    def embedding_size(self) -> int:
        return self.embed_dim or self.n_embd

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    @property
    def inner_size(self) -> int:
        return self.n_inner if self.n_inner is not None else 4 * self.n_embd

    @property
    def activation(self) -> str:
        return ACTIVATIONS[self.activation_function]

    def attention_scale(self, layer: int) -> float:
        """Return the factor on q·k in `layer`, counted from 0."""
        scale = self.head_size**-0.5 if self.scale_attn_weights else 1.0
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale

    @property
    def alibi_slopes(self) -> tuple[float, ...]:
        """For each head, the loss of a key's score for each position of distance; none without ALiBi.

        Heads beyond a power of two have every second slope of twice as many heads.
        """
        if not self.has_alibi:
            return ()
        power = 1 << (self.n_head.bit_length() - 1)
        slopes = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
        return (*slopes, *(2.0 ** (-4 * (2 * head + 1) / power) for head in range(self.n_head - power)))


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
