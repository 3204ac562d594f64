"""Every kind of file that the project reads: undamaged ones, how they may be damaged, how they are loaded and judged.

A format whose files take torch or tokenizers to write is left out where these are not installed.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from tinygpt.tokenizer.prepared import PREPARED_FILE
from tinygpt.weights.stored.packed import PACKED_FILE

from . import binary_mutators as binary
from . import foreign_seeds, loaders, mutators, oracles, seeds, tokenizer_seeds
from .mutators import Mutator


@dataclass(frozen=True)
class Format:
    """`files` make a folder; `targets` are those that get damaged, and by which mutators.

    load: what tinygpt makes of the folder. check: what is wrong with that, or None; it is given the folder, what was
    loaded, and what the undamaged folder gave. seal: makes checksums right again. weight: its share of all inputs.
    is_writing: loading may write to the folder.
    """

    name: str
    files: Callable[[], seeds.Files]
    targets: Mapping[str, list[Mutator]]
    load: Callable[[Path], Any]
    check: Callable[[Path, Any, Any], str | None]
    seal: Mutator | None = None
    weight: int = 1
    is_writing: bool = False


JSON, SAFETENSORS, TORCH = [[*mutators.BYTES, *kind * 3] for kind in (mutators.JSON, binary.SAFETENSORS, binary.TORCH)]
STORED, LEGACY, ZIP = [[*mutators.BYTES, *kind] for kind in (binary.STORED, binary.LEGACY * 20, binary.ZIP)]
TEXT, JSON_LINES = [[*mutators.BYTES, *kind * 3] for kind in (mutators.LINE, mutators.JSON_LINES)]
CONFIGS = {"config.json": JSON, "generation_config.json": JSON}
OPTIONS = dict.fromkeys(("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"), JSON)


def _is_there(package: str) -> bool:
    """Imported here, so that no file is to blame for it."""
    with suppress(ImportError):
        importlib.import_module(package)
    return package in sys.modules


def _checkpoints() -> list[Format]:
    load, check, file = loaders.tensors, oracles.check_checkpoint, {"model.safetensors": SAFETENSORS}
    half, shards = partial(seeds.safetensors, np.float16), partial(seeds.shards, "model.safetensors", save)
    return [
        Format("safetensors", seeds.safetensors, file, load, check, weight=3),
        Format("safetensors-float16", half, file, load, check),
        Format("safetensors-shards", shards, {"model.safetensors.index.json": JSON}, load, check),
        Format("config", seeds.safetensors, CONFIGS, loaders.model, oracles.check_config, weight=2),
    ]


def _torch_checkpoints() -> list[Format]:
    load, check, file = loaders.tensors, oracles.check_checkpoint, "pytorch_model.bin"
    zipped, legacy = partial(seeds.in_torch, seeds.torch_bytes), partial(seeds.in_torch, seeds.legacy_bytes)
    shards = partial(seeds.shards, file, seeds.torch_bytes)
    damaged = {f"{file}.index.json": JSON, "pytorch_model-00002-of-00002.bin": TORCH}
    lora = partial(seeds.lora, {}, True)
    return [
        Format("torch-zip", zipped, {file: TORCH}, load, check, weight=4),
        Format("torch-legacy", legacy, {file: LEGACY}, load, check, weight=3),
        Format("torch-shards", shards, damaged, load, check),
        Format("lora-torch", lora, {"adapter_model.bin": TORCH}, loaders.lora, oracles.check_lora),
    ]


def _foreign() -> list[Format]:
    """What other programs write, in each of their forms."""
    return [
        Format(
            form,
            partial(foreign_seeds.foreign, form),
            {name: _kinds_of(name, data) for name, data in foreign_seeds.foreign(form).items()},
            loaders.tensors,
            foreign_seeds.check_verified if form == "openai_tf" else foreign_seeds.check_foreign,
            foreign_seeds.seal_table if form == "openai_tf" else None,
        )
        for form in foreign_seeds.FORMS
    ]


def _kinds_of(file: str, data: bytes) -> list[Mutator]:
    """How a file is damaged, by its name and its first bytes."""
    if file.endswith(".json"):
        return JSON
    if file.endswith(".pt"):
        return TORCH if data.startswith(b"PK") else LEGACY
    if file.endswith(".txt"):  # it holds a number, and nothing else
        return [mutators.set_number, mutators.truncate]
    if file.endswith(".ini"):
        return TEXT
    return [mutator for mutator in mutators.BYTES if mutator is not mutators.set_number]  # none is spelt out


def _adapters() -> list[Format]:
    load, check, config = loaders.lora, oracles.check_lora, {"adapter_config.json": JSON}
    files = {**config, "adapter_model.safetensors": SAFETENSORS}
    return [
        Format("lora", partial(seeds.lora, {}), files, load, check, weight=2),
        Format("lora-patterns", partial(seeds.lora, seeds.PATTERNS), config, load, check, weight=2),
        Format("soft-prompt", seeds.soft_prompt, files, loaders.soft_prompt, oracles.check_soft_prompt),
    ]


def _stored() -> list[Format]:
    """What tinygpt itself writes."""
    files, seal = {PACKED_FILE: STORED, "config.json": JSON}, binary.seal_packed
    packed = [
        Format(f"packed-{dtype}", partial(seeds.packed, dtype), files, loaders.packed, oracles.check_packed, seal)
        for dtype in ("float32", "int4")
    ]
    file, seal = {"session": STORED}, binary.seal_session
    session = Format("session", seeds.session, file, loaders.session, oracles.check_session, seal, weight=3)
    files = {"add.kernel": mutators.BYTES, "key": mutators.BYTES}
    kernel = Format("kernel", seeds.kernel, files, loaders.kernel, oracles.check_kernel, is_writing=True)
    load, check, seal = loaders.kernel_archive, oracles.check_kernel_archive, binary.seal_archive
    archive = Format(
        "kernel-archive", seeds.kernel_archive, {"kernels.bin": mutators.BYTES}, load, check, seal, is_writing=True
    )
    return [*packed, session, kernel, archive]


def _tokenizers() -> list[Format]:
    load, check = loaders.tokenizer, oracles.check_texts
    gpt2 = partial(tokenizer_seeds.pair, "vocab.json", "merges.txt")
    openai = partial(tokenizer_seeds.pair, "encoder.json", "vocab.bpe")
    whole, as_library = tokenizer_seeds.tokenizer_json, partial(oracles.check_tokenizer, loaders.ASKED)
    files = {"tokenizer.json": JSON, "tokenizer_config.json": JSON}
    prepared = {PREPARED_FILE: [*mutators.BYTES, *binary.PREPARED * 3]}
    return [
        Format("tokenizer.json", whole, files, load, as_library, weight=2),
        Format("vocab.json", gpt2, {"vocab.json": JSON, "merges.txt": TEXT, **OPTIONS}, load, check, weight=2),
        Format("encoder.json", openai, {"encoder.json": JSON, "vocab.bpe": TEXT}, load, check),
        Format(PREPARED_FILE, tokenizer_seeds.prepared, prepared, load, oracles.check_prepared, binary.seal_prepared),
    ]


def _library_tokenizers() -> list[Format]:
    files, as_library = {"tokenizer.json": JSON}, partial(oracles.check_tokenizer, loaders.ASKED)
    words = {"vocab.txt": TEXT, "tokenizer_config.json": JSON}
    return [
        Format("vocab.txt", tokenizer_seeds.vocab_txt, words, loaders.tokenizer, oracles.check_texts),
        Format("unigram", tokenizer_seeds.unigram, files, loaders.tokenizer, as_library),
    ]


def _results() -> list[Format]:
    prompts, results = {"prompts.jsonl": JSON_LINES}, {"results.jsonl": JSON_LINES}
    return [
        Format("prompts.jsonl", seeds.prompts, prompts, loaders.prompts, oracles.check_prompts, weight=2),
        Format("results.jsonl", seeds.results, results, loaders.results, oracles.check_results, weight=2),
        Format("golden.npz", seeds.golden, {"golden.npz": ZIP}, loaders.golden, oracles.check_golden),
    ]


def _formats() -> list[Format]:
    found = [*_checkpoints(), *_foreign(), *_adapters(), *_stored(), *_tokenizers(), *_results()]
    found += _torch_checkpoints() if _is_there("torch") else []
    found += _library_tokenizers() if _is_there("tokenizers") else []
    return found


FORMATS = {format.name: format for format in _formats()}
