"""Compilation of kernels, their files on disk, and instructions that numba.cuda lacks, as inline PTX (ISA 9.0).

A uint32 holds two numbers of 16 bits, the first in the low half. `index` counts elements; all accesses are aligned.

Numba types a sum of int32 as int64, which LLVM mostly narrows again. A cast stands if the PTX is longer without it: in
loop counters, shared addresses, unsigned indices, and before a number is widened.

Two modules use what numba-cuda does not promise: this one the dispatcher's `_cache`, `_Kernel._rebuild` and
`_reduce_states`, `serialize`, `intrinsic`, llvmlite's builder, `cgutils` and `ConfigStack`; device.py
`cudadrv.libs` and `nvvm`, `compile`, `_codelibrary.get_cufunc`, `device_ctypes_pointer`, `device_memset`,
`deallocations` and `config`.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from llvmlite import ir
from numba import cuda, float32, int32, int64, types, uint32
from numba.core import cgutils
from numba.cuda.extending import intrinsic

from ..kernel_cache import FunctionCache, KernelCache, fingerprint, open_cache

SOURCES = Path(__file__).resolve().parent
OTHERS = (SOURCES.parent / "numbers.py",)  # which kernels import
COMPILERS = ("numba", "numba-cuda", "llvmlite", "cuda-bindings", "cuda-core")
INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
FLOAT = ir.FloatType()
LETTERS = {"i32": "r", "i64": "l", "float": "f", "double": "d"}  # of constraints, by LLVM's types
TWO_FLOATS = types.UniTuple(float32, 2)
FOUR_FLOATS = types.UniTuple(float32, 4)
FOUR_WORDS = types.UniTuple(uint32, 4)
WARP = 32
LANE_BITS = 5
ALL_LANES = 0xFFFFFFFF
# Compute capabilities: the first with mma of 16 of K and cp.async; the first that begins a kernel before another ends.
AMPERE = 8, 0
HOPPER = 9, 0
MAX_WARPS = 32


def kernel(function, threads=None):
    """Compile a kernel, once on a machine. It may fuse a product and a sum: to agree to the bit, call `cuda.fma`.

    threads: of a block, if the compiler would otherwise give each too many registers, or with the blocks of a
    multiprocessor that should have registers at once, if it would give them too few.
    """
    compiled = cuda.jit(launch_bounds=threads)(function)
    compiled._cache = DiskCache(function)
    return compiled


def device_function(function):
    return cuda.jit(function, device=True, forceinline=True)


def unrolled(step: Callable, count: int, first: int = 0):
    """Return a device function that calls step(i, ...) for `count` i: LLVM leaves long loops, and arrays in memory."""
    if count == 1:
        return device_function(lambda *arguments: step(first, *arguments))
    low = unrolled(step, count // 2, first)
    high = unrolled(step, count - count // 2, first + count // 2)

    def call(*arguments):
        low(*arguments)
        high(*arguments)

    return device_function(call)


class DiskCache(FunctionCache):
    """numba-cuda's interface to saved kernels. A file's name covers the values that a kernel closes over."""

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        from numba.cuda.dispatcher import _Kernel

        kernel = kernel_cache().load(self._name(signature), lambda states: _Kernel._rebuild(**states))
        if kernel is None:
            kernel_cache().announce(self._function.__name__)
        return kernel

    def save_overload(self, signature: Any, kernel: Any) -> None:
        from numba.cuda.serialize import dumps

        kernel_cache().save(self._name(signature), lambda: dumps(kernel._reduce_states()))

    def _name(self, signature: Any) -> str:
        capability = cuda.get_current_device().compute_capability
        return self.file_name(f"{describe(self._function)} {signature} {tuple(capability)}")


def describe(function: Callable) -> str:
    """Return a function's name and place, and its closure in brackets."""
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    held = [describe(value.py_func) if hasattr(value, "py_func") else repr(value) for value in values]
    place = f"{function.__module__}.{function.__qualname__}:{function.__code__.co_firstlineno}"
    return f"{place}({', '.join(held)})"


@functools.cache
def kernel_cache() -> KernelCache:
    build = [metadata.version(name) for name in COMPILERS], sys.version, __debug__
    return open_cache(f"cuda-{fingerprint(SOURCES, build, OTHERS)}")


def instruction(
    text: str | Callable,
    result: Any = types.void,
    *,
    is_pure: bool = False,
    is_convergent: bool = False,
    since: tuple[int, int] = (0, 0),
    before: str = "",
    **casts: Any,
) -> Callable[[Callable], Any]:
    """Make an intrinsic of one instruction, with the name and the parameters of a function.

    text: in which $0, $1, ... are the result's elements, then the arguments'; or a function of the arguments' types
    is_pure: it touches no memory, so LLVM may move or drop it
    is_convergent: all lanes of a warp take part, so LLVM may not move it into a branch
    since: the compute capability without which it is left out, or is `before`
    casts: types of parameters; the others are as given. An array and its index become an address.
    """

    def make(named: Callable) -> Any:
        parameters = inspect.signature(named).parameters

        def define(typing_context, *given):
            kinds = [casts.get(name, kind) for name, kind in zip(parameters, given, strict=True)]
            asm = text if isinstance(text, str) else text(*given)
            returned = result or given[0].dtype
            generator = _generator(asm, before, returned, is_pure, is_convergent, since)
            return asm and (returned(*kinds), generator)

        context = inspect.Parameter("typing_context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        define.__name__ = named.__name__
        define.__signature__ = inspect.Signature([context, *parameters.values()])
        return intrinsic(define)

    return make


def _generator(
    asm: str, before: str, result: Any, is_pure: bool, is_convergent: bool, since: tuple[int, int]
) -> Callable:
    def generate(context, builder, signature, arguments):
        from numba.cuda.core.targetconfig import ConfigStack  # numba-cuda's: Numba itself has none

        text = asm if tuple(ConfigStack().top().compute_capability[:2]) >= since else before
        if not text:
            return context.get_dummy_value()
        operands = _operands(context, builder, signature, arguments)
        kinds = () if result is types.void else result if isinstance(result, types.BaseTuple) else (result,)
        outputs = [context.get_value_type(kind) for kind in kinds]
        constraints = [f"={LETTERS[str(output)]}" for output in outputs]
        constraints += [LETTERS[str(operand.type)] for operand in operands]
        constraints += [] if is_pure else ["~{memory}"]
        returned = ir.LiteralStructType(outputs) if len(outputs) > 1 else [*outputs, ir.VoidType()][0]
        function_type = ir.FunctionType(returned, [operand.type for operand in operands])
        function = ir.InlineAsm(function_type, text, ",".join(constraints), not is_pure)
        found = builder.call(function, operands, attrs=("convergent",) if is_convergent else ())
        if not outputs:
            return context.get_dummy_value()
        if len(outputs) == 1:
            return found
        return cgutils.pack_array(builder, [builder.extract_value(found, k) for k in range(len(outputs))])

    return generate


def _operands(context, builder, signature, arguments) -> list:
    """Return an array and its index as an address, a tuple as its elements, and no literals."""
    operands = []
    kinds = signature.args
    for i, kind in enumerate(kinds):
        if isinstance(kind, types.Array):
            array = context.make_array(kind)(context, builder, value=arguments[i])
            index = context.cast(builder, arguments[i + 1], kinds[i + 1], types.intp)
            operands.append(builder.ptrtoint(builder.gep(array.data, [index]), INT64))
        elif isinstance(kind, types.BaseTuple):
            operands += [builder.extract_value(arguments[i], k) for k in range(len(kind))]
        elif not isinstance(kind, types.IntegerLiteral) and not (i and isinstance(kinds[i - 1], types.Array)):
            operands.append(arguments[i])
    return operands


@instruction("ld.global.L1::no_allocate.v4.u32 {$0,$1,$2,$3}, [$4];", FOUR_WORDS)
def load_weights(array, index):
    """Load 16 bytes that are read once. Not `.nc`: the assembler moves it after an unrelated wait."""


@instruction("ld.global.v4.u32 {$0,$1,$2,$3}, [$4];", FOUR_WORDS)
def load_cached(array, index):
    """Load 16 bytes that other warps or blocks read, too. Not `.nc`: the kernel before may still write."""


@instruction("ld.global.cg.v4.u32 {$0,$1,$2,$3}, [$4];", FOUR_WORDS)
def load_global(array, index):
    """Load 16 bytes past the L1 cache, written by other blocks."""


@instruction(lambda array, index: f"ld.global.cg.b{array.dtype.bitwidth} $0, [$1];", None)
def load_fresh(array, index):
    """Load array[index], of 32 or 64 bits, past the L1 cache, anew after each barrier."""


@instruction("ld.global.cg.v2.f32 {$0,$1}, [$2];", TWO_FLOATS)
def load_fresh_pair(array, index): ...


class Halves(NamedTuple):
    """Instructions for numbers of 16 bits."""

    store: Callable
    store_pair: Callable
    pack: Callable
    mma: Callable
    expand: Callable


def _halves(kind: str, one: int, base: int) -> Halves:
    """kind: PTX's name. one: the bits of 1; base: those of 128 or more, whose last bit is worth 1."""
    words = {"ONE": one, "BASE": base, "LESS": base | 0x8000}

    def of_kind(text: str, *result: Any, **options: Any) -> Callable[[Callable], Any]:
        text = text.replace("KIND", kind)
        for name, half in words.items():
            text = text.replace(name, f"0x{half:04X}{half:04X}")

        def make(named: Callable) -> Any:
            named.__name__ += f"_{kind}"
            return instruction(text, *result, **options)(named)

        return make

    @of_kind("{ .reg .b16 h; cvt.rn.KIND.f32 h, $1; st.global.b16 [$0], h; }", value=float32)
    def store(array, index, value): ...

    @of_kind(
        "{ .reg .b32 h; cvt.rn.KINDx2.f32 h, $2, $1; st.global.b32 [$0], h; }", low=float32, high=float32
    )
    def store_pair(array, index, low, high):
        """Round two float32 to array[index] and array[index + 1]."""

    @of_kind("cvt.rn.KINDx2.f32 $0, $2, $1;", uint32, is_pure=True, low=float32, high=float32)
    def pack(low, high): ...

    @of_kind(
        "mma.sync.aligned.m16n8k16.row.col.f32.KIND.KIND.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        FOUR_FLOATS,
        is_pure=True,
        is_convergent=True,
    )
    def mma(a, b, c):
        """Return c (16, 8) float32 + a (16, 16) @ b (16, 8), by a warp. Lane 4 g + q holds, in pairs,

        a: rows g, g + 8, g, g + 8 at columns 2q and 2q + 1, and the last two at 2q + 8 and 2q + 9
        b: rows 2q and 2q + 1, then 2q + 8 and 2q + 9, of column g
        c: row g at columns 2q and 2q + 1, then row g + 8 at the same
        """

    @of_kind(
        "{ .reg .b32 low, sign, one; and.b32 low, $1, 0x007F007F; or.b32 low, low, BASE; "
        "and.b32 sign, $1, 0x00800080; or.b32 sign, sign, LESS; mov.b32 one, ONE; "
        "fma.rn.KINDx2 $0, low, one, sign; }",
        uint32,
        is_pure=True,
    )
    def expand_even_bytes(word):
        """Return the int8 of bytes 0 and 2: base + the lower 7 bits, minus base, and 128 if the sign is set."""

    @device_function
    def expand(word):
        """Return the int8 of bytes 0 and 2, and of bytes 1 and 3, as pairs, exactly."""
        return expand_even_bytes(word), expand_even_bytes(uint32(word >> uint32(8)))

    return Halves(store, store_pair, pack, mma, expand)


BF16 = _halves("bf16", 0x3F80, 0x4300)
F16 = _halves("f16", 0x3C00, 0x6400)


@instruction("mul.rn.f32 $0, $1, $2;", float32, is_pure=True, a=float32, b=float32)
def rounded_product(a, b):
    """Return a product that is never fused with a sum."""


@instruction("ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];", FOUR_WORDS, address=uint32)
def load_shared(address): ...


@instruction("ld.shared.v2.f32 {$0,$1}, [$2];", TWO_FLOATS, address=uint32)
def load_shared_pair(address): ...


@instruction("st.shared.b32 [$0], $1;", address=uint32, word=uint32)
def store_shared(address, word): ...


@instruction(
    "cp.async.cg.shared.global [$0], [$1], 16;",
    since=AMPERE,
    before="{ .reg .b32 a, b, c, d; ld.global.v4.u32 {a,b,c,d}, [$1]; st.shared.v4.u32 [$0], {a,b,c,d}; }",
    address=uint32,
)
def copy_async(address, array, index):
    """Copy 16 bytes to shared memory; before compute capability 8.0 at once."""


@instruction("cp.async.commit_group;", since=AMPERE)
def commit_copies(): ...


def _text_of_wait(pending) -> str | None:
    return (
        f"cp.async.wait_group {pending.literal_value};" if isinstance(pending, types.IntegerLiteral) else None
    )


@instruction(_text_of_wait, since=AMPERE)
def wait_for_copies(pending):
    """Wait until at most `pending`, a literal, of this thread's groups are in flight."""


@instruction("griddepcontrol.launch_dependents;", since=HOPPER)
def let_next_kernel_begin():
    """Let the next kernel of a graph run up to its `wait_for_kernel_before`."""


@instruction("griddepcontrol.wait;", since=HOPPER)
def wait_for_kernel_before():
    """Wait for earlier kernels' writes. Write nothing before."""


@instruction("cp.async.bulk.prefetch.L2.global [$0], $1;", since=HOPPER, size=int32)
def prefetch_run(array, index, size):
    """Prefetch `size` bytes, 16 n, by one thread."""


@instruction("atom.add.acq_rel.gpu.global.u32 $0, [$1], 1;", uint32)
def arrive(array, index):
    """Add 1 to array[index], uint32, after all writes of this thread. Return its value before."""


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
def shared_address(typing_context, array):
    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        pointer = ir.PointerType(addrspace=3) if data.type.is_opaque else ir.PointerType(data.type.pointee, 3)
        return builder.ptrtoint(builder.addrspacecast(data, pointer), INT32)

    return uint32(array), generate


@device_function
def lane_and_warp():
    """Return this thread's lane, and the number of its warp in the block."""
    thread = int32(cuda.threadIdx.x)
    return thread % int32(WARP), thread // int32(WARP)


@device_function
def of_thread(begin, end):
    """Return this thread's numbers of a range, which the block's threads take in turn."""
    return range(int32(begin + cuda.threadIdx.x), end, cuda.blockDim.x)


@device_function
def four(numbers, first):
    """Return numbers[first : first + 4] as a tuple."""
    return numbers[first], numbers[first + 1], numbers[first + 2], numbers[first + 3]


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
        arrived = _arrived(counters, index, count)
    arrived = cuda.shfl_sync(uint32(ALL_LANES), arrived, 0)
    cuda.syncwarp()
    return arrived == count - 1


@device_function
def is_last_block(counters, index, count, told):
    """As is_last_warp, of a whole block; told: shared float32, of which it takes the first."""
    cuda.syncthreads()
    if int32(cuda.threadIdx.x) == 0:
        told[0] = float32(_arrived(counters, index, count))
    cuda.syncthreads()
    return told[0] == float32(count - 1)


@device_function
def _arrived(counters, index, count):
    arrived = int32(arrive(counters, index))
    if arrived == count - 1:
        counters[index] = 0
    return arrived
