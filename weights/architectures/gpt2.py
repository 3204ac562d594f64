"""The one mapping from names in a checkpoint's files to GPT-2's parameters, as Hugging Face names them."""

import re

from tinygpt.config import ModelConfig

# Wrappers that a model may have been saved in: GPT2LMHeadModel and other parents, DataParallel, torch.compile.
_WRAPPERS = re.compile(r"(transformer\.|model\.|module\.|_orig_mod\.)+")
_CAUSAL_MASK = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
# What fine-tunes put on top of the hidden states beside, or instead of, the language model's head.
_OTHER_HEADS = ("multiple_choice_head.", "score.", "classifier.", "qa_outputs.", "v_head.")


def canonical_name(name: str) -> str:
    """`name` without the wrappers it was saved in: module.transformer.wte.weight is wte.weight."""
    return _WRAPPERS.sub("", name, count=1) if _WRAPPERS.match(name) else name


def is_ignored(name: str) -> bool:
    """Whether a canonical name is known and of no use here: a causal mask, or the head of another task."""
    return bool(_CAUSAL_MASK.fullmatch(name)) or name.startswith(_OTHER_HEADS)


def is_transposed(name: str) -> bool:
    """Whether the matrix is stored (in, out), as Hugging Face's Conv1D does. Embeddings and heads are (out, in)."""
    return name.startswith("h.") and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))


def stored_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape that every parameter has in a checkpoint's files, by canonical name."""
    C, V = config.n_embd, config.vocab_size
    layer_shapes = _layer_shapes(C, config.inner_size)
    return {
        "wte.weight": (V, C),
        "wpe.weight": (config.n_positions, C),
        **{f"h.{i}.{name}": shape for i in range(config.n_layer) for name, shape in layer_shapes.items()},
        "ln_f.weight": (C,),
        "ln_f.bias": (C,),
        "lm_head.weight": (V, C),
    }


def _layer_shapes(C: int, F: int) -> dict[str, tuple[int, ...]]:
    return {
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
