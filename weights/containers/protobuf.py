"""Protocol buffers' wire format, read field by field where it lies; what the fields mean is for others to know.

Format: https://protobuf.dev/programming-guides/encoding
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MAX_VARINT = 10  # bytes
_FIXED = {FIXED64: 8, FIXED32: 4}


@dataclass(frozen=True, slots=True)
class Message:
    """A part of a buffer: a message, a text, packed numbers or plain bytes. Copied where it is asked for alone."""

    buffer: memoryview
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def bytes(self) -> bytes:
        return bytes(self.buffer[self.start : self.stop])

    def text(self) -> str:
        return str(self.bytes(), "utf-8")

    def fields(self) -> Iterator[tuple[int, "int | Message"]]:
        """Number and value of each: an unsigned number, or a Message. ValueError where it is no message."""
        place = self.start
        while place < self.stop:
            key, place = read_varint(self.buffer, place, self.stop)
            number, wire = key >> 3, key & 7
            if wire == VARINT:
                value, place = read_varint(self.buffer, place, self.stop)
            else:
                size = _FIXED.get(wire, -1)
                if wire == BYTES:
                    size, place = read_varint(self.buffer, place, self.stop)
                if not 0 <= size <= self.stop - place:
                    raise ValueError(f"field {number} of wire type {wire} has no end")
                value = Message(self.buffer, place, place + size)
                place += size
                if wire != BYTES:
                    value = int.from_bytes(value.bytes(), "little")
            yield number, value

    def varints(self) -> list[int]:
        """Packed numbers."""
        place, numbers = self.start, []
        while place < self.stop:
            number, place = read_varint(self.buffer, place, self.stop)
            numbers.append(number)
        return numbers

    def varint_array(self) -> np.ndarray:
        """Packed numbers, of which there may be very many, as uint64s."""
        data = np.frombuffer(self.buffer[self.start : self.stop], np.uint8)
        ends = np.flatnonzero(data < 0x80)
        if len(data) and (not len(ends) or ends[-1] != len(data) - 1):
            raise ValueError("a number has no end")
        lengths = np.diff(ends, prepend=-1)
        if (lengths > MAX_VARINT).any():
            raise ValueError("a number has no end")
        numbers = np.zeros(len(ends), np.uint64)
        for byte in range(lengths.max(initial=0)):
            (longer,) = np.nonzero(lengths > byte)
            digits = data[ends[longer] - lengths[longer] + 1 + byte] & 0x7F
            numbers[longer] |= digits.astype(np.uint64) << np.uint64(7 * byte)
        return numbers


def read_varint(buffer: memoryview, place: int, stop: int) -> tuple[int, int]:
    """A number, 7 bits a byte, the low ones first; and where it ends. ValueError if that is not before `stop`."""
    number = 0
    for shift in range(0, 7 * MAX_VARINT, 7):
        if place >= stop:
            break
        byte = buffer[place]
        number, place = number | (byte & 0x7F) << shift, place + 1
        if byte < 0x80:
            return number, place
    raise ValueError("a number has no end")


def numbers_of(value: int | Message) -> list[int]:
    """Of a repeated field, one of its numbers or many, packed."""
    return [value] if isinstance(value, int) else value.varints()


def message(value: int | Message) -> Message:
    """ValueError for a number where a message belongs."""
    if isinstance(value, int):
        raise ValueError("a number stands where a message belongs")
    return value


def number(value: int | Message) -> int:
    """ValueError for a message where a number belongs."""
    if not isinstance(value, int):
        raise ValueError("a message stands where a number belongs")
    return value
