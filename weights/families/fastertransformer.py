"""GPT as FasterTransformer's converters write it: Megatron's names, every matrix (in, out), in files without shapes."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..config import EMBEDDING, POSITIONS, ModelConfig, is_transposed, parameter_shapes
from ..containers.ranks import number_of
from ..errors import shown
from ..tensor import StoredTensor
from .family import (
    Family,
    NamedTensor,
    Names,
    Shapes,
    Source,
    TensorRule,
    Transform,
    num_parts,
    shared,
    split_name,
)
from .megatron import ATTENTION, EXPERT, MLP
from .settings import config_of_parts
from .transformers import BLOOM_LAYOUT

_NORMS = {"ln_e": "model.pre_decoder_layernorm", "ln_f": "model.final_layernorm"}
_NAMES = Names("model.layers", {**_NORMS, "lm_head": "model.lm_head"}, ATTENTION + MLP)
# The axis in files along which GPUs share a tensor; of queries, keys and values, each GPU has its heads of all three.
_AXES = {"attn.c_proj.weight": 0, "mlp.c_fc.weight": 1, "mlp.c_fc.bias": 0, "mlp.c_proj.weight": 0}
_GPU = re.compile(r"(.+)\.(\d{1,4})")
# A file has all experts of a layer, one after another.
_EXPERTS = ".mlp.moe.experts."
_GATE = "model.layers.{}.mlp.moe.gate.wg.weight"
_SIZES = {
    "decoder_layers": "n_layer",
    "num_layer": "n_layer",
    "layernorm_eps": "layer_norm_epsilon",
    "start_id": "bos_token_id",
    "end_id": "eos_token_id",
}
_ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu"}  # its gelu is by tanh
# Settings that change the arithmetic: GPT-2's value, and another value (of OPT-350M and BLOOM) with its meaning.
_ARITHMETIC: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "layernorm_type": ("pre_layernorm", "post_layernorm", {"norm_placement": "post"}),
    "has_positional_encoding": ("true", "false", {"positions": "alibi"}),
    "use_attention_linear_bias": ("false", "true", {}),  # together with the one before
    "has_pre_decoder_layernorm": ("false", "true", {"embed_norm": True}),
    "has_post_decoder_layernorm": ("true", "false", {"final_norm": False}),
    "has_adapters": ("false", None, {}),
    "gpt_with_moe": ("false", "true", {"experts_per_token": 1}),  # moe_k of its examples
}
# gpt_config.ini describes several models, one of which runs, and names the kind of a model for its settings.
_INSTANCE = "ft_instance_hyperparameter"
_VARIANTS: dict[str, dict[str, str]] = {
    "opt-pre": {"activation_type": "relu"},
    "opt-post": {
        "activation_type": "relu",
        "layernorm_type": "post_layernorm",
        "has_post_decoder_layernorm": "false",
    },
    "bloom-pre": {
        "has_positional_encoding": "false",
        "use_attention_linear_bias": "true",
        "has_pre_decoder_layernorm": "true",
    },
}
_VARIANTS |= {"gpt": {}, "bloom": _VARIANTS["bloom-pre"]}
_BLOOM = {"positions": "alibi", "embed_norm": True}
_BLOOMS_LENGTH = "2048"  # its converter writes none


def _detect(source: Source) -> bool:
    return any("head_num" in section for section in source.container.metadata.values())


def _settings(source: Source) -> dict[str, str]:
    sections = source.container.metadata
    running = sections.get(sections.get(_INSTANCE, {}).get("model_name"), {})
    section = next(one for one in (running, *sections.values()) if "head_num" in one)
    variant = section.get("model_variant", "gpt")
    if variant not in _VARIANTS:
        raise source.error(
            f"has model_variant {shown(variant)}, which must be one of {', '.join(_VARIANTS)}."
        )
    return {**_VARIANTS[variant], **sections.get("structure", {}), **section}


def _named(source: Source) -> Iterable[NamedTensor]:
    for name, tensor in source.container.tensors.items():
        of_gpu = _GPU.fullmatch(name)
        own, part = (of_gpu[1], int(of_gpu[2])) if of_gpu else (name, 0)
        if _EXPERTS not in own:
            yield NamedTensor(own, name, tensor, part)
            continue
        for expert, of_expert in enumerate(_split(tensor, number_of(_settings(source).get("expert_num")))):
            yield NamedTensor(own.replace(_EXPERTS, f".mlp.experts.{expert}."), name, of_expert, part)


def _split(tensor: StoredTensor, n: Any) -> list[StoredTensor]:
    """Return a tensor's n equal parts, or the tensor."""
    if type(n) is not int or n < 1 or tensor.shape[0] % n:
        return [tensor]
    size = tensor.nbytes // n
    shape = (tensor.shape[0] // n,)
    return [replace(tensor, shape=shape, offset=tensor.offset + size * i) for i in range(n)]


def _config(source: Source) -> ModelConfig:
    settings, n = _settings(source), num_parts(_named(source))
    structure = _structure(source, settings)
    heads = number_of(settings.get("head_num"))
    head_size = number_of(settings.get("size_per_head"))
    if not all(isinstance(size, int) and 0 < size < 2**31 for size in (heads, head_size)) or heads % n:
        raise source.error(
            f"has head_num {shown(heads)} and size_per_head {shown(head_size)} for {n} GPUs: both must be "
            "whole numbers from 1 up, and each GPU has as many heads."
        )
    C = heads * head_size
    shapes = Shapes(source, _named(source))
    if "experts_per_token" in structure:
        structure |= _experts(source, settings, shapes, C)
    experts = "experts.0." if 0 in structure.get("expert_layers", ()) else ""
    has_table = structure.get("positions") != "alibi"
    length = settings.get("max_pos_seq_len", _BLOOMS_LENGTH)
    seen = {
        "vocab_size": shapes.size(_name(EMBEDDING), 0) // C,
        "n_positions": shapes.size(_name(POSITIONS), 0) // C if has_table else number_of(length),
        "n_embd": C,
        "n_head": heads,
        "n_inner": shapes.size(f"model.layers.0.mlp.{experts}dense_h_to_4h.bias", 0) * n,
    }
    said = {ours: number_of(settings[theirs]) for theirs, ours in _SIZES.items() if theirs in settings}
    if (activation := settings.get("activation_type")) is not None:
        said["activation_function"] = _ACTIVATIONS.get(activation.lower(), activation)
    return config_of_parts(source, "config.ini", {"activation_function": "gelu_new"}, seen, said, structure)


def _structure(source: Source, settings: Mapping[str, str]) -> dict[str, Any]:
    structure, wrong = {}, []
    switches = {name: settings.get(name, usual).lower() for name, (usual, _, _) in _ARITHMETIC.items()}
    switches = {name: {"1": "true", "0": "false"}.get(value, value) for name, value in switches.items()}
    for name, (usual, other, fields) in _ARITHMETIC.items():
        if switches[name] == other:
            structure |= fields
        elif switches[name] != usual:
            wrong.append(name)
    has_bias = switches["use_attention_linear_bias"] == "true"
    if has_bias != (switches["has_positional_encoding"] == "false"):
        wrong += ["has_positional_encoding", "use_attention_linear_bias"]
    # BLOOM's residual from after its layer norm is not implemented.
    if has_bias and "norm_placement" in structure:
        wrong += ["layernorm_type", "use_attention_linear_bias"]
    if wrong:
        named = "; ".join(
            f"{name} is {shown(settings.get(name, _ARITHMETIC[name][0]))}" for name in dict.fromkeys(wrong)
        )
        raise source.error(f"is no plain GPT-2, and its kind is not implemented: {named}.")
    return structure


def _experts(source: Source, settings: Mapping[str, str], shapes: Shapes, C: int) -> dict[str, Any]:
    """Raise CheckpointError if gates, in proportion to which are the names, are not those of the settings."""
    layers = tuple(sorted({int(layer) for layer in re.findall(r"\d{1,6}", settings.get("moe_layers", ""))}))
    experts = {shapes.size(_GATE.format(layer), 0) / C for layer in layers}
    num_experts = number_of(settings.get("expert_num"))
    if type(num_experts) is not int or experts != {num_experts}:
        raise source.error(f"has gates of {sorted(experts)} experts: correct moe_layers and expert_num.")
    return {"expert_layers": layers, "num_experts": num_experts}


def _name(parameter: str) -> str:
    is_table = parameter in (EMBEDDING, POSITIONS)
    return f"model.{parameter.removesuffix('.weight')}" if is_table else _NAMES.of(parameter)


def _rules(source: Source, config: ModelConfig) -> dict[str, TensorRule]:
    shapes = parameter_shapes(config)
    n = num_parts(_named(source))
    return {name: _rule(name, shape, n) for name, shape in shapes.items()}


def _rule(parameter: str, shape: tuple[int, ...], n: int) -> TensorRule:
    layer, module, _ = split_name(parameter)
    if module == "mlp.gate":
        return TensorRule((_GATE.format(layer),), _flat(parameter, shape, 1))
    expert = "".join(EXPERT.findall(module))
    plain = parameter.replace(expert, "")
    return TensorRule((_name(plain).replace(".mlp.", f".mlp.{expert}"),), _flat(plain, shape, n))


def _flat(parameter: str, shape: tuple[int, ...], n: int) -> Transform:
    """Join n parts without shapes: matrices (in, out); queries, keys and values (..., 3, C of the part)."""
    _, module, kind = split_name(parameter)
    is_in_out = is_transposed(parameter) or module == "mlp.gate"
    there = shape[::-1] if is_in_out else shape
    whole = there
    axis = _AXES.get(f"{module}.{kind}")
    if module == "attn.c_attn":
        whole = (*there[:-1], 3, there[-1] // 3)
        axis = len(there)
    part = shared(whole, axis, n)

    def of_whole(array: np.ndarray) -> np.ndarray:
        return array.reshape(there).T if is_in_out else array.reshape(there)

    return Transform(lambda shape, n: (math.prod(part),), lambda array: array.reshape(part), axis, of_whole)


def _quirks(source: Source, config: ModelConfig) -> list[str]:
    settings = source.container.metadata
    inter_size = number_of(_settings(source).get("inter_size"))
    quirks = [f"inter_size is {inter_size} in config.ini and {config.n_inner} in the files"]
    quirks = [] if inter_size == config.n_inner else quirks
    if config.expert_layers:
        quirks.append(f"each token has 1 of {config.num_experts} experts; biases of their outputs are added")
    modes = {section.get("int8_mode", "0") for section in settings.values()} - {"0"}
    told = "the float weights are read, and --dtype int8 makes int8 of them"
    return quirks + [f"int8_mode is {mode}: {told}" for mode in sorted(modes)]


FAMILY = Family(
    name="GPT of FasterTransformer",
    described_by="config.ini",
    detect=_detect,
    config=_config,
    rules=_rules,
    named=_named,
    # Soft prompts, and int8 copies.
    ignored=(r".*model\.prompt_table\..*", r".*\.int8.*", r".*\.scale(_inter|_out)?"),
    quirks=_quirks,
)
BLOOM = replace(
    FAMILY,
    name="BLOOM of FasterTransformer",
    detect=lambda source: _detect(source) and _structure(source, _settings(source)) == _BLOOM,
    layout=BLOOM_LAYOUT,
)
