"""Every kind of file that the project reads: undamaged ones, how they may be damaged, how they are loaded and judged.

A format whose files take torch or tokenizers to write is left out where these are not installed.
"""

import functools
import importlib
import io
import json
import pickle
import struct
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from tinygpt import LLM, SamplingParams
from tinygpt.cli.output_file import read_earlier
from tinygpt.cli.prompts_file import read_prompts
from tinygpt.cli.records import record_line
from tinygpt.config import ModelConfig
from tinygpt.errors import TinyGPTError
from tinygpt.evaluation.golden import Golden, load_goldens, save_goldens
from tinygpt.execution.model_source import ModelSource
from tinygpt.kernels.cpu import packed as packing
from tinygpt.kernels.kernel_files import KernelFiles
from tinygpt.outputs import RequestMetrics
from tinygpt.tokenizer.tokenizer import Tokenizer
from tinygpt.weights.adapters.lora import merge_lora
from tinygpt.weights.adapters.soft_prompt import read_soft_prompt
from tinygpt.weights.architectures import gpt2
from tinygpt.weights.checkpoint import HEAD
from tinygpt.weights.containers.torch_file import MAGIC_NUMBER, PROTOCOL_VERSION
from tinygpt.weights.open import open_checkpoint
from tinygpt.weights.random_checkpoint import random_checkpoint
from tinygpt.weights.stored.packed import PACKED_FILE, write_packed

from . import binary_mutators as binary
from . import mutators, oracles
from .mutators import Mutator

CONFIG = {"model_type": "gpt2", "vocab_size": 16, "n_positions": 12, "n_embd": 8, "n_head": 2, "n_layer": 2}
CONFIG |= {"n_inner": 12, "bos_token_id": 1, "eos_token_id": 2, "layer_norm_epsilon": 1e-5}
GENERATION_CONFIG = {"bos_token_id": 1, "eos_token_id": [2, 3], "max_length": 12, "do_sample": True}
TEXTS = ("the theme there", " \n\t of Ångström's 12 日本", "<|endoftext|>then", "")
ASKED = [(text, is_split) for text in TEXTS for is_split in (False, True)]  # is_split: special tokens are plain text
Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Format:
    """`files` make a folder; `targets` are those that get damaged, and by which mutators.

    load: what tinygpt makes of the folder. check: what is wrong with that, or None; it is given the folder, what was
    loaded, and what the undamaged folder gave. seal: makes checksums right again. weight: its share of all inputs.
    is_writing: loading may write to the folder.
    """

    name: str
    files: Callable[[], Files]
    targets: Mapping[str, list[Mutator]]
    load: Callable[[Path], Any]
    check: Callable[[Path, Any, Any], str | None]
    seal: Mutator | None = None
    weight: int = 1
    is_writing: bool = False


def to_json(value: Any) -> bytes:
    return json.dumps(value).encode()


# --- checkpoints


def _model_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: config[name] for name in ModelConfig.__dataclass_fields__ if name in config}


def base_tensors(dtype: type = np.float32) -> dict[str, np.ndarray]:
    stored = random_checkpoint("seed", ModelConfig(**_model_fields(CONFIG))).stored
    return {f"transformer.{name}": tensor.float32().astype(dtype) for name, tensor in stored.items()}


def _configs() -> Files:
    return {"config.json": to_json(CONFIG), "generation_config.json": to_json(GENERATION_CONFIG)}


def _safetensors(dtype: type = np.float32) -> Files:
    return {**_configs(), "model.safetensors": save(base_tensors(dtype), {"format": "pt"})}


def _torch(to_bytes: Callable[[Mapping[str, np.ndarray]], bytes]) -> Files:
    return {**_configs(), "pytorch_model.bin": to_bytes(base_tensors())}


def _torch_bytes(tensors: Mapping[str, np.ndarray]) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save({name: torch.from_numpy(array) for name, array in tensors.items()}, buffer)
    return buffer.getvalue()


def _legacy_bytes(tensors: Mapping[str, np.ndarray]) -> bytes:
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


def _shards(name: str, to_bytes: Callable[[Mapping[str, np.ndarray]], bytes]) -> Files:
    stem, suffix = name.split(".")
    tensors, files, weight_map = base_tensors(), {}, {}
    for i in range(2):
        part = {name: array for j, (name, array) in enumerate(tensors.items()) if j % 2 == i}
        shard = f"{stem}-{i + 1:05}-of-00002.{suffix}"
        files[shard] = to_bytes(part)
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": sum(map(len, files.values()))}, "weight_map": weight_map}
    return {**_configs(), **files, f"{name}.index.json": to_json(index)}


def _load_tensors(folder: Path) -> dict[str, np.ndarray]:
    checkpoint = open_checkpoint(folder)
    loaded = {name: tensor.float32().copy() for name, tensor in checkpoint.stored.items()}
    for name in checkpoint.stored:
        checkpoint.release(name)
    return loaded


def _load_model(folder: Path) -> tuple[ModelConfig, np.ndarray]:
    """A model that runs, which finds what was believed too early."""
    with LLM(str(folder), device="reference", max_num_seqs=1, threads=1) as llm:
        llm.generate([[]], SamplingParams(max_tokens=2))
        return llm.config, llm.logits([1, 2, 3])


def _load_packed(folder: Path) -> dict[str, np.ndarray]:
    source = ModelSource.open(str(folder))
    return {name: array.copy() for name, array in packing.arrays_of(source.load_params(1)).items()}


def _packed(dtype: str) -> Files:
    with tempfile.TemporaryDirectory() as name:
        folder = _written(Path(name), _safetensors())
        source = ModelSource.open(str(folder), dtype)
        metadata = {"dtype": dtype, "tied": "true", "vocab_size": CONFIG["vocab_size"], "source": "seed"}
        path = write_packed(folder, packing.arrays_of(source.load_params(1)), metadata | packing.PACKING)
        return {**_configs(), PACKED_FILE: path.read_bytes()}


# --- sessions


@functools.cache
def _session_llm() -> LLM:
    """The model that saves and loads sessions."""
    with tempfile.TemporaryDirectory() as name:
        folder = _written(Path(name), _safetensors())
        return LLM(str(folder), device="reference", max_num_seqs=2, prefix_cache_seqs=2, threads=1)


def _session() -> Files:
    session = _session_llm().session()
    session.extend([1, 5, 6, 7, 8])
    session.generate(SamplingParams(max_tokens=2, ignore_eos=True))
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "session"
        session.save(path)
        return {"session": binary.sort_header(path.read_bytes())}


def _load_session(folder: Path) -> tuple[list[int], Any]:
    """The session's tokens, and what another request gets that begins as the undamaged one does."""
    llm = _session_llm()
    llm.generate(
        [[9], [10]], SamplingParams(max_tokens=1)
    )  # these take the places in the cache of what an earlier file may have left there
    with llm.load_session(folder / "session") as session:
        token_ids = session.token_ids
        session.generate(SamplingParams(max_tokens=1, overflow="slide"))
    (other,) = llm.generate([[1, 5, 6, 7, 8]], SamplingParams(max_tokens=3, ignore_eos=True, logprobs=2, seed=1))
    return token_ids, other.outputs


# --- adapters

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


def _lora(changes: Mapping[str, Any], is_torch: bool = False) -> Files:
    tensors = _lora_tensors("modules_to_save" in changes)
    weights = {"adapter_model.bin": _torch_bytes(tensors)} if is_torch else {"adapter_model.safetensors": save(tensors)}
    return {"adapter_config.json": to_json({**LORA, **changes}), **weights}


@functools.cache
def _base():
    """The checkpoint that adapters belong to; its file has left its folder, and stays mapped."""
    with tempfile.TemporaryDirectory() as name:
        return open_checkpoint(_written(Path(name), _safetensors()))


def _load_lora(folder: Path) -> dict[str, np.ndarray]:
    return {name: tensor.float32().copy() for name, tensor in merge_lora(_base(), folder).stored.items()}


def _soft_prompt() -> Files:
    embeds = np.random.default_rng(2).standard_normal((3, 8), np.float32)
    return {
        "adapter_config.json": to_json(SOFT),
        "adapter_model.safetensors": save({"prompt_embeddings": embeds}),
    }


def _load_soft_prompt(folder: Path) -> dict[str, np.ndarray]:
    prompt = read_soft_prompt(folder, _base().config)
    return {"prompt_embeddings": prompt.embeds}


# --- tokenizers

MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("r", "e"), ("Ġ", "o"), ("Ġo", "f"), ("1", "2"), ("Ã", "ħ")]
OPTIONS = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "bos_token": "<|endoftext|>"}
OPTIONS |= {"add_bos_token": False, "unk_token": {"content": "<|endoftext|>", "lstrip": False}, "model_max_length": 12}
DECODER = {"added_tokens_decoder": {"264": {"content": "<|endoftext|>", "special": True, "normalized": False}}}


def _alphabet() -> list[str]:
    """GPT-2's characters for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]


def _vocab() -> dict[str, int]:
    return {token: i for i, token in enumerate([*_alphabet(), *map("".join, MERGES)])}


def _pair(vocab: str, merges: str) -> Files:
    return {
        vocab: to_json(_vocab()),
        merges: ("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in MERGES)).encode(),
        "tokenizer_config.json": to_json(OPTIONS),
        "special_tokens_map.json": to_json({"eos_token": "<|endoftext|>", "additional_special_tokens": ["<a>"]}),
        "added_tokens.json": to_json({"<|endoftext|>": 264, "<a>": 265}),
    }


def _tokenizer_json() -> Files:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": True, "normalized": False}
    spec = {
        "version": "1.0",
        "added_tokens": [
            {"id": 264, "content": "<|endoftext|>", "special": True, **flags},
            {"id": 265, "content": "then", "special": False, **flags},
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "unk_token": None, "vocab": _vocab(), "merges": [f"{a} {b}" for a, b in MERGES]},
    }
    return {"tokenizer.json": to_json(spec), "tokenizer_config.json": to_json(DECODER)}


def _vocab_txt() -> Files:
    words = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "the", "##me", "##re", "of", "12", "日", "本", "th", "##en"]
    return {"vocab.txt": "\n".join(words).encode() + b"\n", "tokenizer_config.json": to_json({"do_lower_case": True})}


def _unigram() -> Files:
    pieces = [["<unk>", 0.0], *([f"<0x{byte:02X}>", -9.0] for byte in range(256)), ["▁", -2.0], ["▁the", -1.5]]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    spec = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": metaspace,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, metaspace]},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": True},
    }
    return {"tokenizer.json": to_json(spec)}


def _load_tokenizer(folder: Path) -> list[tuple[list[int] | str, str]]:
    """What each of ASKED becomes, and its text again. A text that cannot be encoded has its error in place of ids."""
    tokenizer, results = Tokenizer.from_folder(folder), []
    for text, is_split in ASKED:
        try:
            ids = tokenizer.encode(text, is_split)
        except TinyGPTError as error:
            ids = str(error)
        results.append((ids, tokenizer.decode([] if isinstance(ids, str) else ids)))
    stream = tokenizer.detokenizer()
    results.append(([], "".join(map(stream.push, [*range(300), 2**40])) + stream.finish()))
    return results


# --- JSONL, and other results

PROMPTS = b"""{"id": "fox", "prompt": "The fox said", "max_tokens": 12, "temperature": 0.5, "stop": ["\\n", "."]}
{"prompt": [1, 2, 3], "seed": 5, "logit_bias": {"7": -3.5}, "bad_words_ids": [[4, 5]], "top_p": 0.9}

{"id": 7, "prompt_token_ids": [4], "repetition_detection": {"max_pattern_size": 3, "min_count": 2}, "logprobs": 1}
"""


def _load_prompts(folder: Path) -> list[tuple[Any, Any]]:
    return [(record.id, record.prompt) for record in read_prompts(folder / "prompts.jsonl", SamplingParams())]


def _results() -> Files:
    llm = _session_llm()
    outputs = llm.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=3, logprobs=1, ignore_eos=True, seed=1))
    outputs = [
        replace(output, metrics=RequestMetrics(0.0, 0.1, 0.2, 0.3, 3), num_cached_tokens=0) for output in outputs
    ]
    lines = [record_line(i, "seed", "float32", output) for i, output in zip((2, 7), outputs, strict=True)]
    half = lines[0][: len(lines[0]) // 2]
    prompts = [b'{"id": 2, "prompt": [1, 2, 3]}', b'{"id": 7, "prompt": [4]}', b'{"id": 8, "prompt": [5]}']
    return {"prompts.jsonl": b"\n".join(prompts), "results.jsonl": "\n".join([*lines, half]).encode()}


def _load_results(folder: Path) -> Any:
    prompts = read_prompts(folder / "prompts.jsonl", SamplingParams())
    return read_earlier(folder / "results.jsonl", prompts, "seed", "auto")


def _golden() -> Files:
    generator = np.random.default_rng(3)
    goldens = [Golden([1, 2], generator.standard_normal((2, 16), np.float32), [3], [0.5], None)]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "golden.npz"
        save_goldens(path, goldens)
        return {"golden.npz": path.read_bytes()}


def _load_golden(folder: Path) -> list[Golden]:
    return load_goldens(folder / "golden.npz")


def write_world(folder: Path) -> None:
    """A model that random requests can be asked of: with a tokenizer, a smaller model to draft, and a soft prompt."""
    generator = np.random.default_rng(4)
    config = {**CONFIG, "vocab_size": 272, "n_positions": 64, "n_embd": 16, "n_inner": 24, "eos_token_id": 264}
    for place, layers in ((folder, 2), (folder / "draft", 1)):
        shapes = gpt2.stored_shapes(ModelConfig(**{**_model_fields(config), "n_layer": layers}))
        # Far from even, so that one token is much more probable than another.
        arrays = {name: generator.standard_normal(shape, np.float32) * 0.4 for name, shape in shapes.items()}
        place.mkdir(exist_ok=True)
        _written(place, {**_tokenizer_json(), "config.json": to_json({**config, "n_layer": layers})})
        _written(place, {"model.safetensors": save({name: array for name, array in arrays.items() if name != HEAD})})
    (folder / "soft").mkdir()
    embeds = generator.standard_normal((3, 16), np.float32)
    soft = {**SOFT, "token_dim": 16}
    _written(
        folder / "soft",
        {"adapter_config.json": to_json(soft), "adapter_model.safetensors": save({"prompt_embeddings": embeds})},
    )


# --- compiled kernels


def _kernel() -> Files:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "key").touch(mode=0o600)
        (Path(name) / "key").write_bytes(b"key " * 8)
        KernelFiles(Path(name)).save("add.kernel", b"machine code" * 20)
        return {path.name: path.read_bytes() for path in Path(name).iterdir()}


def _load_kernel(folder: Path) -> bytes | None:
    """What is given to be unpickled and run; None where it would be compiled again."""
    body = KernelFiles(folder).load("add.kernel")
    return None if body is None else bytes(body)


def _written(folder: Path, files: Files) -> Path:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


JSON, SAFETENSORS, TORCH = [[*mutators.BYTES, *kind * 3] for kind in (mutators.JSON, binary.SAFETENSORS, binary.TORCH)]
STORED, LEGACY, ZIP = [[*mutators.BYTES, *kind] for kind in (binary.STORED, binary.LEGACY * 20, binary.ZIP)]
TEXT, JSON_LINES = [[*mutators.BYTES, *kind * 3] for kind in (mutators.LINE, mutators.JSON_LINES)]
CONFIGS = {"config.json": JSON, "generation_config.json": JSON}
OPTION_FILES = dict.fromkeys(("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"), JSON)
ADAPTER = {"adapter_config.json": JSON, "adapter_model.safetensors": SAFETENSORS}
BIN_INDEX, SAFETENSORS_INDEX = "pytorch_model.bin.index.json", "model.safetensors.index.json"


def _is_there(package: str) -> bool:
    """Imported here, so that no file is to blame for it."""
    with suppress(ImportError):
        importlib.import_module(package)
    return package in sys.modules


def _formats() -> list[Format]:
    half = functools.partial(_safetensors, np.float16)
    shards = functools.partial(_shards, "model.safetensors", save)
    torch_shards = functools.partial(_shards, "pytorch_model.bin", _torch_bytes)
    zipped, legacy = functools.partial(_torch, _torch_bytes), functools.partial(_torch, _legacy_bytes)
    gpt2, openai = (
        functools.partial(_pair, "vocab.json", "merges.txt"),
        functools.partial(_pair, "encoder.json", "vocab.bpe"),
    )
    lora, patterns = functools.partial(_lora, {}), functools.partial(_lora, PATTERNS)
    lora_bin = functools.partial(_lora, {}, True)
    bin_shard = "pytorch_model-00002-of-00002.bin"
    tensors, checkpoint = _load_tensors, oracles.check_checkpoint
    check_tokenizer = functools.partial(oracles.check_tokenizer, ASKED)
    found = [
        Format("safetensors", _safetensors, {"model.safetensors": SAFETENSORS}, tensors, checkpoint, weight=3),
        Format("safetensors-float16", half, {"model.safetensors": SAFETENSORS}, tensors, checkpoint),
        Format("safetensors-shards", shards, {SAFETENSORS_INDEX: JSON}, tensors, checkpoint),
        Format("config", _safetensors, CONFIGS, _load_model, oracles.check_config, weight=2),
        *(
            Format(
                f"packed-{dtype}",
                functools.partial(_packed, dtype),
                {PACKED_FILE: STORED, "config.json": JSON},
                _load_packed,
                oracles.check_packed,
                binary.seal_packed,
            )
            for dtype in ("float32", "int4")
        ),
        Format("session", _session, {"session": STORED}, _load_session, oracles.check_session, binary.seal_session, 3),
        Format("lora", lora, ADAPTER, _load_lora, oracles.check_lora, weight=2),
        Format("lora-patterns", patterns, {"adapter_config.json": JSON}, _load_lora, oracles.check_lora, weight=2),
        Format("soft-prompt", _soft_prompt, ADAPTER, _load_soft_prompt, oracles.check_soft_prompt),
        Format(
            "tokenizer.json",
            _tokenizer_json,
            {"tokenizer.json": JSON, "tokenizer_config.json": JSON},
            _load_tokenizer,
            check_tokenizer,
            weight=2,
        ),
        Format(
            "vocab.json",
            gpt2,
            {"vocab.json": JSON, "merges.txt": TEXT, **OPTION_FILES},
            _load_tokenizer,
            oracles.check_texts,
            weight=2,
        ),
        Format("encoder.json", openai, {"encoder.json": JSON, "vocab.bpe": TEXT}, _load_tokenizer, oracles.check_texts),
        Format(
            "prompts.jsonl",
            lambda: {"prompts.jsonl": PROMPTS},
            {"prompts.jsonl": JSON_LINES},
            _load_prompts,
            oracles.check_prompts,
            weight=2,
        ),
        Format(
            "results.jsonl", _results, {"results.jsonl": JSON_LINES}, _load_results, oracles.check_results, weight=2
        ),
        Format(
            "kernel",
            _kernel,
            {"add.kernel": mutators.BYTES, "key": mutators.BYTES},
            _load_kernel,
            oracles.check_kernel,
            is_writing=True,
        ),
        Format("golden.npz", _golden, {"golden.npz": ZIP}, _load_golden, oracles.check_golden),
    ]
    if _is_there("torch"):
        found += [
            Format("torch-zip", zipped, {"pytorch_model.bin": TORCH}, tensors, checkpoint, weight=4),
            Format("torch-legacy", legacy, {"pytorch_model.bin": LEGACY}, tensors, checkpoint, weight=3),
            Format("torch-shards", torch_shards, {BIN_INDEX: JSON, bin_shard: TORCH}, tensors, checkpoint),
            Format("lora-torch", lora_bin, {"adapter_model.bin": TORCH}, _load_lora, oracles.check_lora),
        ]
    if _is_there("tokenizers"):
        found += [
            Format(
                "vocab.txt",
                _vocab_txt,
                {"vocab.txt": TEXT, "tokenizer_config.json": JSON},
                _load_tokenizer,
                oracles.check_texts,
            ),
            Format("unigram", _unigram, {"tokenizer.json": JSON}, _load_tokenizer, check_tokenizer),
        ]
    return found


FORMATS = {format.name: format for format in _formats()}
