"""Instructions that numba.cuda lacks, as inline PTX (PTX ISA 9.0, sections 9.7.9, 9.7.13 and 9.7.15).

A bfloat16 is the upper half of a float32; a uint32 holds two, the first in the low half. `index` counts elements;
16-byte loads are aligned.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.cuda.extending import intrinsic

INT32, INT64, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
VOID = ir.VoidType()
FOUR_WORDS, TWO_FLOATS = ir.LiteralStructType([INT32] * 4), ir.LiteralStructType([FLOAT] * 2)


@intrinsic
def load_weights(typing_context, array, index):
    """Return 16 bytes as four uint32, of memory that is read once and not written.

    Not `.nc`: the assembler moves such a load after an unrelated wait.
    """
    return _load_128("ld.global.L1::no_allocate.v4.u32", array, index)


@intrinsic
def load_cached(typing_context, array, index):
    """Return 16 bytes as four uint32, of memory that other warps of the block read, too.

    Not `.nc`: the kernel before may still write.
    """
    return _load_128("ld.global.v4.u32", array, index)


@intrinsic
def load_global(typing_context, array, index):
    """Return 16 bytes as four uint32, past the L1 cache, written by other blocks."""
    return _load_128("ld.global.cg.v4.u32", array, index)


@intrinsic
def load_fresh(typing_context, array, index):
    """Return array[index], of 32 or 64 bits, past the L1 cache, loaded anew after each barrier."""
    signature = array.dtype(array, index)

    def generate(context, builder, signature, arguments):
        address, bits = _address(context, builder, signature, arguments), array.dtype.bitwidth
        result, kind = context.get_value_type(array.dtype), "l" if bits == 64 else "r"
        if isinstance(array.dtype, types.Float):
            kind = "d" if bits == 64 else "f"
        asm, constraints = f"ld.global.cg.b{bits} $0, [$1];", f"={kind},l,~{{memory}}"
        return _call(builder, result, [INT64], asm, constraints, [address], side_effect=True)

    return signature, generate


@intrinsic
def load_fresh_pair(typing_context, array, index):
    """Return two float32 on a boundary of 8 bytes, as `load_fresh`."""
    signature = types.UniTuple(types.float32, 2)(array, index)

    def generate(context, builder, signature, arguments):
        address = _address(context, builder, signature, arguments)
        asm, constraints = "ld.global.cg.v2.f32 {$0,$1}, [$2];", "=f,=f,l,~{memory}"
        return _unpacked(builder, _call(builder, TWO_FLOATS, [INT64], asm, constraints, [address], side_effect=True), 2)

    return signature, generate


@intrinsic
def store_bfloat16_pair(typing_context, array, index, low, high):
    """Round two float32 to array[index] and array[index + 1], uint16 on a boundary of 4 bytes."""
    return _on_element(
        "{ .reg .b32 h; cvt.rn.bf16x2.f32 h, $2, $1; st.global.b32 [$0], h; }",
        types.void(array, index, types.float32, types.float32),
        FLOAT,
        FLOAT,
    )


@intrinsic
def store_bfloat16(typing_context, array, index, value):
    """Round a float32 to array[index], uint16, ties to even."""
    return _on_element(
        "{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; st.global.b16 [$0], h; }", types.void(array, index, types.float32), FLOAT
    )


@intrinsic
def pack_bfloat16(typing_context, low, high):
    """Return two float32 as two bfloat16."""
    signature = types.uint32(types.float32, types.float32)

    def generate(context, builder, signature, arguments):
        low, high = arguments
        return _call(builder, INT32, [FLOAT, FLOAT], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low])

    return signature, generate


@intrinsic
def bits_to_float32(typing_context, bits):
    signature = types.float32(types.uint32)

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], FLOAT)

    return signature, generate


@intrinsic
def float32_to_bits(typing_context, value):
    signature = types.uint32(types.float32)

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], INT32)

    return signature, generate


@intrinsic
def rounded_product(typing_context, a, b):
    """Return the product of two float32, never fused with a sum."""
    signature = types.float32(types.float32, types.float32)

    def generate(context, builder, signature, arguments):
        return _call(builder, FLOAT, [FLOAT, FLOAT], "mul.rn.f32 $0, $1, $2;", "=f,f,f", list(arguments))

    return signature, generate


@intrinsic
def int8_to_bfloat16(typing_context, word):
    """Return four int8 as two pairs of bfloat16, exactly."""
    signature = types.UniTuple(types.uint32, 2)(types.uint32)

    def generate(context, builder, signature, arguments):
        floats = []
        for byte in range(4):
            shifted = builder.ashr(builder.shl(arguments[0], INT32(24 - 8 * byte)), INT32(24))
            floats.append(builder.bitcast(builder.sitofp(shifted, FLOAT), INT32))
        # A whole number of 8 bits is a bfloat16: the lower half of its float32 is 0.
        pairs = [
            builder.or_(builder.lshr(floats[i], INT32(16)), builder.and_(floats[i + 1], INT32(0xFFFF0000)))
            for i in (0, 2)
        ]
        return cgutils.pack_array(builder, pairs)

    return signature, generate


@intrinsic
def mma_bfloat16(typing_context, a, b, c):
    """Return c (16, 8) float32 + a (16, 16) @ b (16, 8) of bfloat16, by a warp.

    Lane 4 g + q holds, a pair in each uint32,
        a: rows g, g + 8, g, g + 8 at columns 2q and 2q + 1, and the last two at 2q + 8 and 2q + 9
        b: rows 2q and 2q + 1, then 2q + 8 and 2q + 9, of column g
        c: row g at columns 2q and 2q + 1, then row g + 8 at the same
    """
    signature = types.UniTuple(types.float32, 4)(a, b, c)

    def generate(context, builder, signature, arguments):
        operands = [builder.extract_value(arguments[i], k) for i, size in enumerate((4, 2, 4)) for k in range(size)]
        asm = (
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
        )
        result = ir.LiteralStructType([FLOAT] * 4)
        given = [INT32] * 6 + [FLOAT] * 4
        constraints = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
        values = _call(builder, result, given, asm, constraints, operands, is_convergent=True)
        return cgutils.pack_array(builder, [builder.extract_value(values, k) for k in range(4)])

    return signature, generate


@intrinsic
def shared_address(typing_context, array):
    """Return the address of a shared array, in bytes."""
    signature = types.uint32(array)

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        pointer = ir.PointerType(addrspace=3) if data.type.is_opaque else ir.PointerType(data.type.pointee, 3)
        return builder.ptrtoint(builder.addrspacecast(data, pointer), INT32)

    return signature, generate


@intrinsic
def load_shared(typing_context, address):
    """Return 16 bytes of shared memory as four uint32."""
    signature = types.UniTuple(types.uint32, 4)(types.uint32)

    def generate(context, builder, signature, arguments):
        asm, constraints = "ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,r,~{memory}"
        words = _call(builder, FOUR_WORDS, [INT32], asm, constraints, list(arguments), side_effect=True)
        return _unpacked(builder, words)

    return signature, generate


@intrinsic
def load_shared_pair(typing_context, address):
    """Return 8 bytes of shared memory as two float32."""
    signature = types.UniTuple(types.float32, 2)(types.uint32)

    def generate(context, builder, signature, arguments):
        asm, constraints = "ld.shared.v2.f32 {$0,$1}, [$2];", "=f,=f,r,~{memory}"
        return _unpacked(builder, _call(builder, TWO_FLOATS, [INT32], asm, constraints, [*arguments], True), 2)

    return signature, generate


@intrinsic
def store_shared(typing_context, address, word):
    """Store a uint32 to shared memory."""
    signature = types.void(types.uint32, types.uint32)

    def generate(context, builder, signature, arguments):
        _call(builder, VOID, [INT32, INT32], "st.shared.b32 [$0], $1;", "r,r,~{memory}", list(arguments), True)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def copy_async(typing_context, address, array, index):
    """Begin to copy 16 bytes of array[index:] to shared memory."""
    signature = types.void(types.uint32, array, index)

    def generate(context, builder, signature, arguments):
        source = _address(context, builder, signature, arguments, 1)
        asm = "cp.async.cg.shared.global [$0], [$1], 16;"
        _call(builder, VOID, [INT32, INT64], asm, "r,l,~{memory}", [arguments[0], source], side_effect=True)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def commit_copies(typing_context):
    """Group this thread's copies since the last group."""
    return _statement("cp.async.commit_group;")


@intrinsic
def wait_for_copies(typing_context, pending):
    """Wait until at most `pending` (a literal) of this thread's groups are in flight."""
    count = pending.literal_value if isinstance(pending, types.IntegerLiteral) else None
    if count is None:
        return None
    return _statement(f"cp.async.wait_group {count};", types.IntegerLiteral(count))


@intrinsic
def let_next_kernel_begin(typing_context):
    """Let the next kernel of a graph run up to its `wait_for_kernel_before`."""
    return _statement("griddepcontrol.launch_dependents;")


@intrinsic
def wait_for_kernel_before(typing_context):
    """Wait for all that earlier kernels have written. Write nothing before."""
    return _statement("griddepcontrol.wait;")


@intrinsic
def prefetch(typing_context, array, index):
    """Prefetch the 128 bytes around array[index] into the L2 cache."""
    return _on_element("prefetch.global.L2 [$0];", types.void(array, index))


@intrinsic
def prefetch_run(typing_context, array, index, size):
    """Prefetch `size` bytes (16 n) from array[index] into the L2 cache; one thread is enough."""
    return _on_element("cp.async.bulk.prefetch.L2.global [$0], $1;", types.void(array, index, types.int32), INT32)


@intrinsic
def arrive(typing_context, array, index):
    """Count array[index], uint32, up by 1 after all writes of this thread. Return its value before."""
    return _on_element("atom.add.acq_rel.gpu.global.u32 $0, [$1], 1;", types.uint32(array, index))


def _load_128(instruction: str, array, index):
    signature = types.UniTuple(types.uint32, 4)(array, index)

    def generate(context, builder, signature, arguments):
        address = _address(context, builder, signature, arguments)
        asm, constraints = f"{instruction} {{$0,$1,$2,$3}}, [$4];", "=r,=r,=r,=r,l,~{memory}"
        return _unpacked(builder, _call(builder, FOUR_WORDS, [INT64], asm, constraints, [address], side_effect=True))

    return signature, generate


def _statement(asm: str, *argument_types):
    signature = types.void(*argument_types)

    def generate(context, builder, signature, arguments):
        _call(builder, VOID, [], asm, "~{memory}", [], side_effect=True)
        return context.get_dummy_value()

    return signature, generate


def _on_element(asm: str, signature, *kinds: ir.Type):
    """Return an instruction on the element of the first two arguments; `kinds` are the types of the others.

    Operands are numbered from the result on, a uint32, if there is one.
    """
    has_result = signature.return_type == types.uint32
    letters = ["=r"] * has_result + ["l", *("f" if kind is FLOAT else "r" for kind in kinds), "~{memory}"]

    def generate(context, builder, signature, arguments):
        values = [_address(context, builder, signature, arguments), *arguments[2:]]
        result = INT32 if has_result else VOID
        found = _call(builder, result, [INT64, *kinds], asm, ",".join(letters), values, side_effect=True)
        return found if has_result else context.get_dummy_value()

    return signature, generate


def _address(context, builder, signature, arguments, first: int = 0):
    """Return the address of arguments[first][arguments[first + 1]] in global memory."""
    array = context.make_array(signature.args[first])(context, builder, value=arguments[first])
    index = context.cast(builder, arguments[first + 1], signature.args[first + 1], types.intp)
    return builder.ptrtoint(builder.gep(array.data, [index]), INT64)


def _call(builder, result, given, asm: str, constraints: str, values, side_effect=False, is_convergent=False):
    """Call inline assembly. is_convergent: all lanes take part, so LLVM may not move it into a branch."""
    function = ir.InlineAsm(ir.FunctionType(result, given), asm, constraints, side_effect)
    return builder.call(function, values, attrs=("convergent",) if is_convergent else ())


def _unpacked(builder, words, count=4):
    return cgutils.pack_array(builder, [builder.extract_value(words, k) for k in range(count)])
