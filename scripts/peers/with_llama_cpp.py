"""llama.cpp through its C interface: one llama_batch a step, with a token of every sequence."""

import ctypes
import json
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file

from .engine import SteppingEngine

FILE_TYPES = {
    "bfloat16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
    "int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}
CACHE_TYPES = {
    "float32": GGMLQuantizationType.F32,
    "bfloat16": GGMLQuantizationType.BF16,  # which llama_cpp has no name for
    "int8": GGMLQuantizationType.Q8_0,
}
NAMES = {
    "wte.": "token_embd.",
    "wpe.": "position_embd.",
    "ln_f.": "output_norm.",
    "h.": "blk.",
    ".ln_1.": ".attn_norm.",
    ".attn.c_attn.": ".attn_qkv.",
    ".attn.c_proj.": ".attn_output.",
    ".ln_2.": ".ffn_norm.",
    ".mlp.c_fc.": ".ffn_up.",
    ".mlp.c_proj.": ".ffn_down.",
    "lm_head.": "output.",
}
MAX_BATCH = 2048  # tokens that one call takes; longer prompts go in several


def make(checkpoint: Path, folder: Path, dtype: str) -> None:
    if dtype == "float32":
        write_gguf(checkpoint, folder / "model.gguf")
        return
    source = folder / "float32.gguf"
    write_gguf(checkpoint, source)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[dtype]
    target = str(folder / "model.gguf").encode()
    if llama_cpp.llama_model_quantize(str(source).encode(), target, ctypes.byref(params)):
        raise RuntimeError(f"llama_model_quantize could not make {dtype}")
    source.unlink()


def write_gguf(checkpoint: Path, path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    if config["activation_function"] not in ("gelu_new", "gelu_pytorch_tanh"):
        raise ValueError(f"llama.cpp's gpt2 has no {config['activation_function']}")
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(config["n_inner"] or 4 * config["n_embd"])
    writer.add_block_count(config["n_layer"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_tokenizer_model("no_vocab")  # token ids go in and come out
    writer.add_vocab_size(config["vocab_size"])
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        is_conv1d = ".c_" in name and tensor.ndim == 2  # (in, out) in Hugging Face's files
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(tensor.T if is_conv1d else tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    name = name.removeprefix("transformer.")
    for theirs, ours in NAMES.items():
        if theirs.startswith(".") or name.startswith(theirs):
            name = name.replace(theirs, ours, 1)
    return name


class Engine(SteppingEngine):
    def __init__(self, folder: Path, dtype: str, threads: int, kv_cache_dtype: str | None = None):
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(folder / "model.gguf").encode(), params)
        if not self.model:
            raise RuntimeError("llama.cpp could not load the model")
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.threads, self.kv_cache_dtype, self.sizes, self.context = threads, kv_cache_dtype, None, None
        self.batch = llama_cpp.llama_batch_init(MAX_BATCH, 0, 1)

    def start(self, ids: list[list[int]]) -> None:
        self._provide_context(len(ids))
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)
        self.position = 0
        self._forward(ids)

    def step(self) -> None:
        self._forward(self.tokens[:, None])

    def last_logits(self, ids: list[int]) -> list[float]:
        self.start([ids])
        return self._logits(len(ids) - 1).tolist()

    def _provide_context(self, sequences: int) -> None:
        """A context, and so a KV cache, for this many sequences, kept for the next time."""
        if self.sizes == sequences:
            return
        if self.context:
            llama_cpp.llama_free(self.context)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sequences * llama_cpp.llama_model_n_ctx_train(self.model)
        params.n_seq_max = sequences
        params.n_batch = MAX_BATCH
        params.n_threads = params.n_threads_batch = self.threads
        if self.kv_cache_dtype:  # its flash attention alone takes quantised values; by itself it chooses as it likes
            params.type_k = params.type_v = CACHE_TYPES[self.kv_cache_dtype]
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp could not make a context for {sequences} sequences")
        self.sizes = sequences

    def _forward(self, ids) -> None:
        """Take the next tokens (sequences, new) of every sequence, and choose the one after them."""
        count, new = np.shape(ids)
        per_call = max(1, MAX_BATCH // new)  # whole sequences
        self.tokens = np.empty(count, np.int64)
        for first in range(0, count, per_call):
            sequences = range(first, min(first + per_call, count))
            self._fill(ids, sequences, new)
            status = llama_cpp.llama_decode(self.context, self.batch)
            if status:
                raise RuntimeError(f"llama_decode returned {status}")
            for i, s in enumerate(sequences):
                self.tokens[s] = self._logits((i + 1) * new - 1).argmax()
        self.position += new

    def _fill(self, ids, sequences: range, new: int) -> None:
        batch = self.batch
        batch.n_tokens = len(sequences) * new
        for i in range(batch.n_tokens):
            s, t = divmod(i, new)
            batch.token[i] = int(ids[sequences[s]][t])
            batch.pos[i] = self.position + t
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequences[s]
            batch.logits[i] = t == new - 1

    def _logits(self, i: int) -> np.ndarray:
        pointer = llama_cpp.llama_get_logits_ith(self.context, i)
        return np.ctypeslib.as_array(pointer, (self.vocabulary,))
