"""Whole numbers that order as float32 do, for maxima and for a search by digits."""

import math

from tinygpt.kernels.cuda.runtime.jit import device_function
from tinygpt.kernels.cuda.runtime.ptx import bits_to_float32, float32_to_bits

from numba import float32, int64, uint32  # isort: skip

SIGN, ALL_ONES = 0x80000000, 0xFFFFFFFF
KEY_OF_MINUS_INFINITY, KEY_OF_REFUSED = 0x007FFFFF, ALL_ONES
ID_BITS = 31
ALL_IDS = (1 << ID_BITS) - 1


@device_function
def key_of(value):
    """A uint32 that orders as the float32 `value` does, both zeros alike."""
    bits = uint32(0) if value == float32(0) else float32_to_bits(value)
    return uint32(bits ^ uint32(ALL_ONES)) if bits >= uint32(SIGN) else uint32(bits ^ uint32(SIGN))


@device_function
def value_of(key):
    """The float32 that `key_of` turns into this key."""
    return bits_to_float32(uint32(key ^ uint32(SIGN)) if key >= uint32(SIGN) else uint32(key ^ uint32(ALL_ONES)))


@device_function
def greatest_key(value, token_id):
    """An int64, 0 or more, that is greater for greater values and for lower ids; greatest for NaN and +inf."""
    key = key_of(value) if value < float32(math.inf) else uint32(KEY_OF_REFUSED)
    return int64(key) << int64(ID_BITS) | int64(ALL_IDS - token_id)


@device_function
def token_of(key):
    """The id in a `greatest_key`; -1 if its value is NaN or an infinity."""
    value_key = key >> int64(ID_BITS)
    if value_key <= int64(KEY_OF_MINUS_INFINITY) or value_key == int64(KEY_OF_REFUSED):
        return int64(-1)
    return int64(ALL_IDS) - (key & int64(ALL_IDS))
