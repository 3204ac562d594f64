"""ModelSource: which checkpoint runs on which backend in which dtypes, decided and checked before a weight is read."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from tinygpt.errors import NoTokenizerError, RequestError
from tinygpt.execution.backend import check_model, load_backend, name_of
from tinygpt.tokenizer.files import checked_spec, read_tokenizer
from tinygpt.tokenizer.tokenizer import Tokenizer
from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.config import ModelConfig
from tinygpt.weights.containers.mapped_file import MappedFile
from tinygpt.weights.open import open_checkpoint
from tinygpt.weights.random_checkpoint import is_random
from tinygpt.weights.stored.packed import PackedCheckpoint


@dataclass(frozen=True)
class ModelSource:
    """An opened checkpoint, and how it is to run. LLM's docstring says what each argument of `open` is."""

    backend: ModuleType
    checkpoint: Checkpoint | PackedCheckpoint
    dtype: str
    kv_cache_dtype: str

    @classmethod
    def open(
        cls,
        model: str,
        dtype: str = "auto",
        device: str = "cpu",
        kv_cache_dtype: str = "auto",
        lora: str | os.PathLike[str] | None = None,
    ) -> "ModelSource":
        """Raises CheckpointError if the checkpoint cannot be opened, RequestError for an impossible combination."""
        return cls.open_all(model, [dtype], device, kv_cache_dtype, lora)[0]

    @classmethod
    def open_all(
        cls,
        model: str,
        dtypes: Sequence[str],
        device: str = "cpu",
        kv_cache_dtype: str = "auto",
        lora: str | os.PathLike[str] | None = None,
    ) -> "list[ModelSource]":
        """As `open`, of one checkpoint in each dtype."""
        backends = [load_backend(device, dtype) for dtype in dtypes]
        checkpoint = open_checkpoint(model)
        if lora is not None:
            from tinygpt.weights.adapters.lora import merge_lora

            checkpoint = merge_lora(checkpoint, lora)
        return [cls._of(checkpoint, *how, kv_cache_dtype) for how in zip(backends, dtypes, strict=True)]

    @classmethod
    def _of(
        cls, checkpoint: Checkpoint | PackedCheckpoint, backend: ModuleType, dtype: str, kv_cache_dtype: str
    ) -> "ModelSource":
        dtype = resolve_dtype(dtype, backend, checkpoint)
        check_model(backend, checkpoint.config, checkpoint.path)
        return cls(backend, checkpoint, dtype, resolve_kv_cache_dtype(kv_cache_dtype, backend, dtype))

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    @property
    def file(self) -> MappedFile | None:
        """The file in which the Params lie, where they are no copies."""
        return self.checkpoint.file if isinstance(self.checkpoint, PackedCheckpoint) else None

    def begin_checksum(self) -> Future[str]:
        """A text that is another one for other weights, made beside whatever else is done."""
        return self.checkpoint.begin_checksum()

    def load_params(self, threads: int) -> Any:
        """The backend's Params: packed now, or as they lie in a converted checkpoint; on several memory nodes, copies.

        Raises CheckpointError if that is damaged, or packed for other kernels.
        """
        if not isinstance(self.checkpoint, PackedCheckpoint):
            return self.backend.load_params(self.checkpoint, self.dtype, threads)
        return self.backend.PACKED.params_of(self._packed_arrays(), self.config, self.dtype, threads)

    def load_part(self, threads: int, part: Any, load: Callable) -> Any:
        """As load_params, what one of several ranks holds. `part` and `load` are of the CPU's kernels, which alone can
        do this."""
        if not isinstance(self.checkpoint, PackedCheckpoint):
            return load(self.checkpoint, self.dtype, threads, part)
        return self.backend.PACKED.params_of_part(self._packed_arrays(), self.config, self.dtype, part)

    def _packed_arrays(self) -> dict[str, np.ndarray]:
        packed = self.backend.PACKED
        return self.checkpoint.arrays(packed.layout_of(self.config, self.dtype, self.checkpoint.tied), packed.PACKING)


def load_tokenizer(checkpoint: Checkpoint | PackedCheckpoint, split_special_tokens: bool = False) -> Tokenizer:
    """The tokenizer that came with the weights, or that of the files beside them.

    NoTokenizerError if there is none that runs here, CheckpointError if it is damaged.
    """
    if is_random(str(checkpoint.path)):
        raise NoTokenizerError(f"{checkpoint.path} has no tokenizer: give token ids, or a checkpoint that has one.")
    spec = None if isinstance(checkpoint, PackedCheckpoint) else checkpoint.read_tokenizer()
    if spec is not None:
        return Tokenizer.from_spec(spec, checkpoint.path, split_special_tokens)
    return Tokenizer.from_folder(checkpoint.folder, split_special_tokens)


def check_tokenizer(checkpoint: Checkpoint) -> None:
    """CheckpointError for a tokenizer that is damaged. None at all is no error: token ids work without one."""
    with suppress(NoTokenizerError):
        load_tokenizer(checkpoint)


def read_spec(checkpoint: Checkpoint) -> dict[str, Any]:
    """The same tokenizer, in the form of a tokenizer.json."""
    spec = checkpoint.read_tokenizer()
    return read_tokenizer(checkpoint.folder) if spec is None else checked_spec(spec, checkpoint.path, {})


def resolve_dtype(dtype: str, backend: ModuleType, checkpoint: Checkpoint | PackedCheckpoint) -> str:
    """The precision of the weights: "auto" is a converted checkpoint's own, bfloat16 for one that was converted to
    float8 where the backend has it, and float32 for any other.

    Raises RequestError if a converted checkpoint has another one, or is of no use to the backend.
    """
    if not isinstance(checkpoint, PackedCheckpoint):
        auto = checkpoint.auto_dtype if checkpoint.auto_dtype in backend.DTYPES else "float32"
        return auto if dtype == "auto" else dtype
    if backend.PACKED is None:
        raise RequestError(
            f"{checkpoint.path} is a converted checkpoint, which device {name_of(backend)!r} cannot read: give the "
            "checkpoint that it was made from, or use device 'cpu'."
        )
    if dtype not in ("auto", checkpoint.dtype):
        raise RequestError(
            f"dtype is {dtype!r} and {checkpoint.path} is converted to {checkpoint.dtype!r}: leave it at 'auto', or "
            "give the checkpoint that it was made from."
        )
    return checkpoint.dtype


def resolve_kv_cache_dtype(kv_cache_dtype: str, backend: ModuleType, dtype: str) -> str:
    """The precision of the KV cache: "auto" is the first that the backend has for weights of `dtype`."""
    allowed = backend.kv_cache_dtypes(dtype)
    if kv_cache_dtype == "auto":
        return allowed[0]
    if kv_cache_dtype not in allowed:
        listed = ", ".join(map(repr, ("auto", *allowed)))
        raise RequestError(
            f"kv_cache_dtype is {kv_cache_dtype!r} and must be one of {listed} for {dtype} weights on device "
            f"{name_of(backend)!r}."
        )
    return kv_cache_dtype
