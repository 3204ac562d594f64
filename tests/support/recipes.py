"""The models that parity is tried on: every field of config.json, every form of file, odd sizes of all kinds."""

from support.factory import Recipe

SIZES = ("n_embd", "n_head", "n_layer", "vocab_size", "n_positions")


def recipe(name: str, sizes: tuple[int, int, int, int, int], **rest) -> Recipe:
    """`sizes` are SIZES' in their order; `rest` are fields of Recipe or of config.json."""
    own = {key: rest.pop(key) for key in list(rest) if key in Recipe.__dataclass_fields__}
    return Recipe(name, {**dict(zip(SIZES, sizes, strict=True)), **rest}, **own)


RECIPES = (
    recipe("plain", (64, 4, 2, 257, 96)),
    recipe("one-layer", (32, 2, 1, 97, 70), prefix=""),
    recipe("one-head", (48, 1, 2, 101, 73), prefix="model."),
    recipe("head-size-1", (6, 6, 2, 97, 70), seed=26, dtype="float16"),
    recipe("head-size-5", (35, 7, 3, 97, 131), seed=2, form="bin"),
    recipe("head-size-7", (21, 3, 2, 131, 77), seed=3, form="safetensors-sharded", dtype="bfloat16"),
    recipe("head-size-20", (60, 3, 2, 257, 90), form="bin-legacy", prefix=""),
    recipe("head-size-64", (128, 2, 2, 503, 150), form="bin-sharded"),
    recipe("head-size-80", (160, 2, 2, 211, 75), prefix="module.transformer."),
    recipe("head-size-128", (256, 2, 1, 509, 81), seed=1, dtype="bfloat16", form="bin"),
    recipe("head-size-300", (300, 1, 1, 97, 69), form="bin-legacy", dtype="bfloat16"),
    recipe("odd-width", (17, 1, 2, 97, 71), seed=3, n_ctx=True),
    recipe("one-token-wider", (65, 5, 2, 129, 129), seed=1, dtype="float16", form="safetensors-sharded"),
    recipe("vocab-50304", (16, 4, 1, 50304, 70), eos="one"),
    recipe("vocab-3", (16, 2, 2, 3, 74), seed=1),
    recipe("short", (20, 4, 2, 113, 16), seed=1, eos="several"),
    recipe(
        "inner-wide",
        (40, 5, 2, 149, 80),
        activation_function="gelu_python_tanh",
        n_inner=333,
        form="bin",
        dtype="float16",
    ),
    recipe("inner-narrow", (40, 5, 2, 149, 80), seed=1, n_inner=7, prefix="_orig_mod.transformer."),
    recipe("gelu", (36, 3, 2, 181, 72), activation_function="gelu", buffers=True, n_ctx=True),
    recipe("gelu-tanh", (36, 3, 2, 181, 72), activation_function="gelu_pytorch_tanh", prefix="_orig_mod."),
    recipe("gelu-fast", (36, 3, 2, 181, 72), activation_function="gelu_fast", eos="several"),
    recipe(
        "quick-gelu",
        (36, 3, 2, 181, 72),
        seed=1,
        activation_function="quick_gelu",
        prefix="model.transformer.",
    ),
    recipe("relu", (36, 3, 2, 181, 72), seed=1, activation_function="relu", form="bin", buffers=True),
    recipe("silu", (36, 3, 2, 181, 72), seed=1, activation_function="silu", eos="one"),
    recipe("swish", (36, 3, 2, 181, 72), seed=1, activation_function="swish", prefix="module."),
    recipe("tanh", (36, 3, 2, 181, 72), activation_function="tanh", form="bin-legacy", buffers=True),
    recipe("scores-unscaled", (48, 4, 2, 193, 85), scale_attn_weights=False),
    recipe(
        "scores-by-layer",
        (48, 4, 3, 193, 85),
        seed=2,
        scale_attn_by_inverse_layer_idx=True,
        form="bin-sharded",
        dtype="float16",
        buffers=True,
    ),
    recipe(
        "scores-both",
        (48, 4, 3, 193, 85),
        seed=2,
        scale_attn_weights=False,
        eos="several",
        scale_attn_by_inverse_layer_idx=True,
    ),
    recipe("upcast", (48, 4, 2, 193, 85), reorder_and_upcast_attn=True, buffers=True, n_ctx=True),
    recipe(
        "mistral-like",
        (80, 4, 3, 211, 100),
        reorder_and_upcast_attn=True,
        eos="one",
        scale_attn_by_inverse_layer_idx=True,
    ),
    recipe("epsilon-large", (32, 4, 2, 157, 78), layer_norm_epsilon=0.1, dtype="bfloat16"),
    recipe("epsilon-small", (32, 4, 2, 157, 78), activation_function="gelu_python", layer_norm_epsilon=1e-12),
    recipe("untied", (44, 4, 2, 223, 90), activation_function="gelu_accurate", tie_word_embeddings=False),
    recipe(
        "untied-bin",
        (44, 4, 2, 223, 90),
        tie_word_embeddings=False,
        form="bin-sharded",
        dtype="bfloat16",
        prefix="module.transformer.",
        eos="several",
    ),
)
