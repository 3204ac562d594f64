"""GPT-2 as transformers' save_pretrained writes it, and as OpenAI published it."""

import math
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from ..config import EMBEDDING, HEAD, POSITIONS, STRUCTURE, ModelConfig, is_transposed, parameter_shapes
from ..containers.formats import OF_TRAINING
from ..errors import listed
from ..files import TENSOR_NAMES, StoredTokenizer
from .family import (
    AS_IS,
    Family,
    Layout,
    NamedTensor,
    Shapes,
    Source,
    TensorRule,
    Transform,
    checked_config,
    renamed,
    rule_in_out,
    written_config,
)

# transformers' attribute_map; an alias wins over the name that it stands for.
ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_CHECKS = {
    "add_cross_attention": (lambda value: not value, "false, because cross-attention is not implemented")
}
# Attributes: of GPT2LMHeadModel and other parents, DataParallel, torch.compile.
WRAPPERS = ("transformer", "model", "module", "_orig_mod")
_WRAPPERS = re.compile(rf"(({'|'.join(WRAPPERS)})\.)+")
MODEL = "model"  # the key of the model next to an average of it
# Keys of a training run's state.
_OF_TRAINING = re.compile(rf"{OF_TRAINING.pattern}|ema(_\w*)?|opt|callbacks|loops")
MAX_KEY = 60  # characters
_IN_LAYER = re.compile(r"(?:^|\.)h\.\d")
BESIDE = "beside the model: "
# Patterns of known names that no text is made with.
CAUSAL_MASK = r"h\.\d+\.attn\.(bias|masked_bias)"
# Of fine-tuned models, next to the language model's head or instead of it.
OTHER_HEAD = r"(multiple_choice_head|score|classifier|qa_outputs|v_head)\..*"
IGNORED = (CAUSAL_MASK, OTHER_HEAD, f"{BESIDE}.*")


def model_config(fields: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Raise one CheckpointError for all fields that are impossible or not implemented."""
    return checked_config({**fields, **renamed(fields, ALIASES)}, generation, _CHECKS)


def config_beside(source: Source, sizes: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration of a config.json; sizes that it leaves out are the tensors', heads the file's own.

    Raise one CheckpointError for all that is wrong.
    """
    if source.model_type is not None and source.container.metadata.keys() <= {"format"}:
        return model_config({**sizes, **source.beside}, source.generation_json)  # without an import
    from .settings import checked_heads, stated_fields

    stated = stated_fields(source, sizes)
    fields = {**sizes, **stated, **source.beside}
    if source.model_type is None or stated:  # transformers' default counts next to its model_type alone
        fields["n_head"] = checked_heads(source, renamed(fields, ALIASES).get("n_head", fields.get("n_head")))
    return model_config(fields, source.generation_json)


def canonical_name(name: str) -> str:
    """Return the name without wrappers: module.transformer.wte.weight is wte.weight."""
    return _WRAPPERS.sub("", name, count=1) if _WRAPPERS.match(name) else name


def named_in(tables: tuple[str, ...], source: Source, has_wrappers: bool = True) -> Iterable[NamedTensor]:
    """Yield all tensors, by their names in the state dict that holds the first of tables, under any key and attribute.

    A training run's other tensors are BESIDE. Raise CheckpointError for several models.
    """
    tensors, dicts = source.container.tensors, source.container.dicts
    places = {}
    for table in tables:
        copies = [name for name in tensors if f".{name}".endswith(f".{table}")]
        copies = [name for name in copies if dicts.get(name) == MODEL] or copies
        if table in copies and not has_wrappers:
            copies = [table]
        for name in copies:
            parts = name.removesuffix(table).split(".")[:-1]
            while has_wrappers and parts and parts[-1] in WRAPPERS:
                parts.pop()
            places["".join(f"{part}." for part in parts), dicts.get(name)] = name
        if places:
            break
    if len(places) > 1:
        raise source.error(
            f"holds several models, by {listed(list(places.values()))}: give the names of one in {TENSOR_NAMES}, as "
            "`tinygpt info` lists them."
        )
    prefix, holder = next(iter(places), ("", None))
    for name, tensor in tensors.items():
        short = name.removeprefix(prefix)
        ours = canonical_name(short) if has_wrappers else short
        yield NamedTensor(BESIDE + name if is_beside(source, name, holder) else ours, name, tensor)


def is_beside(source: Source, name: str, holder: str | None) -> bool:
    """Return whether a tensor outside the holder is a number, of a training run, or next to nanoGPT's model."""
    if source.container.dicts.get(name, holder) == holder:
        return False
    tensor = source.container.tensors[name]
    # Of a class that is not read, the dtype is its name.
    is_number = "." not in tensor.dtype and math.prod(tensor.shape) == 1
    is_nanogpts = holder == MODEL and "model_args" in source.container.metadata
    return is_number or is_nanogpts or bool(_OF_TRAINING.fullmatch(name.partition(".")[0][:MAX_KEY]))


named = partial(named_in, (EMBEDDING,))


def _rules(config: ModelConfig) -> dict[str, TensorRule]:
    return {name: rule_in_out(name, name) for name in parameter_shapes(config)}


def config_json(config: ModelConfig) -> dict[str, Any]:
    names = {
        name: name for name in ModelConfig.__dataclass_fields__ if name not in ("eos_token_ids", *STRUCTURE)
    }
    return written_config("gpt2", "GPT2LMHeadModel", config, names)


_SIZES = {"vocab_size", "n_embd", "n_positions", "n_layer"}


def _shown_sizes(source: Source) -> dict[str, int]:
    shapes = Shapes(source, named(source))
    places = {
        "vocab_size": (EMBEDDING if EMBEDDING in shapes else HEAD, 0),
        "n_embd": (EMBEDDING if EMBEDDING in shapes else HEAD, 1),
        "n_positions": (POSITIONS, 0),
        "n_inner": ("h.0.mlp.c_fc.weight", 1),
    }
    return shapes.shown(places, r"h\.")


def _is_gpt2s(source: Source) -> bool:
    """Decide by names if config.json has no model_type, as one of few fields may."""
    if source.model_type is not None:
        return source.model_type == "gpt2"
    names = [canonical_name(name) for name in source.container.tensors]
    ends = (EMBEDDING, HEAD) if source.config_json else ".attn.c_attn.weight"
    return any(name.endswith(ends) for name in names) and any(map(_IN_LAYER.search, names))


def _characters(source: Source) -> StoredTokenizer | None:
    if not source.container.dicts:  # of no training run
        return None
    from .characters import character_tokenizer

    return character_tokenizer(source)


# Of GPT-2s of every family.
LAYOUT = Layout(
    _rules,
    lambda name: name if name == HEAD else f"transformer.{name}",
    canonical_name,
    has_defaults=False,
    config_json=config_json,
)
FAMILY = Family(
    name="GPT-2",
    described_by="config.json",
    detect=_is_gpt2s,
    adds=lambda source: (
        "" if {*source.beside, *renamed(source.beside, ALIASES)} >= _SIZES else ", with the tensors' sizes,"
    ),
    config=lambda source: config_beside(source, _shown_sizes(source)),
    rules=lambda source, config: _rules(config),
    named=named,
    ignored=IGNORED,
    tokenizer=_characters,
    advice=f'If only names differ, {TENSOR_NAMES} may give them: {{"h.*.attn.c_attn": "blocks.*.attn.qkv"}}. '
    "`tinygpt info --write-names linear` may propose it.",
)


# OpenAI's files: TensorFlow's variables (openai/gpt-2, src/model.py), and hparams.json next to them.

_HPARAMS = {
    "n_ctx": "n_positions",
    "n_vocab": "vocab_size",
    **{name: name for name in ("n_embd", "n_head", "n_layer")},
}
WITHOUT_FIRST_AXIS = Transform(lambda shape, n: (1, *shape[::-1]), lambda array: array[0].T)
# The optimizer's averages, and counts of steps.
_OPTIMIZER = r".*/(Adam|Adam_1|Adafactor.*|Momentum)|(.*/)?(beta[12]_power|global_step)"


def tf_name(parameter: str) -> str:
    """Return OpenAI's name: h.3.attn.c_attn.weight is model/h3/attn/c_attn/w."""
    if parameter in (EMBEDDING, POSITIONS):
        return f"model/{parameter.removesuffix('.weight')}"
    *path, kind = parameter.split(".")
    kind = "b" if kind == "bias" else "g" if path[-1].startswith("ln_") else "w"
    return "/".join(["model", *path, kind]).replace("/h/", "/h", 1)


def _openai_config(source: Source) -> ModelConfig:
    objects = [name for name in source.container.tensors if name.endswith("/.ATTRIBUTES/VARIABLE_VALUE")]
    if objects:
        raise source.error(
            f"holds objects of TensorFlow 2, such as {objects[0]}, and must hold the variables of OpenAI's model: save "
            "those with a tf.compat.v1.train.Saver."
        )
    inner = "model/h0/mlp/c_fc/w", 2
    seen = Shapes(source).sizes("model/wte", "model/wpe", inner, "model/h")
    said = renamed(source.json("hparams.json") or {}, _HPARAMS)
    from .settings import config_of_parts

    return config_of_parts(source, "hparams.json", seen=seen, said=said)


def _openai_rules(source: Source, config: ModelConfig) -> dict[str, TensorRule]:
    """Read convolutions of width 1, (1, in, out); the head is the embedding."""
    return {
        name: TensorRule((tf_name(name),), WITHOUT_FIRST_AXIS if is_transposed(name) else AS_IS)
        for name in parameter_shapes(config)
        if name != HEAD
    }


OPENAI = Family(
    name="GPT-2 of OpenAI's TensorFlow",
    described_by="hparams.json",
    detect=lambda source: any(f"{name}/".startswith("model/wte/") for name in source.container.tensors),
    config=_openai_config,
    rules=_openai_rules,
    ignored=(_OPTIMIZER,),
)
