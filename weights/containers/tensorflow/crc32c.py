"""CRC-32C (Castagnoli), in NumPy: the standard library has CRC-32 alone.

A message is a polynomial over GF(2), its first bit the highest power, and its checksum is the remainder of a division
by P. What is taken from the message in multiples of P changes nothing. So the bulk of it is folded by a multiple of P
of four terms alone, which takes three XORs a word, and the rest by halves, which takes eight looks into a table a word.
"""

import functools

import numpy as np

P = 0x82F63B78  # its bit 31 stands for x^0, as those of all remainders do
ONE = 1 << 31
WORD = 64  # bits
# x^(64 A) + x^(64 B) + x^(64 C) + 1 is a multiple of P; `tests/weights/test_tf_bundle.py` divides it.
A, B, C = 5685, 1362, 426
BLOCK = 10 * A  # words that are folded together: they and the copy of them fit in a cache


def crc32c(data: memoryview) -> int:
    words = np.frombuffer(data, "<u8", len(data) // 8)
    register = _remainder(words) if len(words) else 0xFFFFFFFF
    for byte in data[8 * len(words) :]:
        register = int(_table(32)[register & 0xFF ^ byte]) ^ register >> 8
    return register ^ 0xFFFFFFFF


def _remainder(words: np.ndarray) -> int:
    """The register after the words, which begins with all bits set."""
    begin = np.uint64(0xFFFFFFFF)
    if len(words) > 2 * A:
        words = _folded(words, begin)
    else:
        words = words.copy()
        words[0] ^= begin
    size = 1 << (len(words) - 1).bit_length()
    words = np.concatenate([np.zeros(size - len(words), np.uint64), words])  # powers that the message has not
    while len(words) > 1:
        high, low = np.split(words, 2)
        words = low ^ _times(high, WORD * len(low)).astype(np.uint64) << np.uint64(32)
    return int(_times(words, 32)[0])


def _folded(words: np.ndarray, begin: np.uint64) -> np.ndarray:
    """A words with the same remainder."""
    stop = len(words) - A
    over = np.zeros(A, np.uint64)  # what falls onto the words that come next
    over[0] = begin
    for start in range(0, stop, BLOCK):
        size = min(BLOCK, stop - start)
        block = np.concatenate([words[start : start + size], np.zeros(A, np.uint64)])
        block[:A] ^= over
        for i in range(0, size, A - B):  # as far as a word falls, at the least
            high = block[i : min(i + A - B, size)]
            for distance in (A - B, A - C, A):
                block[i + distance : i + distance + len(high)] ^= high
        over = block[size:]
    return words[stop:] ^ over


def _times(words: np.ndarray, power: int) -> np.ndarray:
    """The remainders of all words times x^power, uint32."""
    result = np.zeros(len(words), np.uint32)
    for place, values in enumerate(words.view(np.uint8).reshape(-1, 8).T):
        result ^= _table(power + 56 - 8 * place)[values]
    return result


@functools.cache
def _table(power: int) -> np.ndarray:
    """The remainder of every byte times x^power, (256,) uint32. A byte's lowest bit is its highest power."""
    table, remainder = np.zeros(1, np.uint32), _power_of_x(power)
    for _ in range(8):  # bits from the byte's highest, which is x^0, down
        table = np.stack([table, table ^ np.uint32(remainder)], axis=1).reshape(-1)
        remainder = _times_x(remainder)
    return table


def _power_of_x(power: int) -> int:
    """The remainder of x^power."""
    result = ONE
    for place in range(power.bit_length()):
        if power >> place & 1:
            result = _product(result, _squared(place))
    return result


@functools.cache
def _squared(times: int) -> int:
    """The remainder of x, squared so many times."""
    return _product(_squared(times - 1), _squared(times - 1)) if times else _times_x(ONE)


def _product(one: int, other: int) -> int:
    result = 0
    while one:
        if one & ONE:
            result ^= other
        one, other = one << 1 & 0xFFFFFFFF, _times_x(other)
    return result


def _times_x(remainder: int) -> int:
    return remainder >> 1 ^ (P if remainder & 1 else 0)
