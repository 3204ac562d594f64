"""GPT-2 as OpenAI published it: TensorFlow's variables (openai/gpt-2, src/model.py), and hparams.json next to them."""

import re

from tinygpt.weights.config import EMBEDDING, HEAD, POSITIONS, ModelConfig, is_transposed, parameter_shapes
from tinygpt.weights.families.config_fields import Shapes, config_of_parts, renamed
from tinygpt.weights.families.family import AS_IS, Family, Rule, Source, Transform, as_named

_HPARAMS = {"n_ctx": "n_positions", "n_vocab": "vocab_size", **{name: name for name in ("n_embd", "n_head", "n_layer")}}
_LAYER = r"model/h(\d{1,9})/"
WITHOUT_FIRST_AXIS = Transform(lambda shape, n: (1, *shape[::-1]), lambda array: array[0].T)
# Variables of further training: the optimizer's averages, and counts of steps.
_OPTIMIZER = re.compile(r".*/(Adam|Adam_1|Adafactor.*|Momentum)|(.*/)?(beta[12]_power|global_step)")


def _detect(source: Source) -> bool:
    names = source.container.tensors
    return "model/wte" in names or any(name.startswith("model/wte/") for name in names)


def tf_name(parameter: str) -> str:
    """Return the variable of a parameter: h.3.attn.c_attn.weight is model/h3/attn/c_attn/w."""
    if parameter in (EMBEDDING, POSITIONS):
        return f"model/{parameter.removesuffix('.weight')}"
    *path, kind = parameter.split(".")
    kind = "b" if kind == "bias" else "g" if path[-1].startswith("ln_") else "w"
    return "/".join(["model", *path, kind]).replace("/h/", "/h", 1)


def _config(source: Source) -> ModelConfig:
    objects = [name for name in source.container.tensors if name.endswith("/.ATTRIBUTES/VARIABLE_VALUE")]
    if objects:
        raise source.error(
            f"holds objects of TensorFlow 2, such as {objects[0]}, and must hold the variables of OpenAI's model: save "
            "those with a tf.compat.v1.train.Saver."
        )
    shapes = Shapes(source, as_named(source))
    seen = {
        "vocab_size": shapes.size("model/wte", 0),
        "n_positions": shapes.size("model/wpe", 0),
        "n_embd": shapes.size("model/wte", 1),
        "n_inner": shapes.size("model/h0/mlp/c_fc/w", 2),
        "n_layer": shapes.layers(_LAYER),
    }
    said = renamed(source.json("hparams.json") or {}, _HPARAMS)
    return config_of_parts(source, "hparams.json", seen=seen, said=said)


def _rules(source: Source, config: ModelConfig) -> dict[str, Rule]:
    """Matrices were convolutions of width 1: (1, in, out). The head is the embedding."""
    return {
        name: Rule((tf_name(name),), WITHOUT_FIRST_AXIS if is_transposed(name) else AS_IS)
        for name in parameter_shapes(config)
        if name != HEAD
    }


FAMILY = Family(
    name="GPT-2 of OpenAI's TensorFlow",
    described_by="hparams.json",
    detect=_detect,
    config=_config,
    rules=_rules,
    is_ignored=lambda name: bool(_OPTIMIZER.fullmatch(name)),
)
