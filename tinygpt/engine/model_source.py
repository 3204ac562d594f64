"""What a model is to run with, checked before a weight is read: ModelSource and the sizes in EngineConfig."""

import importlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any

import numpy as np

from ..errors import NoTokenizerError, RequestError, invalid, suggest
from ..kernels.backend import DeviceError
from ..text.files import checked_spec, read_tokenizer
from ..text.tokenizer import Tokenizer
from ..weights.checkpoint import Checkpoint, is_random
from ..weights.config import PRECISIONS, STORAGE_DTYPE, ModelConfig
from ..weights.containers.mapped_file import MappedFile
from ..weights.convert.packed import PackedCheckpoint
from ..weights.open import open_checkpoint

DEVICES = ("cpu", "cuda", "reference")  # each a package of kernels/, which exports kernels.backend.Backend
# Rows whose logits are computed together if all are wanted: 64 x 50257 x 4 bytes are 13 MB.
LOGIT_ROWS = 64
# Dtypes that compute with adapters which are not merged.
ADAPTED = tuple(name for name, precision in PRECISIONS.items() if precision.activations == "float32")


@dataclass(frozen=True)
class ModelSource:
    """An opened checkpoint and how it runs. LLM explains each argument."""

    backend: ModuleType
    checkpoint: Checkpoint | PackedCheckpoint
    dtype: str
    kv_cache_dtype: str
    adapters: tuple[
        dict[str, tuple], ...
    ] = ()  # of lora_modules: kernels.backend.Backend.with_adapters explains them

    @classmethod
    def open(cls, model: str, dtype: str = "auto", *how: Any) -> "ModelSource":
        return cls.open_all(model, [dtype], *how)[0]

    @classmethod
    def open_all(
        cls,
        model: str,
        dtypes: Sequence[str],
        device: str = "cpu",
        kv_cache_dtype: str = "auto",
        lora: str | os.PathLike[str] | None = None,
        lora_modules: Mapping[str, str | os.PathLike[str]] | None = None,
    ) -> "list[ModelSource]":
        """Raise CheckpointError if the checkpoint cannot be opened, RequestError for an impossible combination."""
        backends = [load_backend(device, dtype) for dtype in dtypes]
        checkpoint = open_checkpoint(model)
        if lora is not None:
            from ..weights.adapters.lora import merge_lora

            checkpoint = merge_lora(checkpoint, lora)
        adapters = _read_adapters(checkpoint, lora_modules)
        sources = []
        for backend, dtype in zip(backends, dtypes, strict=True):
            dtype = _resolve_dtype(dtype, backend, checkpoint)
            try:
                backend.check_model(checkpoint.config)
            except DeviceError as error:
                reason = (
                    f"is {name_of(backend)!r} and cannot run {checkpoint.path}: {error} Use device 'cpu'."
                )
                raise RequestError(reason, "device") from None
            kv_cache_dtype_of = _resolve_kv_cache_dtype(kv_cache_dtype, backend, dtype)
            if adapters and (backend.with_adapters is None or dtype not in ADAPTED):
                where = f"device {name_of(backend)!r} with {dtype} weights"
                raise RequestError(
                    f"needs {' or '.join(ADAPTED)} weights on device 'cpu', not {where}: or merge one.",
                    "lora_modules",
                )
            sources.append(cls(backend, checkpoint, dtype, kv_cache_dtype_of, adapters))
        return sources

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    @property
    def file(self) -> MappedFile | None:
        """The file that the Params are mapped from, if there is one."""
        return self.checkpoint.file if isinstance(self.checkpoint, PackedCheckpoint) else None

    def load_params(self, threads: int) -> Any:
        """Return the backend's Params, packed now or mapped. Raise CheckpointError for a damaged checkpoint."""
        if not isinstance(self.checkpoint, PackedCheckpoint):
            return self.backend.load_params(self.checkpoint, self.dtype, threads)
        return self.backend.PACKED.params_of(self._packed_arrays(), self.config, self.dtype)

    def load_part(self, threads: int, part: Any) -> Any:
        """Return the Params of one rank, of the CPU's kernels."""
        if not isinstance(self.checkpoint, PackedCheckpoint):
            return self.backend.load_params(self.checkpoint, self.dtype, threads, share=part)
        return self.backend.PACKED.params_of(self._packed_arrays(), self.config, self.dtype, part)

    def _packed_arrays(self) -> dict[str, np.ndarray]:
        packed = self.backend.PACKED
        return self.checkpoint.arrays(
            packed.layout_of(self.config, self.dtype, self.checkpoint.tied), packed.PACKING
        )


def _read_adapters(
    checkpoint: Checkpoint | PackedCheckpoint, lora_modules: Mapping[str, str | os.PathLike[str]] | None
) -> tuple[dict[str, tuple], ...]:
    if lora_modules is None or lora_modules == {}:
        return ()
    if not isinstance(lora_modules, Mapping) or not all(
        isinstance(name, str) and name for name in lora_modules
    ):
        raise invalid("lora_modules", lora_modules, "a dict from names to folders")
    from ..weights.adapters.lora import read_lora

    return tuple(read_lora(checkpoint, folder) for folder in lora_modules.values())


def load_tokenizer(
    checkpoint: Checkpoint | PackedCheckpoint, split_special_tokens: bool = False
) -> Tokenizer:
    """Return the checkpoint's tokenizer. Raise NoTokenizerError if none runs here, CheckpointError if it is damaged."""
    if is_random(str(checkpoint.path)):
        raise NoTokenizerError(
            f"{checkpoint.path} has no tokenizer: give token ids, or a checkpoint that has one."
        )
    spec = None if isinstance(checkpoint, PackedCheckpoint) else checkpoint.read_tokenizer()
    if spec is not None:
        return Tokenizer.from_spec(spec, checkpoint.path, split_special_tokens)
    return Tokenizer.from_folder(checkpoint.folder, split_special_tokens)


def check_tokenizer(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for a damaged tokenizer."""
    with suppress(NoTokenizerError):
        load_tokenizer(checkpoint)


def read_spec(checkpoint: Checkpoint) -> dict[str, Any]:
    spec = checkpoint.read_tokenizer()
    return read_tokenizer(checkpoint.folder) if spec is None else checked_spec(spec, checkpoint.path, {})


def load_backend(device: str, dtype: str) -> ModuleType:
    """Import the kernels of `device`. Raise RequestError if it or `dtype` is not implemented, or not available."""
    if device not in DEVICES:
        raise invalid("device", device, f"one of {', '.join(map(repr, DEVICES))}")
    backend = importlib.import_module(f"tinygpt.kernels.{device}")
    if dtype == STORAGE_DTYPE:
        raise RequestError(
            f"is {dtype!r}, in which weights are kept in files and nothing computes: run `tinygpt convert SRC DST "
            f"--dtype {dtype}` and load DST, leaving dtype at 'auto'.",
            "dtype",
        )
    if dtype != "auto":
        _check_dtype(dtype, backend)
    try:
        backend.check_device()
    except DeviceError as error:
        raise RequestError(
            f"is {device!r} and cannot be used: {error} Or use device 'cpu'.", "device"
        ) from None
    return backend


def _check_dtype(dtype: str, backend: ModuleType) -> None:
    if dtype in backend.DTYPES:
        return
    device = name_of(backend)
    allowed = ", ".join(map(repr, backend.DTYPES))
    hint = suggest(dtype, backend.DTYPES) if isinstance(dtype, str) else ""
    if dtype == "float16":
        why = ", as this CPU lacks F16C" if device == "cpu" else ""
        nearest = (
            "the nearest are 'bfloat16', of the same size, and 'float32', which holds each of its values."
        )
        hint = f"{why}; {nearest}"
    raise RequestError(f"is {dtype!r} and device {device!r} computes in {allowed} only{hint or '.'}", "dtype")


def name_of(backend: ModuleType) -> str:
    return backend.__name__.rpartition(".")[2]


def _resolve_dtype(dtype: str, backend: ModuleType, checkpoint: Checkpoint | PackedCheckpoint) -> str:
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
            f"is {dtype!r} and {checkpoint.path} is converted to {checkpoint.dtype!r}: leave it at 'auto', or give the "
            "checkpoint that it was made from.",
            "dtype",
        )
    _check_dtype(checkpoint.dtype, backend)
    return checkpoint.dtype


def _resolve_kv_cache_dtype(kv_cache_dtype: str, backend: ModuleType, dtype: str) -> str:
    allowed = backend.kv_cache_dtypes(dtype)
    if kv_cache_dtype == "auto":
        return allowed[0]
    if kv_cache_dtype not in allowed:
        listed = ", ".join(map(repr, ("auto", *allowed)))
        where = f"for {dtype} weights on device {name_of(backend)!r}"
        raise invalid("kv_cache_dtype", kv_cache_dtype, f"one of {listed} {where}")
    return kv_cache_dtype


@dataclass(frozen=True)
class EngineConfig:
    """Sizes, explained by LLM. `for_model` replaces None."""

    max_num_seqs: int = 32
    prefix_cache_seqs: int = 4
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_queue: int | None = None
    num_speculative_tokens: int = 4
    max_capture_bytes: int = 2**30

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("prefix_cache_seqs", "max_queue") else 1
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if not is_count and (value is not None or field.default is not None):
                raise invalid(field.name, value, f"a whole number, {least} or more")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise RequestError(
                f"is {self.max_num_batched_tokens} and max_num_seqs is {self.max_num_seqs}: each running sample needs "
                "a token of every step, so raise the one or lower the other.",
                "max_num_batched_tokens",
            )

    def for_model(self, config: ModelConfig, max_step_tokens: int) -> "EngineConfig":
        n_positions = config.n_positions  # with ALiBi, the length of training, which is no limit
        if not config.has_alibi and self.max_model_len is not None and self.max_model_len > n_positions:
            raise RequestError(
                f"is {self.max_model_len} and this model has {n_positions} positions.", "max_model_len"
            )
        return replace(
            self,
            max_model_len=self.max_model_len or n_positions,
            max_num_batched_tokens=self.max_num_batched_tokens or max(max_step_tokens, self.max_num_seqs),
        )

    @property
    def num_slots(self) -> int:
        """Slots of the KV cache: the scheduler's, and a spare one for Probe."""
        return self.max_num_seqs + self.prefix_cache_seqs + 1

    @property
    def max_num_logits(self) -> int:
        """Rows of logits in a step: one for each sequence, and LOGIT_ROWS for prompts and drafts."""
        return LOGIT_ROWS + self.max_num_seqs
