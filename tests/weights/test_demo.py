"""Checkpoints of a name: the embedded demo with the script that makes it, and random ones."""

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
from support.tables import rows
from support.tiny_checkpoint import assert_refused, convert
from tinygpt import LLM
from tinygpt.bench.roofline import num_parameters
from tinygpt.cli import main as cli
from tinygpt.errors import CheckpointError
from tinygpt.weights.checkpoint import SHAPES, Checkpoint
from tinygpt.weights.config import parameter_shapes
from tinygpt.weights.containers.formats import read_weights
from tinygpt.weights.open import open_checkpoint, resolve

if HAS_TRANSFORMERS:
    import torch

    SCRIPT = runpy.run_path(str(ROOT / "scripts" / "train_demo.py"))


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
    upper = np.arange(1 << 16, dtype=np.uint32)
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
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


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint("random:tiny")


# Counted by transformers' GPT2LMHeadModel of these sizes.
@pytest.mark.parametrize(
    ("shape", "count"),
    rows("""
124M | 124439808
355M | 354823168
774M | 774030080
1.5B | 1557611200
"""),
)
def test_shapes_have_as_many_parameters_as_gpt2(shape, count):
    config = SHAPES[shape]
    assert num_parameters(config) == count
    shapes = parameter_shapes(config)
    assert (
        sum(np.prod(shapes[name], dtype=int) for name in open_checkpoint(f"random:{shape}").stored) == count
    )


def test_tensors_are_the_same_bits_in_any_order(checkpoint):
    there = {name: checkpoint.tensor(name) for name in checkpoint.stored}
    again = open_checkpoint("random:TINY")
    for name in reversed(again.stored):
        np.testing.assert_array_equal(again.tensor(name), there[name], err_msg=name)


def test_the_distribution_has_std_002(checkpoint):
    for name in checkpoint.stored:
        tensor = checkpoint.tensor(name)
        is_gain = "ln_" in name and name.endswith(".weight")
        assert tensor.dtype == np.float32
        assert abs(tensor.mean() - is_gain) < 0.01, name
        assert 0.01 < tensor.std() < 0.03, name


def test_an_unknown_shape_is_refused():
    assert_refused("random:9B", r"random:9B is no random checkpoint: give one of .*random:1\.5B")


def test_what_needs_files_is_refused(capsys):
    with pytest.raises(CheckpointError, match="random:tiny is drawn in memory and has no files"):
        resolve("random:tiny")
    assert cli.main(["info", "random:tiny"]) == 2
    assert capsys.readouterr().err.count("drawn in memory") == 1


@pytest.mark.parametrize("flags", [["--dtype", "float32"], ["--to", "safetensors"], ["--to", "gguf"]])
def test_convert_writes_it(tmp_path, flags):
    convert("random:tiny", tmp_path / "written", *flags)
    with LLM("random:tiny") as drawn, LLM(str(tmp_path / "written")) as read:
        np.testing.assert_array_equal(drawn.logits([5, 6, 7]), read.logits([5, 6, 7]))
