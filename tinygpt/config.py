"""ModelConfig: what a model is, whatever file says so. And the dtypes it can run in."""

from dataclasses import dataclass

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


@dataclass(frozen=True)
class ModelConfig:
    """All that the arithmetic must know of a model beside its parameters.

    Names and defaults are Hugging Face's for GPT-2; `n_inner=None` means 4 * n_embd. How what files say becomes a
    ModelConfig is said in weights/families. What sets another architecture apart from GPT-2, such as where its layer
    norms stand, becomes a field here along with the kernels that read it.
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
