"""GPT-2 and BLOOM as llama.cpp names them in GGUF files, with their tokenizers (llama.cpp, gguf-py's constants.py)."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import EMBEDDING, POSITIONS, ModelConfig, parameter_shapes
from ..errors import CheckpointError, NoTokenizerError, shown
from ..files import StoredTokenizer
from .family import Family, Names, Shapes, Source, TensorRule
from .settings import config_of_parts
from .transformers import BLOOM_LAYOUT

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

ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")  # of a text, a turn and a message to a tool
# Texts of ends, as in llama.cpp, which asks for no key of them (llama-vocab.cpp, special_eog_ids).
_END = re.compile(
    r"<\|(eot_id|eom_id|im_end|end|return|calls?|flush|endoftext|end_of_text)\|>|<(end_of_(turn|utterance)|eos|turn\|)>|"
    r"</s>|_?<EOT>|\[EO[TS]\]"
)
# kinds of a token in GGUF
NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5


def _config(source: Source) -> ModelConfig:
    metadata = source.container.metadata
    name = next((name for name in ARCHITECTURES if name == metadata[ARCHITECTURE]), None)
    if name is None:
        raise source.error(
            f"holds the architecture {shown(metadata[ARCHITECTURE])} and must hold 'gpt2' or 'bloom'."
        )
    keys = {
        field: key.format(name) for field, key in KEYS.items() if field != "n_inner"
    }  # which tensors show
    said = {field: metadata[key] for field, key in keys.items() if key in metadata}
    if not source.container.tensors:
        raise source.error("holds a vocabulary, and no weights: give the model's file.")
    said |= {"eos_token_id": ends} if (ends := _ends(metadata)) else {}
    places = {
        "vocab_size": (NAMES.of(EMBEDDING), 0),
        "n_embd": (NAMES.of(EMBEDDING), 1),
        "n_positions": (NAMES.of(POSITIONS), 0),
        "n_inner": (NAMES.of("h.0.mlp.c_fc.weight"), 0),
    }
    seen = Shapes(source).shown(places, r"blk\.")
    config = config_of_parts(source, "its header", _FIXED[name], seen, said, ARCHITECTURES[name])
    if name == "bloom" and config.inner_size != 4 * config.n_embd:
        raise source.error(
            f"is a BLOOM with MLPs of {config.inner_size}, which must be 4 times {config.n_embd}."
        )
    return config


def _ends(metadata: Mapping[str, Any]) -> list[Any]:
    """Return the ids of all ends of a text or a turn; the first is the key's."""
    ids = [i for end in ENDS for i in _listed(metadata.get(f"tokenizer.ggml.{end}", []))]
    tokens, kinds = (metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if isinstance(tokens, list) and isinstance(kinds, list):
        pairs = enumerate(zip(tokens, kinds, strict=False))
        ids += [
            i for i, (token, kind) in pairs if kind in (CONTROL, USER_DEFINED) and _END.fullmatch(str(token))
        ]
    return list(dict.fromkeys(ids))


def _listed(ids: Any) -> list[Any]:
    return ids if isinstance(ids, list) else [ids]


def _quirks(source: Source, config: ModelConfig) -> list[str]:
    blocks = sorted({t.dtype for t in source.container.tensors.values() if t.dtype.startswith("Q")})
    return [f"{', '.join(blocks)} expanded to float32, and not kept as they are"] if blocks else []


def _tokenizer(source: Source) -> StoredTokenizer | None:
    keys = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in source.container.metadata.items()
        if name.startswith("tokenizer.ggml.")
    }
    if "tokens" not in keys or keys.get("model") in ("none", "no_vocab"):
        return None
    return gguf_tokenizer(keys, source.path)


def _chat_options(source: Source) -> dict[str, Any]:
    metadata = source.container.metadata
    if not isinstance(metadata.get("tokenizer.chat_template"), str):
        return {}
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    ids = {name: metadata.get(KEYS[f"{name}_id"]) for name in ("bos_token", "eos_token")}
    ids["eos_token"] = next(iter(_ends(metadata)), None)
    known = {name: tokens[i] for name, i in ids.items() if type(i) is int and 0 <= i < len(tokens)}
    return {"chat_template": metadata["tokenizer.chat_template"], **known}


def _is_gguf_tokenizer(keys: Mapping[str, Any]) -> bool:
    tokens = keys["tokens"]
    ends = [keys.get("bos_token_id", 0), *_listed(keys.get("eos_token_id", 0))]
    lists = [(tokens, str), (keys.get("merges", []), str), (keys.get("token_type", []), int)]
    return (
        all(
            isinstance(values, list) and all(type(value) is kind for value in values)
            for values, kind in lists
        )
        and len(keys.get("token_type", tokens)) == len(tokens)
        and all(type(end) is int and 0 <= end < len(tokens) for end in ends)
    )


def gguf_tokenizer(keys: Mapping[str, Any], path: Path) -> StoredTokenizer:
    """keys: those after "tokenizer.ggml.". Raise CheckpointError."""
    if not _is_gguf_tokenizer(keys):
        raise CheckpointError(f"{path} has a damaged tokenizer: download it again, or give token ids.")
    if keys.get("model") != "gpt2" or keys.get("pre", "default") not in ("gpt-2", "default", "bloom"):
        kind = f"{shown(keys.get('model'))}, {shown(keys.get('pre'))}"
        raise NoTokenizerError(f"{path} has a tokenizer {kind}, which is not implemented: give token ids.")
    tokens = keys["tokens"]
    kinds = keys.get("token_type") or [NORMAL] * len(tokens)
    used = [
        (i, token, kind) for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED
    ]
    vocab = {token: i for i, token, _ in used}
    if twice := [token for i, token, _ in used if vocab[token] != i]:
        raise NoTokenizerError(f"{path} has two tokens {shown(twice[0])}: give token ids.")
    begin = keys.get("bos_token_id") if keys.get("add_bos_token") else None
    end = next(iter(_listed(keys.get("eos_token_id", []))), None)
    return StoredTokenizer(
        cuts="bloom" if keys.get("pre") == "bloom" else "gpt-2",
        vocab=vocab,
        merges=keys.get("merges") or [],
        added_tokens={token: kind == CONTROL for _, token, kind in used if kind in (CONTROL, USER_DEFINED)},
        bos_token=None if begin is None else tokens[begin],
        eos_token=None if end is None else tokens[end],
    )


FAMILY = Family(
    name="GPT-2 of GGUF",
    described_by="its header",
    detect=lambda source: isinstance(source.container.metadata.get(ARCHITECTURE), str),
    config=_config,
    rules=lambda source, config: {name: TensorRule((NAMES.of(name),)) for name in parameter_shapes(config)},
    quirks=_quirks,
    tokenizer=_tokenizer,
    chat_options=_chat_options,
)
BLOOM = replace(
    FAMILY,
    name="BLOOM of GGUF",
    detect=lambda source: source.container.metadata.get(ARCHITECTURE) == "bloom",
    layout=BLOOM_LAYOUT,
)
