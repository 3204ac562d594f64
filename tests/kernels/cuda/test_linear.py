"""CUDA's linear layers, layer norm and embedding: the reference's results."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from support.cuda_device import normal, packed, run_linear, stored
from support.examples import daily
from support.ptx_machine import simulate
from tinygpt.kernels.cuda.layers.epilogue import ADD, LOGITS
from tinygpt.kernels.cuda.layers.linear import (
    LINEAR_THREADS,
    Norm,
    fused_shared_bytes,
    normed_linear_kernel,
)
from tinygpt.kernels.cuda.layers.rows import EMBED_THREADS, NORM_WARPS, embed_kernel, layer_norm_kernel
from tinygpt.kernels.cuda.params import DTYPES as ROWS
from tinygpt.kernels.cuda.params import STEP, pack, step_count
from tinygpt.kernels.reference import model as reference

pytestmark = pytest.mark.usefixtures("compute_capability")

DTYPES = tuple(ROWS)
ALL_BUT_FLOAT16 = [dtype for dtype in DTYPES if dtype != "float16"]  # float16 has bfloat16's kernels
TOLERANCE = 2e-6  # of a sum of about 1, added in float32


def seen(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return values as the kernels read them."""
    numbers = ROWS[dtype].numbers
    return numbers.decode(numbers.encode(values))


def seen_weights(weight: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "int8":
        scales = np.abs(weight).max(-1, keepdims=True) / np.float32(127)
        return np.rint(weight / scales) * scales
    return seen(weight, dtype)


SHAPES = [(1, 3, 40, 1), (3, 17, 200, 1), (19, 8, 648, 2), (9, 8, 4000, 1), (33, 9, 3000, 4)]


CASES = [*((ADD, *shape) for shape in SHAPES), (LOGITS, 2, 13, 70, 1)]
LINEAR = [(*case, dtype) for dtype in DTYPES for case in CASES]
DAILY = [case for case in LINEAR if case[-1] != "float16"] + [(*case, "float16") for case in CASES[:2]]


@pytest.mark.parametrize(("epilogue", "count", "features", "k", "octets", "dtype"), daily(LINEAR, DAILY))
def test_linear(epilogue, count, features, k, octets, dtype):
    """A sum is added to the residual stream, with its bias, or becomes a logit, without."""
    x = normal(count, k)
    weight = normal(2, features, k) / np.float32(math.sqrt(k))
    bias = normal(2, features)
    target = normal(count, features + 2, seed=1)
    expected = target.astype(np.float64)
    product = seen(x, dtype) @ seen_weights(weight[1], dtype).T.astype(np.float64)
    expected[:, :features] = product if epilogue == LOGITS else expected[:, :features] + product + bias[1]
    out = target.ravel().copy()
    arguments = 1, features + 2, count, dtype, octets, epilogue
    run_linear(out, stored(x, dtype), packed(weight, bias, dtype), *arguments)
    np.testing.assert_allclose(out.reshape(expected.shape), expected, atol=TOLERANCE, rtol=0)


ACTIVATIONS = [(name, dtype) for name in reference.ACTIVATIONS for dtype in ("float32", "bfloat16")]
DAILY_ACTIVATIONS = [(name, "float32") for name in reference.ACTIVATIONS] + [("gelu_tanh", "bfloat16")]


@pytest.mark.parametrize(("activation", "dtype"), daily(ACTIVATIONS, DAILY_ACTIVATIONS))
def test_activations(activation, dtype):
    tolerance = {"float32": 3e-6, "bfloat16": 2**-8}[dtype]
    x = normal(2, 64)
    weight = normal(1, 16, 64)
    bias = 9 * normal(1, 16)
    bias[0, 5] = np.nan  # stays NaN
    out = stored(np.zeros((2, 64), np.float32), dtype)
    run_linear(out, stored(x, dtype), packed(weight, bias, dtype), 0, 64, 2, dtype, 1, activation)
    product = seen(x, dtype) @ seen_weights(weight[0], dtype).T.astype(np.float64) + bias[0]
    expected = reference.ACTIVATIONS[activation](product)
    result = ROWS[dtype].numbers.decode(out).reshape(2, 64)[:, :16]
    np.testing.assert_allclose(result, expected, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("dtype", daily(DTYPES, ALL_BUT_FLOAT16))
def test_a_token_has_the_same_bits_in_any_batch(dtype):
    x = normal(33, 200)
    weight = normal(1, 8, 200)
    bias = normal(1, 8)
    weights = packed(weight, bias, dtype)
    results = []
    for octets, tokens in ((1, [32]), (1, list(range(33))), (2, list(range(33))), (4, [4, 32])):
        out = np.zeros(len(tokens) * 8, np.float32)
        run_linear(out, stored(x[tokens], dtype), weights, 0, 8, len(tokens), dtype, octets, ADD)
        results.append(out.reshape(-1, 8)[tokens.index(32)])
    assert all((result == results[0]).all() for result in results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [0xFFFFFFFF, 0x7FFFFFFF, 0x7F800001])
def test_a_weight_of_nan_spoils_its_feature_and_its_token_alone(dtype, bits):
    weight = normal(1, 3, 40)
    weight.view(np.uint32)[0, 1, 7] = bits
    weights = packed(weight, np.zeros(0, np.float32), dtype)
    logits = np.zeros(3, np.float32)
    run_linear(logits, stored(normal(1, 40), dtype), weights, 0, 3, 1, dtype, 1, LOGITS)
    assert np.isnan(logits).tolist() == [False, True, False]
    embedded = np.zeros((3, 40), np.float32)
    tokens = np.arange(3, dtype=np.int32), np.zeros(3, np.int32), np.zeros(40, np.float32)
    positions = np.zeros(40, np.float32), 40, 1, np.array([3], np.int32)
    tables = weights.panels, weights.scales, np.float32(1), *positions
    kernel = embed_kernel(dtype, "float32", True, True)
    simulate(kernel, 3, EMBED_THREADS, embedded.ravel(), 40, *tokens, *tables)
    assert np.isnan(embedded).any(1).tolist() == [False, True, False]


NORMS = [(dtype, columns) for dtype in DTYPES for columns in (70, 96, 192)]
DAILY_NORMS = [case for case in NORMS if case[1] == 70 or case == ("float32", 192)]


@pytest.mark.parametrize(("dtype", "columns"), daily(NORMS, DAILY_NORMS))
def test_layer_norm(dtype, columns):
    x = 3 * normal(9, columns) + 1
    weight = normal(2, columns)
    bias = normal(2, columns)
    rows = np.array([8, 0, 5, 5, 2], np.int32)
    layer = 1
    padded = step_count(columns) * STEP
    normed = stored(np.zeros((6, columns), np.float32), dtype)
    arguments = x.ravel(), rows, weight.ravel(), bias.ravel(), layer, padded, np.float32(1e-5)
    sizes = np.array([9, 5], np.int32)
    simulate(
        layer_norm_kernel(dtype, columns), -(-6 // NORM_WARPS), NORM_WARPS * 32, normed, *arguments, sizes, 1
    )
    names = {"ln.weight": weight[layer], "ln.bias": bias[layer]}
    params = reference.Params(SimpleNamespace(layer_norm_epsilon=1e-5), names)
    expected = reference.layer_norm(params, "ln", x[rows].astype(np.float64))
    result = ROWS[dtype].numbers.decode(normed).reshape(6, padded)
    np.testing.assert_allclose(
        result[:5, :columns], expected, rtol=2**-8 if dtype != "float32" else 2e-6, atol=2e-6
    )
    assert not result[5].any()
    assert not result[:, columns:].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(("count", "columns"), [(1, 320), (7, 192)])
def test_the_fused_layer_norm_gives_the_same_bits(dtype, count, columns):
    layer = 1
    x = 2 * normal(9, columns)
    norm_weight = normal(2, columns)
    norm_bias = normal(2, columns)
    weights = packed(normal(2, 19, columns), normal(2, 19), dtype)
    rows = np.array([3, 8, 0, 1, 7, 2, 4][:count], np.int32)
    sizes = np.array([count], np.int32)
    normed = stored(np.zeros((count, columns), np.float32), dtype)
    arguments = x.ravel(), rows, norm_weight.ravel(), norm_bias.ravel()
    padded = weights.num_steps * STEP
    norm_arguments = (*arguments, layer, padded, np.float32(1e-5), sizes, 0)
    simulate(layer_norm_kernel(dtype, columns), 2, NORM_WARPS * 32, normed, *norm_arguments)
    apart = np.ones(count * 19, np.float32)
    fused = np.ones(count * 19, np.float32)
    run_linear(apart, normed, weights, layer, 19, count, dtype, 1, ADD)
    norm = Norm(*arguments, np.float32(1e-5))
    kernel = normed_linear_kernel(dtype, columns, ADD)
    shared = fused_shared_bytes(columns)
    grid = weights.num_panels
    simulate(kernel, grid, LINEAR_THREADS, fused, norm, weights, layer, 19, sizes, 0, shared_bytes=shared)
    assert (apart == fused).all()
    assert (apart != 1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(dtype):
    wte = normal(21, 70)
    wpe = normal(5, 70)
    embeds = normal(2, 70)
    panels, scales = pack(wte, dtype)
    token_ids = np.array([20, 3, -2, 0], np.int32)
    positions = np.array([4, 0, 1, 2], np.int32)
    x = np.full(4 * 70, np.nan, np.float32)
    sizes = np.array([3], np.int32)
    tables = panels, scales, np.float32(1), wpe.ravel(), 70, step_count(70), sizes
    kernel = embed_kernel(dtype, "float32", True, True)
    simulate(kernel, 4, EMBED_THREADS, x, 70, token_ids, positions, embeds.ravel(), *tables)
    expected = (
        np.stack([seen_weights(wte, dtype)[20], seen_weights(wte, dtype)[3], embeds[1]]) + wpe[[4, 0, 1]]
    )
    np.testing.assert_allclose(x.reshape(4, 70)[:3], expected, rtol=1e-6, atol=1e-6)
    assert np.isnan(x.reshape(4, 70)[3]).all()  # past sizes[0]
