"""The least work of a pass through the model: bytes read, and operations. A multiplication and an addition are two
operations."""

from tinygpt.weights.config import ModelConfig

# Bytes of one weight in the blocks, and of one in the head. The scales of int8 are too few to count; int4 has a
# bfloat16 scale and offset for every 32 weights, and an int8 head.
BYTES = {"float32": (4, 4), "bfloat16": (2, 2), "int8": (1, 1), "int4": (0.5 + 4 / 32, 1)}
# The dtype of the KV cache that goes with weights; of a cache, the bytes of one number, and llama.cpp's name.
CACHES = {"float32": "float32", "bfloat16": "bfloat16", "int8": "bfloat16", "int4": "bfloat16"}
CACHE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
CACHE_NAMES = {"float32": "f32", "bfloat16": "bf16", "int8": "q8_0"}
# The tiles that multiply in the blocks, and those in the head.
TILES = {
    "float32": ("float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "int8": ("int8", "int8"),
    "int4": ("int4", "int8"),
}


def tiles_of(dtype: str, device: str = "cpu") -> tuple[str, str]:
    """TILES on a device: a GPU expands int8 to bfloat16."""
    if device == "cuda" and dtype != "float32":
        return "bfloat16", "bfloat16"
    return TILES[dtype]


def num_parameters(config: ModelConfig) -> int:
    """All of them, a tied head counted once."""
    embeddings = head_weights(config) * (1 if config.tie_word_embeddings else 2)
    return block_weights(config) + _more_experts(config) + embeddings + _others(config)


def model_bytes(config: ModelConfig, dtype: str) -> int:
    """What all parameters take in memory: biases, layer norms and position embeddings are float32."""
    in_block, in_head = BYTES[dtype]
    embeddings = head_weights(config) * (1 if config.tie_word_embeddings else 2)
    return int(in_block * (block_weights(config) + _more_experts(config)) + in_head * embeddings + 4 * _others(config))


def weight_bytes(config: ModelConfig, dtype: str, num_passes: int = 1, num_logit_passes: int | None = None) -> float:
    """Read by so many passes: the matrices of all blocks, and the head where logits are wanted (None: in all)."""
    in_block, in_head = BYTES[dtype]
    num_logit_passes = num_passes if num_logit_passes is None else num_logit_passes
    return num_passes * in_block * block_weights(config) + num_logit_passes * in_head * head_weights(config)


def kv_cache_bytes(config: ModelConfig, kv_cache_dtype: str, num_positions: float) -> float:
    """Of the keys and values of so many positions; in int8, each head has a float32 scale for its key and its value."""
    scales = 4 * config.n_head if kv_cache_dtype == "int8" else 0
    return num_positions * 2 * config.n_layer * (CACHE_BYTES[kv_cache_dtype] * config.n_embd + scales)


def block_operations(config: ModelConfig, num_tokens: float, num_attended: float) -> float:
    """Of so many tokens in all blocks, each of which attends to `num_attended` positions, on average."""
    return num_tokens * (2 * block_weights(config) + 4 * num_attended * config.n_layer * config.n_embd)


def head_operations(config: ModelConfig, num_logit_rows: float) -> float:
    """Of the logits of so many tokens."""
    return 2 * num_logit_rows * head_weights(config)


def block_weights(config: ModelConfig) -> int:
    """Numbers in the matrices of all blocks, those of one expert where there are several."""
    return config.n_layer * (4 * config.n_embd * config.n_embd + 2 * config.n_embd * config.inner_size)


def head_weights(config: ModelConfig) -> int:
    return config.vocab_size * config.embedding_size


def _others(config: ModelConfig) -> int:
    """wpe, the biases of the matrices (3C + C + F + C), the layer norms' weights and biases, and the matrices between
    embeddings of another width and the model's."""
    C, experts = config.n_embd, len(config.expert_layers) * (config.num_experts - 1)
    biases = config.n_layer * (5 * C + config.inner_size) + experts * (config.inner_size + C)
    norms = 2 * (2 * config.n_layer + config.final_norm + config.embed_norm) * C
    positions = 0 if config.has_alibi else config.n_positions * C
    return positions + biases + norms + 2 * C * (config.embed_dim or 0)


def _more_experts(config: ModelConfig) -> int:
    """Numbers in the matrices of all experts of a layer but one, and in its gate."""
    C, F = config.n_embd, config.inner_size
    return len(config.expert_layers) * ((config.num_experts - 1) * 2 * C * F + config.num_experts * C)
