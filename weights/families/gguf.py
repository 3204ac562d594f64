"""GPT-2 and BLOOM as llama.cpp names them in GGUF files, with their tokenizers (llama.cpp, gguf-py's constants.py)."""

from dataclasses import replace
from typing import Any

from ..config import EMBEDDING, ModelConfig, parameter_shapes
from ..errors import shown
from .config_fields import Shapes, config_of_parts
from .family import Family, Names, Source, TensorRule
from .model_types import BLOOM as HUGGING_FACES_BLOOM
from .tokenizers import gguf_tokenizer

ARCHITECTURE = "general.architecture"
_IN_LAYER = ("attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down")
_TOP = {"wte": "token_embd", "wpe": "position_embd", "lm_head": "output"}
# BLOOM's queries, keys and values are in GPT-2's order already.
NAMES = Names("blk", {**_TOP, "ln_f": "output_norm", "ln_e": "token_embd_norm"}, _IN_LAYER)
# Fields of STRUCTURE of each architecture, and fields that no key has.
ARCHITECTURES = {"gpt2": {}, "bloom": {"positions": "alibi", "embed_norm": True}}
_FIXED = {"gpt2": {}, "bloom": {"activation_function": "gelu_fast", "bos_token_id": 1, "eos_token_id": 2}}
KEYS = {
    "n_layer": "{}.block_count",
    "n_positions": "{}.context_length",
    "n_embd": "{}.embedding_length",
    "n_inner": "{}.feed_forward_length",
    "n_head": "{}.attention.head_count",
    "layer_norm_epsilon": "{}.attention.layer_norm_epsilon",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
}


def _config(source: Source) -> ModelConfig:
    metadata = source.container.metadata
    name = next((name for name in ARCHITECTURES if name == metadata[ARCHITECTURE]), None)
    if name is None:
        raise source.error(
            f"holds the architecture {shown(metadata[ARCHITECTURE])} and must hold 'gpt2' or 'bloom'."
        )
    said = {field: metadata[key.format(name)] for field, key in KEYS.items() if key.format(name) in metadata}
    seen = {"vocab_size": Shapes(source).size(NAMES.of(EMBEDDING), 0)}
    config = config_of_parts(source, "its header", _FIXED[name], seen, said, ARCHITECTURES[name])
    if name == "bloom" and config.inner_size != 4 * config.n_embd:
        raise source.error(
            f"is a BLOOM with MLPs of {config.inner_size}, which must be 4 times {config.n_embd}."
        )
    return config


def _quirks(source: Source, config: ModelConfig) -> list[str]:
    blocks = sorted({t.dtype for t in source.container.tensors.values() if t.dtype.startswith("Q")})
    return [f"{', '.join(blocks)} expanded to float32, and not kept as they are"] if blocks else []


def _tokenizer(source: Source) -> dict[str, Any] | None:
    about = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in source.container.metadata.items()
        if name.startswith("tokenizer.ggml.")
    }
    if "tokens" not in about or about.get("model") in ("none", "no_vocab"):
        return None
    return gguf_tokenizer(about, source.path)


FAMILY = Family(
    name="GPT-2 of GGUF",
    described_by="its header",
    detect=lambda source: isinstance(source.container.metadata.get(ARCHITECTURE), str),
    config=_config,
    rules=lambda source, config: {name: TensorRule((NAMES.of(name),)) for name in parameter_shapes(config)},
    quirks=_quirks,
    tokenizer=_tokenizer,
)
BLOOM = replace(
    FAMILY,
    name="BLOOM of GGUF",
    detect=lambda source: source.container.metadata.get(ARCHITECTURE) == "bloom",
    layout=HUGGING_FACES_BLOOM.layout,
)
