"""GPT-1, as transformers writes it (Radford et al., 2018): GPT-2 with its layer norms behind the blocks."""

from tinygpt.weights.config import ModelConfig
from tinygpt.weights.families.config_fields import checked_config, renamed
from tinygpt.weights.families.family import Rule
from tinygpt.weights.families.hugging_face.gpt2 import ALIASES
from tinygpt.weights.families.hugging_face.model_types import Fields, ModelType
from tinygpt.weights.parameters import EMBEDDING, POSITIONS, parameter_shapes

_DEFAULTS = {
    "vocab_size": 40478,
    "n_positions": 512,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "afn": "gelu",
    "bos_token_id": None,
    "eos_token_id": None,
}
_ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "swish"}  # what its code means by them
_CHECKS = {
    "afn": (lambda value: isinstance(value, str) and value in _ACTIVATIONS, f"one of {', '.join(_ACTIVATIONS)}"),
}
_TOP = {EMBEDDING: "tokens_embed.weight", POSITIONS: "positions_embed.weight"}


def model_config(fields: Fields, generation: Fields | None = None) -> ModelConfig:
    """Raises one CheckpointError that names every field that is impossible or not implemented."""
    fields = {**_DEFAULTS, **fields, **renamed(fields, ALIASES)}
    activation = _ACTIVATIONS.get(fields["afn"], "gelu_new") if isinstance(fields["afn"], str) else "gelu_new"
    values = {**fields, "activation_function": activation, "n_inner": None}
    return checked_config(values, generation, _CHECKS, structure={"norm_placement": "post", "final_norm": False})


def _rules(config: ModelConfig, fields: Fields) -> dict[str, Rule]:
    return {name: Rule((_TOP.get(name, name),)) for name in parameter_shapes(config)}


OPENAI_GPT = ModelType("openai-gpt", "GPT-1", model_config, _rules, prefix="transformer.", is_in_out=True)
