"""A converted checkpoint's file, which is mapped while the model runs, and what others do to it meanwhile."""

import os

import numpy as np
import pytest

from support import tiny_checkpoint
from support.apart import told
from support.kernel_tools import warpers_of
from tinygpt import LLM, SamplingParams
from tinygpt.errors import LostFileError
from tinygpt.kernels.backend import Batch
from tinygpt.weights.checkpoint import PACKED_FILE


def call_after(tell, folder, change):
    """Tell what each call came to after the change. In another process: to touch what was cut off ends it."""
    llm = LLM(folder)
    params = SamplingParams(max_tokens=3, seed=1)
    file = folder / PACKED_FILE
    before = llm.generate([[3]], params)[0].outputs
    if change == "cut":
        os.truncate(file, 100)
    else:
        file.rename(folder / "old")
        file.touch()
    batch = Batch.of([[3]], [0], [0])
    zeros = np.zeros(1, np.uint64)
    warpers = warpers_of(1, temperature=0)
    calls = {
        "generate": lambda: llm.generate([[3]], params)[0].outputs,
        "steps": lambda: llm.engine.runner.multi_step(batch, warpers, zeros, zeros, 2, np.empty(0, np.int32)),
        "submit": lambda: llm.submit([3], params).result().outputs,
        "logits": lambda: llm.logits([3]).shape,
        "hidden_states": lambda: llm.hidden_states([3]).shape,
    }
    said = {}
    for name, call in calls.items():
        try:
            said[name] = str(call() == before)
        except LostFileError as error:
            said[name] = str(error)
    llm.close()
    tell(said)


@pytest.fixture
def folder(tmp_path):
    source = tiny_checkpoint.write_checkpoint(tmp_path / "source", tiny_checkpoint.random_tensors())
    return tiny_checkpoint.convert(source, tmp_path / "int8")


@pytest.mark.skipif(os.name == "nt", reason="Windows lets nobody cut a file that is mapped")
def test_a_file_that_is_cut_short_is_reported_by_every_call(folder):
    (said,) = told(call_after, folder, "cut", patience=100)
    assert len(said) == 5
    for sentence in said.values():
        assert sentence.startswith(f"{folder / PACKED_FILE} was cut short while it was in use: restore it")


@pytest.mark.skipif(os.name == "nt", reason="Windows lets nobody rename a file that is mapped")
def test_a_file_may_be_replaced_by_renaming(folder):
    (said,) = told(call_after, folder, "rename", patience=100)
    assert (said["generate"], said["submit"]) == ("True", "True")
