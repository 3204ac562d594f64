"""Instructions that numba.cuda lacks, as inline PTX (ISA 9.0), and reductions.

A uint32 holds two bfloat16, the first in the low half. `index` counts elements; all accesses are aligned.
"""

from llvmlite import ir
from numba import cuda, float32, int32, int64, types, uint32
from numba.core import cgutils
from numba.cuda.extending import intrinsic

from .jit import device_function

INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
FLOAT = ir.FloatType()
DOUBLE = ir.DoubleType()
VOID = ir.VoidType()
FOUR_WORDS = ir.LiteralStructType([INT32] * 4)
TWO_FLOATS = ir.LiteralStructType([FLOAT] * 2)
FOUR_FLOATS = ir.LiteralStructType([FLOAT] * 4)
WARP = 32
LANE_BITS = 5
ALL_LANES = 0xFFFFFFFF
HOPPER = 9, 0  # compute capability; an older GPU runs one kernel after another
MAX_WARPS = 32


@intrinsic
def load_weights(typing_context, array, index):
    """Load 16 bytes that are read once. Not `.nc`: the assembler moves it after an unrelated wait."""
    return _load_128("ld.global.L1::no_allocate.v4.u32", array, index)


@intrinsic
def load_cached(typing_context, array, index):
    """Load 16 bytes that other warps or blocks read, too. Not `.nc`: the kernel before may still write."""
    return _load_128("ld.global.v4.u32", array, index)


@intrinsic
def load_global(typing_context, array, index):
    """Load 16 bytes past the L1 cache, written by other blocks."""
    return _load_128("ld.global.cg.v4.u32", array, index)


@intrinsic
def load_fresh(typing_context, array, index):
    """Load array[index], of 32 or 64 bits, past the L1 cache, anew after each barrier."""
    bits = array.dtype.bitwidth
    is_float = isinstance(array.dtype, types.Float)
    letter = ("fd" if is_float else "rl")[bits == 64]
    result = ((INT32, INT64), (FLOAT, DOUBLE))[is_float][bits == 64]
    asm = f"ld.global.cg.b{bits} $0, [$1];"
    constraints = f"={letter},l,~{{memory}}"
    return _instruction(array.dtype(array, index), asm, constraints, result)


@intrinsic
def load_fresh_pair(typing_context, array, index):
    signature = types.UniTuple(float32, 2)(array, index)
    return _instruction(signature, "ld.global.cg.v2.f32 {$0,$1}, [$2];", "=f,=f,l,~{memory}", TWO_FLOATS)


@intrinsic
def store_bfloat16_pair(typing_context, array, index, low, high):
    """Round two float32 to array[index] and array[index + 1], uint16."""
    asm = "{ .reg .b32 h; cvt.rn.bf16x2.f32 h, $2, $1; st.global.b32 [$0], h; }"
    return _instruction(types.void(array, index, float32, float32), asm, "l,f,f,~{memory}")


@intrinsic
def store_bfloat16(typing_context, array, index, value):
    asm = "{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; st.global.b16 [$0], h; }"
    return _instruction(types.void(array, index, float32), asm, "l,f,~{memory}")


@intrinsic
def pack_bfloat16(typing_context, low, high):
    asm = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return _instruction(uint32(float32, float32), asm, "=r,f,f", INT32, side_effect=False)


@intrinsic
def bits_to_float32(typing_context, bits):
    return float32(uint32), lambda context, builder, signature, arguments: builder.bitcast(
        arguments[0], FLOAT
    )


@intrinsic
def float32_to_bits(typing_context, value):
    return uint32(float32), lambda context, builder, signature, arguments: builder.bitcast(
        arguments[0], INT32
    )


@intrinsic
def rounded_product(typing_context, a, b):
    """Return a product that is never fused with a sum."""
    return _instruction(
        float32(float32, float32), "mul.rn.f32 $0, $1, $2;", "=f,f,f", FLOAT, side_effect=False
    )


@intrinsic
def int8_to_bfloat16(typing_context, word):
    """Return four int8 as two pairs of bfloat16, exactly."""

    def generate(context, builder, signature, arguments):
        floats = []
        for byte in range(4):
            shifted = builder.ashr(builder.shl(arguments[0], INT32(24 - 8 * byte)), INT32(24))
            floats.append(builder.bitcast(builder.sitofp(shifted, FLOAT), INT32))
        # The lower half of the float32 of 8 bits is 0.
        pairs = [
            builder.or_(builder.lshr(floats[i], INT32(16)), builder.and_(floats[i + 1], INT32(0xFFFF0000)))
            for i in (0, 2)
        ]
        return cgutils.pack_array(builder, pairs)

    return types.UniTuple(uint32, 2)(uint32), generate


@intrinsic
def mma_bfloat16(typing_context, a, b, c):
    """Return c (16, 8) float32 + a (16, 16) @ b (16, 8) of bfloat16, by a warp. Lane 4 g + q holds, in pairs,

    a: rows g, g + 8, g, g + 8 at columns 2q and 2q + 1, and the last two at 2q + 8 and 2q + 9
    b: rows 2q and 2q + 1, then 2q + 8 and 2q + 9, of column g
    c: row g at columns 2q and 2q + 1, then row g + 8 at the same
    """
    instruction = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    asm = f"{instruction} {{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, {{$10,$11,$12,$13}};"
    constraints = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
    signature = types.UniTuple(float32, 4)(a, b, c)
    return _instruction(signature, asm, constraints, FOUR_FLOATS, side_effect=False, is_convergent=True)


@intrinsic
def shared_address(typing_context, array):
    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        pointer = ir.PointerType(addrspace=3) if data.type.is_opaque else ir.PointerType(data.type.pointee, 3)
        return builder.ptrtoint(builder.addrspacecast(data, pointer), INT32)

    return uint32(array), generate


@intrinsic
def load_shared(typing_context, address):
    asm = "ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];"
    constraints = "=r,=r,=r,=r,r,~{memory}"
    return _instruction(types.UniTuple(uint32, 4)(uint32), asm, constraints, FOUR_WORDS)


@intrinsic
def load_shared_pair(typing_context, address):
    signature = types.UniTuple(float32, 2)(uint32)
    return _instruction(signature, "ld.shared.v2.f32 {$0,$1}, [$2];", "=f,=f,r,~{memory}", TWO_FLOATS)


@intrinsic
def store_shared(typing_context, address, word):
    return _instruction(types.void(uint32, uint32), "st.shared.b32 [$0], $1;", "r,r,~{memory}")


@intrinsic
def copy_async(typing_context, address, array, index):
    return _instruction(
        types.void(uint32, array, index), "cp.async.cg.shared.global [$0], [$1], 16;", "r,l,~{memory}"
    )


@intrinsic
def commit_copies(typing_context):
    return _instruction(types.void(), "cp.async.commit_group;", "~{memory}")


@intrinsic
def wait_for_copies(typing_context, pending):
    """Wait until at most `pending`, a literal, of this thread's groups are in flight."""
    if not isinstance(pending, types.IntegerLiteral):
        return None
    count = pending.literal_value
    return _instruction(types.void(types.IntegerLiteral(count)), f"cp.async.wait_group {count};", "~{memory}")


@intrinsic
def let_next_kernel_begin(typing_context):
    """Let the next kernel of a graph run up to its `wait_for_kernel_before`."""
    return _instruction(types.void(), "griddepcontrol.launch_dependents;", "~{memory}", since=HOPPER)


@intrinsic
def wait_for_kernel_before(typing_context):
    """Wait for earlier kernels' writes. Write nothing before."""
    return _instruction(types.void(), "griddepcontrol.wait;", "~{memory}", since=HOPPER)


@intrinsic
def prefetch_run(typing_context, array, index, size):
    """Prefetch `size` bytes, 16 n, by one thread."""
    signature = types.void(array, index, types.int32)
    return _instruction(
        signature, "cp.async.bulk.prefetch.L2.global [$0], $1;", "l,r,~{memory}", since=HOPPER
    )


@intrinsic
def arrive(typing_context, array, index):
    """Add 1 to array[index], uint32, after all writes of this thread. Return its value before."""
    asm = "atom.add.acq_rel.gpu.global.u32 $0, [$1], 1;"
    return _instruction(uint32(array, index), asm, "=r,l,~{memory}", INT32)


def _load_128(instruction: str, array, index):
    asm = f"{instruction} {{$0,$1,$2,$3}}, [$4];"
    constraints = "=r,=r,=r,=r,l,~{memory}"
    return _instruction(types.UniTuple(uint32, 4)(array, index), asm, constraints, FOUR_WORDS)


def _instruction(
    signature, asm: str, constraints: str, result=VOID, side_effect=True, is_convergent=False, since=(0, 0)
):
    """Return an intrinsic of one instruction. An array and its index become an address, a tuple its elements.

    is_convergent: all lanes of a warp take part, so LLVM may not move it into a branch.
    since: the compute capability without which it is left out
    """

    def generate(context, builder, signature, arguments):
        from numba.cuda.core.targetconfig import ConfigStack  # numba-cuda's: Numba itself has none

        if tuple(ConfigStack().top().compute_capability[:2]) < since:
            return context.get_dummy_value()
        operands, kinds = [], signature.args
        for i, kind in enumerate(kinds):
            if isinstance(kind, types.Array):
                array = context.make_array(kind)(context, builder, value=arguments[i])
                index = context.cast(builder, arguments[i + 1], kinds[i + 1], types.intp)
                operands.append(builder.ptrtoint(builder.gep(array.data, [index]), INT64))
            elif isinstance(kind, types.BaseTuple):
                operands += [builder.extract_value(arguments[i], k) for k in range(len(kind))]
            elif not isinstance(kind, types.IntegerLiteral) and not (
                i and isinstance(kinds[i - 1], types.Array)
            ):
                operands.append(arguments[i])
        function_type = ir.FunctionType(result, [operand.type for operand in operands])
        function = ir.InlineAsm(function_type, asm, constraints, side_effect)
        found = builder.call(function, operands, attrs=("convergent",) if is_convergent else ())
        if result is VOID:
            return context.get_dummy_value()
        if isinstance(result, ir.LiteralStructType):
            return cgutils.pack_array(
                builder, [builder.extract_value(found, k) for k in range(len(result.elements))]
            )
        return found

    return signature, generate


@device_function
def warp_cumulated(value):
    """Return the sum of the int64 of this lane and the lanes before it."""
    lane = int32(cuda.threadIdx.x) % WARP
    for i in range(LANE_BITS):
        before = cuda.shfl_up_sync(uint32(ALL_LANES), value, int32(1 << i))
        value += before if lane >= 1 << i else int64(0)
    return value


def _reductions(join):
    """Return the functions that join the values of a warp, and of a block, in one order."""

    @device_function
    def of_warp(value):
        for i in range(LANE_BITS):
            value = join(value, cuda.shfl_xor_sync(uint32(ALL_LANES), value, int32(WARP >> 1 + i)))
        return value

    @device_function
    def of_block(value, partial):
        """partial: shared, (MAX_WARPS,), which two kernels cannot link."""
        value = of_warp(value)
        if int32(cuda.threadIdx.x) % WARP == 0:
            partial[int32(cuda.threadIdx.x) // WARP] = value
        cuda.syncthreads()
        joined = partial[0]
        for warp in range(1, int32(cuda.blockDim.x) // WARP):
            joined = join(joined, partial[warp])
        cuda.syncthreads()
        return joined

    return of_warp, of_block


warp_sum, block_sum = _reductions(device_function(lambda a, b: a + b))
warp_greatest, block_greatest = _reductions(device_function(lambda a, b: max(a, b)))


@device_function
def is_last_warp(counters, index, count):
    """Return whether this warp is the last of `count` at counters[index], and may read the others' results.

    The last sets it to 0.
    """
    cuda.syncwarp()
    arrived = int32(0)
    if int32(cuda.threadIdx.x) % WARP == 0:
        arrived = int32(arrive(counters, index))
        if arrived == count - 1:
            counters[index] = 0
    arrived = cuda.shfl_sync(uint32(ALL_LANES), arrived, 0)
    cuda.syncwarp()
    return arrived == count - 1
