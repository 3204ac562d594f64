"""The families, and how a source finds its own. A family's module is imported for its own sources alone."""

from collections.abc import Callable, Iterator
from importlib import import_module

from .family import Family, Source

# "module.NAME" of each family, of containers that hold models of one program alone.
BY_FORMAT: dict[str, tuple[str, ...]] = {
    "GGUF": ("gguf.BLOOM", "gguf.FAMILY"),
    "ONNX": ("onnx.FAMILY",),
    "TensorFlow bundle": ("gpt2.OPENAI",),
    "FasterTransformer folder": ("fastertransformer.BLOOM", "fastertransformer.FAMILY"),
}


def _has_megatrons_names(source: Source) -> bool:
    return any("embedding." in name or ".deepspeed_moe." in name for name in source.container.tensors)


def _may_be_karpathys(source: Source) -> bool:
    """Return whether nanoGPT or minGPT may have written it: no config.json says another model_type."""
    return source.model_type is None or "model_args" in source.container.metadata


# Of other containers: by names, then by config.json, which may lie next to any file. Each row has a quick test of a
# source, which may be true of other families too; a family's own `detect` decides.
OTHERS: tuple[tuple[Callable[[Source], bool], tuple[str, ...]], ...] = (
    (_has_megatrons_names, ("megatron.WITH_EXPERTS", "megatron.FAMILY")),
    (_may_be_karpathys, ("nanogpt.NANOGPT", "nanogpt.MINGPT")),
    (lambda source: True, ("gpt2.FAMILY",)),
)


def family_of(source: Source) -> Family:
    """Raise CheckpointError if the source has no family's names and layout."""
    format = source.container.format
    for place in BY_FORMAT[format] if format in BY_FORMAT else _candidates(source):
        module, name = place.split(".")
        family = getattr(import_module(f".{module}", __package__), name)
        if family.detect(source):
            return family
    if source.config_json is not None:
        from .transformers import model_type_of

        model_type = model_type_of(source.config_json)  # raises CheckpointError
        if format not in BY_FORMAT:
            return model_type.family
    raise source.error(f"holds {format} of no model that is implemented, and no config.json lies beside it.")


def _candidates(source: Source) -> Iterator[str]:
    return (place for may_be, places in OTHERS if may_be(source) for place in places)
