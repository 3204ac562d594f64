"""What a rank computes of a model, and the functions of a backend that several ranks need."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .backend import Backend, Batch
from .numbers import even_run


@dataclass(frozen=True)
class RankShare:
    """A rank's layers, heads, hidden units and tokens, in place of the model's config."""

    layers: range
    heads: range
    inner: range
    stream: range  # columns of x that projections lead to, on a GPU
    vocab: range  # tokens of the head's rows here, and on a CPU of wte's
    n_embd: int
    head_size: int
    is_first: bool  # stage: it embeds
    is_last: bool  # stage: it has ln_f and the head
    tensor_rank: int
    tensor_size: int  # ranks that share these layers

    @classmethod
    def even(cls, config, layers: range | None, *of_ranks: int) -> Any:
        """Return a share of a model whose ranks have equal parts, up to 1. of_ranks: tensor_rank and tensor_size."""
        layers = range(config.n_layer) if layers is None else layers
        counts = config.n_head, config.inner_size, config.n_embd, config.vocab_size
        parts = [even_run(count, *of_ranks) for count in counts]
        ends = layers.start == 0, layers.stop == config.n_layer
        return cls(layers, *parts, config.n_embd, config.head_size, *ends, *of_ranks)

    @property
    def n_layer(self) -> int:
        return len(self.layers)

    @property
    def n_head(self) -> int:
        return len(self.heads)

    @property
    def inner_size(self) -> int:
        return len(self.inner)

    @property
    def vocab_size(self) -> int:
        """Return the logits' columns; 1 for a stage without a head."""
        return len(self.vocab) if self.is_last else 1

    @property
    def samples(self) -> bool:
        """Return whether this is rank 0."""
        return self.is_first and self.tensor_rank == 0

    @property
    def runs(self) -> dict[str, list[range]]:
        start = self.heads.start * self.head_size
        stop = self.heads.stop * self.head_size
        return {
            "qkv": [range(i * self.n_embd + start, i * self.n_embd + stop) for i in range(3)],
            "heads": [range(start, stop)],
            "stream": [self.stream],
            "inner": [self.inner],
            "vocab": [self.vocab],
        }


class RankBackend(Backend, Protocol):
    """The functions for several ranks.

    `load_params` and `new_workspace` take a share, too, and `check_memory` those of a GPU's ranks. A workspace's
    `has_lost_rank` tells whether a rank is gone.
    """

    def gpu_room(self) -> tuple[str, int] | None:
        """Return the identity and the free bytes of this process's GPU, None on a CPU."""

    def share_of(
        self, config, dtype: str, layers: range, tensor_rank: int, tensor_size: int
    ) -> RankShare: ...

    def share_embedding(self, workspace, batch: Batch, starts: np.ndarray, rank: int) -> Batch:
        """Return what a rank embeds of a batch, of which rank 0 has the embeds. starts: each rank's first token."""

    def stream_of(self, workspace, count: int) -> np.ndarray:
        """Return x (N, C) float32 of the last step's `count` tokens."""

    def logits_of(self, workspace, logits: np.ndarray, first_row: int) -> Any:
        """Return the host's logits (R, V), of rows that `forward` could write, as `sample` takes them."""
