"""Cases of a benchmark, the least work of their passes through the model, and the machine's limits.

A multiplication and an addition count as two operations.
"""

import math
from dataclasses import dataclass

from ..weights.config import EMBEDDING, HEAD, PRECISIONS, ModelConfig, parameter_shapes

# Bytes of a number in a KV cache, and llama.cpp's name of its type.
CACHE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
CACHE_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "q8_0"}


@dataclass(frozen=True)
class Case:
    """Prompts of these lengths to read, or, with new_tokens, to continue, in batches of at most `batch_size`.

    is_at_depth: the prompts begin alike, so that most of the time goes into generating.
    """

    batch_size: int
    prompt_lengths: tuple[int, ...]
    new_tokens: int = 0
    is_at_depth: bool = False

    @property
    def prompt_length(self) -> int:
        return max(self.prompt_lengths)

    @property
    def length(self) -> int:
        return self.prompt_length + max(self.new_tokens, 1)  # reading a prompt ends with its first new token


@dataclass(frozen=True)
class Run:
    """Seconds of one repetition. A pass counts as prompt while any sequence is in its prompt."""

    prompt: float = 0.0  # passes that read prompts
    generation: float = 0.0  # passes that decode
    sampling: float = 0.0
    first_token: float = 0.0  # from the call of generate to the first token of the last prompt
    total: float = 0.0  # the whole LLM.generate
    num_steps: int = 0  # passes; 0 if unknown
    num_prompt_steps: int = 0  # passes that read prompts
    together: float = 0.0  # passes in which all sequences decode one token
    num_together: int = 0


@dataclass(frozen=True)
class Work:
    """Seconds of the passes that count, their tokens, bytes read, and operations of the blocks and of the head."""

    seconds: float
    tokens: int
    bytes_read: float
    in_blocks: float
    in_head: float


@dataclass(frozen=True)
class MachineLimits:
    """Bytes of memory read a second, and operations a second of each kind of tile."""

    bandwidth: float
    tile_rates: dict[str, float]

    def best(self, other: "MachineLimits") -> "MachineLimits":
        kinds = {**self.tile_rates, **other.tile_rates}
        rates = {kind: max(self.tile_rates.get(kind, 0.0), other.tile_rates.get(kind, 0.0)) for kind in kinds}
        return MachineLimits(max(self.bandwidth, other.bandwidth), rates)


def measure_limits(dtype: str, threads: int, device: str) -> MachineLimits:
    """Measure the limits of the threads, or of the GPU, in half a second."""
    kinds = sorted({*tiles_of(dtype, device)})
    if device == "cuda":
        from ..kernels.cuda import peak

        return MachineLimits(peak.read_bandwidth(), {kind: peak.tile_rate(kind) for kind in kinds})
    from ..hardware import read_bandwidth
    from ..kernels.cpu.peak import tile_rate

    return MachineLimits(read_bandwidth(threads), {kind: tile_rate(kind, threads) for kind in kinds})


def tiles_of(dtype: str, device: str = "cpu") -> tuple[str, str]:
    """Return the dtypes of the tiles that multiply in the blocks and in the head."""
    if device == "cuda" and dtype != "float32":
        return "bfloat16", "bfloat16"  # to which a GPU expands int8, and as fast as float16
    return dtype, PRECISIONS[dtype].head


def work_of(case: Case, run: Run, config: ModelConfig, dtype: str, kv_cache_dtype: str) -> Work:
    """Return the work of reading prompts, or of passes in which the whole batch decodes."""
    if not case.new_tokens:
        tokens = case.batch_size * case.prompt_length
        num_logit_passes = min(run.num_prompt_steps, case.batch_size)  # passes in which a prompt ends
        read = weight_bytes(config, dtype, run.num_prompt_steps, num_logit_passes)
        in_blocks = block_operations(config, tokens, (case.prompt_length + 1) / 2)
        return Work(run.prompt, tokens, read, in_blocks, head_operations(config, case.batch_size))
    tokens = run.num_together * case.batch_size
    attended = case.prompt_length + case.new_tokens / 2  # by a token, on average
    read = weight_bytes(config, dtype, run.num_together)
    read += kv_cache_bytes(config, kv_cache_dtype, tokens * attended)
    in_blocks = block_operations(config, tokens, attended)
    return Work(run.together, tokens, read, in_blocks, head_operations(config, tokens))


def num_parameters(config: ModelConfig) -> int:
    return sum(_sizes(config))


def model_bytes(config: ModelConfig, dtype: str) -> int:
    in_blocks, in_head, others = _sizes(config)
    of_block, of_head = _weight_sizes(dtype)
    return int(of_block * in_blocks + of_head * in_head + 4 * others)


def _sizes(config: ModelConfig) -> tuple[int, int, int]:
    """Return the parameters of the blocks' matrices, of embedding and head, and of all that stays float32."""
    shapes = parameter_shapes(config)
    if config.tie_word_embeddings:
        del shapes[HEAD]
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    in_blocks = sum(size for name, size in sizes.items() if name.startswith("h.") and len(shapes[name]) > 1)
    in_head = sum(sizes.get(name, 0) for name in (EMBEDDING, HEAD))
    return in_blocks, in_head, sum(sizes.values()) - in_blocks - in_head


def weight_bytes(
    config: ModelConfig, dtype: str, num_passes: int = 1, num_logit_passes: int | None = None
) -> float:
    """Return the bytes that passes read; `num_logit_passes` of them (None: all) read the head.

    A screened head (kernels/README.md) reads less: a share of the bandwidth may be above its true value.
    """
    in_block, in_head = _weight_sizes(dtype)
    num_logit_passes = num_passes if num_logit_passes is None else num_logit_passes
    return num_passes * in_block * block_weights(config) + num_logit_passes * in_head * head_weights(config)


def _weight_sizes(dtype: str) -> tuple[float, float]:
    """Return the bytes of a weight in the blocks and in the head."""
    precision = PRECISIONS[dtype]
    return precision.bytes, PRECISIONS[precision.head].bytes


def kv_cache_bytes(config: ModelConfig, kv_cache_dtype: str, num_positions: float) -> float:
    scales = 4 * config.n_head if kv_cache_dtype == "int8" else 0  # float32, of a head's key and of its value
    return num_positions * 2 * config.n_layer * (CACHE_BYTES[kv_cache_dtype] * config.n_embd + scales)


def block_operations(config: ModelConfig, num_tokens: float, num_attended: float) -> float:
    return num_tokens * (2 * block_weights(config) + 4 * num_attended * config.n_layer * config.n_embd)


def head_operations(config: ModelConfig, num_logit_rows: float) -> float:
    return 2 * num_logit_rows * head_weights(config)


def block_weights(config: ModelConfig) -> int:
    """Count one expert a layer."""
    return config.n_layer * (4 * config.n_embd * config.n_embd + 2 * config.n_embd * config.inner_size)


def head_weights(config: ModelConfig) -> int:
    return config.vocab_size * config.embedding_size
