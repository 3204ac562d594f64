"""The embedded demo checkpoint, and the script that makes it."""

import json
import runpy
import shutil

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from support.kernel_tools import bfloat16_bits
from support.paths import DATA, ROOT
from support.recorded import HAS_TRANSFORMERS, needs_transformers
from tinygpt.weights.open import open_checkpoint

if HAS_TRANSFORMERS:
    import torch

    SCRIPT = runpy.run_path(str(ROOT / "scripts" / "embed_demo.py"))

TRAINED = DATA / "demo-model"
# Of the embedded demo; train_demo.py did not write them then.
TRAINING = {
    "corpus": "English classics in the public domain",
    "tokens_seen": 9_700_000,
    "validation_loss": 3.973,
    "bits_per_byte": 1.46,
    "window": 512,
}


@needs_transformers
def test_embedding_rounds_to_the_nearest_bfloat16(tmp_path):
    """Every upper half, followed by lower halves below, at and above half-way; ties go to the even one."""
    upper, lower = np.arange(1 << 16, dtype=np.uint32), np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = (upper[:, None] << 16 | lower).ravel()
    bits = bits[~np.isnan(bits.view(np.float32))]
    save_file({"wte.weight": bits.view(np.float32)}, tmp_path / "model.safetensors")
    write_training(tmp_path)
    for name, text in {"config.json": "{}", "vocab.json": "{}", "merges.txt": ""}.items():
        (tmp_path / name).write_text(text)
    SCRIPT["embed"](tmp_path, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        found = file.get_tensor("wte.weight")
    assert found.dtype == torch.bfloat16
    np.testing.assert_array_equal(found.view(torch.uint16).numpy(), bfloat16_bits(bits.view(np.float32)))


def write_training(folder):
    (folder / "training.json").write_text(json.dumps(TRAINING), encoding="utf-8")


def test_the_demo_opens_by_its_name():
    checkpoint = open_checkpoint("demo")
    assert checkpoint.path == ROOT / "weights" / "demo"
    assert checkpoint.tied
    assert checkpoint.ignored == ()
    assert checkpoint.tensor("wte.weight").shape == (8193, 256)
    assert (checkpoint.path / "README.md").read_text(encoding="utf-8").startswith("# The demo checkpoint")


@needs_transformers
def test_the_demo_is_what_transformers_reads_in_it():
    from transformers import GPT2LMHeadModel

    theirs = GPT2LMHeadModel.from_pretrained(ROOT / "weights" / "demo", dtype=torch.float32).transformer
    ours = open_checkpoint("demo")
    np.testing.assert_array_equal(ours.tensor("wpe.weight"), theirs.wpe.weight.detach())
    np.testing.assert_array_equal(ours.tensor("h.5.mlp.c_fc.weight"), theirs.h[5].mlp.c_fc.weight.detach().T)


@needs_transformers
@pytest.mark.skipif(not TRAINED.is_dir(), reason=f"the trained float32 checkpoint is not in {TRAINED}")
def test_embedding_the_trained_checkpoint_again_gives_the_same_files(tmp_path):
    source, target = shutil.copytree(TRAINED, tmp_path / "trained", copy_function=shutil.copyfile), tmp_path / "demo"
    source.chmod(0o755)
    write_training(source)
    SCRIPT["embed"](source, target)
    embedded = {path.name: path.read_bytes() for path in (ROOT / "weights" / "demo").iterdir()}
    assert {path.name: path.read_bytes() for path in target.iterdir()} == embedded
