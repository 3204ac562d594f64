"""What is measured, and what it takes at least: bytes and operations."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tinygpt.bench.work import CACHES, block_operations, head_operations, kv_cache_bytes, weight_bytes
from tinygpt.weights.config import ModelConfig
from tinygpt.weights.random_checkpoint import PREFIX, SHAPES

MODELS = ("124M", "355M", "774M", "1.5B")
# 1024 positions hold the prompt and the token that comes of it.
PREFILL_TOKENS = 1023
CONTEXTS = {1: 160}  # positions that a decode step attends to, on average, by batch size
OTHER_CONTEXT = 512


@dataclass(frozen=True)
class Case:
    """Decoding `batch` sequences at a mean context of `context` positions, or, with context 0, a prefill."""

    batch: int
    context: int = 0

    @classmethod
    def decode(cls, batch: int) -> "Case":
        return cls(batch, CONTEXTS.get(batch, OTHER_CONTEXT))

    @property
    def is_prefill(self) -> bool:
        return self.context == 0

    @property
    def name(self) -> str:
        if self.is_prefill:
            return f"prefill of {PREFILL_TOKENS}"
        return f"decode, batch {self.batch}, context {self.context}"

    def prompts(self, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
        """One of `length` random tokens for each sequence."""
        shape = self.batch, length
        return np.random.default_rng(seed).integers(0, vocab_size, shape).tolist()

    def bytes_read(self, config: ModelConfig, dtype: str) -> float:
        """By one step: each weight once, and the keys and values of every sequence."""
        return weight_bytes(config, dtype) + kv_cache_bytes(config, CACHES[dtype], self.batch * self.context)

    def operations(self, config: ModelConfig) -> float:
        """Of a prefill; the logits are the last token's alone."""
        return block_operations(config, PREFILL_TOKENS, (PREFILL_TOKENS + 1) / 2) + head_operations(config, 1)


PREFILL = Case(1)


@dataclass(frozen=True)
class Job:
    """The work of one process: engines of one side ("limits", "ours" or "torch"), one model and dtype, cases in order.

    steps: that are timed at once. repeats: at the most.
    check: a file for this side's logits and greedy tokens, or None.
    """

    side: str
    model: str = "124M"
    dtype: str = "bfloat16"
    device: str = "cuda"
    runs: tuple[tuple[str, Case], ...] = ()
    steps: int = 128
    repeats: int = 9
    check: str | None = None

    @property
    def name(self) -> str:
        return PREFIX + self.model

    @property
    def config(self) -> ModelConfig:
        return SHAPES[self.model]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Job":
        runs = tuple((engine, Case(**case)) for engine, case in values["runs"])
        return cls(**{**values, "runs": runs})


def least_seconds(engine: str, config: ModelConfig) -> float:
    """What has to be left for a case to be begun: about what it takes, torch.compile's compilation above all."""
    return 15 + 2.5 * config.n_layer if engine == "compiled" else 8 + config.n_layer / 6
