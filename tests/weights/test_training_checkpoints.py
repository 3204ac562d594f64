"""Training checkpoints beside torch itself: what it writes is read, and what these tests write without it, it reads."""

import argparse
import io
from functools import partial

import numpy as np
import pytest

from support.foreign import nanogpt_state
from support.megatron_writer import Form, rank_file
from support.recorded import MISSING
from support.tiny_checkpoint import random_tensors
from support.torch_files import own_bytes
from tinygpt.weights.containers.torch import Stub, fields_of, read_training_checkpoint

torch = pytest.importorskip("torch", reason=MISSING)
TENSORS = random_tensors(prefix="")


@pytest.mark.parametrize("save", [own_bytes, partial(own_bytes, is_legacy=True)])
def test_torch_reads_what_these_tests_write(save):
    state = {"model": nanogpt_state(TENSORS)["model"], "number": 5, "halves": np.ones(3, np.float16)}
    theirs = torch.load(io.BytesIO(save(state)), weights_only=True)
    assert theirs["number"] == 5
    np.testing.assert_array_equal(theirs["halves"].numpy(), state["halves"])
    for name, array in state["model"].items():
        np.testing.assert_array_equal(theirs["model"][name].numpy(), array, err_msg=name)


def to_torch(value):
    if isinstance(value, dict):
        return {name: to_torch(item) for name, item in value.items()}
    return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("is_zip", [True, False])
def test_what_torch_writes_with_objects_beside_the_weights(tmp_path, is_zip):
    state = rank_file(TENSORS, Form())
    args = argparse.Namespace(
        num_attention_heads=2, dtype=torch.float16, rng=np.random.RandomState(3).get_state()[1]
    )
    numbers = {
        "args": args,
        "checkpoint_version": 3.0,
        "rng": np.random.default_rng(1),
        "place": tmp_path,
        "set": {1},
    }
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    model = to_torch(state["model"])
    path = tmp_path / "x.pt"
    torch.save(
        {"model": model, "optimizer": optimizer, **numbers}, path, _use_new_zipfile_serialization=is_zip
    )
    container = read_training_checkpoint(path)
    for name, array in state["model"].items():
        np.testing.assert_array_equal(container.tensors[f"model.{name}"].float32(), array, err_msg=name)
    assert container.tensors["optimizer.state.0.exp_avg"].float32().tolist() == [1, 1, 1]
    assert fields_of(container.metadata["args"])["num_attention_heads"] == 2
    assert isinstance(container.metadata["rng"], Stub)
    assert container.metadata["checkpoint_version"] == 3.0


def test_tensors_of_dtypes_that_are_no_weights(tmp_path):
    dtypes = {"a": torch.float32, "b": torch.float8_e4m3fn, "c": torch.cfloat}
    tensors = {name: torch.ones(3, dtype=dtype) for name, dtype in dtypes.items()}
    torch.save({**tensors, "d": torch.eye(2).to_sparse()}, tmp_path / "x.pt")
    container = read_training_checkpoint(tmp_path / "x.pt")
    assert container.tensors["a"].float32().tolist() == [1, 1, 1]
    assert not any(
        container.tensors[name].is_floating for name in ("b", "c", "d") if name in container.tensors
    )
