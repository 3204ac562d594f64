"""A model's configuration and parameters: from files, packed by `convert`, or at random."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .config import DTYPES, EMBEDDING, HEAD, ModelConfig, parameter_shapes
from .containers.safetensors import Entry, read_safetensors, write_tensors
from .errors import CheckpointError, NoTokenizerError
from .families import gpt2
from .families.family import Layout
from .files import PACKED_FILE, StoredTokenizer, crc32_of, in_a_thread, open_regular, read_json_object
from .tensor import FILES, LazyTensor, MappedFile, StoredTensor, Tensor, drawn, parsing

READ_SIZE = 2**20  # bytes
# Of converted checkpoints.
FORMAT, VERSION = "tinygpt packed weights", "3"
BOUNDARY = 64  # bytes of the widest vector
CONVERT_AGAIN = "convert the original checkpoint again with `tinygpt convert`."
# Dtypes in the file, by the arrays'.
STORED = {"float32": "float32", "uint8": "U8", "uint16": "bfloat16", "int16": "float16"}

PackedLayout = Mapping[str, tuple[tuple[int, ...], np.dtype]]


@dataclass(frozen=True)
class Checkpoint:
    """A model to load. Its tensors stay in their files until they are asked for.

    container, family: for messages; stored: by the names and shapes of `config.py`; tied: the head is the token
    embedding; ignored: known, unused names; heads: of other tasks, by GPT-2's names; quirks: what was evened out;
    files: all with tensors.
    layout: transformers', None for GPT-2's. tokenizer_folder: of another tokenizer, an adapter's.
    read_tokenizer: returns one in the weights' files, or None if it lies in `folder`; may raise CheckpointError.
    chat_options: a chat template with its special tokens in the file itself, as tokenizer_config.json has them.
    on_release: called with the name of a parameter that has been read.
    converted_to: the dtype that `convert` has packed the weights in. packed: in place of `stored`.
    """

    path: Path
    container: str
    family: str
    config: ModelConfig
    stored: Mapping[str, Tensor]
    tied: bool
    ignored: tuple[str, ...] = ()
    quirks: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    read_tokenizer: Callable[[], StoredTokenizer | None] = lambda: None
    chat_options: Mapping[str, Any] = field(default_factory=dict)
    heads: Mapping[str, Tensor] = field(default_factory=dict)
    layout: Layout | None = None
    tokenizer_folder: Path | None = None
    on_release: Callable[[str], Any] = lambda name: None
    converted_to: str | None = None
    packed: "PackedWeights | None" = None

    @property
    def folder(self) -> Path:
        return self.path.parent if self.path.is_file() else self.path

    @property
    def auto_dtype(self) -> str:
        """Return the dtype of "auto"."""
        return self.converted_to or "float32"

    def tensor(self, name: str) -> np.ndarray:
        """Return a float32 parameter, a view if the file holds float32; every matrix is (out, in)."""
        return self._parameter(name).float32()

    def release(self, name: str) -> None:
        self._parameter(name).release()
        self.on_release(name)

    def _parameter(self, name: str) -> Tensor:
        return self.stored[EMBEDDING if self.tied and name == HEAD else name]

    def begin_checksum(self) -> Future[str]:
        """Return the CRC-32s of all files, computed in a thread. The future may raise CheckpointError.

        Files are read, not mapped: unused pages would count as this process's memory.
        """
        if self.packed:
            return self.packed.checksum
        return in_a_thread(lambda: " ".join(sorted(map(_checksum, self.files))))

    def unpacked(self, unpack: Callable[[str], np.ndarray]) -> "Checkpoint":
        """Return a converted checkpoint for a device that cannot read it in place.

        unpack: a parameter by its name, in float32.
        """
        stored = {name: LazyTensor(partial(unpack, name), ()) for name in parameter_shapes(self.config)}
        return replace(self, stored=stored, packed=None)


def _checksum(path: Path) -> str:
    with parsing(path, "file"), open_regular(path, is_weights=True) as file:
        return crc32_of(iter(partial(file.read, READ_SIZE), b""))


def read_config(folder: Path) -> ModelConfig:
    """Return the configuration of a folder. Raise one CheckpointError for all that is wrong."""
    generation = folder / "generation_config.json"
    fields = read_json_object(folder / "config.json")
    return model_config(fields, read_json_object(generation) if generation.exists() else None)


def model_config(fields: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    if fields.get("model_type", "gpt2") == "gpt2":  # the first ones have none
        return gpt2.model_config(fields, generation)
    from .families.transformers import model_type_of

    return model_type_of(fields).model_config(fields, generation)


@dataclass(frozen=True)
class PackedWeights:
    """The weights of a converted checkpoint in one safetensors file, which kernels read in place.

    The file holds the CPU kernels' arrays by name, bfloat16 as two bytes. Its metadata: `format`, `version`, `dtype`,
    whether the head is `tied` to wte, the packing's numbers, the `source`, the calibration, and the `crc32` of the
    data. Arrays of whole 64 bytes come first: each starts on such a boundary.
    checksum: of the data, computed in a thread.
    """

    file: MappedFile
    vocab_size: int
    metadata: Mapping[str, str]
    stored: Mapping[str, StoredTensor]
    checksum: Future[str]

    def arrays(self, layout: PackedLayout, packing: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Return writable views of the file, whose writes stay out of it.

        Raise one CheckpointError that lists all differences from this layout and packing, or for damaged data.
        """
        wanted = {**packing, "vocab_size": self.vocab_size}  # no array is as long: panels are padded
        problems = [
            f"its {name} is {self.metadata.get(name)} and {number} is asked for"
            for name, number in wanted.items()
            if self.metadata.get(name) != str(number)
        ]
        problems += _differences(self.stored, layout)
        if problems:
            lines = "\n".join(f"  {problem}" for problem in problems)
            raise CheckpointError(
                f"{self.file.path} does not hold what its config.json and this tinygpt ask for:\n{lines}\n"
                f"Restore the two files as they were made together, or {CONVERT_AGAIN}"
            )
        if self.checksum.result() != self.metadata.get("crc32"):
            raise CheckpointError(
                f"{self.file.path} is damaged, its data does not have the checksum in its header: copy it "
                f"again, or {CONVERT_AGAIN}"
            )
        return {name: self.stored[name].array(dtype) for name, (_, dtype) in layout.items()}


def open_packed(path: Path) -> Checkpoint:
    """Open a folder with PACKED_FILE. Raise CheckpointError if it is damaged or of another version."""
    file = path / PACKED_FILE
    for name in FILES:
        if (path / name).exists():
            raise CheckpointError(f"{path} holds both {PACKED_FILE} and {name}: move one to another folder.")
    config = read_config(path)
    try:
        container = read_safetensors(file)
    except CheckpointError as error:
        raise CheckpointError(f"{error} If it was made on this machine, {CONVERT_AGAIN}") from None
    metadata = container.metadata
    stored = container.tensors
    _check_metadata(file, metadata)
    mapped = next(iter(stored.values())).file
    checksum = in_a_thread(lambda: crc32_of([_data(stored)]))
    return Checkpoint(
        path,
        container.format,
        "GPT-2",
        config,
        stored={},
        tied=metadata["tied"] == "true",
        files=(file,),
        converted_to=metadata["dtype"],
        packed=PackedWeights(mapped, config.vocab_size, metadata, stored, checksum),
    )


def write_packed(folder: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, object]) -> Path:
    ordered = sorted(arrays.items(), key=lambda item: (item[1].nbytes % BOUNDARY != 0, -item[1].itemsize))
    checksum = crc32_of(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for _, array in ordered)
    header = {"format": FORMAT, "version": VERSION, **metadata, "crc32": checksum}
    path = folder / PACKED_FILE
    entries = {name: Entry(STORED[a.dtype.name], a.shape, partial(np.asarray, a)) for name, a in ordered}
    write_tensors(path, entries, {name: str(value) for name, value in header.items()}, BOUNDARY)
    return path


def _check_metadata(file: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"{file} is a safetensors file that was not made by tinygpt's convert: {CONVERT_AGAIN}"
        )
    if metadata.get("version") != VERSION:
        raise CheckpointError(
            f"{file} is in version {metadata.get('version')} of its format and this tinygpt reads version {VERSION}: "
            f"{CONVERT_AGAIN}"
        )
    if metadata.get("dtype") not in DTYPES or metadata.get("tied") not in ("true", "false"):
        raise CheckpointError(f"{file} has damaged metadata, {metadata}: {CONVERT_AGAIN}")


def _differences(stored: Mapping[str, StoredTensor], layout: PackedLayout) -> Iterable[str]:
    yield from (f"{name} is missing" for name in layout if name not in stored)
    yield from (f"{name} is unexpected" for name in stored if name not in layout)
    for name in layout.keys() & stored.keys():
        (shape, dtype), tensor = layout[name], stored[name]
        if tensor.shape != shape or tensor.dtype != STORED[dtype.name]:
            yield f"{name} is {tensor.dtype} {tensor.shape} and should be {STORED[dtype.name]} {shape}"
        elif tensor.offset % (
            BOUNDARY if dtype.itemsize * np.prod(shape) % BOUNDARY == 0 else dtype.itemsize
        ):
            yield f"{name} does not start on its boundary"


def _data(stored: Mapping[str, StoredTensor]) -> memoryview:
    data = memoryview(next(iter(stored.values())).file.data)
    return data[min(tensor.offset for tensor in stored.values()) :]


PREFIX = "random:"
SHAPES = {
    "tiny": ModelConfig(n_layer=2, n_embd=64, n_head=2),
    "124M": ModelConfig(),
    "355M": ModelConfig(n_layer=24, n_embd=1024, n_head=16),
    "774M": ModelConfig(n_layer=36, n_embd=1280, n_head=20),
    "1.5B": ModelConfig(n_layer=48, n_embd=1600, n_head=25),
}
SHAPE_OF = {shape.lower(): shape for shape in SHAPES}  # 124m is 124M


def open_random(model: str) -> Checkpoint:
    """Open "random:SHAPE". Raise CheckpointError for an unknown shape."""
    shape = SHAPE_OF.get(model.removeprefix(PREFIX).lower())
    if shape is None:
        raise CheckpointError(
            f"{model} is no random checkpoint: give one of {', '.join(map(PREFIX.__add__, SHAPES))}."
        )
    return random_checkpoint(model, SHAPES[shape])


def random_checkpoint(name: str, config: ModelConfig) -> Checkpoint:
    """Return a checkpoint of any sizes, whose path is `name`, for messages."""
    shapes = parameter_shapes(config)
    stored = {
        name: LazyTensor(partial(drawn, name, shape), ()) for name, shape in shapes.items() if name != HEAD
    }
    return Checkpoint(
        Path(name),
        "random weights",
        "GPT-2",
        config,
        stored,
        tied=True,
        read_tokenizer=partial(_no_tokenizer, name),
    )


def _no_tokenizer(model: str) -> None:
    raise NoTokenizerError(f"{model} has no tokenizer: give token ids, or a checkpoint that has one.")


def is_random(model: object) -> bool:
    return isinstance(model, str) and model.startswith(PREFIX)
