"""llama.cpp through its C interface: one llama_batch a step, with a token of every sequence."""

import ctypes
import shutil
from pathlib import Path

import llama_cpp
import numpy as np

from .engines import SteppingEngine

FILE_TYPES = {
    "bfloat16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
    "int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}
CACHE_TYPES = {"float32": 0, "bfloat16": 30, "int8": 8}  # ggml's numbers: llama_cpp has no name for bfloat16's
MAX_BATCH = 2048  # tokens of one call; longer prompts take several


class LlamaCpp(SteppingEngine):
    """llama.cpp, whose float32 GGUF file tinygpt converts and llama.cpp quantizes."""

    @staticmethod
    def make(source: Path, folder: Path, dtype: str) -> None:
        if dtype == "float32":
            shutil.copy(source / "model.gguf", folder)
            return
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = FILE_TYPES[dtype]
        paths = [str(place / "model.gguf").encode() for place in (source, folder)]
        if llama_cpp.llama_model_quantize(*paths, ctypes.byref(params)):
            raise RuntimeError(f"llama_model_quantize could not make {dtype}")

    def __init__(self, folder: Path, dtype: str, threads: int, kv_cache_dtype: str | None = None):
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(folder / "model.gguf").encode(), params)
        if not self.model:
            raise RuntimeError("llama.cpp could not load the model")
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.threads, self.kv_cache_dtype, self.sequences, self.context = threads, kv_cache_dtype, None, None
        self.batch = llama_cpp.llama_batch_init(MAX_BATCH, 0, 1)

    def start(self, ids: list[list[int]]) -> None:
        if self.sequences != len(ids):
            self._make_context(len(ids))
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)
        self.position = 0
        self._forward(ids)

    def step(self) -> None:
        self._forward(self.tokens[:, None])

    def last_logits(self, ids: list[int]) -> list[float]:
        self.start([ids])
        return self._logits(len(ids) - 1).tolist()

    def _make_context(self, sequences: int) -> None:
        """Allocate the KV cache of so many sequences."""
        if self.context:
            llama_cpp.llama_free(self.context)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sequences * llama_cpp.llama_model_n_ctx_train(self.model)
        params.n_seq_max, params.n_batch = sequences, MAX_BATCH
        params.n_threads = params.n_threads_batch = self.threads
        if self.kv_cache_dtype:  # only its flash attention takes quantized values; by default it chooses
            params.type_k = params.type_v = CACHE_TYPES[self.kv_cache_dtype]
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp could not make a context for {sequences} sequences")
        self.sequences = sequences

    def _forward(self, ids) -> None:
        """Take the next tokens (sequences, new) of every sequence, and choose the following ones."""
        count, new = np.shape(ids)
        per_call = max(1, MAX_BATCH // new)  # whole sequences
        self.tokens = np.empty(count, np.int64)
        for first in range(0, count, per_call):
            sequences = range(first, min(first + per_call, count))
            batch = self.batch
            batch.n_tokens = len(sequences) * new
            for i in range(batch.n_tokens):
                s, t = divmod(i, new)
                batch.token[i], batch.pos[i] = int(ids[sequences[s]][t]), self.position + t
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequences[s]
                batch.logits[i] = t == new - 1
            if status := llama_cpp.llama_decode(self.context, batch):
                raise RuntimeError(f"llama_decode returned {status}")
            for i, s in enumerate(sequences):
                self.tokens[s] = self._logits((i + 1) * new - 1).argmax()
        self.position += new

    def _logits(self, i: int) -> np.ndarray:
        pointer = llama_cpp.llama_get_logits_ith(self.context, i)
        return np.ctypeslib.as_array(pointer, (self.vocabulary,))
