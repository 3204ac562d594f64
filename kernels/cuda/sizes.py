"""Sizes: of the largest step that buffers are laid out for."""

from dataclasses import dataclass
from typing import Any

from tinygpt.kernels.cuda.layers.attention import CHUNK


@dataclass(frozen=True)
class Sizes:
    """Of the largest step: new tokens, rows with logits, sequences that decode, positions of the longest sequence."""

    tokens: int
    logits: int
    decode_tokens: int
    positions: int

    @property
    def max_chunks(self) -> int:
        return -(-self.positions // CHUNK)


def sizes_of(config: Any, max_num_tokens: int, max_num_logits: int) -> Sizes:
    """A step in which all sequences decode has no more tokens than rows of logits."""
    return Sizes(max_num_tokens, max_num_logits, min(max_num_tokens, max_num_logits), config.n_positions)
