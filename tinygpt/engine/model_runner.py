"""ModelSource, a checkpoint and how it is to run, and ModelRunner, the loaded model on one backend."""

import importlib
import logging
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import NoTokenizerError, RequestError, invalid, suggest
from ..hardware import local_rank
from ..kernels.backend import MAX_STEPS, Batch, DeviceError, WeightError
from ..llm_args import LOGIT_ROWS, EngineConfig, LLMArgs, PathOrId
from ..text.files import checked_spec, read_tokenizer, spec_of
from ..text.tokenizer import Tokenizer
from ..weights.checkpoint import Checkpoint, PackedWeights
from ..weights.config import HEAD, POSITIONS, PRECISIONS, ModelConfig, parameter_shapes
from ..weights.open import open_checkpoint
from ..weights.tensor import MappedFile

if TYPE_CHECKING:
    from ..look.captures import StepCaptures

logger = logging.getLogger(__name__)

LARGE = 2**28  # bytes of float32 matrices, which take a second or more to read
DEVICES = ("cpu", "cuda", "reference")  # each a package of kernels/, which exports kernels.backend.Backend


@dataclass(frozen=True)
class ModelSource:
    """An opened checkpoint and how it runs. adapters: of lora_modules, as Backend.with_adapters takes them."""

    backend: ModuleType
    checkpoint: Checkpoint
    dtype: str
    kv_cache_dtype: str
    adapters: tuple[dict[str, tuple], ...] = ()

    @classmethod
    def open(cls, args: LLMArgs) -> "ModelSource":
        """Raise CheckpointError if the checkpoint cannot be opened, RequestError for an impossible combination."""
        return cls.open_all(args, [args.dtype])[0]

    @classmethod
    def open_all(cls, args: LLMArgs, dtypes: Sequence[str]) -> "list[ModelSource]":
        """Open the checkpoint once."""
        number = local_rank() if args.num_ranks > 1 else 0
        backends = [load_backend(args.device, dtype, number) for dtype in dtypes]
        checkpoint = open_checkpoint(args.checkpoint)
        if args.lora is not None:
            from ..weights.adapters.lora import merge_lora

            checkpoint = merge_lora(checkpoint, args.lora)
        adapters = _read_adapters(checkpoint, args.lora_modules or {})
        if checkpoint.packed and backends[0].PACKED is None:
            checkpoint = _unpacked(checkpoint, checkpoint.packed)
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
            kv_cache_dtype_of = _resolve_kv_cache_dtype(args.kv_cache_dtype, backend, dtype)
            if adapters and dtype not in backend.ADAPTED:
                raise RequestError(
                    f"needs {' or '.join(backend.ADAPTED)} weights on device {name_of(backend)!r}, not {dtype}: or "
                    "merge one.",
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
        return self.checkpoint.packed.file if self.checkpoint.packed else None

    def load_params(self, threads: int, **share: Any) -> Any:
        """Return the backend's Params, packed now or mapped. share: of a rank, for the CPU's kernels.

        Raises CheckpointError for a damaged checkpoint, RequestError for weights that the dtype cannot hold.
        """
        if self.checkpoint.packed:
            kernels = self.backend.PACKED
            arrays = _packed_arrays(self.checkpoint, self.checkpoint.packed, kernels)
            return kernels.params_of(arrays, self.config, self.dtype, **share)
        try:
            with reading(self.checkpoint, "loading") as checkpoint:
                return self.backend.load_params(checkpoint, self.dtype, threads, **share)
        except WeightError as error:
            raise RequestError(str(error), "dtype") from None


def _read_adapters(
    checkpoint: Checkpoint, lora_modules: Mapping[str, PathOrId]
) -> tuple[dict[str, tuple], ...]:
    if not lora_modules:
        return ()
    from ..weights.adapters.lora import read_lora

    return tuple(read_lora(checkpoint, folder) for folder in lora_modules.values())


@contextmanager
def reading(checkpoint: Checkpoint, doing: str) -> Iterator[Checkpoint]:
    """Yield the checkpoint, with a bar for the bytes that are read of a large one, on a terminal and next to a log."""
    skipped = (POSITIONS, HEAD) if checkpoint.tied else (POSITIONS,)
    left = {
        name: 4 * math.prod(shape)
        for name, shape in parameter_shapes(checkpoint.config).items()
        if len(shape) > 1 and name not in skipped
    }
    total = sum(left.values())
    is_shown = total >= LARGE and logger.isEnabledFor(logging.INFO)
    if not is_shown or sys.stderr is None or not sys.stderr.isatty():
        yield checkpoint
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=doing, unit="B", unit_scale=True, leave=False) as bar:
        yield replace(checkpoint, on_release=lambda name: bar.update(left.pop(name, 0)))


def load_tokenizer(checkpoint: Checkpoint, split_special_tokens: bool = False) -> Tokenizer:
    """Return the checkpoint's tokenizer. Raise NoTokenizerError if none runs here, CheckpointError if it is damaged."""
    if checkpoint.tokenizer_folder:
        return Tokenizer.from_folder(checkpoint.tokenizer_folder, split_special_tokens)
    stored = checkpoint.read_tokenizer()
    if stored is not None:
        return Tokenizer.from_spec(spec_of(stored), checkpoint.path, split_special_tokens)
    return Tokenizer.from_folder(checkpoint.folder, split_special_tokens)


def check_tokenizer(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for a damaged tokenizer."""
    with suppress(NoTokenizerError):
        load_tokenizer(checkpoint)


def read_spec(checkpoint: Checkpoint) -> dict[str, Any]:
    stored = checkpoint.read_tokenizer()
    if stored is None:
        return read_tokenizer(checkpoint.folder)
    return checked_spec(spec_of(stored), checkpoint.path, {})


def load_backend(device: str, dtype: str, number: int = 0) -> ModuleType:
    """Import the kernels of `device`. Raise RequestError if it or `dtype` is not implemented, or not available.

    number: of this process on its host.
    """
    if device not in DEVICES:
        raise invalid("device", device, f"one of {', '.join(map(repr, DEVICES))}")
    backend = importlib.import_module(f"tinygpt.kernels.{device}")
    if dtype != "auto":
        _check_dtype(dtype, backend)
    try:
        if device == "cpu":
            _check_numba()
        backend.check_device(number)
    except DeviceError as error:
        others = "" if device == "cpu" else " Or use device 'cpu'."
        raise RequestError(f"is {device!r} and cannot be used: {error}{others}", "device") from None
    return backend


def _check_numba() -> None:
    from ..kernels.cpu.native import other_code

    if not other_code(os.environ):  # no setting of Numba's, which is slow to import
        return
    from ..kernels.cpu.compiler import config

    if is_disabled := vars(config)["DISABLE_JIT"]:
        raise DeviceError(
            f"NUMBA_DISABLE_JIT is {is_disabled}, and may be 0 or unset, as kernels must be compiled. Or use "
            "device 'reference'."
        )


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


def _unpacked(checkpoint: Checkpoint, packed: PackedWeights) -> Checkpoint:
    dtype = checkpoint.auto_dtype
    kernels = load_backend("cpu", dtype).PACKED
    arrays = _packed_arrays(checkpoint, packed, kernels)
    return checkpoint.unpacked(partial(kernels.parameter_of, arrays, checkpoint.config, dtype))


def _packed_arrays(checkpoint: Checkpoint, packed: PackedWeights, kernels: Any) -> dict[str, np.ndarray]:
    """kernels: the module that stores Params."""
    layout = kernels.layout_of(checkpoint.config, checkpoint.converted_to, checkpoint.tied)
    return packed.arrays(layout, kernels.PACKING)


def _resolve_dtype(dtype: str, backend: ModuleType, checkpoint: Checkpoint) -> str:
    if not checkpoint.packed:
        return _auto_dtype(checkpoint.auto_dtype, backend) if dtype == "auto" else dtype
    stored = checkpoint.auto_dtype
    if dtype not in ("auto", stored):
        raise RequestError(
            f"is {dtype!r} and {checkpoint.path} is converted to {stored!r}: leave it at 'auto', or give the "
            "checkpoint that it was made from.",
            "dtype",
        )
    _check_dtype(stored, backend)
    return stored


def _auto_dtype(stored: str, backend: ModuleType) -> str:
    """Return the dtype that a checkpoint is stored in, if PRECISIONS describes the backend's, or float32.

    On a GPU float16 has activations of 16 bits, too: it is to be asked for.
    """
    if stored in backend.DTYPES and backend.kv_cache_dtypes(stored)[0] == PRECISIONS[stored].kv_cache:
        return stored
    return "float32"


def _resolve_kv_cache_dtype(kv_cache_dtype: str, backend: ModuleType, dtype: str) -> str:
    allowed = backend.kv_cache_dtypes(dtype)
    if kv_cache_dtype == "auto":
        return allowed[0]
    if kv_cache_dtype not in allowed:
        listed = ", ".join(map(repr, ("auto", *allowed)))
        where = f"for {dtype} weights on device {name_of(backend)!r}"
        raise invalid("kv_cache_dtype", kv_cache_dtype, f"one of {listed} {where}")
    return kv_cache_dtype


class GivenStream:
    """Hooks that give the head a residual stream (N, C), through no layer."""

    changes = True

    def __init__(self, stream: np.ndarray, num_layers: int):
        self.first = num_layers
        self.points = {("resid_post", num_layers - 1)}
        self._stream = stream

    def __call__(self, kind: str, layer: int, array: np.ndarray, sequence: int | None = None) -> None:
        array[:] = self._stream

    def check(self, read_positions: Any) -> None:
        """Check nothing: no layer writes keys and values."""


class ModelRunner:
    _max_head_rows = 1  # of a step without layers
    adapter_of_slot: np.ndarray | None = None  # of a model with lora_modules, (slots,) int32; -1: none

    def __init__(self, source: ModelSource, engine_config: EngineConfig, threads: int):
        """Raise CheckpointError for a damaged checkpoint, RequestError if memory does not suffice."""
        self.config: ModelConfig = source.config
        self.dtype = source.dtype
        self.kv_cache_dtype = source.kv_cache_dtype
        self._file = source.file
        self.backend = source.backend
        check_memory(source, engine_config)
        started = time.perf_counter()
        self._params = source.load_params(threads)
        if source.adapters:
            self._params, self.adapter_of_slot = self.backend.with_adapters(
                self._params, self.config, source.adapters, engine_config.num_slots
            )
        seconds = time.perf_counter() - started
        logger.debug("%s: weights in %s after %.2f s", source.checkpoint.path, self.dtype, seconds)
        self._kv_cache = _new_kv_cache(source, engine_config)
        self._workspace = _new_workspace(source, engine_config, threads)
        self._max_head_rows = min(
            LOGIT_ROWS, engine_config.max_num_batched_tokens, engine_config.max_model_len
        )

    def forward(self, batch: Batch, look: "StepCaptures | None" = None) -> Any:
        """Run one step, which `look` sees. Raise CheckpointError if the mapped file was cut short."""
        self._check_file()
        logits = self.backend.forward(self._params, batch, self._kv_cache, self._workspace, look)  # (R, V)
        if look is not None:
            look.check(self.read_positions)
        return logits

    def final_norm(self, x: np.ndarray) -> np.ndarray:
        """Return ln_f of a residual stream (N, C), Hugging Face's last hidden states."""
        return self.backend.final_norm(self._params, x)

    def head(self, stream: np.ndarray) -> np.ndarray:
        """Return logits (N, V) of a residual stream (N, C) after the last layer."""
        logits = np.empty((len(stream), self.config.vocab_size), np.float32)
        for start in range(0, len(stream), self._max_head_rows):
            rows = stream[start : start + self._max_head_rows]
            batch = Batch.of([[0] * len(rows)], [0], [0], "all")  # no layer runs, which would write to slot 0
            logits[start : start + len(rows)] = self.forward(batch, GivenStream(rows, self.config.n_layer))
        return logits

    def choose_num_steps(self, num_sequences: int, num_in_time: int) -> int:
        """Return how many decode steps `multi_step` is to run; 1: use `forward`. num_in_time: steps that fit."""
        if self.backend.multi_step is None:
            return 1
        if self.backend.QUEUES_STEPS:  # tokens come while steps run
            return MAX_STEPS
        return min(num_in_time, MAX_STEPS)

    def multi_step(
        self, batch: Batch, warpers: Any, seeds: np.ndarray, indices: np.ndarray, steps: int, ends: np.ndarray
    ) -> Iterable[np.ndarray]:
        if steps > MAX_STEPS:
            raise ValueError(f"{steps} steps at once and a workspace keeps the tokens of {MAX_STEPS}.")
        self._check_file()
        on = self._params, batch, self._kv_cache, self._workspace
        return self.backend.multi_step(*on, warpers, seeds, indices, steps, ends)

    def stop_early(self, is_wanted: bool) -> None:
        """Make the current step of `multi_step` its last, from any thread."""
        workspace = self._workspace
        if workspace is not None:  # `close` frees it in another thread
            self.backend.stop_early(workspace, is_wanted)

    def copy_positions(self, source_slot: int, target_slot: int, start: int, stop: int) -> None:
        self.backend.copy_positions(self._kv_cache, source_slot, target_slot, start, stop)

    def read_positions(self, slot: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return self.backend.read_positions(self._kv_cache, slot, start, stop, self.config.head_size)

    def write_positions(self, slot: int, start: int, keys: np.ndarray, values: np.ndarray) -> None:
        self.backend.write_positions(self._kv_cache, slot, start, keys, values)

    def close(self) -> None:
        self._params = self._file = self._kv_cache = self._workspace = None

    def _check_file(self) -> None:
        if self._file is not None:
            self._file.check_whole()


def check_memory(source: ModelSource, sizes: EngineConfig, **of_ranks: Any) -> None:
    """Raise RequestError before a load. of_ranks: shares, and the free bytes of their GPU."""
    config = source.config
    tied = source.checkpoint.tied
    slots = (sizes.num_slots, sizes.max_model_len)
    steps = (sizes.max_num_batched_tokens, sizes.max_num_logits)
    try:
        source.backend.check_memory(
            config, tied, source.dtype, source.kv_cache_dtype, *slots, *steps, **of_ranks
        )
    except DeviceError as error:
        raise RequestError(str(error)) from None


def _new_kv_cache(source: ModelSource, sizes: EngineConfig) -> Any:
    shape = source.config, sizes.num_slots, sizes.max_model_len, source.kv_cache_dtype
    size = source.backend.kv_cache_bytes(*shape) / 2**30
    logger.debug("KV cache: %d slots of %d positions in %s, %.2f GiB", *shape[1:], size)
    try:
        return source.backend.new_kv_cache(*shape)
    except MemoryError:
        raise RequestError(
            f"the KV cache of {source.checkpoint.path} for {sizes.max_num_seqs} running samples, "
            f"{sizes.prefix_cache_seqs} finished ones and {sizes.max_model_len} positions takes {size:.1f} GiB, "
            "which this machine cannot give: lower max_num_seqs, prefix_cache_seqs or max_model_len."
        ) from None


def _new_workspace(source: ModelSource, sizes: EngineConfig, threads: int) -> Any:
    steps = sizes.max_num_batched_tokens, sizes.max_num_logits
    try:
        return source.backend.new_workspace(source.config, *steps, threads, source.dtype)
    except MemoryError:
        raise RequestError(
            f"this machine cannot give the memory for steps of {sizes.max_num_batched_tokens} tokens: lower "
            "max_num_batched_tokens."
        ) from None
