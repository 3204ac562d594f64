"""Arguments of the CUDA backend's linear layers, and one of them run in the simulator."""

import math

import numpy as np

from support.cuda_simulator import simulate
from tinygpt.kernels.cuda.layers.epilogue import ADD, LOGITS, QKV, Heads
from tinygpt.kernels.cuda.layers.linear import LINEAR_THREADS, Weights, linear_kernel
from tinygpt.kernels.cuda.packing import STEP, pack, panel_count, step_count
from tinygpt.kernels.host import to_bfloat16


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Activations (n, K) as the kernels of a family keep them, K filled up with zeros; flat."""
    padded = np.zeros((len(values), step_count(values.shape[1]) * STEP), np.float32)
    padded[:, : values.shape[1]] = values
    return (padded if dtype == "float32" else to_bfloat16(padded)).ravel()


def packed(weight: np.ndarray, bias: np.ndarray, dtype: str) -> Weights:
    """weight (L, features, K)."""
    parts = [pack(of_layer, dtype) for of_layer in weight]
    panels, scales = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    _, features, k = weight.shape
    return Weights(panels, scales, bias.ravel(), panel_count(features), step_count(k), features)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def run_linear(target, inputs, weights, layer, width, count, dtype, tiles, epilogue):
    grid = (weights.num_panels, math.ceil(count / (16 * tiles)))
    sizes = np.array([0, count], np.int32)
    kernel = linear_kernel(dtype, tiles, epilogue)
    simulate(kernel, grid, LINEAR_THREADS, target, inputs, weights, layer, width, sizes, 1)


def heads_of(dtype: str, count: int, slots: int, length: int, heads: int, size: int, positions, token_slots) -> Heads:
    padded = -(-size // 32) * 32
    kind = np.float32 if dtype == "float32" else np.uint16
    q, cache = np.zeros(count * heads * padded, kind), 2 * slots * heads * length * padded
    places = np.array(positions, np.int32), np.array(token_slots, np.int32)
    return Heads(q, np.zeros(cache, kind), np.zeros(cache, kind), *places, slots, length, heads, size, padded)


FLOATS, INTS = np.zeros(8, np.float32), np.zeros(8, np.int32)


def sample_arguments(dtype: str, epilogue: str):
    activations = FLOATS if dtype == "float32" else np.zeros(8, np.uint16)
    heads = Heads(activations, activations, activations, INTS, INTS, 1, 1, 1, 1, 1)
    target = {ADD: FLOATS, LOGITS: FLOATS, QKV: heads}.get(epilogue, activations)
    panels = {"float32": FLOATS, "bfloat16": np.zeros(8, np.uint16), "int8": np.zeros(8, np.int8)}[dtype]
    return target, activations, Weights(panels, FLOATS, FLOATS, 1, 1, 1)
