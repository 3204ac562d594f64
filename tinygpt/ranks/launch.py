"""Ranks that mpiexec has started, and how they share a model; imports fast."""

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from ..fields import integer, read_field

# Variables of MPICH and derivatives, Open MPI, PMIx and Slurm.
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
LOCAL_RANKS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
SLURM_RANK = "SLURM_PROCID"
SLURM_SIZE = "SLURM_STEP_NUM_TASKS"  # a step of one task may be a shell


def mpiexec_beside() -> str | None:
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent))


def find_mpiexec() -> str | None:
    return mpiexec_beside() or shutil.which("mpiexec")


def launched_rank() -> int | None:
    """Return the rank of this process, None if it was started alone."""
    names = RANKS + (SLURM_RANK,) * (_number(SLURM_SIZE) > 1)
    return next((_number(name) for name in names if name in os.environ), None)


def is_first_of_host() -> bool:
    local = next((_number(name) for name in LOCAL_RANKS if name in os.environ), launched_rank())
    return not local


def launched_size() -> int:
    return max(1, *map(_number, (*SIZES, SLURM_SIZE)))


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0


TENSOR_SIZE = integer(1, 4)  # kernels sum four segments of K
PIPELINE_SIZE = integer(1, 1024)


@dataclass(frozen=True)
class Layout:
    """`pipeline_size` stages of `tensor_size` neighboring ranks, which share a stage's layers."""

    tensor_size: int = 1
    pipeline_size: int = 1

    def __post_init__(self):
        read_field("tensor_parallel_size", self.tensor_size, TENSOR_SIZE)
        read_field("pipeline_parallel_size", self.pipeline_size, PIPELINE_SIZE)

    @property
    def size(self) -> int:
        return self.tensor_size * self.pipeline_size

    def rank_at(self, stage: int, tensor_rank: int) -> int:
        return stage * self.tensor_size + tensor_rank

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return (stage, index in it)."""
        return divmod(rank, self.tensor_size)

    def tensor_group(self, rank: int) -> list[int]:
        stage, _ = self.place_of(rank)
        return [self.rank_at(stage, t) for t in range(self.tensor_size)]
