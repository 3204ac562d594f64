"""The innermost step of a tile: 4 bytes of a row of A, in every lane, times a vector of B, added to a sum.

B            B is taken as        4 bytes of A are     a step adds, in each of 16 lanes
float32      it lies              1 float32            a product, fused
float16      float32              1 float32            a product, fused
bfloat16     it lies              2 bfloat16           two products, in float32                      VDPBF16PS
             float32, two steps   1 float32            a product, fused                              WIDENED
int8         it lies              4 int8               four products, in int32                       VPDPBUSD
             int16, two steps     2 int16              two products, in int32                        VPMADDWD
int4         uint8, two steps     4 int8               as VPDPBUSD, or two products in int16        VPMADDUBSW
             int16, four steps    2 int16              two products, in int32                        VPMADDWD
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from llvmlite import ir

from .targets import SDOT, TARGET, USMMLA, VDPBF16PS, VPDPBUSD, VPMADDUBSW, VPMADDWD
from .vector_ir import (
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    INTS,
    LANES,
    PANEL_VECTORS,
    SCALE_GROUP,
    VECTOR_BYTES,
    WEIGHT_GROUP,
    declare,
    emits,
    multiply_add,
    shuffle,
    splat,
)

EIGHTS = ir.VectorType(I8, 4 * LANES)
SIXTEENS = ir.VectorType(I16, 2 * LANES)
BITS = 8 * TARGET.vector_bytes


class BFloat(ir.types.Type):
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self):
        return "bfloat"

    __str__ = _to_string

    def __eq__(self, other):
        return isinstance(other, BFloat)

    def __hash__(self):
        return hash("bfloat")


class StepHalf(NamedTuple):
    a_offset: int  # of its 4 bytes in the step's bytes of A
    take: Callable  # (builder, vector of B) -> factor
    multiply: Callable  # (builder, a, b, sum) -> sum


class Step(NamedTuple):
    lane_bytes: int  # of B, in a column
    halves: tuple[StepHalf, ...]
    element: ir.Type = F32  # of B, if a lane is a float: narrower ones are widened

    def vector(self, lanes: int) -> ir.VectorType:
        """Return the type of a vector of B as it is loaded."""
        return ir.VectorType(ir.IntType(8 * self.lane_bytes), lanes)


def _as_it_lies(builder, vector):
    return vector


def to_floats(builder, vector, element=F32):
    """Return a vector of B as float32."""
    lanes = vector.type.count
    floats = builder.bitcast(vector, ir.VectorType(element, lanes))
    return floats if element is F32 else builder.fpext(floats, ir.VectorType(F32, lanes))


def _low_widened(builder, pairs):
    return builder.shl(pairs, splat(INTS, 16))


def _high_widened(builder, pairs):
    return builder.and_(pairs, splat(INTS, 0xFFFF0000))


def _multiply_floats(builder, a, b, total):
    return multiply_add(builder, builder.bitcast(a, FLOATS), builder.bitcast(b, FLOATS), total)


def _vdpbf16ps(builder, a, b, total):
    pairs = ir.VectorType(BFloat(), 2 * LANES)
    dot = declare(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [FLOATS, pairs, pairs])
    return builder.call(dot, [total, builder.bitcast(a, pairs), builder.bitcast(b, pairs)])


# High half first, as vdpbf16ps adds.
WIDENED_PARTS = (StepHalf(4, _high_widened, _multiply_floats), StepHalf(0, _low_widened, _multiply_floats))
PAIR_PARTS = (StepHalf(0, _as_it_lies, _vdpbf16ps),) if TARGET.bfloat16 == VDPBF16PS else WIDENED_PARTS
HALF = ir.HalfType()
# By the dtype of the array that holds B. Numba knows no float16 on a CPU: it lies as its bits, in int16.
STEPS = {
    "float32": Step(4, (StepHalf(0, to_floats, _multiply_floats),)),
    "uint16": Step(4, PAIR_PARTS),
    "int16": Step(2, (StepHalf(0, partial(to_floats, element=HALF), _multiply_floats),), HALF),
}


class IntegerStep(NamedTuple):
    k: int  # values of K
    sums: ir.VectorType
    multiply: Callable  # (builder, a, b, sum) -> sum; a signed, b not
    finish: Callable  # (builder, sum) -> 16 int32


def _vpdpbusd(builder, a, b, total):
    name = f"llvm.x86.avx512.vpdpbusd.{BITS}"
    return _in_parts(builder, name, INTS, [total, builder.bitcast(b, EIGHTS), builder.bitcast(a, EIGHTS)])


def _vpmaddwd(builder, a, b, total):
    a = builder.bitcast(a, SIXTEENS)
    b = builder.bitcast(b, SIXTEENS)
    return builder.add(total, _add_pairs(builder, a, b))


def _vpmaddubsw(builder, a, b, total):
    name = "llvm.x86.avx512.pmaddubs.w.512" if BITS == 512 else "llvm.x86.avx2.pmadd.ub.sw"
    products = _in_parts(builder, name, SIXTEENS, [builder.bitcast(b, EIGHTS), builder.bitcast(a, EIGHTS)])
    return builder.add(total, products)


def _add_pairs(builder, x, y):
    if BITS == 128:  # left to LLVM, which has one for every vector unit
        wide = ir.VectorType(I32, 2 * LANES)
        products = builder.mul(builder.sext(x, wide), builder.sext(y, wide))
        return builder.add(*(shuffle(builder, range(start, 2 * LANES, 2), products) for start in (0, 1)))
    name = "llvm.x86.avx512.pmaddw.d.512" if BITS == 512 else "llvm.x86.avx2.pmadd.wd"
    return _in_parts(builder, name, INTS, [x, y])


def _pairs_added(builder, sums):
    return _add_pairs(builder, sums, splat(SIXTEENS, 1))


def _in_parts(builder, name: str, result, vectors):
    count = VECTOR_BYTES // TARGET.vector_bytes

    def part_of(kind):
        return ir.VectorType(kind.element, kind.count // count)

    def part(vector, i: int):
        size = vector.type.count // count
        return shuffle(builder, range(i * size, (i + 1) * size), vector)

    function = declare(builder, name, part_of(result), [part_of(vector.type) for vector in vectors])
    if count == 1:
        return builder.call(function, vectors)
    low, high = (builder.call(function, [part(vector, i) for vector in vectors]) for i in range(count))
    return shuffle(builder, range(result.count), low, high)


INTEGER_STEPS = {
    VPDPBUSD: IntegerStep(4, INTS, _vpdpbusd, _as_it_lies),
    VPMADDWD: IntegerStep(2, INTS, _vpmaddwd, _as_it_lies),
    VPMADDUBSW: IntegerStep(4, SIXTEENS, _vpmaddubsw, _pairs_added),
}


def strip_of(rows: int, vectors: int = PANEL_VECTORS) -> int:
    kept = 1 if rows > 1 else 0  # one row uses each vector of B once, from memory
    return next((strip for strip in (4, 3, 2) if vectors % strip == 0 and has_room((rows + kept) * strip)), 1)


def has_room(vectors: int) -> bool:
    return vectors * VECTOR_BYTES // TARGET.vector_bytes < TARGET.registers


class Grouped(NamedTuple):
    """A dtype of quantized weights, whose products are whole numbers over a group of K."""

    product: str  # of targets.py
    part_k: int  # values of K that a sum goes over before it is scaled
    per_byte: int  # weights in a byte

    @property
    def is_neon(self) -> bool:
        return self.product in (SDOT, USMMLA)

    @property
    def group_bytes(self) -> int:
        """Return the bytes of a panel's SCALE_GROUP."""
        return SCALE_GROUP * PANEL_VECTORS * LANES // self.per_byte

    @property
    def operand_bytes(self) -> int:
        """Return the bytes of an activation."""
        return 2 if self.product == VPMADDWD else 1

    @property
    def expansion(self) -> int:
        """Return how many times larger a panel is as the steps multiply it."""
        return self.per_byte * self.operand_bytes

    @property
    def expands(self) -> bool:
        """Return whether a panel lies otherwise than several rows multiply it."""
        return self.expansion > 1 or self.is_neon


INT8 = Grouped(TARGET.int8, SCALE_GROUP, 1)
INT4 = Grouped(TARGET.int4, WEIGHT_GROUP, 2)


def unpacked(builder, vector, kind: Grouped):
    vectors = [vector] if kind is INT8 else _nibbles(builder, vector)
    if kind.product == VPMADDWD:
        vectors = [short for four in vectors for short in shorts_of(builder, four)]
    return vectors


def _nibbles(builder, vector):
    mask = splat(INTS, 0x0F0F0F0F)
    four = splat(INTS, 4)
    return [builder.and_(vector, mask), builder.and_(builder.lshr(vector, four), mask)]


def shorts_of(builder, vector):
    """Return bytes 0 and 1 of each lane as two int16, then bytes 2 and 3."""
    fours = builder.bitcast(vector, EIGHTS)
    zeros = EIGHTS(None)
    zero, shorts = 4 * LANES, []
    for first in (0, 2):
        places = [
            place for lane in range(LANES) for place in (4 * lane + first, zero, 4 * lane + first + 1, zero)
        ]
        shorts.append(builder.bitcast(shuffle(builder, places, fours, zeros), INTS))
    return shorts


@emits("int16", "float32")
def to_float16(builder, x):
    """Return the bits of the nearest float16, ties to even; NaN stays NaN, and beyond 65504 there is infinity."""
    return builder.bitcast(builder.fptrunc(x, HALF), I16)


@emits("float32", "int16")
def from_float16(builder, bits):
    return builder.fpext(builder.bitcast(bits, HALF), F32)
