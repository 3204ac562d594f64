"""GPT-2: the names that its files give to parameters, and the fields of its config.json."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tinygpt.config import ModelConfig
from tinygpt.weights.architectures.config_fields import checked_config
from tinygpt.weights.tensor import Derived, Tensor

NAME = "GPT-2"
# transformers' attribute_map; an alias wins over the name that it stands for.
_ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_CHECKS = {"add_cross_attention": (lambda value: not value, "false, because cross-attention is not implemented")}
# Wrappers that a model may have been saved in: GPT2LMHeadModel and other parents, DataParallel, torch.compile.
_WRAPPERS = re.compile(r"(transformer\.|model\.|module\.|_orig_mod\.)+")
_CAUSAL_MASK = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
# What fine-tunes put on top of the hidden states beside, or instead of, the language model's head.
_OTHER_HEADS = ("multiple_choice_head.", "score.", "classifier.", "qa_outputs.", "v_head.")


def model_config(fields: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """Read config.json and, where there is one, generation_config.json.

    Raises one CheckpointError naming every field that is impossible or not implemented.
    """
    values = {**fields, **{_ALIASES[name]: value for name, value in fields.items() if name in _ALIASES}}
    return checked_config(values, generation, _CHECKS)


def canonical_name(name: str) -> str:
    """`name` without the wrappers it was saved in: module.transformer.wte.weight is wte.weight."""
    return _WRAPPERS.sub("", name, count=1) if _WRAPPERS.match(name) else name


def is_ignored(canonical_name: str) -> bool:
    """Whether the tensor is known and of no use here: a causal mask, or the head of another task."""
    return bool(_CAUSAL_MASK.fullmatch(canonical_name)) or canonical_name.startswith(_OTHER_HEADS)


def is_transposed(canonical_name: str) -> bool:
    """Whether the matrix is stored (in, out), as Hugging Face's Conv1D does. Embeddings and heads are (out, in)."""
    return canonical_name.startswith("h.") and canonical_name.endswith(
        (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    )


def parameter(name: str, stored: Mapping[str, Tensor]) -> Tensor:
    """The engine's parameter `name`, which is GPT-2's own; every matrix is (out, in)."""
    return Derived(np.transpose, (stored[name],)) if is_transposed(name) else stored[name]


def stored_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape that every parameter has in a checkpoint's files, by canonical name."""
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
        "wte.weight": (V, C),
        "wpe.weight": (config.n_positions, C),
        **{f"h.{i}.{name}": shape for i in range(config.n_layer) for name, shape in layer.items()},
        "ln_f.weight": (C,),
        "ln_f.bias": (C,),
        "lm_head.weight": (V, C),
    }
