"""ModelConfig: what a model is, whatever file says so. And the dtypes it can run in."""

from dataclasses import dataclass
from typing import Any

# The precisions that weights can be held in.
DTYPES = ("float32", "bfloat16", "int8", "int4")
STORAGE_DTYPE = "float8"  # one more, which `convert` writes, and which is expanded to bfloat16 as it is loaded
# Every spelling of a function that is implemented, and the one function each stands for.
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
# Fields of ModelConfig that no GPT-2 has otherwise than by default.
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
    """All that the arithmetic must know of a model beside its parameters.

    Names and defaults are Hugging Face's for GPT-2; `n_inner=None` means 4 * n_embd. How what files say becomes a
    ModelConfig is said in weights/families. The fields of STRUCTURE set other architectures apart from GPT-2, and no
    code beside weights/families asks for a model by its name:

    norm_placement: where a block's layer norm stands: "pre", before it, or "post", behind its residual.
    positions: "learned" embeddings, or "alibi", a bias on scores (Press et al., 2022).
    embed_norm: whether a layer norm follows the embeddings.
    final_norm: whether one stands before the head.
    embed_dim: how wide token embeddings are where two matrices lead from them to n_embd and back; None: n_embd.
    embed_scale: what token embeddings, but not the head, are multiplied by.
    expert_layers: layers, from 0, whose MLP is num_experts experts, of which each token has experts_per_token, weighted
        by their probabilities; norm_topk_prob: scaled so that these sum to 1.
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
    # Changes only where float16 training would overflow; attention is float32 here in any case.
    reorder_and_upcast_attn: bool = False
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
        """The fields of STRUCTURE that are not GPT-2's."""
        return {name: value for name in STRUCTURE if (value := getattr(self, name)) != getattr(ModelConfig, name)}

    @property
    def has_alibi(self) -> bool:
        return self.positions == "alibi"

    @property
    def embedding_size(self) -> int:
        """How wide the token embeddings and the head are."""
        return self.embed_dim or self.n_embd

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    @property
    def inner_size(self) -> int:
        return self.n_inner if self.n_inner is not None else 4 * self.n_embd

    @property
    def activation(self) -> str:
        """The function behind `activation_function`: several spellings name the same one."""
        return ACTIVATIONS[self.activation_function]

    def attention_scale(self, layer: int) -> float:
        """The factor on q·k in `layer`, counted from 0."""
        scale = self.head_size**-0.5 if self.scale_attn_weights else 1.0
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale

    @property
    def alibi_slopes(self) -> tuple[float, ...]:
        """For each head, what a key's score loses for each position that it lies back; none without ALiBi.

        Where heads are no power of two, those beyond it have every second slope of twice as many heads.
        """
        if not self.has_alibi:
            return ()
        power = 1 << (self.n_head.bit_length() - 1)
        slopes = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
        return (*slopes, *(2.0 ** (-4 * (2 * head + 1) / power) for head in range(self.n_head - power)))
