"""Random checkpoints: GPT-2's shapes, the same bits every time, and no files."""

import numpy as np
import pytest

from support.tiny_checkpoint import assert_refused
from tinygpt import LLM
from tinygpt.bench.work import num_parameters
from tinygpt.cli import main as cli
from tinygpt.errors import CheckpointError
from tinygpt.weights.checkpoint import SHAPES, Checkpoint
from tinygpt.weights.config import parameter_shapes
from tinygpt.weights.open import open_checkpoint, resolve
from tinygpt.weights.stored.export import write_safetensors, write_sidecar_files


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint("random:tiny")


# Counted by transformers' GPT2LMHeadModel of these sizes.
@pytest.mark.parametrize(
    ("shape", "count"),
    [("124M", 124_439_808), ("355M", 354_823_168), ("774M", 774_030_080), ("1.5B", 1_557_611_200)],
)
def test_shapes_have_as_many_parameters_as_gpt2(shape, count):
    config = SHAPES[shape]
    assert num_parameters(config) == count
    shapes = parameter_shapes(config)
    assert sum(np.prod(shapes[name], dtype=int) for name in open_checkpoint(f"random:{shape}").stored) == count


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


def test_it_is_the_model_of_the_same_tensors_in_a_file(tmp_path, checkpoint):
    write_safetensors(tmp_path, checkpoint, "float32")
    write_sidecar_files(tmp_path, checkpoint)
    with LLM("random:tiny") as drawn, LLM(str(tmp_path)) as read:
        np.testing.assert_array_equal(drawn.logits([5, 6, 7]), read.logits([5, 6, 7]))


def test_an_unknown_shape_is_refused():
    assert_refused("random:9B", r"random:9B is no random checkpoint: give one of .*random:1\.5B")


def test_what_needs_files_is_refused(tmp_path, capsys):
    with pytest.raises(CheckpointError, match="random:tiny is drawn in memory and has no files"):
        resolve("random:tiny")
    assert cli.main(["info", "random:tiny"]) == 2
    assert cli.main(["convert", "random:tiny", str(tmp_path / "packed")]) == 2
    assert capsys.readouterr().err.count("drawn in memory") == 2
    assert not any(tmp_path.iterdir())
