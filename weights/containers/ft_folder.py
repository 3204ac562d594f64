"""FasterTransformer's folder: config.ini, and for each tensor a file of plain numbers without a shape.

A tensor's name is its file's without `.bin`; one that is shared by several GPUs ends in the number of each.
"""

import configparser
from pathlib import Path

from tinygpt.weights.checks import shown
from tinygpt.weights.containers.mapped_file import Container, MappedFile, MappedTensor
from tinygpt.weights.errors import CheckpointError
from tinygpt.weights.files import read_regular_text

FORMAT, CONFIG = "FasterTransformer folder", "config.ini"
MAX_FILES = 100_000
DTYPES = {"fp32": ("float32", 4), "fp16": ("float16", 2), "bf16": ("bfloat16", 2)}


def find_ft_folder(folder: Path) -> Path | None:
    return folder if (folder / CONFIG).is_file() and any(folder.glob("model.wte*.bin")) else None


def read_ft_folder(folder: Path) -> Container:
    """Tensors of one dimension; the metadata are the sections of config.ini. CheckpointError when a file is damaged."""
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(read_regular_text(folder / CONFIG))
    except (configparser.Error, OSError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG} cannot be read ({str(error)[:200]}): copy it again.") from error
    sections = {name: dict(parser[name]) for name in parser.sections()}
    given = next(
        (section["weight_data_type"] for section in sections.values() if "weight_data_type" in section), "fp32"
    )
    if given not in DTYPES:
        raise CheckpointError(
            f"{folder / CONFIG}: weight_data_type is {shown(given)} and must be one of {', '.join(DTYPES)}."
        )
    files = sorted(folder.glob("model.*.bin"))
    if len(files) > MAX_FILES:
        raise CheckpointError(f"{folder} holds {len(files)} files, which are more than any model has.")
    return Container(FORMAT, {file.stem: _tensor(file, *DTYPES[given]) for file in files}, sections)


def _tensor(path: Path, dtype: str, itemsize: int) -> MappedTensor:
    file = MappedFile(path)
    if len(file) % itemsize:
        raise CheckpointError(f"{path} has {len(file)} bytes, which are no whole {dtype} numbers: copy it again.")
    return MappedTensor(file, dtype, (len(file) // itemsize,), (1,), 0)
