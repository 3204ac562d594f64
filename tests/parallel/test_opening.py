"""What ranks tell one another as they open a model: whose weights they have, where they run, what they must compile.

Ranks are threads here; that real ones see the same is in test_mpi.py.
"""

import numpy as np
import pytest

from support.golden_models import write_lora, write_model
from support.thread_world import Threads, running
from tinygpt.cli.main import main
from tinygpt.engine.model_source import EngineConfig, ModelSource
from tinygpt.errors import CheckpointError
from tinygpt.parallel import driver
from tinygpt.parallel.driver import LoadCommand, RankZeroDriver, follow
from tinygpt.parallel.launch import Layout
from tinygpt.parallel.runner import ParallelRunner

FIELDS = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 37, "n_positions": 20}
SIZES = EngineConfig(max_num_seqs=2)


@pytest.fixture
def opened(monkeypatch):
    """Opens a model over ranks that are threads, of which the others find what `there` names in its place."""
    leads = []

    def open_model(arguments: tuple, there: tuple | None = None, tensor_size: int = 2) -> ParallelRunner:
        layout = Layout(tensor_size, 2 // tensor_size)
        own, others = ModelSource.open(*arguments), there or arguments
        opens = ModelSource.open

        def open_there(*given):
            return opens(*others) if given == tuple(arguments) else opens(*given)

        monkeypatch.setattr(driver.ModelSource, "open", open_there)
        leads.append(RankZeroDriver(running(Threads(layout.size), follow)))
        sizes = SIZES.for_model(own.config, 16)
        return ParallelRunner(leads[-1], own, LoadCommand(tuple(arguments), layout, sizes, 1))

    yield open_model
    for lead in leads:
        lead.end()


@pytest.fixture
def five(tmp_path):
    return write_model(tmp_path / "model", **FIELDS)


def changed(folder, name: str, path):
    """A copy of a folder, in one of whose files the last byte is another."""
    path.mkdir()
    for file in folder.iterdir():
        data = bytearray(file.read_bytes())
        if file.name == name:
            data[-1] ^= 1
        (path / file.name).write_bytes(data)
    return path


def test_a_host_with_one_other_weight_is_refused_by_name(opened, five, tmp_path):
    other = changed(five, "model.safetensors", tmp_path / "other")
    said = "rank 1 of 2, on here, has other weights than rank 0: give all hosts the same files"
    with pytest.raises(CheckpointError, match=said):
        opened((str(five),), (str(other),))


def test_a_host_with_another_adapter_is_refused(opened, five, tmp_path):
    adapter = write_lora(tmp_path / "lora", 3, ["c_attn"], has_head=False, **FIELDS)
    other = changed(adapter, "adapter_model.safetensors", tmp_path / "other")
    lora = (str(five), "auto", "cpu", "auto")
    with pytest.raises(CheckpointError, match="has other weights than rank 0"):
        opened((*lora, str(adapter)), (*lora, str(other)))


def test_a_host_whose_converted_weights_are_others_is_refused(opened, five, tmp_path):
    converted = [tmp_path / "a", tmp_path / "b"]
    second = changed(five, "model.safetensors", tmp_path / "second")
    for source, target in zip((five, second), converted, strict=True):
        assert main(["convert", str(source), str(target), "--dtype", "float32"]) == 0
    with pytest.raises(CheckpointError, match="has other weights than rank 0"):
        opened((str(converted[0]),), (str(converted[1]),))


def test_a_host_with_another_model_is_refused(opened, five, tmp_path):
    other = write_model(tmp_path / "other", **{**FIELDS, "n_layer": 3})
    with pytest.raises(CheckpointError, match="rank 1 of 2, on here, has another model than rank 0"):
        opened((str(five),), (str(other),))


def test_the_same_weights_elsewhere_are_the_same(opened, five, tmp_path):
    copy = changed(five, "no file", tmp_path / "copy")
    assert opened((str(five),), (str(copy),)).config
    assert opened(("random:tiny",), tensor_size=1).config


def test_each_rank_is_sent_its_share_of_keys_and_values(opened):
    """Two stages of a layer each: half of both goes to the other."""
    runner = opened(("random:tiny",), tensor_size=1)
    keys, values = (np.arange(2 * 2 * 5 * 32, dtype=np.float32).reshape(2, 2, 5, 32) + i for i in (0, 0.5))
    runner.write_positions(1, 3, keys, values)
    found = runner.read_positions(1, 3, 8)
    np.testing.assert_array_equal(found, (keys, values))
    assert runner._lead.world._threads.num_scattered == keys.size
