"""Small hostile files: each is loaded or refused in time and memory that its size accounts for.

What is held to a limit of CPU time and memory took longer than that, or more, before the loader bounded it.
"""

import json
import os
import re
import struct
import sys
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from support import onnx_writer, tf_writer
from support.apart import outcome, outcomes
from support.foreign import GGUF_KEYS
from support.gguf_writer import gguf_bytes
from support.megatron_writer import Form, nemo_members, tar_bytes
from support.tiny_checkpoint import LAYERS, C, random_tensors, write_checkpoint, write_config, write_json
from support.torch_files import ORDERED_DICT, RECORD, STORAGE, TENSOR, program, text

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of a process, as Linux has them")


def put(index):
    return b"r" + struct.pack("<I", index)


def get(index):
    return b"h" + bytes([index])


PICKLES = {
    "huge dimensions": program(
        b"}" + text("a") + TENSOR + b"(" + STORAGE + b"K\x00",
        b"(" + b"J\xff\xff\xff\x7f" * 300_000 + b"t",
        b"(" + b"K\x00" * 300_000 + b"t\x89NtRs",
    ),
    "one list in many dictionaries": program(
        b"](" + b"]" + put(1) + text("a") + b"aK\x00a" + get(1) * 300_000 + b"e" + put(2),
        ORDERED_DICT + put(3),
        (get(3) + get(2) + b"\x85R") * 100_000,
    ),
    "one long shape in many tensors": program(
        STORAGE + put(1) + b"(" + b"K\x01" * 200_000 + b"t" + put(2) + TENSOR + put(3),
        (get(3) + b"(" + get(1) + b"K\x00" + get(2) + get(2) + b"\x89NtR") * 50_000,
    ),
    "one long record in many storages": program(
        RECORD + b"N" * 300_000 + b"t" + put(1), (get(1) + b"Q") * 300_000
    ),
}


def write_pickle(folder, data):
    write_config(folder)
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/data/0", b"\0" * 16)


def write_huge_dimensions(folder):
    write_config(folder)
    header = {"a": {"dtype": "F32", "shape": [0] + [2**40] * 300_000, "data_offsets": [0, 0]}}
    data = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data)


def write_lora(folder, **fields):
    """An adapter of rank 1 for the tiny checkpoint, which lies in `folder` / "base"."""
    write_checkpoint(folder / "base")
    modules = [f"base_model.model.transformer.h.{i}.attn.c_attn" for i in range(LAYERS)]
    tensors = {f"{module}.lora_A.weight": np.zeros((1, C), np.float32) for module in modules}
    tensors |= {f"{module}.lora_B.weight": np.zeros((3 * C, 1), np.float32) for module in modules}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "target_modules": ["c_attn"], "r": 1, "lora_alpha": 1, **fields}
    write_json(folder / "adapter_config.json", config)


def write_long_name(folder):
    write_lora(folder)
    names = ("module." * 100_000 + f"transformer.h.0.attn.c_attn.lora_{factor}.weight" for factor in "AB")
    tensors = {f"base_model.model.{name}": np.zeros(1, "f4") for name in names}
    save_file(tensors, folder / "adapter_model.safetensors")


def write_tokenizer(folder, added=None, **fields):
    characters = [*map(chr, [*range(33, 127), *range(161, 173), *range(174, 324)])]
    model = {"type": "BPE", "vocab": {character: i for i, character in enumerate(characters)}, "merges": []}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False}
    spec = {
        "model": model,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "added_tokens": added or [],
        **fields,
    }
    write_json(folder / "tokenizer.json", spec)


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "a", "type_id": 0}}] * 20_000
    + [{"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {"a": {"id": "a", "ids": [1] * 200_000, "tokens": ["a"] * 200_000}},
}
OPEN = "open_checkpoint(folder)"
MERGE = "merge_lora(open_checkpoint(folder + '/base'), folder)"
TOKENIZE = "Tokenizer.from_folder(folder)"
# By name, a function that writes the files, the call, and its sentence.
CASES = {
    **{
        name: (partial(write_pickle, data=data), OPEN, "pytorch_model.bin is a damaged pickle")
        for name, data in PICKLES.items()
    },
    "huge dimensions in safetensors": (write_huge_dimensions, OPEN, "impossible shape"),
    "target_modules": (partial(write_lora, target_modules=r"(((.+)+)+)+\d{3}X"), MERGE, "unexpected"),
    "target_modules without end": (
        partial(write_lora, target_modules="(?:(.|..)+)+(?<!n)"),
        MERGE,
        "seconds: name the modules",
    ),
    "many patterns": (
        partial(write_lora, rank_pattern={f"{i:05}.*": 2 for i in range(200_000)}),
        MERGE,
        "refused",
    ),
    "a long pattern": (
        partial(write_lora, target_modules="|".join(["a" * 500_000 + end for end in "bc"])),
        MERGE,
        "refused",
    ),
    "a tensor's name without end": (write_long_name, MERGE, "names a tensor by"),
    "added tokens with one long beginning": (
        partial(
            write_tokenizer,
            added=[{"id": 256 + i, "content": "a" * 700_000 + end} for i, end in enumerate("bc")],
        ),
        TOKENIZE,
        "has 700001 characters",
    ),
    "a template that grows": (
        partial(write_tokenizer, post_processor=TEMPLATE),
        TOKENIZE,
        "more than 1000 tokens around a text",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_work_that_is_more_than_a_files_size(tmp_path, case):
    write, call, sentence = CASES[case]
    write(tmp_path)
    assert sentence in outcome(call, tmp_path)


FILES = dict.fromkeys(("generation_config.json", "model.safetensors", "model.safetensors.index.json"), OPEN)
FILES |= dict.fromkeys(("pytorch_model.bin", "model.tinygpt.safetensors", "shard"), OPEN)
FILES |= dict.fromkeys(("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"), MERGE)
FILES |= dict.fromkeys(
    ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "vocab.txt"), TOKENIZE
)
FILES["soft prompt"] = "read_soft_prompt(folder + '/soft prompt', open_checkpoint().config)"
# The files beside, which are looked for first or are in the way.
WITHOUT = {
    "config.json": [],
    "adapter_model.bin": ["adapter_model.safetensors"],
    "vocab.txt": ["tokenizer.json"],
}
BESIDE_SAFETENSORS = (
    "pytorch_model.bin",
    "model.safetensors.index.json",
    "model.tinygpt.safetensors",
    "shard",
)
WITHOUT |= {name: ["model.safetensors"] for name in BESIDE_SAFETENSORS}


@pytest.mark.parametrize("kind", ["FIFO", "character device"])
def test_a_file_that_is_not_regular_is_refused_and_not_waited_for(tmp_path, kind):
    assert_none_is_read(tmp_path, FILES, kind, "it is not a regular file")


# Files of other programs, of which some are found in a folder by their suffix.
MORE_FILES = dict.fromkeys(
    ("config.json", "x.gguf", "x.onnx", "x.nemo", "x.index", "ckpt.pt", "x.ckpt"), OPEN
)
MORE_FILES |= dict.fromkeys(("vocab.json", "merges.txt", "special_tokens_map.json"), TOKENIZE)
MORE_FILES |= dict.fromkeys(("config.ini", "latest", "checkpoint"), OPEN)


WEIGHTS = ("model.safetensors", "pytorch_model.bin", "model.tinygpt.safetensors", "shard", "soft prompt")
WEIGHTS += (
    "adapter_model.safetensors",
    "adapter_model.bin",
    "x.gguf",
    "x.onnx",
    "x.nemo",
    "x.index",
    "ckpt.pt",
)
WEIGHTS += ("x.ckpt",)


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    (tmp_path / "outside").write_text("a secret")
    texts = {name: opens for name, opens in (FILES | MORE_FILES).items() if name not in WEIGHTS}
    assert_none_is_read(tmp_path, texts, "link", "it is a link out of its folder")


def test_a_link_of_weights_out_of_the_folder_is_followed_and_not_quoted(tmp_path):
    (tmp_path / "outside").write_text("a secret")
    files = FILES | MORE_FILES
    folders = {name: write_irregular(tmp_path / f"without {name}", name, "link") for name in WEIGHTS}
    sentences = outcomes([(files[name], folder) for name, folder in folders.items()])
    assert not re.search("a secret|cannot be read", sentences), sentences
    assert len(sentences.splitlines()) == len(WEIGHTS)


def test_a_git_lfs_pointer_in_the_place_of_any_file_is_told(tmp_path):
    assert_none_is_read(
        tmp_path, FILES | MORE_FILES, "pointer", "it is a Git LFS pointer.* run `git lfs pull`"
    )


def assert_none_is_read(place, files, kind, reason):
    folders = {name: write_irregular(place / f"without {name}", name, kind) for name in files}
    sentences = outcomes([(files[name], folder) for name, folder in folders.items()]).splitlines()
    for (name, folder), sentence in zip(folders.items(), sentences, strict=True):
        assert re.search(f"{re.escape(str(folder / name))} cannot be read: {reason}", sentence), sentence


def write_irregular(folder: Path, name: str, kind: str) -> Path:
    """All that may be opened, regular but for one file."""
    folder.mkdir()
    write_lora(folder)
    write_checkpoint(folder)
    write_tokenizer(folder)
    if name == "shard":
        write_json(
            folder / "model.safetensors.index.json", {"weight_map": dict.fromkeys(random_tensors(), "shard")}
        )
    in_the_way = ["model.safetensors", "adapter_model.safetensors"] if MORE_FILES.get(name) == OPEN else []
    for other in (name, *WITHOUT.get(name, in_the_way)):
        (folder / other).unlink(missing_ok=True)
    if name in ("vocab.json", "merges.txt"):
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.json").write_text('{"a": 0}')
        (folder / "merges.txt").write_text("")
        (folder / name).unlink()
    if name == "config.ini":
        (folder / "model.wte.bin").write_bytes(b"1234")
    if kind == "FIFO":
        os.mkfifo(folder / name)
    elif kind == "pointer":
        (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    else:
        (folder / name).symlink_to("/dev/zero" if kind == "character device" else folder.parent / "outside")
    return folder


# Other programs' files: much that is small, and names and numbers that lie about how much there is.

MANY_LAYERS = 3_000


def gguf_of(count):
    tensors = {f"t{i}": ((1,), 0, b"\0" * 4) for i in range(count)}
    return {"x.gguf": gguf_bytes({**GGUF_KEYS, "gpt2.block_count": (4, MANY_LAYERS)}, tensors)}


def onnx_of(count):
    tensors = [onnx_writer.tensor(f"t{i}", np.zeros((1, 2), np.float32)) for i in range(count)]
    tensors += [
        onnx_writer.tensor(name, np.zeros((2, 2), np.float32)) for name in ("wte.weight", "wpe.weight")
    ]
    tensors.append(onnx_writer.tensor(f"h.{MANY_LAYERS - 1}.mlp.c_fc.bias", np.zeros(2, np.float32)))
    tensors.append(onnx_writer.tensor("h.0.mlp.c_fc.bias", np.zeros(2, np.float32)))
    nodes = [onnx_writer.node("MatMul", ["x", f"t{i}"], ["y"]) for i in range(count)]
    nodes.append(onnx_writer.node("Tanh", ["x"], ["y"]))
    return {"x.onnx": onnx_writer.model(onnx_writer.graph(nodes, tensors, {"past_0": (2, 1, 2, 1, 1)}))}


def fastertransformer_of(count):
    files = {f"model.t{i}.bin": b"\0" * 4 for i in range(count)}
    files |= {"model.wte.bin": b"\0" * 64, "model.wpe.bin": b"\0" * 64}
    files["model.layers.0.mlp.dense_h_to_4h.bias.0.bin"] = b"\0" * 64
    return {**files, "config.ini": b"[gpt]\nhead_num = 2\nsize_per_head = 4\nnum_layer = %d\n" % MANY_LAYERS}


def tf_of(count):
    """Keys that each share all but a byte with the one before would be the square of their number in bytes."""
    records = [(b"", b"\x08\x01"), *((b"a" * i, b"\x08\x01") for i in range(1, count))]
    return {"x.index": tf_writer.table(records)}


def nemo_of(count):
    members = nemo_members(random_tensors(prefix=""), Form()) | {"./model_config.yaml": b"[" * count}
    return {"x.nemo": tar_bytes(members)}


@pytest.mark.parametrize(
    ("make", "count", "sentence"),
    [
        (gguf_of, 20_000, "missing: |which shows a size"),
        (onnx_of, 8_000, "does not hold the GPT-2 of ONNX"),
        (fastertransformer_of, 1_000, "does not hold the GPT of FasterTransformer"),
        (tf_of, 1_010, "too long a key"),
        (nemo_of, 99_000, "more than 100 levels"),
    ],
)
def test_other_programs_files_with_much_that_is_small(tmp_path, make, count, sentence):
    for name, data in make(count).items():
        (tmp_path / name).write_bytes(data)
    assert re.search(sentence, outcome("open_checkpoint(folder)", tmp_path, cpu_seconds=6))
