"""The sizes of the largest step (MaxShape) and of one step (StepShape), which decides its kernels and grids."""

from dataclasses import dataclass
from typing import Any

from tinygpt.kernels.batch import query_tiles
from tinygpt.kernels.cuda.layers.attention import KEY_BLOCK, QUERY_TILE

# Where kernels find the true sizes of a step (`Inputs.sizes`): its tokens, its rows with logits, and how many steps
# have been taken before it without the host.
NUM_TOKENS, NUM_LOGITS, NUM_STEPS_DONE = 0, 1, 2
NUM_SIZES = 4


@dataclass(frozen=True)
class MaxShape:
    """Of the largest step: new tokens, rows with logits, sequences that decode, positions of the longest sequence."""

    tokens: int
    logits: int
    decode_tokens: int
    positions: int

    @classmethod
    def of(cls, config: Any, max_num_tokens: int, max_num_logits: int) -> "MaxShape":
        """A step in which all sequences decode has no more tokens than rows of logits."""
        return cls(max_num_tokens, max_num_logits, min(max_num_tokens, max_num_logits), config.n_positions)

    @property
    def max_chunks(self) -> int:
        return -(-self.positions // KEY_BLOCK)


@dataclass(frozen=True)
class StepShape:
    """A step's sizes, rounded up so that steps of like size share a graph."""

    tokens: int
    logits: int
    chunks: int  # of keys that a decoding token has
    tiles: int  # of queries; 0: each sequence has one new token

    @classmethod
    def of(cls, batch: Any, sizes: MaxShape, num_steps: int = 1) -> "StepShape":
        """num_steps: of this shape that follow one another, each with one more position."""
        tokens, positions = batch.token_ids.size, int(batch.context_lens.max()) + num_steps - 1
        chunks = min(rounded_up(-(-positions // KEY_BLOCK)), sizes.max_chunks)
        is_decode = tokens == batch.slots.size and tokens <= sizes.decode_tokens
        tiles = 0 if is_decode else rounded_up(query_tiles(batch.seq_starts, QUERY_TILE).size - 1)
        return cls(rounded_up(tokens), rounded_up(batch.logit_rows.size), chunks, tiles)


def rounded_up(count: int) -> int:
    """The next power of two: 0, 1, 2, 4, ..."""
    return 1 << (count - 1).bit_length() if count else 0
