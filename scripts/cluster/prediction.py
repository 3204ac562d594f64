"""What a model would do on hosts: memory, seconds of a step, and what goes between them."""

from contextlib import suppress
from dataclasses import dataclass, replace

from tinygpt.bench.machine_limits import MachineLimits
from tinygpt.bench.work import (
    BYTES,
    CACHE_BYTES,
    CACHES,
    TILES,
    block_operations,
    head_operations,
    head_weights,
    kv_cache_bytes,
)
from tinygpt.config import ModelConfig
from tinygpt.errors import RequestError
from tinygpt.parallel.cut import check_cut, part_of_rank
from tinygpt.parallel.layout import Layout
from tinygpt.parallel.runner import GROUP_STEPS, LEAST_GROUP

FLOAT = 4  # bytes


@dataclass(frozen=True)
class Network:
    """seconds until a message arrives, and bytes a second."""

    latency: float
    bandwidth: float

    def seconds(self, messages: float, sent: float) -> float:
        return messages * self.latency + sent / self.bandwidth


@dataclass(frozen=True)
class Load:
    """Sequences that decode together on a replica, and the positions that each attends to."""

    batch_size: float
    context: int


@dataclass(frozen=True)
class Prediction:
    memory: float  # bytes of the rank that has most: weights, and positions in use
    seconds: float  # of a step
    sent: int  # bytes between ranks, in a step


def predict(
    config: ModelConfig, dtype: str, layout: Layout, load: Load, limits: MachineLimits, network: Network, share: float
) -> Prediction:
    """A step of decoding on one replica. share: of the limits that a step reaches."""
    stages = layout.pipeline_size
    seconds = sum(_first_rank(config, dtype, layout, i, load, limits) for i in range(stages)) / share
    memory = max(rank_bytes(config, dtype, layout, rank, load) for rank in range(layout.size))
    if stages > 1 and load.batch_size >= stages * LEAST_GROUP:  # each stage works on another group
        group = replace(load, batch_size=load.batch_size / stages)
        turn = max(_first_rank(config, dtype, layout, i, group, limits) for i in range(stages)) / share
        seconds = turn * (stages + (stages - 1) / GROUP_STEPS)
    between = _messages(config, layout, load.batch_size)
    return Prediction(memory, seconds + network.seconds(*between), sent_bytes(config, layout, load.batch_size))


def sent_bytes(config: ModelConfig, layout: Layout, rows: int) -> int:
    """Between all ranks, in a step of so many tokens whose logits are all wanted, but for the plan of the step.

    The embedding is one exchange among the ranks of a stage and each layer two, in which each rank sends its part to
    each other one.
    """
    width, tensor = rows * config.n_embd * FLOAT, layout.tensor_size
    exchanges = (2 * config.n_layer + 1) * tensor * (tensor - 1) * width
    hops = (layout.pipeline_size - 1) * tensor * width
    own = 0 if layout.pipeline_size > 1 else len(part_of_rank(layout, 0, config, "float32").vocab)
    logits = rows * (config.vocab_size - own) * FLOAT if layout.size > 1 else 0
    return exchanges + hops + logits


def _messages(config: ModelConfig, layout: Layout, rows: int) -> tuple[float, float]:
    """One after another: how many, and bytes that one link carries."""
    width = rows * config.n_embd * FLOAT
    others = layout.tensor_size - 1
    exchanges = (2 * config.n_layer + 1) * (others > 0)
    hops = layout.pipeline_size - 1
    logits = rows * config.vocab_size * FLOAT * (layout.size > 1)
    return exchanges + hops + 2 * (layout.size > 1), (exchanges * others + hops) * width + logits


def rank_bytes(config: ModelConfig, dtype: str, layout: Layout, rank: int, load: Load) -> float:
    """What a rank holds: its part of each matrix, and of the KV cache for the load; whole norms and biases of sums."""
    part, (in_block, in_head) = part_of_rank(layout, rank, config, dtype), BYTES[dtype]
    C, Q, F = config.n_embd, part.n_head * part.head_size, len(part.inner)
    matrices = part.n_layer * (4 * C * Q + 2 * C * F)
    # A tied head that is in another stage than the embedding is held by both.
    tables = 2 if part.is_first and part.is_last and not config.tie_word_embeddings else part.is_first or part.is_last
    others = part.n_layer * (3 * Q + F + 2 * C)  # biases
    others += 2 * C * (2 * part.n_layer + config.final_norm * part.is_last + config.embed_norm * part.is_first)
    others += config.n_positions * C * (not config.has_alibi)
    cache = CACHE_BYTES[CACHES[dtype]] * 2 * part.n_layer * Q * load.batch_size * load.context
    return in_block * matrices + in_head * tables * len(part.vocab) * C + FLOAT * others + cache


def _first_rank(
    config: ModelConfig, dtype: str, layout: Layout, stage: int, load: Load, limits: MachineLimits
) -> float:
    """Seconds of the stage's largest rank, which is the first."""
    part = part_of_rank(layout, layout.rank_at(stage, 0), config, dtype)
    in_block, in_head = BYTES[dtype]
    share = part.n_layer / config.n_layer * part.n_head / config.n_head
    rows = len(part.vocab) / config.vocab_size
    head, blocks = head_weights(config) * rows, _blocks(config) * share
    cache = kv_cache_bytes(config, CACHES[dtype], load.batch_size * load.context) * share
    read = in_block * blocks + in_head * head * part.is_last + cache
    block_rate, head_rate = map(limits.tile_rates.get, TILES[dtype])
    compute = block_operations(config, load.batch_size, load.context) * share / block_rate
    compute += head_operations(config, load.batch_size) * rows * part.is_last / head_rate
    return max(read / limits.bandwidth, compute)


def _blocks(config: ModelConfig) -> int:
    return config.n_layer * (4 * config.n_embd**2 + 2 * config.n_embd * config.inner_size)


def layouts(config: ModelConfig, dtype: str, hosts: int) -> list[tuple[Layout, int]]:
    """Every layout of so many hosts that the model can be cut by, and its replicas."""
    sizes = [(t, p) for t in (1, 2, 3, 4) for p in range(1, config.n_layer + 1) if hosts % (t * p) == 0]
    return [(Layout(t, p), hosts // (t * p)) for t, p in sizes if can_be_cut(Layout(t, p), config, dtype)]


def can_be_cut(layout: Layout, config: ModelConfig, dtype: str) -> bool:
    with suppress(RequestError):
        check_cut(layout, config, dtype, "cpu")
        return True
    return layout.size == 1
