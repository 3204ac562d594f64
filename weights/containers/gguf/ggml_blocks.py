"""ggml's block formats: rows cut into blocks of 32 or 256 values, each with a scale of its own.

Layouts are those of ggml's `ggml-common.h`. A block is a row of bytes here; what is decoded and encoded are (N, bytes)
uint8 and (N, values) float32 arrays.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class BlockFormat:
    """`id` is ggml's number of the type. encode: None for a format that is only read."""

    id: int
    values: int
    bytes: int
    decode: Callable[[Array], Array]
    encode: Callable[[Array], Array] | None = None


def _half(blocks: Array, start: int) -> Array:
    """The float16 at byte `start` of every block: (N, 1) float32."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Array) -> Array:
    """All low halves of the bytes, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(blocks: Array) -> Array:
    """Bit j of the little-endian word of every block, as 16 for value j: (N, 32)."""
    bits = np.unpackbits(blocks, axis=1, bitorder="little")
    return bits << 4


def _decode_q8_0(blocks: Array) -> Array:
    values = blocks[:, 2:].view(np.int8).astype(np.float32)
    values *= _half(blocks, 0)
    return values


def _decode_q4_0(blocks: Array) -> Array:
    return (_nibbles(blocks[:, 2:]).astype(np.float32) - 8) * _half(blocks, 0)


def _decode_q4_1(blocks: Array) -> Array:
    return _nibbles(blocks[:, 4:]) * _half(blocks, 0) + _half(blocks, 2)


def _decode_q5_0(blocks: Array) -> Array:
    values = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return (values.astype(np.float32) - 16) * _half(blocks, 0)


def _decode_q5_1(blocks: Array) -> Array:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return values * _half(blocks, 0) + _half(blocks, 2)


def _scales_and_minima(packed: Array) -> tuple[Array, Array]:
    """Of the 8 sub-blocks, 6 bits each, from their 12 bytes: (N, 8, 1) both."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6) << 4], axis=1)
    return scales[:, :, None], minima[:, :, None]


def _with_minima(blocks: Array, values: Array) -> Array:
    """What 8 sub-blocks of 32 values (N, 8, 32) stand for, in the formats that have a minimum for each."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    d, dmin = _half(blocks, 0)[:, :, None], _half(blocks, 2)[:, :, None]
    return ((d * scales) * values - dmin * minima).reshape(len(blocks), 256)


def _decode_q4_k(blocks: Array) -> Array:
    return _with_minima(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _decode_q5_k(blocks: Array) -> Array:
    values = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return _with_minima(blocks, values | fifth << 4)


def _decode_q6_k(blocks: Array) -> Array:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    values = (low | high << 4).astype(np.float32).reshape(-1, 16, 16) - 32
    scales = blocks[:, 192:208].view(np.int8)[:, :, None]
    return (_half(blocks, 208)[:, :, None] * scales * values).reshape(len(blocks), 256)


def _encode_q8_0(values: Array) -> Array:
    """ggml's own rounding: the inverse is that of the float32 scale, halves away from zero."""
    scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    scaled = values * _inverse(scale)
    rounded = np.sign(scaled) * np.floor(np.abs(scaled) + np.float32(0.5))
    return _joined(scale, rounded.astype(np.int8).view(np.uint8))


def _encode_q4_0(values: Array) -> Array:
    """The value of the largest size becomes -8."""
    largest = np.take_along_axis(values, np.abs(values).argmax(axis=1)[:, None], axis=1)
    scale = largest / np.float32(-8)
    rounded = np.trunc(values * _inverse(scale) + np.float32(8.5)).clip(0, 15).astype(np.uint8)
    return _joined(scale, rounded[:, :16] | rounded[:, 16:] << 4)


def _inverse(scale: Array) -> Array:
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _joined(scale: Array, quants: Array) -> Array:
    return np.concatenate([scale.astype(np.float16).view(np.uint8), quants], axis=1)


BLOCKS = {
    "Q4_0": BlockFormat(2, 32, 18, _decode_q4_0, _encode_q4_0),
    "Q4_1": BlockFormat(3, 32, 20, _decode_q4_1),
    "Q5_0": BlockFormat(6, 32, 22, _decode_q5_0),
    "Q5_1": BlockFormat(7, 32, 24, _decode_q5_1),
    "Q8_0": BlockFormat(8, 32, 34, _decode_q8_0, _encode_q8_0),
    "Q4_K": BlockFormat(12, 256, 144, _decode_q4_k),
    "Q5_K": BlockFormat(13, 256, 176, _decode_q5_k),
    "Q6_K": BlockFormat(14, 256, 210, _decode_q6_k),
}
# By ggml's numbers.
NOT_IMPLEMENTED = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
