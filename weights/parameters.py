"""The parameters that the engine asks for: their names, which are Hugging Face's for GPT-2, and their shapes.

Every family of checkpoints is brought to this form. As in Hugging Face's files, the matrices of layers are (in, out) in
it; embeddings and the head are (out, in), as the engine takes all matrices.
"""

from tinygpt.config import ModelConfig

EMBEDDING, POSITIONS, HEAD = "wte.weight", "wpe.weight", "lm_head.weight"


def is_transposed(name: str) -> bool:
    """Whether the parameter is a matrix that is (in, out)."""
    return name.startswith("h.") and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter, by name."""
    C, F, V = config.n_embd, config.inner_size, config.vocab_size
    layer = {
        "ln_1.weight": (C,),
        "ln_1.bias": (C,),
        "attn.c_attn.weight": (C, 3 * C),
        "attn.c_attn.bias": (3 * C,),
        "attn.c_proj.weight": (C, C),
        "attn.c_proj.bias": (C,),
        "ln_2.weight": (C,),
        "ln_2.bias": (C,),
        "mlp.c_fc.weight": (C, F),
        "mlp.c_fc.bias": (F,),
        "mlp.c_proj.weight": (F, C),
        "mlp.c_proj.bias": (C,),
    }
    return {
        EMBEDDING: (V, C),
        POSITIONS: (config.n_positions, C),
        **{f"h.{i}.{name}": shape for i in range(config.n_layer) for name, shape in layer.items()},
        "ln_f.weight": (C,),
        "ln_f.bias": (C,),
        HEAD: (V, C),
    }
