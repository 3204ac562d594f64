"""Runs the source of CUDA kernels on a CPU, a Python generator for each thread.

A kernel is rewritten so that whatever waits for other threads (a barrier, a shuffle, a product of a warp) is a
`yield`; a scheduler runs the threads and lets a group go on when all of it has arrived. Stricter than a GPU: shared
memory and buffers begin as NaN, an index out of bounds is an error, so is a barrier that not all threads reach, and an
asynchronous copy has not happened before it is waited for. Sums within a warp's product are in float32, in order.

Kernels of a graph run one after another here. On a GPU each may begin before those in front of it have ended, so that
`Touched` notes what a kernel reads before it waits for them.
"""

import ast
import functools
import inspect
import math
import operator
import random
import textwrap
import types
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np

WARP = 32
WARP_OPERATIONS = {"syncwarp", "mma_bfloat16", "shfl_sync", "shfl_xor_sync", "shfl_up_sync"}
WAITING = WARP_OPERATIONS | {"syncthreads"}
Dimensions = namedtuple("Dimensions", "x y z", defaults=(1, 1))


class Touched:
    """What a launch reads before it has waited for the kernel before it, and what it writes: addresses of numbers."""

    def __init__(self, is_first: bool = False):
        """is_first: of a graph, and so with nothing to wait for."""
        self.read_early: set[int] = set()
        self.written: set[int] = set()
        self.is_first = self.has_waited = is_first  # has_waited: a thread at least

    def note_read(self, array: "GlobalArray", first: int, count: int = 1) -> None:
        if not cuda.current.has_waited:
            self.read_early.update(array.addresses(first, count))

    def note_write(self, array: "GlobalArray", index: int) -> None:
        assert cuda.current.has_waited, "something is written before the kernel has waited for the one before it"
        self.written.update(array.addresses(index, 1))


class GlobalArray:
    """Memory of the device, (size,): an index must be within it, and never counts from the end."""

    def __init__(self, values: np.ndarray, touched: Touched | None = None):
        assert values.ndim == 1, "device arrays are flat"
        assert values.flags.c_contiguous, "device arrays are contiguous"
        self.values, self.size, self.shape = values, values.size, values.shape
        self.is_whole, self.touched = values.dtype.kind == "i", touched

    def __getitem__(self, index):
        self.need(index)
        if self.touched:
            self.touched.note_read(self, index)
        value = self.values[index]
        return int(value) if self.is_whole else value

    def __setitem__(self, index, value):
        self.need(index)
        if self.touched:
            self.touched.note_write(self, index)
        self.values[index] = value

    def words(self, index) -> np.ndarray:
        """16 bytes from an index on, as four uint32."""
        step = 16 // self.values.itemsize
        self.need(index, step)
        if index % step:
            raise IndexError(f"16 bytes at index {index} are not on their boundary")
        if self.touched:
            self.touched.note_read(self, index, step)
        return self.values[index : index + step].view(np.uint32)

    def need(self, index, count: int = 1) -> None:
        if not 0 <= index <= self.size - count:
            raise IndexError(f"{count} at index {index} of {self.size}")

    def addresses(self, first, count: int) -> range:
        start, size = self.values.__array_interface__["data"][0], self.values.itemsize
        return range(start + int(first) * size, start + (int(first) + count) * size, size)


class Block:
    """Its threads share an arena of memory, of which a shared array is a part."""

    def __init__(self, index: Dimensions, number: int, launch: "Launch"):
        self.index, self.number, self.launch = index, number, launch
        self.arena = np.full(launch.arena_bytes, 0xFF, np.uint8)  # NaN, whatever kind of float
        self.offsets: dict[Any, int] = {}
        self.used = launch.shared_bytes  # what the launch asks for lies in front

    def shared_array(self, site, shape, dtype, alignment: int) -> np.ndarray:
        """alignment: 0 is none but that of its numbers, and then the array lies on no greater boundary."""
        dtype, size = np.dtype(_numpy_type(dtype)), math.prod(shape) if isinstance(shape, tuple) else shape
        if size == 0:  # the launch's
            assert alignment >= 16, "shared memory of the launch begins anywhere unless it has an alignment"
            return self.arena[: self.launch.shared_bytes].view(dtype)
        if site not in self.offsets:
            self.offsets[site] = self.used = -(-self.used // 16) * 16 + (0 if alignment else dtype.itemsize)
            self.used += size * dtype.itemsize
            assert self.used <= self.arena.size, "more shared memory than the simulator's arena"
        start = self.offsets[site]
        return self.arena[start : start + size * dtype.itemsize].view(dtype).reshape(shape)


class Thread:
    """A thread of a block. Its methods stand for the intrinsics of ptx.py that do not wait."""

    def __init__(self, block: Block, index: Dimensions, number: int):
        self.block, self.index = block, index
        self.lane, self.warp = number % WARP, (block.number, number // WARP)
        self.operation: tuple = ()
        self.answer: Any = None
        touched = block.launch.touched
        self.has_waited = touched is not None and touched.is_first  # for the kernel before
        self.copies: list[list[tuple[np.ndarray, np.ndarray]]] = [[]]  # (to, from) by commit
        self.generator = None

    def load_weights(self, array: GlobalArray, index):
        return tuple(array.words(index))

    load_global = load_cached = load_weights

    def load_fresh(self, array: GlobalArray, index):
        return array[index]

    def load_fresh_pair(self, array: GlobalArray, index):
        assert index % 2 == 0, f"8 bytes at index {index} are not on their boundary"
        return array[index], array[index + 1]

    def let_next_kernel_begin(self):
        pass

    def wait_for_kernel_before(self):
        self.has_waited = True
        if self.block.launch.touched:
            self.block.launch.touched.has_waited = True

    def store_bfloat16(self, array: GlobalArray, index, value):
        array[index] = _rounded(value)

    def store_bfloat16_pair(self, array: GlobalArray, index, low, high):
        assert index % 2 == 0, f"4 bytes at index {index} are not on their boundary"
        array[index], array[index + 1] = _rounded(low), _rounded(high)

    def pack_bfloat16(self, low, high):
        return np.uint32(int(_rounded(low)) | int(_rounded(high)) << 16)

    def bits_to_float32(self, bits):
        return (bits if isinstance(bits, np.uint32) else np.uint32(bits)).view(np.float32)

    def float32_to_bits(self, value):
        return np.float32(value).view(np.uint32)

    def rounded_product(self, a, b):
        return np.float32(a) * np.float32(b)

    def int8_to_bfloat16(self, word):
        one, two, three, four = (_BFLOAT16_OF_INT8[byte] for byte in int(word).to_bytes(4, "little"))
        return np.uint32(one | two << 16), np.uint32(three | four << 16)

    def shared_address(self, array: np.ndarray) -> int:
        return array.__array_interface__["data"][0] - self.block.arena.__array_interface__["data"][0]

    def _shared(self, address, size: int, dtype=np.uint32) -> np.ndarray:
        assert address % size == 0, f"{size} bytes at address {address} are not on their boundary"
        return self.block.arena[address : address + size].view(dtype)

    def load_shared(self, address):
        return tuple(self._shared(address, 16))

    def load_shared_pair(self, address):
        return tuple(self._shared(address, 8, np.float32))

    def store_shared(self, address, word):
        self._shared(address, 4)[0] = word

    def copy_async(self, address, array: GlobalArray, index):
        self.copies[-1].append((self._shared(address, 16), array.words(index)))

    def commit_copies(self):
        self.copies.append([])

    def wait_for_copies(self, pending):
        while len(self.copies) - 1 > pending:
            for target, words in self.copies.pop(0):
                target[:] = words

    def prefetch(self, array: GlobalArray, index):
        array.need(index)

    def prefetch_run(self, array: GlobalArray, index, size):
        assert size % 16 == 0, f"{size} bytes are not 16 n"
        assert index * array.values.itemsize % 16 == 0, f"a run at index {index} is not on a boundary of 16 bytes"
        array.need(index, int(size) // array.values.itemsize)

    def arrive(self, array: GlobalArray, index):
        old = array[index]
        array[index] = old + np.uint32(1)
        return old


Launch = namedtuple("Launch", "grid threads shared_bytes arena_bytes touched")


class Cuda:
    """What a kernel sees as `cuda`; `current` is the thread that runs."""

    warpsize = WARP

    def __init__(self):
        self.current: Thread | None = None
        self.atomic = types.SimpleNamespace(
            add=self._atomic(lambda old, value: old + value), exch=self._atomic(lambda old, value: value)
        )
        self.local = types.SimpleNamespace(array=lambda shape, dtype: _local_array(shape, dtype))

    threadIdx = property(lambda self: self.current.index)
    blockIdx = property(lambda self: self.current.block.index)
    blockDim = property(lambda self: self.current.block.launch.threads)
    gridDim = property(lambda self: self.current.block.launch.grid)

    def shared_array(self, site, shape, dtype, alignment=0):
        return self.current.block.shared_array(site, shape, dtype, alignment)

    def fma(self, a, b, c):
        if isinstance(a, np.float64):
            return np.float64(a * b + c)
        return np.float32(float(a) * float(b) + float(c))

    def _atomic(self, operation):
        def change(array, index, value):
            old = array[index]
            array[index] = operation(old, value)
            return old

        return change


cuda = Cuda()


class Simulated:
    """A kernel or device function whose source has been rewritten; called, it is a generator if it ever waits."""

    def __init__(self, function: Callable):
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        definition = tree.body[0]
        definition.decorator_list = []
        names = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
        used = _names_in(definition)
        known = {name: _stand_in(name, value) for name, value in names.items() if name in used}
        rewriter = _Rewriter(known, function.__qualname__)
        rewriter.visit(definition)
        self.waits = rewriter.waits
        ast.fix_missing_locations(tree)
        ast.increment_lineno(tree, inspect.getsourcelines(function)[1] - 1)
        scope = {**function.__globals__, **known, **BUILTINS}
        exec(compile(tree, inspect.getsourcefile(function) or function.__name__, "exec"), scope)
        self.function = scope[function.__name__]

    def __call__(self, *arguments):
        return self.function(*arguments)


class _Rewriter(ast.NodeTransformer):
    def __init__(self, known: dict[str, Any], function: str):
        self.known, self.function, self.waits, self.sites = known, function, False, 0

    def visit_Call(self, node: ast.Call):
        self.generic_visit(node)
        called = node.func
        if isinstance(called, ast.Attribute):
            if ast.unparse(called) == "cuda.shared.array":
                self.sites += 1
                node.func = ast.parse("cuda.shared_array", mode="eval").body
                node.args.insert(0, ast.Constant((self.function, self.sites)))
            elif called.attr in WAITING and ast.unparse(called.value) == "cuda":
                return self._yield(called.attr, node)
        elif isinstance(called, ast.Name):
            if called.id in WAITING:
                return self._yield(called.id, node)
            stand_in = self.known.get(called.id)
            if isinstance(stand_in, Simulated) and stand_in.waits:
                self.waits = True
                return ast.copy_location(ast.YieldFrom(node), node)
        return node

    def _yield(self, name: str, node: ast.Call):
        self.waits = True
        return ast.copy_location(ast.Yield(ast.Tuple([ast.Constant(name), *node.args], ast.Load())), node)


def simulate(kernel, grid, threads: int, *arguments, shared_bytes: int = 0, touched: Touched | None = None) -> None:
    """Run a kernel. Arrays are changed in place.

    touched: what it touches is noted there.
    """
    grid = (grid,) if isinstance(grid, int) else tuple(grid)
    simulated = _simulated(kernel.py_func)
    launch = Launch(Dimensions(*grid), Dimensions(threads), shared_bytes, shared_bytes + (64 << 10), touched)
    arguments = [_device_argument(argument, touched) for argument in arguments]
    blocks = []
    sizes = grid + (1,) * (3 - len(grid))
    for number, (z, y, x) in enumerate(np.ndindex(*sizes[::-1])):
        block = Block(Dimensions(x, y, z), number, launch)
        blocks.append([Thread(block, Dimensions(i), i) for i in range(threads)])
    with np.errstate(all="ignore"):
        for block in blocks:
            _run(block, simulated, arguments)


def _device_argument(argument, touched: Touched | None):
    if isinstance(argument, tuple):
        return type(argument)(*(_device_argument(part, touched) for part in argument))
    return GlobalArray(argument, touched) if isinstance(argument, np.ndarray) else argument


def _run(threads: list[Thread], simulated: Simulated, arguments: list) -> None:
    """Run threads until each waits; let go on whatever group has arrived in full; and so on."""
    if not simulated.waits:
        for cuda.current in threads:
            simulated(*arguments)
        return
    for thread in threads:
        cuda.current = thread
        thread.generator = simulated(*arguments)
    alive: dict[Any, int] = {}
    for thread in threads:
        for group in (thread.warp, thread.block):
            alive[group] = alive.get(group, 0) + 1
    waiting: dict[Any, list[Thread]] = {}
    runnable = list(threads)
    order = random.Random(0)
    while runnable:
        order.shuffle(runnable)  # in a fixed order, a barrier that is missing might not be missed
        for thread in runnable:
            cuda.current = thread
            try:
                thread.operation = thread.generator.send(thread.answer)
            except StopIteration:
                alive[thread.warp] -= 1
                alive[thread.block] -= 1
                continue
            name = thread.operation[0]
            group = thread.warp if name in WARP_OPERATIONS else thread.block
            waiting.setdefault((name, group), []).append(thread)
        runnable = []
        for (name, group), members in list(waiting.items()):
            if len(members) == alive[group]:
                del waiting[name, group]
                OPERATIONS[name](members)
                runnable += members
    if waiting:
        places = [f"{name} with {len(members)} threads" for (name, _), members in waiting.items()]
        raise RuntimeError(f"a barrier that not all threads reach: {', '.join(places[:5])}")


def _no_answer(members: list[Thread]) -> None:
    for thread in members:
        thread.answer = None


def _shuffle(source: Callable[[int, int], int]) -> Callable[[list[Thread]], None]:
    def operate(members: list[Thread]) -> None:
        values = {thread.lane: thread.operation[2] for thread in members}
        for thread in members:
            lane = source(thread.lane, thread.operation[3])
            thread.answer = values.get(lane, thread.operation[2])

    return operate


def _multiply(members: list[Thread]) -> None:
    """mma.m16n8k16 of bfloat16: ptx.py says which lane holds what, lane 4 g + q in group g of 8 and quad q of 4."""
    assert len(members) == WARP, "a product of a warp needs all its lanes"
    members = sorted(members, key=operator.attrgetter("lane"))
    of_a, of_b, of_c = zip(*(thread.operation[1:] for thread in members), strict=True)
    a = _pairs(of_a).reshape(8, 4, 2, 2, 2).transpose(3, 0, 2, 1, 4).reshape(16, 16)  # (M, K)
    b = _pairs(of_b).reshape(8, 4, 2, 2).transpose(2, 1, 3, 0).reshape(16, 8)  # (K, N)
    c = np.array(of_c, np.float64).reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8)  # (M, N)
    result = (c + a @ b).astype(np.float32)
    answers = result.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(WARP, 4)
    for thread, answer in zip(members, answers, strict=True):
        thread.answer = tuple(answer)


def _pairs(words: Sequence[Sequence[int]]) -> np.ndarray:
    """The two bfloat16 in each word, as float64: (lanes, words, 2)."""
    bits = np.array(words, np.uint32)
    return np.stack([bits << 16, bits & 0xFFFF0000], axis=-1).view(np.float32).astype(np.float64)


OPERATIONS = {
    **dict.fromkeys(("syncthreads", "syncwarp"), _no_answer),
    "shfl_xor_sync": _shuffle(lambda lane, mask: lane ^ mask),
    "shfl_sync": _shuffle(lambda lane, source: source),
    "shfl_up_sync": _shuffle(lambda lane, count: lane - count),
    "mma_bfloat16": _multiply,
}


class _Math:
    """`math` for numbers of NumPy: the result has the argument's precision, and nothing overflows into an error."""

    inf = math.inf

    def __getattr__(self, name: str):
        if name == "erf":
            return lambda x: type(x)(math.erf(x))
        return lambda x: getattr(np, name)(x)


def _whole(name: str) -> Callable[[Any], Any]:
    """Return the conversion to an unsigned type, called like it: kernels name arrays' types by it."""
    kind = getattr(np, name)
    mask = int(np.iinfo(kind).max)

    def convert(value):
        return kind(int(value) & mask)

    convert.__name__ = name
    return convert


def int32(value):
    return int(value)


def int64(value):
    return int(value)


NUMBERS = [int32, int64, *map(_whole, ("uint16", "uint32", "uint64")), np.float32, np.float64]
TYPES = {getattr(numba, number.__name__): number for number in NUMBERS}
# Numba's max of two float32 is a float32, and so is Python's; range takes NumPy's whole numbers.
BUILTINS = {"range": lambda *bounds: range(*map(int, bounds))}


def _stand_in(name: str, value: Any) -> Any:
    """What a kernel finds under a name in place of what CUDA's compiler would."""
    if getattr(value, "__name__", "") in ("numba.cuda", "numba_cuda.numba.cuda"):
        return cuda
    if value is math:
        return _Math()
    if isinstance(value, numba.types.Type) and value in TYPES:
        return TYPES[value]
    if hasattr(value, "py_func"):
        return _simulated(value.py_func)
    if type(value).__name__ == "_Intrinsic" or type(value).__module__.endswith("extending"):
        called = getattr(value, "_name", None) or value.__name__
        if called in WAITING:  # the rewriter knows it by its name
            return value
        method = getattr(Thread, called)
        return lambda *arguments: method(cuda.current, *arguments)
    return value


@functools.cache
def _simulated(function: Callable) -> Simulated:
    return Simulated(function)


def _names_in(definition: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)}


def _numpy_type(dtype):
    return np.dtype(getattr(dtype, "__name__", None) or str(dtype))


def _local_array(shape, dtype):
    dtype = _numpy_type(dtype)
    return np.full(shape, np.nan if dtype.kind == "f" else -1 if dtype.kind == "i" else 0, dtype)


def _rounded(value) -> np.uint32:
    """The bits of the nearest bfloat16, ties to even."""
    bits = int((value if isinstance(value, np.float32) else np.float32(value)).view(np.uint32))
    if bits & 0x7FFFFFFF > 0x7F800000:  # NaN
        return np.uint32(0x7FFF)
    return np.uint32((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


_BFLOAT16_OF_INT8 = [int(_rounded(np.float32(np.uint8(byte).view(np.int8)))) for byte in range(256)]
