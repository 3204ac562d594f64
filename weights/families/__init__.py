"""One module for each way in which files name and lay out a model, and the table in which a source finds its own.

Belongs here: what names, layouts and configurations mean. Only JSON files beside the weights are opened here. May
import the model's config, the errors, and weights' containers, parameters, tensors and JSON reader.
"""

from tinygpt.errors import CheckpointError
from tinygpt.weights.families import fastertransformer, gguf, hugging_face, megatron, nanogpt, onnx, openai_tf
from tinygpt.weights.families.family import Family, Source

# The first that recognises a source has it. Hugging Face's is last: it goes by config.json, which may lie anywhere.
FAMILIES: tuple[Family, ...] = (
    gguf.FAMILY,
    openai_tf.FAMILY,
    fastertransformer.FAMILY,
    megatron.FAMILY,
    onnx.FAMILY,
    nanogpt.NANOGPT,
    nanogpt.MINGPT,
    hugging_face.FAMILY,
)


def family_of(source: Source) -> Family:
    """The family whose names and layout the source has. CheckpointError where it is none of them."""
    for family in FAMILIES:
        if family.detect(source):
            return family
    raise CheckpointError(hugging_face.refusal(source))
