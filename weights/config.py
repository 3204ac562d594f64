"""ModelConfig, which describes a model's arithmetic, dtypes of weights, and names and shapes of parameters.

Names of parameters are Hugging Face's for GPT-2. Every matrix is (out, in).
"""

from collections.abc import Set
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Precision:
    """What reports say of a dtype of weights. kernels/cpu/dtypes.py has what computes in it."""

    bytes: float  # of a weight in the blocks, with its share of scales
    head: str  # dtype of the embedding and the head
    activations: str  # dtype
    kv_cache: str  # default dtype
    # Of a logit, compared with transformers in float32: two to four times the demo's differences, which reach 0.07 in
    # bfloat16, 0.5 and 2.1 in int8 and int4. The standard deviation of a trained model's logits is a few units.
    tolerance: float
    label: str  # GGML's name


PRECISIONS = {
    "float32": Precision(4, "float32", "float32", "float32", 1e-4, "F32"),
    "float16": Precision(2, "float16", "float32", "float32", 0.03, "F16"),
    "bfloat16": Precision(2, "bfloat16", "bfloat16", "bfloat16", 0.25, "BF16"),
    "int8": Precision(1, "int8", "int8", "bfloat16", 1.0, "Q8"),
    # 4 bytes of scale and offset for a group of 32.
    "int4": Precision(0.5 + 4 / 32, "int8", "int8", "bfloat16", 4.0, "Q4"),
}
DTYPES = tuple(PRECISIONS)
DTYPE_ALIASES = {
    **dict.fromkeys(("f32", "fp32", "float"), "float32"),
    **dict.fromkeys(("f16", "fp16", "half"), "float16"),
    "bf16": "bfloat16",
    "q8_0": "int8",
    "q4_0": "int4",
}
# Every spelling of an implemented function, and the function.
ACTIVATIONS = {
    **dict.fromkeys(
        ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_tanh"
    ),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    **dict.fromkeys(("silu", "swish"), "silu"),
    "tanh": "tanh",
}


def dtype_name(value: Any) -> str:
    """Return our name of a dtype that is named as in another program, or is torch's own."""
    name = str(value).strip().removeprefix("torch.")
    return DTYPE_ALIASES.get(name.lower(), name)


@dataclass(frozen=True)
class Attention:
    """The scores of a layer's attention: scale q·k - slope * distance."""

    scale: float
    slopes: tuple[float, ...] = ()  # of each head; none without ALiBi
    window: int | None = None  # how many positions a query sees, with its own; None: all before it


@dataclass(frozen=True)
class ModelConfig:
    """All that the arithmetic must know of a model besides its parameters.

    Names and defaults are Hugging Face's for GPT-2; `n_inner=None` means 4 * n_embd. The fields of STRUCTURE tell other
    architectures from GPT-2: no code outside weights/families asks for a model by its name.

    norm_placement: "pre", layer norms before the blocks, or "post", after their residuals.
    positions: "learned" embeddings, or "alibi", a bias on scores (Press et al., 2022).
    embed_norm: a layer norm follows the embeddings. final_norm: one precedes the head.
    embed_dim: the width of token embeddings, if two matrices lead from them to n_embd and back.
    embed_scale: the factor on token embeddings, not on the head.
    expert_layers: layers, from 0, whose MLP is num_experts experts. A token has experts_per_token, weighted by their
        probabilities, which sum to 1 if norm_topk_prob.
    local_layers: layers, from 0, whose attention sees the last window_size positions alone.
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
    # From here on fields of STRUCTURE, which have one value in every GPT-2.
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
    local_layers: tuple[int, ...] = ()
    window_size: int | None = None

    @property
    def structure(self) -> dict[str, Any]:
        """Return the fields in which the model differs from GPT-2."""
        return {
            name: value for name in STRUCTURE if (value := getattr(self, name)) != getattr(ModelConfig, name)
        }

    def unsupported(self, supported: Set[Any]) -> dict[str, Any]:
        """Return the fields of `structure` that are not supported: by name, or as a pair with the value."""
        return {
            name: value
            for name, value in self.structure.items()
            if name not in supported and (name, value) not in supported
        }

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

    def attention(self, layer: int) -> Attention:
        """Return the attention of `layer`, counted from 0."""
        scale = self.head_size**-0.5 if self.scale_attn_weights else 1.0
        if self.scale_attn_by_inverse_layer_idx:
            scale /= layer + 1
        return Attention(scale, self.alibi_slopes, self.window_size if layer in self.local_layers else None)

    @property
    def alibi_slopes(self) -> tuple[float, ...]:
        """Return each head's loss of a key's score for a position of distance; none without ALiBi.

        Heads beyond a power of two have every second slope of twice as many heads.
        """
        if not self.has_alibi:
            return ()
        power = 1 << (self.n_head.bit_length() - 1)
        slopes = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
        return (*slopes, *(2.0 ** (-4 * (2 * head + 1) / power) for head in range(self.n_head - power)))


_NAMES = [field.name for field in fields(ModelConfig)]
STRUCTURE = _NAMES[_NAMES.index("norm_placement") :]
EMBEDDING = "wte.weight"
POSITIONS = "wpe.weight"
HEAD = "lm_head.weight"
HEAD_BIAS = "lm_head.bias"  # of some models in files, folded into others at loading


def is_transposed(name: str) -> bool:
    """Return whether the parameter is a matrix that GPT-2's own files have as (in, out)."""
    return name.startswith("h.") and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    C = config.n_embd
    E = config.embedding_size
    V = config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (V, E)}
    if config.embed_dim:
        shapes["project_in.weight"] = C, E
    if config.positions == "learned":
        shapes[POSITIONS] = config.n_positions, C
    if config.embed_norm:
        shapes |= _module("ln_e", C)
    for layer in range(config.n_layer):
        shapes |= {f"h.{layer}.{name}": shape for name, shape in _layer(config, layer).items()}
    if config.final_norm:
        shapes |= _module("ln_f", C)
    if config.embed_dim:
        shapes["project_out.weight"] = E, C
    return shapes | {HEAD: (V, E)}


def _layer(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    C, F = config.n_embd, config.inner_size
    shapes = (
        _module("ln_1", C)
        | _module("attn.c_attn", 3 * C, C)
        | _module("attn.c_proj", C, C)
        | _module("ln_2", C)
    )
    mlps = ["mlp"]
    if layer in config.expert_layers:
        shapes["mlp.gate.weight"] = config.num_experts, C
        mlps = [f"mlp.experts.{expert}" for expert in range(config.num_experts)]
    for mlp in mlps:
        shapes |= _module(f"{mlp}.c_fc", F, C) | _module(f"{mlp}.c_proj", C, F)
    return shapes


def _module(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
