"""The stand-in for torch.save that tests have without torch, beside torch itself."""

import io

import numpy as np
import pytest

from support.recorded import needs_transformers
from support.tiny_checkpoint import random_tensors
from support.torch_files import own_bytes


@needs_transformers
@pytest.mark.parametrize("is_legacy", [False, True])
def test_torch_reads_what_was_saved_without_it(is_legacy):
    import torch

    state = random_tensors()
    found = torch.load(io.BytesIO(own_bytes({**state, "inside": {"epoch": 3, "a": [1, 2]}}, is_legacy)))
    assert found.pop("inside") == {"epoch": 3, "a": [1, 2]}
    assert found.keys() == state.keys()
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor.numpy(), state[name])
