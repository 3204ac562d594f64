"""ModelConfig: the fields of a checkpoint's config.json that change the result. And the dtypes it can run in."""

from dataclasses import dataclass
from typing import Any

from tinygpt.errors import CheckpointError

# The precisions that weights can be held in.
DTYPES = ("float32", "bfloat16", "int8", "int4")
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
ALIASES = {  # transformers' attribute_map; an alias wins over the name it stands for
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
# The largest of each that is believed: beyond, config.json is damaged, or an attack on memory.
SIZES = {
    "vocab_size": 2**31 - 1,
    "n_positions": 2**31 - 1,
    "n_embd": 2**31 - 1,
    "n_layer": 10_000,
    "n_head": 2**31 - 1,
    "n_inner": 2**31 - 1,
}
BOOLEANS = (
    "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx",
    "reorder_and_upcast_attn",
    "tie_word_embeddings",
)


@dataclass(frozen=True)
class ModelConfig:
    """A GPT-2 architecture, with Hugging Face's names and defaults. `n_inner=None` means 4 * n_embd."""

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

    @classmethod
    def from_dict(cls, config: dict[str, Any], generation: dict[str, Any] | None = None) -> "ModelConfig":
        """Read config.json and, where there is one, generation_config.json.

        As in transformers, the ids that end a text come from generation_config.json alone where that exists, even
        if it names none. Raises one CheckpointError naming every field that is impossible or not implemented.
        """
        values = {**config, **{ALIASES[name]: value for name, value in config.items() if name in ALIASES}}
        ending = values if generation is None else {"eos_token_id": None, **generation}
        starting = generation if generation and generation.get("bos_token_id") is not None else values
        problems = [*_unsupported(values), *_impossible(values), *_wrong_token_ids(starting, ending)]
        if problems:
            raise CheckpointError(
                f"config.json or generation_config.json cannot be used: {'; '.join(problems)}. "
                "Correct the file, or take another checkpoint."
            )
        known = cls.__dataclass_fields__.keys() - {"bos_token_id", "eos_token_ids"}
        return cls(
            **{name: values[name] for name in known if name in values},
            bos_token_id=starting.get("bos_token_id", cls.bos_token_id),
            eos_token_ids=_as_tuple(ending.get("eos_token_id", 50256)),
        )


def _unsupported(values: dict[str, Any]) -> list[str]:
    problems = []
    if values.get("model_type", "gpt2") != "gpt2":
        problems.append(f"model_type is {values['model_type']!r} and only 'gpt2' is implemented")
    if values.get("add_cross_attention"):
        problems.append(f"add_cross_attention is {values['add_cross_attention']!r} and only false is implemented")
    if values.get("quantization_config") is not None:
        problems.append("quantization_config is given and quantised checkpoints are not implemented")
    activation = values.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        problems.append(f"activation_function is {activation!r} and only {', '.join(ACTIVATIONS)} are implemented")
    return problems


def _impossible(values: dict[str, Any]) -> list[str]:
    problems = []
    sizes = {name: values[name] for name in SIZES if name in values}
    if sizes.get("n_inner", 0) is None:
        del sizes["n_inner"]
    for name, size in sizes.items():
        if not _is_int(size) or not 1 <= size <= SIZES[name]:
            problems.append(f"{name} is {size!r} and must be a whole number from 1 to {SIZES[name]}")
    for name in BOOLEANS:
        if not isinstance(values.get(name, True), bool):
            problems.append(f"{name} is {values[name]!r} and must be true or false")
    epsilon = values.get("layer_norm_epsilon", 1e-5)
    if not (_is_int(epsilon) or isinstance(epsilon, float)) or not 0 <= epsilon < float("inf"):
        problems.append(f"layer_norm_epsilon is {epsilon!r} and must be a number from 0 up")
    n_embd, n_head = values.get("n_embd", 768), values.get("n_head", 12)
    if not problems and n_embd % n_head:
        problems.append(f"n_embd {n_embd} cannot be divided into {n_head} heads (n_head)")
    return problems


def _wrong_token_ids(starting: dict[str, Any], ending: dict[str, Any]) -> list[str]:
    """Ids outside the vocabulary are believed, as transformers does: they are simply never produced."""
    problems = []
    bos = starting.get("bos_token_id")
    if bos is not None and not _is_int(bos):
        problems.append(f"bos_token_id is {bos!r} and must be a token id or null")
    eos = ending.get("eos_token_id")
    if not all(_is_int(token_id) for token_id in _as_tuple(eos)):
        problems.append(f"eos_token_id is {eos!r} and must be a token id, a list of token ids or null")
    return problems


def _as_tuple(token_ids: Any) -> tuple[Any, ...]:
    if isinstance(token_ids, list):
        return tuple(token_ids)
    return () if token_ids is None else (token_ids,)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
