"""How a model is cut: the layers of each stage, and what each rank holds of them."""

from dataclasses import fields
from itertools import pairwise

from tinygpt.errors import RequestError
from tinygpt.kernels.cpu.rank import Part, can_share, part_of
from tinygpt.parallel.layout import Layout
from tinygpt.weights.config import ModelConfig

# Fields of ModelConfig that ranks know, whatever their value: sizes, switches, and what each rank does alike. What
# another one adds to a model would have to be cut, too.
KNOWN = {
    *("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "tie_word_embeddings"),
    *("activation_function", "layer_norm_epsilon", "bos_token_id", "eos_token_ids"),
    *("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"),
    *("embed_norm", "final_norm", "embed_scale"),
}
# Those of which ranks know these values, each of which tests have run on several.
KNOWN_VALUES = {"norm_placement": ("pre", "post"), "positions": ("learned", "alibi")}


def part_of_rank(layout: Layout, rank: int, config: ModelConfig, dtype: str) -> Part:
    """What a rank holds."""
    stage, tensor_rank = layout.place_of(rank)
    layers = stage_layers(config, layout.pipeline_size)[stage]
    return part_of(config, dtype, layers, tensor_rank, layout.tensor_size)


def check_cut(layout: Layout, config: ModelConfig, dtype: str, device: str) -> None:
    """RequestError if a model cannot be cut in this way."""
    if device != "cpu":
        raise RequestError(
            f"device is {device!r}, tensor_parallel_size is {layout.tensor_size} and pipeline_parallel_size is "
            f"{layout.pipeline_size}: ranks compute on the CPU alone, so leave device at 'cpu', or both sizes at 1."
        )
    unlike = {
        field.name: value
        for field in fields(config)
        if field.name not in KNOWN
        and (value := getattr(config, field.name)) not in KNOWN_VALUES.get(field.name, (field.default,))
    }
    if unlike:
        raise RequestError(
            f"this model's {', '.join(f'{name} is {value!r}' for name, value in unlike.items())}, which several ranks "
            "cannot run: leave tensor_parallel_size and pipeline_parallel_size at 1."
        )
    if layout.pipeline_size > config.n_layer:
        raise RequestError(
            f"is {layout.pipeline_size} and this model has {config.n_layer} layers: each stage takes one or more.",
            "pipeline_parallel_size",
        )
    if layout.tensor_size > 1 and not can_share(config, dtype):
        raise RequestError(
            f"is {layout.tensor_size} and this model's {config.n_head} heads of "
            f"{config.head_size} and {config.inner_size} hidden units cannot be shared in {dtype} with the same "
            "results: it takes 4 heads or more, and sizes that are whole pairs in bfloat16 and whole groups of 64 in "
            "int8 and int4: use another dtype, or pipeline_parallel_size.",
            "tensor_parallel_size",
        )


def stage_layers(config: ModelConfig, stages: int) -> list[range]:
    """The layers of each stage, so that the one with the most bytes has as few as possible: the last has the head too.

    A layer of GPT-2 124M has 7 million weights and the head 39, so two stages take 9 and 3 layers.
    """
    width, layers = config.n_embd, config.n_layer
    layer, head = width * (4 * width + 2 * config.inner_size), width * config.vocab_size
    if stages == 1:
        return [range(layers)]
    others = stages - 1

    def largest(in_last: int) -> int:
        return max(in_last * layer + head, -(-(layers - in_last) // others) * layer)

    in_last = min(range(1, layers - others + 1), key=largest)
    share, longer = divmod(layers - in_last, others)
    bounds = [i * share + min(i, longer) for i in range(stages)] + [layers]
    return [range(*pair) for pair in pairwise(bounds)]
