"""What is measured, and the shortest time in which the machine could do it."""

from collections.abc import Iterable
from dataclasses import dataclass

from tinygpt.bench.work import CACHES, TILES, block_operations, head_operations, kv_cache_bytes, weight_bytes
from tinygpt.weights.config import ModelConfig
from tinygpt.weights.families.hugging_face.gpt2 import model_config


@dataclass(frozen=True)
class Case:
    """`new` tokens for each of `batch` prompts of `prompt` tokens; new = 1 is a prefill."""

    name: str
    batch: int
    prompt: int
    new: int

    @property
    def is_prefill(self) -> bool:
        return self.new == 1


CASES = (
    Case("decode, batch 1", 1, 50, 100),
    Case("decode, batch 8", 8, 32, 64),
    Case("decode, batch 32", 32, 32, 64),
    Case("prefill 512", 1, 512, 1),
)
LONG_CASES = (
    Case("decode at 1000, batch 1", 1, 1000, 24),
    Case("decode at 1000, batch 8", 8, 1000, 24),
)


def decode_cases(batch_sizes: Iterable[int]) -> tuple[Case, ...]:
    """Decoding alike at each batch size: what a curve is made of."""
    return tuple(Case(f"decode, batch {batch}", batch, 32, 64) for batch in batch_sizes)


@dataclass(frozen=True)
class Floor:
    """The shortest time of a case, in milliseconds, and the limit that sets it."""

    ms: float
    limit: str


def floor(case: Case, config: dict, dtype: str, limits: dict[str, float], kv_cache_dtype: str | None = None) -> Floor:
    """The larger of two times: reading each byte once at the machine's bandwidth, multiplying at our tiles' rate.

    config: config.json's content. limits: bytes a second "bandwidth", operations a second for each kind of tile.
    """
    config = model_config(config)
    in_blocks, in_head = (limits[kind] for kind in TILES[dtype])
    blocks = block_operations(config, new_tokens(case), cached_positions(case))
    seconds = {
        "bandwidth": bytes_read(case, config, dtype, kv_cache_dtype) / limits["bandwidth"],
        "tile peak": blocks / in_blocks + head_operations(config, case.batch) / in_head,
    }
    limit = max(seconds, key=seconds.__getitem__)
    return Floor(1e3 * seconds[limit], limit)


def bytes_read(case: Case, config: ModelConfig, dtype: str, kv_cache_dtype: str | None = None) -> float:
    if case.is_prefill:  # keys and values are written, and read again from the caches
        return weight_bytes(config, dtype)
    positions = case.batch * cached_positions(case)
    return weight_bytes(config, dtype) + kv_cache_bytes(config, kv_cache_dtype or CACHES[dtype], positions)


def cached_positions(case: Case) -> float:
    """Positions of one sequence that a step attends to, on average over the steps."""
    return (case.prompt + 1) / 2 if case.is_prefill else case.prompt + case.new / 2


def new_tokens(case: Case) -> int:
    """Tokens that go through the blocks in the time that is measured."""
    return case.batch * (case.prompt if case.is_prefill else 1)
