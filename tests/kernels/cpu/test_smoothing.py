"""What evens out channels before they are quantized: sizes told from weights, factors, and corrected biases."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from support.golden_models import write_model
from support.kernel_tools import packed, random_values, unpacked
from tinygpt.kernels import cpu, reference
from tinygpt.kernels.cpu.dtypes import DTYPES, unpack
from tinygpt.kernels.cpu.load import BITS, Smoothing, bias_correction, rounded, smoothing_factors
from tinygpt.kernels.reference.layers import ACTIVATIONS, layer_norm
from tinygpt.weights.checkpoint import open_random
from tinygpt.weights.config import ModelConfig
from tinygpt.weights.open import open_checkpoint

SPELLED = {"gelu_tanh": "gelu_new"}  # in config.json


class Tensors:
    """A checkpoint of one layer, C = 24 and F = 70."""

    def __init__(self, activation: str = "gelu_tanh"):
        sizes = {"n_embd": 24, "n_inner": 70, "n_layer": 1, "n_head": 2}
        self.config = ModelConfig(**sizes, activation_function=SPELLED.get(activation, activation))
        generator = np.random.default_rng(1)
        shapes = {"attn.c_attn": (72, 24), "mlp.c_fc": (70, 24), "ln_1": (24,), "ln_2": (24,)}
        self.tensors, self.released = {}, []
        for name, shape in shapes.items():
            self.tensors[f"h.0.{name}.weight"] = generator.standard_normal(shape, np.float32) / 3
            self.tensors[f"h.0.{name}.bias"] = generator.standard_normal(shape[0], np.float32)

    def tensor(self, name: str) -> np.ndarray:
        return self.tensors[name]

    def release(self, name: str) -> None:
        self.released.append(name)

    def inputs(self, norm: str) -> np.ndarray:
        """What leaves a layer norm where channels are normal and independent: (draws, 24)."""
        z = np.random.default_rng(2).standard_normal((50_000, 24), np.float32)
        return z * self.tensors[f"h.0.{norm}.weight"] + self.tensors[f"h.0.{norm}.bias"]


def root_mean_square(x: np.ndarray) -> np.ndarray:
    return np.sqrt((x.astype(float) ** 2).mean(axis=0))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_sizes_of_activations_are_told_by_the_weights(activation):
    model = Tensors(activation)
    inner = model.inputs("ln_2") @ model.tensor("h.0.mlp.c_fc.weight").T + model.tensor("h.0.mlp.c_fc.bias")
    expected = root_mean_square(ACTIVATIONS[activation](inner))
    sizes = Smoothing(model, "int8")._inner_sizes(0)
    np.testing.assert_allclose(sizes, expected, rtol=0.03, atol=0.01)


def test_sizes_of_values_are_told_by_the_weights():
    model = Tensors()
    qkv = model.inputs("ln_1") @ model.tensor("h.0.attn.c_attn.weight").T + model.tensor(
        "h.0.attn.c_attn.bias"
    )
    np.testing.assert_allclose(
        Smoothing(model, "int8")._value_sizes(0), root_mean_square(qkv[:, 48:]), rtol=0.02
    )
    # Else a checkpoint is in memory whole while it is packed.
    assert model.released == ["h.0.attn.c_attn.weight"]


def test_a_channel_of_the_inputs_takes_its_share_of_the_size():
    weight = random_values(50, 35)
    sizes = np.ones(35, np.float32)
    weight[:, 12] = weight[:, 13]
    sizes[12] = 16
    for share, ratio in ((0.0, 1), (0.5, 4), (1.0, 16)):
        factors = smoothing_factors(weight, sizes, share)
        assert factors[12] / factors[13] == pytest.approx(ratio, rel=2.0**-BITS * 2)


def test_a_row_that_is_large_as_a_whole_changes_no_factor():
    """Values x 30 are large rows of c_attn, each with scales of its own."""
    weight = random_values(50, 35)
    sizes = np.abs(random_values(35, seed=1)) + 1
    before = smoothing_factors(weight, sizes, 0.5)
    weight[7] *= 32
    np.testing.assert_array_equal(smoothing_factors(weight, sizes, 0.5), before)


def test_factors_have_few_bits():
    factors = smoothing_factors(random_values(50, 35), np.abs(random_values(35, seed=1)), 0.5)
    digits, _ = np.frexp(factors)
    assert (digits * 2**BITS == np.rint(digits * 2**BITS)).all()
    assert rounded(np.array([1 + 2.0**-BITS * 0.9]))[0] == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_smoothed_that_is_not_quantized(dtype):
    checkpoint = open_random("random:tiny")
    weight = checkpoint.tensor("h.0.mlp.c_proj.weight")
    assert (Smoothing(checkpoint, dtype).factors("mlp_proj", 0, weight) == 1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(5, 35), (130, 97)])
def test_unpack_is_what_the_arrays_stand_for(dtype, n, k):
    record = packed(random_values(n, k), dtype)
    found = unpack(dtype, tuple(array[0] for array in record), n, k)
    np.testing.assert_allclose(found, unpacked(record, dtype)[:n, :k], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_the_mean_comes_out_exactly(dtype):
    weight = random_values(50, 97)
    factors = np.abs(random_values(97, seed=1)) + 1
    means = random_values(97, seed=2)
    record = packed(weight, dtype, factors=factors)
    back = unpack(dtype, tuple(array[0] for array in record), 50, 97)
    exact = weight.astype(float) @ means
    quantized = back.astype(float) @ (means / factors)
    assert np.abs(quantized - exact).max() > 0.1
    np.testing.assert_allclose(quantized + bias_correction(weight, factors, back, means), exact, atol=2e-3)


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_last_hidden_state_is_free_of_smoothing(tmp_path, is_tied):
    """Three channels of ln_f are far above the rest, which the head's factors even out."""
    folder = write_model(tmp_path, n_embd=48, tie_word_embeddings=is_tied)
    tensors = load_file(folder / "model.safetensors")
    for part in ("weight", "bias"):
        tensors[f"transformer.ln_f.{part}"][3::16] *= 30
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    params = cpu.load_params(checkpoint, "int8", 1)
    x = np.random.default_rng(0).standard_normal((4, 48))
    assert np.ptp(params.head_factors) > 0.5  # there is something to undo
    expected = layer_norm(reference.load_params(checkpoint), "ln_f", x)
    np.testing.assert_allclose(cpu.final_norm(params, x.astype(np.float32)), expected, rtol=1e-4, atol=1e-4)
