"""float8: its values and its rounding beside torch's, and checkpoints that are converted to it."""

import struct
from pathlib import Path

import numpy as np
import pytest

from support import tiny_checkpoint
from support.kernel_tools import same_bits
from support.recorded import HAS_TRANSFORMERS, needs_transformers
from tinygpt import LLM
from tinygpt.cli import main as cli
from tinygpt.errors import CheckpointError
from tinygpt.weights.containers.safetensors import LARGEST, VALUES, encode
from tinygpt.weights.open import open_checkpoint

if HAS_TRANSFORMERS:
    import torch
    from safetensors.torch import load_file

MATRICES = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


@pytest.fixture
def source(tmp_path) -> Path:
    return tiny_checkpoint.write_checkpoint(tmp_path / "source")


@pytest.fixture
def target(source, tmp_path) -> Path:
    assert cli.main(["convert", str(source), str(tmp_path / "float8"), "--dtype", "float8"]) == 0
    return tmp_path / "float8"


# The format.


@needs_transformers
def test_every_byte_is_what_torch_reads():
    bytes_ = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(VALUES, bytes_.view(torch.float8_e4m3fn).float().numpy())


@needs_transformers
def test_encoding_rounds_as_torch_does_ties_included():
    values = VALUES[:127].astype(np.float64)
    between = (values[:-1] + values[1:]) / 2
    sizes = np.concatenate([values, between, between * (1 - 1e-6), between * (1 + 1e-6), [0, LARGEST]])
    x = np.concatenate([sizes, -sizes]).astype(np.float32)[None]  # the largest is LARGEST: the scale is 1
    codes, scales = encode(x, axis=1)
    assert scales.tolist() == [[1.0]]
    np.testing.assert_array_equal(codes, torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy())


# Checkpoints.


@needs_transformers
def test_the_file_is_read_by_others(source, target):
    mine, before = load_file(target / "model.safetensors"), load_file(source / "model.safetensors")
    for name in MATRICES:
        codes, scales = mine[f"h.1.{name}"], mine[f"h.1.{name}_scale"]
        assert (codes.dtype, scales.dtype, scales.shape) == (torch.float8_e4m3fn, torch.float32, (1, codes.shape[1]))
        exact = before[f"transformer.h.1.{name}"]
        assert ((codes.float() * scales - exact).abs() <= exact.abs() / 16 + scales * 2.0**-10).all()
    assert mine["wte.weight_scale"].shape == (tiny_checkpoint.V, 1)
    assert torch.equal(mine["wpe.weight"], before["transformer.wpe.weight"])


def test_it_computes_what_bfloat16_makes_of_the_same_weights(target, tmp_path):
    tensors = tiny_checkpoint.gpt2_arrays(open_checkpoint(target))
    plain = tiny_checkpoint.write_checkpoint(tmp_path / "plain", tensors)
    with LLM(str(target), max_num_seqs=1) as float8, LLM(str(plain), "bfloat16", max_num_seqs=1) as bfloat16:
        assert (float8.dtype, bfloat16.dtype) == ("bfloat16", "bfloat16")
        same_bits(float8.logits([3, 1, 4, 1]), bfloat16.logits([3, 1, 4, 1]))


def test_a_tensor_without_its_scales_is_refused(target):
    file = target / "model.safetensors"
    data = file.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = data[8 : 8 + size].replace(b"h.0.mlp.c_fc.weight_scale", b"h.0.mlp.c_fc.weight_other")
    file.write_bytes(data[:8] + header + data[8 + size :])
    with pytest.raises(CheckpointError, match=r"holds h\.0\.mlp\.c_fc\.weight as float8 without its scales: convert"):
        open_checkpoint(target)
