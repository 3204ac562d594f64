"""Epilogues of linear layers: a sum becomes a part of q, k, v or x, a logit, or an activation."""

import functools
import math
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint32, uint64

from ..jit import device_function, load_fresh
from ..params import DTYPES, FLOAT32, OUT_TILE, Numbers

# epilogues, next to the names of activations
ADD = "add"
LOGITS = "logits"
QKV = "qkv"
QKV_ROWS = "qkv rows"  # as PLAIN, for an int8 cache
PLAIN = "plain"
FLOATS = "floats"  # as PLAIN, in float32


class Heads(NamedTuple):
    """The target of c_attn. attention.py has the layouts."""

    q: Any
    k_cache: Any
    v_cache: Any
    positions: Any  # (N,) int32
    token_slots: Any  # (N,) int32
    num_slots: int
    padded_len: int
    num_heads: int
    head_size: int
    padded_head: int


class Epilogue(NamedTuple):
    """The steps of an epilogue: put(..., read(...) + finish(...), ...)."""

    locate: Any  # (target, weights, layer, feature): place, which depends on the feature alone
    find: Any  # (target, layer, width, token, place): the sum's index in the target
    finish: Any  # (value, place): the sum, scaled, biased and activated
    read: Any  # (target, at): the number before
    put: Any  # (target, at, value, place)


@functools.cache
def epilogue_of(dtype: str, epilogue: str) -> Epilogue:
    numbers = DTYPES[dtype].numbers
    if epilogue == QKV:
        return _in_heads(numbers)
    if epilogue in (ADD, LOGITS, FLOATS, PLAIN, QKV_ROWS):
        locate = _locate_logit if epilogue == LOGITS else _locate
        read = _read if epilogue == ADD else _nothing
        put = _put_function(numbers if epilogue in (PLAIN, QKV_ROWS) else FLOAT32)
        return Epilogue(locate, _find, _biased, read, put)
    activation = ACTIVATIONS[epilogue]

    @device_function
    def activated(value, place):
        return activation(_biased(value, place))

    return Epilogue(_locate, _find, activated, _nothing, _put_function(numbers))


@device_function
def _locate(target, weights, layer, feature):
    """Return (scale, bias, part, offset): a token has this feature at `offset` of array `part`."""
    bias = weights.bias[uint32(layer * weights.features + feature)]
    return _scale(weights, layer, feature), bias, 0, feature


@device_function
def _locate_logit(target, weights, layer, feature):
    return _scale(weights, layer, feature), float32(0), 0, feature


@device_function
def _scale(weights, layer, feature):
    return weights.scales[uint32(layer * weights.num_panels * OUT_TILE + feature)]


@device_function
def _biased(value, place):
    return cuda.fma(value, place[0], place[1])  # rounded once, in every kernel


@device_function
def _find(target, layer, width, token, place):
    return token * width + place[3]


@device_function
def _nothing(target, at):
    return float32(-0.0)  # -0 + x is x, also if x is -0


@device_function
def _read(target, at):
    return load_fresh(target, at)


@functools.cache
def _put_function(numbers: Numbers):
    store = numbers.store

    def put(target, at, value, place):
        store(target, uint64(at), value)  # a signed index costs three instructions more

    return device_function(put)


def _in_heads(numbers: Numbers) -> Epilogue:
    IS_PAIRED = numbers.has_mma  # values of two positions are interleaved
    put_number = _put_function(numbers)

    @device_function
    def locate(heads, weights, layer, feature):
        scale, bias, _, _ = _locate(heads, weights, layer, feature)
        columns = uint32(heads.num_heads * heads.head_size)
        part = int32(uint32(feature) // columns)
        c = uint32(uint32(feature) - uint32(part) * columns)
        head = int32(c // uint32(heads.head_size))
        d = int32(c) - head * heads.head_size
        if part == 0:
            return scale, bias, part, head * heads.padded_head + d
        if part == 2 and IS_PAIRED:
            d *= 2
        return scale, bias, part, head * heads.padded_len * heads.padded_head + d

    @device_function
    def find(heads, layer, width, token, place):
        part, offset = place[2], place[3]
        if part == 0:
            return int64(token) * (heads.num_heads * heads.padded_head) + offset
        position = heads.positions[uint32(token)]
        slot = layer * heads.num_slots + heads.token_slots[uint32(token)]
        start = slot * (heads.num_heads * heads.padded_len * heads.padded_head)
        at = start + position * heads.padded_head + offset
        if part == 2 and IS_PAIRED:
            at += int32(position & 1) * (1 - heads.padded_head)
        return at

    @device_function
    def put(heads, at, value, place):
        if place[2] == 0:
            put_number(heads.q, at, value, place)
        elif place[2] == 1:
            put_number(heads.k_cache, at, value, place)
        else:
            put_number(heads.v_cache, at, value, place)

    return Epilogue(locate, find, _biased, _nothing, put)


@device_function
def _sigmoid(x):
    """Return 1 / (1 + exp(-x)) without overflow."""
    small = math.exp(-abs(x))
    return (float32(1) if x >= float32(0) else small) / (float32(1) + small)


@device_function
def gelu_tanh(x):
    """Return 0.5 x (1 + tanh(y)), as x times the sigmoid of 2 y."""
    return x * _sigmoid(float32(1.5957691216057308) * (x + float32(0.044715) * x * x * x))


@device_function
def gelu(x):
    return float32(0.5) * x * (float32(1) + math.erf(x * float32(0.7071067811865476)))


@device_function
def quick_gelu(x):
    return x * _sigmoid(float32(1.702) * x)


@device_function
def silu(x):
    return x * _sigmoid(x)


@device_function
def relu(x):
    return x if x > float32(0) or x != x else float32(0)


@device_function
def tanh(x):
    return math.tanh(x)


ACTIVATIONS = {
    "gelu_tanh": gelu_tanh,
    "gelu": gelu,
    "quick_gelu": quick_gelu,
    "relu": relu,
    "silu": silu,
    "tanh": tanh,
}
