"""Undamaged checkpoints of other programs, as the tests write them: one folder each."""

import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from support.foreign import WRITERS
from support.moe_models import moe_arrays, write_moe
from support.tf_writer import crc32c, mask
from support.tiny_checkpoint import random_tensors

from .seeds import Files

EXPERTS = "deepspeed"  # a model of its own
FORMS = (*(form for form in WRITERS if form != "hugging_face"), EXPERTS)


def foreign(form: str) -> Files:
    """All files that a writer makes, by their paths."""
    with tempfile.TemporaryDirectory() as name:
        if form == EXPERTS:
            write_moe(Path(name), moe_arrays(num_experts=2))
        else:
            WRITERS[form](Path(name), random_tensors(prefix=""))
        paths = sorted(path for path in Path(name).rglob("*") if path.is_file())
        return {path.relative_to(name).as_posix(): path.read_bytes() for path in paths}


def seal_table(data: bytes, rng: object) -> bytes:
    """The checksums of a TensorFlow index made right again; of other files, nothing can be."""
    if data[-8:] != bytes.fromhex("57fb808b247547db"):
        raise ValueError("no table")
    sealed = bytearray(data)
    numbers, place = [], len(data) - 48
    while len(numbers) < 4:
        number, shift = 0, 0
        while True:
            byte = data[place]
            number, shift, place = number | (byte & 127) << shift, shift + 7, place + 1
            if byte < 128:
                break
        numbers.append(number)
    for stop in (numbers[0] - 5, numbers[2] + numbers[3]):  # of the first block, and of the one that lists the others
        start = 0 if stop == numbers[0] - 5 else numbers[2]
        sealed[stop + 1 : stop + 5] = mask(crc32c(bytes(sealed[start : stop + 1])))
    return bytes(sealed)


def check_foreign(folder: Path, loaded: dict[str, np.ndarray], undamaged: dict[str, np.ndarray]) -> str | None:
    """Where nothing is checked but structure, elements may differ; not what they are, nor how many there can be."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if any(array.dtype != np.float32 for array in loaded.values()):
        return "elements that are no float32"
    total = sum(array.nbytes for array in loaded.values())
    return f"{total} bytes of a folder of {size}" if total > 200 * size else None


def check_verified(folder: Path, loaded: dict[str, np.ndarray], undamaged: dict[str, np.ndarray]) -> str | None:
    """Every tensor has a checksum, so that none can differ."""
    wrong = [name for name, array in loaded.items() if not np.array_equal(array, undamaged.get(name), equal_nan=True)]
    return f"{wrong[0]} is not what was written" if wrong else None
