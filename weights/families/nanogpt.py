"""nanoGPT and minGPT: GPT-2 in torch's Linear layers, whose matrices are (out, in).

nanoGPT saves a training checkpoint: `model`, `model_args` and the optimizer's state (karpathy/nanoGPT, train.py).
minGPT saves the state dict alone, its head untied (karpathy/minGPT).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..config import HEAD, ModelConfig, parameter_shapes
from ..containers.torch import fields_of, read_plain_pickle
from ..errors import CheckpointError
from .family import (
    NO_BIAS,
    Family,
    NamedTensor,
    Shapes,
    Source,
    TensorRule,
    config_of_parts,
    named_by,
    renamed,
)
from .gpt2 import CAUSAL_MASK, canonical_name, named

_ARGUMENTS = {
    "block_size": "n_positions",
    **{name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")},
}
_BESIDE = "beside the model: "
_PLAIN_NAME = re.compile(r"\w[\w.-]*")
# minGPT's config.json may name one of its sizes instead of giving numbers: the heads of each.
_MINGPT_HEADS = {
    "gpt2": 12,
    "openai-gpt": 12,
    "gpt2-medium": 16,
    "gpt2-large": 20,
    "gpt2-xl": 25,
    "gopher-44m": 16,
    "gpt-mini": 6,
    "gpt-micro": 4,
    "gpt-nano": 3,
}


def _arguments(source: Source) -> dict[str, Any]:
    return fields_of(source.container.metadata.get("model_args"))


def _is_mingpt(source: Source) -> bool:
    """Decide by the layout: Hugging Face has the same names, and (in, out)."""
    for name, tensor in source.container.tensors.items():
        if canonical_name(name) == "h.0.attn.c_attn.weight" and source.model_type is None:
            return len(tensor.shape) == 2 and tensor.shape[0] == 3 * tensor.shape[1]
    return False


def _named_model(source: Source) -> Iterable[NamedTensor]:
    return named_by(
        lambda name: canonical_name(name) if name.startswith("model.") else _BESIDE + name, source
    )


def _nanogpt_config(source: Source) -> ModelConfig:
    """Return the configuration. Before May 2023, nanoGPT's GELU was gelu_new, which config.json may say."""
    inner = Shapes(source, _named_model(source)).size("h.0.mlp.c_fc.weight", 0)
    guessed = {"n_inner": inner, "activation_function": "gelu"}
    return config_of_parts(source, "model_args", guessed, said=renamed(_arguments(source), _ARGUMENTS))


def _mingpt_config(source: Source) -> ModelConfig:
    shapes = Shapes(source, named(source))
    model = fields_of((source.config_json or {}).get("model"))
    heads = model.get("n_head") or _MINGPT_HEADS.get(str(model.get("model_type")))
    seen = shapes.sizes("wte.weight", "wpe.weight", ("h.0.mlp.c_fc.weight", 0), r"h\.")
    seen["tie_word_embeddings"] = HEAD not in shapes
    return config_of_parts(
        source, "the checkpoint", {"n_head": heads, "activation_function": "gelu_new"}, seen
    )


def _rules(source: Source, config: ModelConfig) -> dict[str, TensorRule]:
    """Return the rules. A model that was trained without biases has none in its layer norms either."""
    names = parameter_shapes(config)
    has_bias = _arguments(source).get("bias")
    if not isinstance(has_bias, bool):
        stored = set(map(canonical_name, source.container.tensors))
        has_bias = any(name in stored for name in names if name.endswith(".bias"))
    return {
        name: NO_BIAS if name.endswith(".bias") and not has_bias else TensorRule((name,)) for name in names
    }


def _tokenizer(source: Source) -> dict[str, Any] | None:
    """Return the characters of the data set's meta.pkl, next to the checkpoint or in nanoGPT's folder."""
    data_set = fields_of(source.container.metadata.get("config")).get("dataset")
    places = [source.folder / "meta.pkl"]
    if isinstance(data_set, str) and _PLAIN_NAME.fullmatch(data_set):
        places.append(source.folder.absolute().parent / "data" / data_set / "meta.pkl")
    path = next((path for path in places if path.is_file()), None)
    if path is None:
        return None
    characters = fields_of(fields_of(read_plain_pickle(path)).get("stoi"))
    if not characters:
        raise CheckpointError(f"{path} has no characters in its 'stoi': copy it from the data set again.")
    return character_tokenizer(characters, str(path))


def character_tokenizer(ids: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the tokenizer whose characters have these ids. Raise CheckpointError, which names `place`."""
    if any(
        len(character) != 1 or type(token_id) is not int or token_id < 0
        for character, token_id in ids.items()
    ):
        raise CheckpointError(f"{place} must give each character a whole number from 0.")
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"[\s\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": dict(ids), "unk_token": "[UNK]"},
    }


NANOGPT = Family(
    name="nanoGPT",
    described_by="model_args",
    detect=lambda source: (
        bool(_arguments(source)) and any(name.startswith("model.") for name in source.container.tensors)
    ),
    config=_nanogpt_config,
    rules=_rules,
    named=_named_model,
    ignored=(CAUSAL_MASK, f"{_BESIDE}.*"),
    quirks=lambda source, config: (
        f"activation_function is {config.activation_function}, which the checkpoint does not say",
    ),
    tokenizer=_tokenizer,
)
MINGPT = replace(
    NANOGPT,
    name="minGPT",
    described_by="its embedding",
    detect=_is_mingpt,
    config=_mingpt_config,
    named=named,
    ignored=(CAUSAL_MASK,),
)
