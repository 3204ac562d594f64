"""Undamaged files: folders of each format, the same bytes every time, so that a seed says what an input is."""

import functools
import io
import pickle
import struct
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from tinygpt import LLM, SamplingParams
from tinygpt.cli.batch import record_line
from tinygpt.evaluation.golden import Golden, save_goldens
from tinygpt.execution.model_source import ModelSource
from tinygpt.kernels.cpu import packed as packing
from tinygpt.kernels.kernel_archive import export_kernels
from tinygpt.kernels.kernel_files import KernelFiles
from tinygpt.outputs import RequestMetrics
from tinygpt.weights.config import ModelConfig
from tinygpt.weights.containers.torch import MAGIC_NUMBER, PROTOCOL_VERSION
from tinygpt.weights.parameters import HEAD, parameter_shapes
from tinygpt.weights.random_checkpoint import random_checkpoint
from tinygpt.weights.stored.packed import PACKED_FILE, write_packed

from .binary_mutators import sort_header
from .tokenizer_seeds import to_json, tokenizer_json

Files = Mapping[str, bytes]
CONFIG = {"model_type": "gpt2", "vocab_size": 16, "n_positions": 12, "n_embd": 8, "n_head": 2, "n_layer": 2}
CONFIG |= {"n_inner": 12, "bos_token_id": 1, "eos_token_id": 2, "layer_norm_epsilon": 1e-5}
GENERATION_CONFIG = {"bos_token_id": 1, "eos_token_id": [2, 3], "max_length": 12, "do_sample": True}
LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["c_attn", "mlp.c_proj"], "bias": "none"}
LORA |= {"rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None, "layers_to_transform": None}
LORA |= {"use_rslora": False, "fan_in_fan_out": True, "exclude_modules": None, "layers_pattern": None}
# The other way to name modules: expressions.
PATTERNS = {
    "target_modules": r".*\.(c_attn|mlp\.c_proj)",
    "rank_pattern": {r"h\.0\..*c_attn": 2},
    "exclude_modules": "z",
}
PATTERNS |= {"alpha_pattern": {"c_proj": 3.5}, "use_rslora": True, "modules_to_save": ["ln_f"]}
SOFT = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3, "token_dim": 8, "num_layers": 2}
SOFT |= {"num_attention_heads": 2, "num_transformer_submodules": 1, "task_type": "CAUSAL_LM"}
PROMPTS = b"""{"id": "fox", "prompt": "The fox said", "max_tokens": 12, "temperature": 0.5, "stop": ["\\n", "."]}
{"prompt": [1, 2, 3], "seed": 5, "logit_bias": {"7": -3.5}, "bad_words_ids": [[4, 5]], "top_p": 0.9}

{"id": 7, "prompt_token_ids": [4], "repetition_detection": {"max_pattern_size": 3, "min_count": 2}, "logprobs": 1}
"""
# What kernels that are exported were compiled for.
BUILD = {"CPU": "znver4", "Python": "3.11.2"}


def written(folder: Path, files: Files) -> Path:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def base_tensors(dtype: type = np.float32) -> dict[str, np.ndarray]:
    stored = random_checkpoint("seed", ModelConfig(**model_fields(CONFIG))).stored
    return {f"transformer.{name}": tensor.float32().astype(dtype) for name, tensor in stored.items()}


def model_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: config[name] for name in ModelConfig.__dataclass_fields__ if name in config}


def configs() -> Files:
    return {"config.json": to_json(CONFIG), "generation_config.json": to_json(GENERATION_CONFIG)}


def safetensors(dtype: type = np.float32) -> Files:
    return {**configs(), "model.safetensors": save(base_tensors(dtype), {"format": "pt"})}


def in_torch(to_bytes: Callable[[Mapping[str, np.ndarray]], bytes]) -> Files:
    return {**configs(), "pytorch_model.bin": to_bytes(base_tensors())}


def torch_bytes(tensors: Mapping[str, np.ndarray]) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save({name: torch.from_numpy(array) for name, array in tensors.items()}, buffer)
    return buffer.getvalue()


def legacy_bytes(tensors: Mapping[str, np.ndarray]) -> bytes:
    """As torch.save wrote before 1.6, but for the names of storages, which were addresses."""
    import torch

    storages = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> tuple | None:
            if not isinstance(value, torch.storage.TypedStorage):
                return None
            key = str(len(storages))
            storages[key] = struct.pack("<Q", value._size()) + bytes(value._untyped_storage)
            return "storage", torch.FloatStorage, key, "cpu", value._size(), None

    buffer = io.BytesIO()
    state = {name: torch.from_numpy(array.copy()) for name, array in tensors.items()}
    for part in (MAGIC_NUMBER, PROTOCOL_VERSION, {"little_endian": True}, state, [*map(str, range(len(state)))]):
        Pickler(buffer, protocol=2).dump(part)
    return buffer.getvalue() + b"".join(storages.values())


def shards(name: str, to_bytes: Callable[[Mapping[str, np.ndarray]], bytes]) -> Files:
    stem, suffix = name.split(".")
    tensors, files, weight_map = base_tensors(), {}, {}
    for i in range(2):
        part = {name: array for j, (name, array) in enumerate(tensors.items()) if j % 2 == i}
        shard = f"{stem}-{i + 1:05}-of-00002.{suffix}"
        files[shard] = to_bytes(part)
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": sum(map(len, files.values()))}, "weight_map": weight_map}
    return {**configs(), **files, f"{name}.index.json": to_json(index)}


def packed(dtype: str) -> Files:
    with tempfile.TemporaryDirectory() as name:
        folder = written(Path(name), safetensors())
        source = ModelSource.open(str(folder), dtype)
        metadata = {"dtype": dtype, "tied": "true", "vocab_size": CONFIG["vocab_size"], "source": "seed"}
        path = write_packed(folder, packing.arrays_of(source.load_params(1)), metadata | packing.PACKING)
        return {**configs(), PACKED_FILE: path.read_bytes()}


@functools.cache
def session_llm() -> LLM:
    """The model that saves and loads sessions."""
    with tempfile.TemporaryDirectory() as name:
        folder = written(Path(name), safetensors())
        return LLM(str(folder), device="reference", max_num_seqs=2, prefix_cache_seqs=2, threads=1)


def session() -> Files:
    session = session_llm().session()
    session.extend([1, 5, 6, 7, 8])
    session.generate(SamplingParams(max_tokens=2, ignore_eos=True))
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "session"
        session.save(path)
        return {"session": sort_header(path.read_bytes())}


def lora(changes: Mapping[str, Any], is_torch: bool = False) -> Files:
    tensors = _lora_tensors("modules_to_save" in changes)
    weights = {"adapter_model.bin": torch_bytes(tensors)} if is_torch else {"adapter_model.safetensors": save(tensors)}
    return {"adapter_config.json": to_json({**LORA, **changes}), **weights}


def _lora_tensors(is_saving: bool = False) -> dict[str, np.ndarray]:
    generator, tensors = np.random.default_rng(1), {}
    for layer in range(2):
        for module, n_in, n_out in (("attn.c_attn", 8, 24), ("mlp.c_proj", 12, 8)):
            path = f"base_model.model.transformer.h.{layer}.{module}"
            tensors[f"{path}.lora_A.weight"] = generator.standard_normal((2, n_in), np.float32)
            tensors[f"{path}.lora_B.weight"] = generator.standard_normal((n_out, 2), np.float32)
    if is_saving:
        for kind in ("weight", "bias"):
            tensors[f"base_model.model.transformer.ln_f.{kind}"] = generator.standard_normal(8, np.float32)
    return tensors


def soft_prompt() -> Files:
    embeds = np.random.default_rng(2).standard_normal((3, 8), np.float32)
    return {
        "adapter_config.json": to_json(SOFT),
        "adapter_model.safetensors": save({"prompt_embeddings": embeds}),
    }


def prompts() -> Files:
    return {"prompts.jsonl": PROMPTS}


def results() -> Files:
    llm = session_llm()
    params = SamplingParams(max_tokens=3, logprobs=1, ignore_eos=True, seed=1)
    outputs = llm.generate([[1, 2, 3], [4]], params, use_tqdm=False)
    outputs = [
        replace(output, metrics=RequestMetrics(0.0, 0.1, 0.2, 0.3, 3), num_cached_tokens=0) for output in outputs
    ]
    lines = [record_line(i, "seed", "float32", output) for i, output in zip((2, 7), outputs, strict=True)]
    half = lines[0][: len(lines[0]) // 2]
    prompts = [b'{"id": 2, "prompt": [1, 2, 3]}', b'{"id": 7, "prompt": [4]}', b'{"id": 8, "prompt": [5]}']
    return {"prompts.jsonl": b"\n".join(prompts), "results.jsonl": "\n".join([*lines, half]).encode()}


def golden() -> Files:
    generator = np.random.default_rng(3)
    goldens = [Golden([1, 2], generator.standard_normal((2, 16), np.float32), [3], [0.5], None)]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "golden.npz"
        save_goldens(path, goldens)
        return {"golden.npz": path.read_bytes()}


def kernel() -> Files:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "key").touch(mode=0o600)
        (Path(name) / "key").write_bytes(b"key 4567" * 4)
        KernelFiles(Path(name)).save("add.kernel", b"machine code" * 20)
        return {path.name: path.read_bytes() for path in Path(name).iterdir()}


def kernel_archive() -> Files:
    """Two kernels, and a mark that they are all that int8 takes."""
    with tempfile.TemporaryDirectory() as name:
        files, path = KernelFiles(Path(name) / "kept"), Path(name) / "kernels.bin"
        for kernel, body in {"add": b"machine code" * 20, "multiply": b"more of it"}.items():
            files.save(f"{kernel}-{kernel.encode().hex():0>32}.kernel", body)
        files.mark("int8")
        export_kernels(path, files, BUILD)
        return {path.name: path.read_bytes()}


def write_world(folder: Path) -> None:
    """A model that random requests can be asked of: with a tokenizer, a smaller model to draft, and a soft prompt."""
    generator = np.random.default_rng(4)
    config = {**CONFIG, "vocab_size": 272, "n_positions": 64, "n_embd": 16, "n_inner": 24, "eos_token_id": 264}
    for place, layers in ((folder, 2), (folder / "draft", 1)):
        shapes = parameter_shapes(ModelConfig(**{**model_fields(config), "n_layer": layers}))
        # Far from even, so that one token is much more probable than another.
        arrays = {name: generator.standard_normal(shape, np.float32) * 0.4 for name, shape in shapes.items()}
        place.mkdir(exist_ok=True)
        written(place, {**tokenizer_json(), "config.json": to_json({**config, "n_layer": layers})})
        written(place, {"model.safetensors": save({name: array for name, array in arrays.items() if name != HEAD})})
    (folder / "soft").mkdir()
    embeds = generator.standard_normal((3, 16), np.float32)
    soft = {**SOFT, "token_dim": 16}
    written(
        folder / "soft",
        {"adapter_config.json": to_json(soft), "adapter_model.safetensors": save({"prompt_embeddings": embeds})},
    )
