"""The embedded demo checkpoint, and the script that makes it."""

import runpy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.paths import DATA, ROOT
from tinygpt.weights.open import open_checkpoint

TRAINED = DATA / "demo-model"
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "embed_demo.py"))


LOWER_HALVES = st.sampled_from([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])  # below, at and above half-way


@given(st.lists(st.tuples(st.integers(0, 0xFFFF), LOWER_HALVES), min_size=1, max_size=50))
def test_rounding_to_bfloat16_is_that_of_torch(halves):
    array = np.array([upper << 16 | lower for upper, lower in halves], np.uint32).view(np.float32)
    array = array[~np.isnan(array)]
    expected = torch.from_numpy(array).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(SCRIPT["to_bfloat16"](array), expected)


def test_the_demo_opens_by_its_name():
    checkpoint = open_checkpoint("demo")
    assert checkpoint.path == ROOT / "weights" / "demo"
    assert checkpoint.tied
    assert checkpoint.ignored == ()
    assert checkpoint.tensor("wte.weight").shape == (8193, 256)
    assert (checkpoint.path / "README.md").read_text(encoding="utf-8").startswith("# The demo checkpoint")


def test_the_demo_is_what_transformers_reads_in_it():
    from transformers import GPT2LMHeadModel

    theirs = GPT2LMHeadModel.from_pretrained(ROOT / "weights" / "demo", dtype=torch.float32).transformer
    ours = open_checkpoint("demo")
    np.testing.assert_array_equal(ours.tensor("wpe.weight"), theirs.wpe.weight.detach())
    np.testing.assert_array_equal(ours.tensor("h.5.mlp.c_fc.weight"), theirs.h[5].mlp.c_fc.weight.detach().T)


@pytest.mark.skipif(not TRAINED.is_dir(), reason=f"the trained float32 checkpoint is not in {TRAINED}")
def test_embedding_the_trained_checkpoint_again_gives_the_same_files(tmp_path):
    SCRIPT["embed"](TRAINED, tmp_path)
    embedded = {path.name: path.read_bytes() for path in (ROOT / "weights" / "demo").iterdir()}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == embedded
