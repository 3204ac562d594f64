"""Layout: how many ranks there are, and how they stand to one another."""

from dataclasses import dataclass
from typing import Any

from tinygpt.errors import invalid

MAX_TENSOR_SIZE = 4  # kernels sum four segments of K
MAX_PIPELINE_SIZE = 1024


@dataclass(frozen=True)
class Layout:
    """`pipeline_size` stages of `tensor_size` ranks each, which share the stage's layers; a stage's are neighbours."""

    tensor_size: int = 1
    pipeline_size: int = 1

    @classmethod
    def of(cls, tensor_parallel_size: Any, pipeline_parallel_size: Any) -> "Layout":
        """RequestError for an impossible size."""
        _check_size("tensor_parallel_size", tensor_parallel_size, MAX_TENSOR_SIZE)
        _check_size("pipeline_parallel_size", pipeline_parallel_size, MAX_PIPELINE_SIZE)
        return cls(tensor_parallel_size, pipeline_parallel_size)

    @property
    def size(self) -> int:
        """Of the world: how many ranks there are."""
        return self.tensor_size * self.pipeline_size

    def rank_at(self, stage: int, tensor_rank: int) -> int:
        return stage * self.tensor_size + tensor_rank

    def place_of(self, rank: int) -> tuple[int, int]:
        """A rank's stage, and its rank among those that share the stage."""
        return divmod(rank, self.tensor_size)

    def tensor_group(self, rank: int) -> list[int]:
        """The ranks that share a rank's stage, itself included."""
        stage, _ = self.place_of(rank)
        return [self.rank_at(stage, t) for t in range(self.tensor_size)]


def _check_size(name: str, size: Any, most: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= most:
        raise invalid(name, size, f"a whole number from 1 to {most}")
