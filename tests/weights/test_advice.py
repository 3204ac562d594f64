"""Paths and files that are nearly a checkpoint: the sentence names what is there and the next step."""

import struct

import pytest

from support.tables import rows
from support.tiny_checkpoint import (
    assert_holds,
    assert_refused,
    random_tensors,
    write_checkpoint,
    write_config,
    write_with_demo_tokenizer,
)
from tinygpt.engine.model_runner import load_tokenizer
from tinygpt.weights.open import open_checkpoint

FOREIGN = rows(r"""
x.h5 | "\u0089HDF\r\n\u001a\n" | a file of Keras, .*: read it with transformers before 5, from_tf=True
x.bin | "\u0089HDF\r\n\u001a\n" | a file of Keras
flax_model.msgpack | "\u0082" | a file of Flax, .*from_flax=True
model.keras | "PK" | a file of Keras, .*tensor_names.json
ggml-model.bin | "lmgg" | a file of ggml before GGUF
ggml-model.bin | "tjgg" | a file of ggml before GGUF
model.bin | "\u0006\u0000\u0000\u0000\u0017\u0000TransformerDecoderSpec\u0000" | a file of CTranslate2
""")
LLM_C = (
    "gpt2_124M.bin",
    struct.pack("<256i", 20240326, *range(255)).decode("latin-1"),
    "llm.c, .*export_hf.py",
)


@pytest.mark.parametrize(("name", "text", "sentence"), [*FOREIGN, LLM_C])
def test_another_programs_file_is_named(tmp_path, name, text, sentence):
    """By itself, and in a folder that holds nothing else."""
    (tmp_path / name).write_bytes(text.encode("latin-1") + b"\0" * 64)
    assert_refused(tmp_path / name, sentence)
    write_config(tmp_path)
    assert_refused(tmp_path, sentence)


def test_a_byte_order_mark_is_none_of_the_content(tmp_path):
    folder = write_with_demo_tokenizer(tmp_path)
    ids = load_tokenizer(open_checkpoint(folder)).encode("Once upon a time")
    for name in ("config.json", "merges.txt", "vocab.json"):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    checkpoint = open_checkpoint(folder)
    assert_holds(checkpoint, {"ln_f.bias": random_tensors()["transformer.ln_f.bias"]})
    assert load_tokenizer(checkpoint).encode("Once upon a time") == ids


def test_a_folder_of_the_hubs_cache_is_two_levels_above(tmp_path):
    (tmp_path / "models--x--y" / "snapshots").mkdir(parents=True)
    write_checkpoint(tmp_path / "models--x--y" / "snapshots" / "c0ffee")
    assert_refused(tmp_path / "models--x--y", "Its subfolders snapshots/c0ffee look like checkpoints")


def test_a_snapshot_that_no_branch_names_is_told(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    commit = "c0ffee" * 6 + "1234"
    (tmp_path / "models--x--y" / "snapshots").mkdir(parents=True)
    write_checkpoint(tmp_path / "models--x--y" / "snapshots" / commit)
    assert_refused("x/y", f"it has x/y@{commit}, of which you may name one; HF_HUB_OFFLINE forbids downloads")
    assert_refused("x/z", "check the spelling")
    assert open_checkpoint(f"x/y@{commit}").path.name == commit
