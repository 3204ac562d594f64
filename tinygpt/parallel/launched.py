"""mpiexec: where it is, and what it has told a process that it has started, before any MPI is asked."""

import os
import shutil
import sys
from pathlib import Path

# Under these names a process finds its rank and how many there are: those of MPICH and its kin, Open MPI, PMIx, Slurm.
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
LOCAL_RANKS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
SLURM_RANK, SLURM_SIZE = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"  # a step of one task may be somebody's shell


def mpiexec_beside() -> str | None:
    """The one beside this Python, as MPICH's wheel has it."""
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent))


def find_mpiexec() -> str | None:
    return mpiexec_beside() or shutil.which("mpiexec")


def launched_rank() -> int | None:
    """Its rank; None in a process that was started alone."""
    names = RANKS + (SLURM_RANK,) * (_number(SLURM_SIZE) > 1)
    return next((_number(name) for name in names if name in os.environ), None)


def is_first_of_host() -> bool:
    """Whether it is the first of its host; where nothing says so, whether it is rank 0."""
    local = next((_number(name) for name in LOCAL_RANKS if name in os.environ), launched_rank())
    return not local


def launched_size() -> int:
    """How many processes were started together."""
    return max(1, *map(_number, (*SIZES, SLURM_SIZE)))


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0
