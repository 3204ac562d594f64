"""GPT as FasterTransformer's converters write it: Megatron's names, every matrix (in, out), in files without shapes."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tinygpt.weights.checks import shown
from tinygpt.weights.config import ModelConfig
from tinygpt.weights.containers.ft_folder import FORMAT
from tinygpt.weights.errors import CheckpointError
from tinygpt.weights.families.config_fields import checked_config
from tinygpt.weights.families.family import (
    Family,
    NamedTensor,
    Rule,
    Shape,
    Source,
    Transform,
    flat,
    flat_queries_keys_values,
)
from tinygpt.weights.families.infer_config import Shapes, ends_of, from_config_json
from tinygpt.weights.families.megatron import MODULES
from tinygpt.weights.families.model_types import BLOOM as HUGGING_FACES_BLOOM
from tinygpt.weights.parameters import EMBEDDING, HEAD, POSITIONS, name_in_tables, parameter_shapes

_TOP = {EMBEDDING: "model.wte", POSITIONS: "model.wpe", HEAD: "model.lm_head.weight"}
_TOP |= {f"ln_e.{kind}": f"model.pre_decoder_layernorm.{kind}" for kind in ("weight", "bias")}
_TOP |= {"ln_f.weight": "model.final_layernorm.weight", "ln_f.bias": "model.final_layernorm.bias"}
# Along which axis of the parameter GPUs share it; of queries, keys and values, each has its heads of all three.
_AXES = {"attn.c_proj.weight": 0, "mlp.c_fc.weight": 1, "mlp.c_fc.bias": 0, "mlp.c_proj.weight": 0}
_GPU = re.compile(r"(.+)\.(\d{1,4})")
_ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu"}  # its own gelu is by tanh
# Settings that change the arithmetic, and what they are in GPT-2.
_PLAIN = {
    "layernorm_type": "pre_layernorm",
    "has_positional_encoding": "true",
    "has_pre_decoder_layernorm": "false",
    "has_post_decoder_layernorm": "true",
    "use_attention_linear_bias": "false",
    "has_adapters": "false",
    "gpt_with_moe": "false",
}
# What else they may be, as the converters for OPT-350M and for BLOOM write them, and what that means here.
_STRUCTURE = {
    ("layernorm_type", "post_layernorm"): {"norm_placement": "post"},
    ("has_positional_encoding", "false"): {"positions": "alibi"},
    ("use_attention_linear_bias", "true"): {},  # with the one before
    ("has_pre_decoder_layernorm", "true"): {"embed_norm": True},
    ("has_post_decoder_layernorm", "false"): {"final_norm": False},
}
_SPELLINGS = {"1": "true", "0": "false"}  # of switches
_BLOOMS_LENGTH = 2048  # which its converter does not write


def _detect(source: Source) -> bool:
    return source.container.format == FORMAT and any(
        "head_num" in section for section in source.container.metadata.values()
    )


def _detect_bloom(source: Source) -> bool:
    return _detect(source) and _structure(source, _settings(source)) == _BLOOM


_BLOOM = {"positions": "alibi", "embed_norm": True}


def _settings(source: Source) -> dict[str, str]:
    """Return the settings of the model's section, whatever its name, and of the section on structure."""
    sections = source.container.metadata
    own = next(section for section in sections.values() if "head_num" in section)
    return {**sections.get("structure", {}), **own}


def _named(source: Source) -> Iterable[NamedTensor]:
    for name, tensor in source.container.tensors.items():
        found = _GPU.fullmatch(name)
        yield NamedTensor(found[1] if found else name, name, tensor, int(found[2]) if found else 0)


def _parts(source: Source) -> int:
    return 1 + max((one.part for one in _named(source)), default=0)


def _is_ignored(name: str) -> bool:
    """int8 copies lie next to the weights."""
    return ".int8" in name or name.endswith((".scale", ".scale_inter", ".scale_out"))


def _config(source: Source) -> ModelConfig:
    settings = _settings(source)
    structure = _structure(source, settings)
    heads, head_size = _number(settings.get("head_num")), _number(settings.get("size_per_head"))
    if not all(isinstance(size, int) and 0 < size < 2**31 for size in (heads, head_size)):
        raise CheckpointError(
            f"{source.path}: head_num is {shown(heads)} and size_per_head {shown(head_size)}; both must be whole "
            "numbers from 1 up. Correct config.ini."
        )
    if heads % _parts(source):
        raise CheckpointError(f"{source.path} has {heads} heads for {_parts(source)} GPUs: correct config.ini.")
    C, shapes = heads * head_size, Shapes(source, _named(source))
    V = shapes.size(_TOP[EMBEDDING], 0) // C
    values = {
        **ends_of(V),
        "activation_function": "gelu_new",
        **from_config_json(source),
        **{ours: _number(settings[theirs]) for theirs, ours in _SETTINGS.items() if theirs in settings},
        "vocab_size": V,
        "n_positions": _n_positions(settings, shapes, structure, C),
        "n_embd": C,
        "n_head": heads,
        "n_inner": shapes.size("model.layers.0.mlp.dense_h_to_4h.bias", 0) * _parts(source),
    }
    if "activation_type" in settings:
        values["activation_function"] = _ACTIVATIONS.get(
            settings["activation_type"].lower(), settings["activation_type"]
        )
    return checked_config(values, described_by="config.ini", structure=structure)


def _n_positions(settings: Mapping[str, str], shapes: Shapes, structure: Mapping[str, Any], C: int) -> Any:
    """Return the rows of the table, or the length of training if there is no table."""
    if structure.get("positions") != "alibi":
        return shapes.size(_TOP[POSITIONS], 0) // C
    return _number(settings.get("max_pos_seq_len", str(_BLOOMS_LENGTH)))


_SETTINGS = {"num_layer": "n_layer", "layernorm_eps": "layer_norm_epsilon", "start_id": "bos_token_id"}
_SETTINGS |= {"end_id": "eos_token_id"}


def _structure(source: Source, settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of STRUCTURE by the settings. Raise CheckpointError for other architectures."""
    found = {name: settings.get(name, plain).lower() for name, plain in _PLAIN.items()}
    found = {name: _SPELLINGS.get(value, value) for name, value in found.items()}
    unlike = {name: value for name, value in found.items() if value != _PLAIN[name]}
    structure = {key: value for setting in unlike.items() for key, value in _STRUCTURE.get(setting, {}).items()}
    wrong = [setting[0] for setting in unlike.items() if setting not in _STRUCTURE]
    has_bias = found["use_attention_linear_bias"] == "true"
    if has_bias != (found["has_positional_encoding"] == "false"):
        wrong += ["has_positional_encoding", "use_attention_linear_bias"]
    if has_bias and "norm_placement" in structure:  # of BLOOM's residual from behind its layer norm, which is no such
        wrong += ["layernorm_type", "use_attention_linear_bias"]
    if wrong:
        named = "; ".join(f"{name} is {shown(settings.get(name, _PLAIN[name]))}" for name in dict.fromkeys(wrong))
        raise CheckpointError(f"{source.path} is no plain GPT-2, and what it is is not implemented: {named}.")
    return structure


def _number(text: str | None) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except (TypeError, ValueError):
            continue
    return text


def _rules(source: Source, config: ModelConfig) -> dict[str, Rule]:
    n = _parts(source)
    return {
        name: Rule((_file_name(name),), _transform(name, shape, n)) for name, shape in parameter_shapes(config).items()
    }


def _file_name(parameter: str) -> str:
    return name_in_tables(parameter, _TOP, "model.layers", MODULES)


def _transform(parameter: str, shape: Shape, n: int) -> Transform:
    kind = parameter.partition(".")[2].partition(".")[2]
    return flat_queries_keys_values(shape, n) if kind.startswith("attn.c_attn.") else flat(shape, n, _AXES.get(kind))


def _quirks(source: Source, config: ModelConfig) -> list[str]:
    said = _number(_settings(source).get("inter_size"))
    return [f"inter_size is {said} in config.ini and {config.n_inner} in the files"] if said != config.n_inner else []


FAMILY = Family(
    name="GPT of FasterTransformer",
    described_by="config.ini",
    detect=_detect,
    config=_config,
    rules=_rules,
    named=_named,
    is_ignored=_is_ignored,
    parts=_parts,
    quirks=_quirks,
)
BLOOM = replace(FAMILY, name="BLOOM of FasterTransformer", detect=_detect_bloom, layout=HUGGING_FACES_BLOOM.layout)
