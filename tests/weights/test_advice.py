"""Paths and files that are nearly a checkpoint: the sentence names what is there and the next step."""

import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from support.foreign import nanogpt_state
from support.tables import rows
from support.tiny_checkpoint import (
    assert_holds,
    assert_refused,
    random_tensors,
    write_checkpoint,
    write_config,
    write_json,
    write_with_demo_tokenizer,
)
from support.torch_files import own_bytes
from tinygpt.cli import main as cli
from tinygpt.engine.model_runner import load_tokenizer
from tinygpt.text.files import read_tokenizer
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


@pytest.mark.parametrize(
    "names", ["optimizer.pt scheduler.pt rng_state.pth", "optimizer.bin training_args.bin rng_state_0.pth"]
)
def test_a_training_runs_state_is_no_weights(tmp_path, names):
    for name in names.split():
        (tmp_path / name).write_bytes(own_bytes({"state": {}}))
    (tmp_path / "model.pt").write_bytes(own_bytes(nanogpt_state(random_tensors(prefix=""))))
    assert open_checkpoint(tmp_path).family == "nanoGPT"
    (tmp_path / "other.pt").write_bytes(b"")
    assert_refused(tmp_path, "several files that may be weights: model.pt, other.pt")


def test_a_config_json_in_utf_16_is_read(tmp_path):
    folder = write_with_demo_tokenizer(tmp_path)
    for name in ("config.json", "vocab.json"):
        text = (folder / name).read_text(encoding="utf-8")
        (folder / name).write_text(text, encoding="utf-16")
    assert load_tokenizer(open_checkpoint(folder)).encode("Once")


def test_a_tokenizer_json_by_aitextgens_name(tmp_path):
    folder = write_with_demo_tokenizer(tmp_path)
    tokenizer = load_tokenizer(open_checkpoint(folder))
    spec = read_tokenizer(folder)
    spec["model"]["merges"] = [list(pair) for pair in spec["model"]["merges"]]
    (folder / "vocab.json").unlink()
    write_json(folder / "aitextgen.tokenizer.json", spec)
    assert load_tokenizer(open_checkpoint(folder)).encode("Once upon") == tokenizer.encode("Once upon")


ROTARY = [
    "rope.cos_cached",
    "layers.0.attn.rotary_emb.inv_freq",
    "model.freqs_cis",
    "blocks.1.rope_cache.cos_cache",
]


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_positions_are_named(tmp_path, name, capsys):
    arrays = {"tok.weight": np.ones((3, 4), "f4"), name: np.ones((6, 2), "f4")}
    save_file(arrays, tmp_path / "model.safetensors")
    sentence = f"has rotary positions, as '{name}' shows, which are not implemented"
    assert_refused(tmp_path, sentence)
    assert cli.main(["info", str(tmp_path), "--write-names", "linear"]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("order", ["C", "F"])
def test_an_archive_of_numpy_is_read(tmp_path, order):
    """By GPT-2's names, with numbers in it; np.savez writes arrays, as they lie."""
    arrays = {name: np.asarray(array, order=order) for name, array in random_tensors().items()}
    np.savez(tmp_path / "model.npz", n_head=2, n_layer=2, **arrays)
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.container, checkpoint.config.n_head) == ("NumPy archive", 2)
    assert_holds(checkpoint, random_tensors(prefix=""))


def test_archives_of_numpy_that_cannot_be_read(tmp_path):
    np.savez_compressed(tmp_path / "model.npz", **random_tensors())
    assert_refused(tmp_path, "an archive of NumPy with compressed arrays, .*: save it by np.savez, not")
    others = {"a": np.array([{}], object), "b": np.ones(3, ">f4"), "c": np.ones(3, "c8")}
    np.savez(tmp_path / "model.npz", **random_tensors(), **others)
    write_config(tmp_path)
    assert_refused(tmp_path, r"damaged NumPy archive|unexpected: a, b, c")
