"""The embedded demo checkpoint, and the script that makes it."""

import json
import runpy
import shutil

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from support.kernel_tools import bfloat16_bits
from support.paths import DEMO, EOS, ROOT, VOCAB_SIZE
from support.recorded import HAS_TRANSFORMERS, needs_transformers
from tinygpt.weights.containers.formats import read_weights
from tinygpt.weights.open import open_checkpoint

if HAS_TRANSFORMERS:
    import torch

    SCRIPT = runpy.run_path(str(ROOT / "scripts" / "embed_demo.py"))


@pytest.fixture
def trained(tmp_path):
    """The demo as train_demo.py writes it, but for its weights."""
    folder = tmp_path / "trained"
    folder.mkdir()
    for name in ("vocab.json", "merges.txt", "training.json"):
        shutil.copyfile(DEMO / name, folder / name)
    values = json.loads((DEMO / "config.json").read_text(encoding="utf-8")) | {"dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


@needs_transformers
def test_embedding_rounds_to_the_nearest_bfloat16(trained, tmp_path):
    """Every upper half, followed by lower halves below, at and above half-way; ties go to the even one."""
    upper, lower = np.arange(1 << 16, dtype=np.uint32), np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = (upper[:, None] << 16 | lower).ravel()
    bits = bits[~np.isnan(bits.view(np.float32))]
    save_file({"wte.weight": bits.view(np.float32)}, trained / "model.safetensors")
    SCRIPT["embed"](trained, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        found = file.get_tensor("wte.weight")
    assert found.dtype == torch.bfloat16
    np.testing.assert_array_equal(found.view(torch.uint16).numpy(), bfloat16_bits(bits.view(np.float32)))


@needs_transformers
def test_the_demo_is_what_the_script_makes_of_its_weights_and_its_record(trained, tmp_path):
    """The card included, which nobody has changed by hand."""
    weights = {name: np.array(tensor.float32()) for name, tensor in read_weights(DEMO).tensors.items()}
    save_file(weights, trained / "model.safetensors")
    SCRIPT["embed"](trained, tmp_path / "demo")
    embedded = {path.name: path.read_bytes() for path in DEMO.iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "demo").iterdir()} == embedded


def test_the_demo_opens_by_its_name():
    checkpoint = open_checkpoint("demo")
    assert checkpoint.path == DEMO
    assert checkpoint.tied
    assert checkpoint.ignored == ()
    assert checkpoint.tensor("wte.weight").shape == (VOCAB_SIZE, checkpoint.config.n_embd)
    assert EOS == VOCAB_SIZE - 1
    assert (checkpoint.path / "README.md").read_text(encoding="utf-8").startswith("# The demo checkpoint")


@needs_transformers
def test_the_demo_is_what_transformers_reads_in_it():
    from transformers import GPT2LMHeadModel

    theirs = GPT2LMHeadModel.from_pretrained(DEMO, dtype=torch.float32).transformer
    ours, last = open_checkpoint("demo"), len(theirs.h) - 1
    np.testing.assert_array_equal(ours.tensor("wpe.weight"), theirs.wpe.weight.detach())
    np.testing.assert_array_equal(ours.tensor(f"h.{last}.mlp.c_fc.weight"), theirs.h[last].mlp.c_fc.weight.detach().T)
