"""Runs a kernel's PTX on a CPU: blocks of a launch together, a NumPy array for each register.

Threads run independently, the furthest behind first. A barrier, shuffle or mma runs when all lanes of the warp, or all
threads of the block, have come to it. Stricter than a GPU:

- Registers and shared memory begin as NaN. Addresses lie within an argument, on their boundary.
- An asynchronous copy spoils its target until it is waited for.
- Two threads touch a word of shared memory, one of them to write, with a barrier between.
- A number of global memory that another thread writes is NaN, unless a barrier or an arrival is between.
- Before griddepcontrol.wait, a kernel writes nothing, and reads nothing that an earlier kernel of its graph writes.
"""

import ctypes
import functools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from support import cuda_compile
from support.ptx_code import KINDS, Piece, Program, PtxError, read_ptx
from tinygpt.kernels.cuda.device import _narrowed
from tinygpt.kernels.numbers import from_bfloat16

WARP = 32
LANES = np.arange(WARP)
SPOILT = 0xFF  # a byte of NaN
MAX_THREADS, MAX_BYTES = 1 << 16, 256 << 20  # that run at once, and of their registers


@dataclass
class Touched:
    """The words that a launch reads before it waits for the kernel before it, and that it writes."""

    is_first: bool = False  # of a graph: there is nothing to wait for
    read_early: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)

    def __post_init__(self):
        self.has_waited = self.is_first  # a thread at least


def simulate(
    kernel, grid, threads: int, *arguments, shared_bytes: int = 0, touched: Touched | None = None
) -> None:
    """Run a kernel as compiled for cuda_compile.ARCHITECTURE. Arrays are changed in place; touched notes addresses."""
    arguments = tuple(map(_narrowed, arguments))
    program = _program(kernel, cuda_compile.signature_of(arguments), cuda_compile.ARCHITECTURE)
    params, spans = _params(program, arguments)
    run(program, grid, threads, params, Memory(spans), shared_bytes, touched)


@functools.cache
def _program(kernel, signature: tuple, architecture: tuple) -> Program:
    return read_ptx(cuda_compile.linked_ptx(kernel, signature, architecture))


def _params(program: Program, arguments: tuple) -> tuple[list[Any], list[tuple[int, int]]]:
    """Return the parameters of a launch, and the address and size of each array."""
    values: list[Any] = []
    spans = []
    for value in _flat(arguments):
        if isinstance(value, np.ndarray):  # Numba's: meminfo, parent, size, item size, data, shape, strides
            spans.append((value.__array_interface__["data"][0], value.nbytes))
            values += 0, 0, value.size, value.itemsize, spans[-1][0], value.size, value.itemsize
        else:
            values.append(value)
    return [
        _param(value, KINDS[kind]) for value, kind in zip(values, program.params.values(), strict=True)
    ], spans


def _flat(value: Any) -> list[Any]:
    return [part for each in value for part in _flat(each)] if isinstance(value, tuple) else [value]


def _param(value: Any, kind: Any) -> Any:
    given = np.asarray(value)
    size = np.dtype(kind).itemsize
    if given.dtype.kind == "f":
        return given.astype(f"f{size}")[()].view(kind)
    return np.array(int(given) & (1 << 8 * size) - 1, f"u{size}").view(kind)[()]


def run(
    program: Program, grid, threads: int, params: list, memory: "Memory", shared_bytes: int, touched
) -> None:
    """Run a launch: blocks in any order, many at once."""
    grid = (grid,) if isinstance(grid, int) else tuple(grid)
    grid += (1,) * (3 - len(grid))
    order = np.random.default_rng(0).permutation(math.prod(grid))
    bytes_of_thread = sum(np.dtype(KINDS[program.registers[name]]).itemsize for name in program.kept) + 64
    at_once = max(min(MAX_THREADS, MAX_BYTES // bytes_of_thread) // threads, 1)
    with np.errstate(all="ignore"):
        for first in range(0, len(order), at_once):
            blocks = order[first : first + at_once]
            Machine(program, grid, threads, blocks, params, memory, shared_bytes, touched).run()


class Memory:
    """The process's own memory as a GPU's, of which a launch may touch some spans: pairs of an address and a size."""

    start = 4096  # the address of bytes[0]
    bytes = np.frombuffer((ctypes.c_uint8 * ((1 << 47) - start)).from_address(start), np.uint8)

    def __init__(self, spans: list[tuple[int, int]]):
        pairs = np.array(sorted(spans) or [(self.start, 0)]).reshape(-1, 2)
        self.starts = pairs[:, 0]
        self.stops = np.maximum.accumulate(pairs.sum(1))
        gone = np.minimum(self.starts[1:], self.stops[:-1]) - self.starts[:-1]
        self.places = np.concatenate([[0], np.cumsum(gone)])  # of spans, one after another without gaps
        self.size = int(self.places[-1] + self.stops[-1] - self.starts[-1])

    def holds(self, address: np.ndarray, size: Any) -> bool:
        span = np.searchsorted(self.starts, address, "right") - 1
        return bool(((span >= 0) & (address + size <= self.stops[span])).all())

    def place_of(self, address: np.ndarray) -> np.ndarray:
        span = np.searchsorted(self.starts, address, "right") - 1
        return address - self.starts[span] + self.places[span]


class Machine:
    """Some blocks of a launch, which run at the same time. Threads are numbered through all of them."""

    def __init__(
        self, program: Program, grid, threads: int, blocks, params, memory, shared_bytes: int, touched
    ):
        self.program = program
        self.params = params
        self.memory = memory
        self.touched = touched
        self.count = threads * len(blocks)
        self.all = self.there = np.arange(self.count)  # `there`: the threads that run an instruction
        thread = self.all % threads
        self.block = self.all // threads
        self.lane = thread % WARP
        self.warp = self.block * -(-threads // WARP) + thread // WARP
        numbers = np.asarray(blocks)[self.block]
        (x, y, z) = grid
        self.specials = dict(
            zip(("%nctaid.x", "%nctaid.y", "%nctaid.z", "%ntid.x"), (x, y, z, threads), strict=True)
        )
        self.specials |= {"%tid.x": thread, "%laneid": self.lane, "%dynamic_smem_size": shared_bytes}
        self.specials |= {
            "%ctaid.x": numbers % x,
            "%ctaid.y": numbers // x % y,
            "%ctaid.z": numbers // (x * y),
        }
        kinds = {name: np.dtype(KINDS[program.registers[name]]) for name in program.kept}
        self.registers = {name: spoilt(self.count * kind.itemsize).view(kind) for name, kind in kinds.items()}
        self.shared_bytes = program.shared_bytes + shared_bytes
        self.window = -(-self.shared_bytes // 16) * 16  # of a block
        self.shared, self.local = spoilt(self.window * len(blocks)), spoilt(program.local_bytes * self.count)
        self.alive = {"warp": np.bincount(self.warp), "block": np.bincount(self.block)}
        self.groups: dict[int, np.ndarray] = {0: self.all}  # threads that are to run a piece
        self.waiting: dict[int, np.ndarray] = {}  # for others, with which they meet there
        self.committed = np.zeros(self.count, np.int64)
        self.copies = np.zeros((4, 0), np.int64)  # under way: thread, group, target, source
        self.has_waited = np.full(self.count, touched is None or touched.is_first)
        # Barriers that each thread has passed: of its warp or its block; of its block.
        self.warp_epoch, self.block_epoch = np.ones(self.count, np.int32), np.ones(self.count, np.int32)
        self.races, self.order = SharedWords(self, self.shared.size), GlobalUnits(self, memory.size)

    def run(self) -> None:
        while self.groups:
            number = min(self.groups)
            piece = self.program.pieces[number]
            there = self.groups.pop(number)
            if piece.instructions[0].is_meeting:
                there = merged(self.waiting.pop(number, None), there)
                is_ready = self._is_complete(piece, there)
                if not is_ready.all():
                    self.waiting[number] = there[~is_ready]
                there = there[is_ready]
            if there.size:
                self._run_piece(number, piece, there)
        if self.waiting:
            places = {
                self.program.pieces[number].instructions[0].text: t.size for number, t in self.waiting.items()
            }
            raise PtxError(
                f"not all threads reach a barrier, or an instruction of a warp; numbers there: {places}"
            )

    def _is_complete(self, piece: Piece, there: np.ndarray) -> np.ndarray:
        """Return, for each thread, whether all living threads of its warp or block are there."""
        is_of_block = piece.instructions[0].op[0] == "bar" and piece.instructions[0].op[1] != "warp"
        group = (self.block if is_of_block else self.warp)[there]
        alive = self.alive["block" if is_of_block else "warp"]
        return np.bincount(group, minlength=alive.size)[group] == alive[group]

    def _run_piece(self, number: int, piece: Piece, there: np.ndarray) -> None:
        self.there, self.now = there, 0
        try:
            taken = piece.run(self, slice(None) if there.size == self.count else there)
        except PtxError as error:
            instruction = piece.instructions[self.now]
            raise PtxError(
                f"{error}: {instruction.text}, line {instruction.line} of the kernel's file"
            ) from None
        taken = np.broadcast_to(
            taken if piece.falls_through and piece.target is not None else True, there.shape
        )
        if piece.target is not None:
            self._go(piece.target, there[taken])
            self._go(number + 1, there[~taken])
        elif piece.falls_through:
            self._go(number + 1, there)
        else:
            self._leave(there)

    def _go(self, number: int, threads: np.ndarray) -> None:
        if threads.size:
            self.groups[number] = merged(self.groups.get(number), threads)

    def _leave(self, threads: np.ndarray) -> None:
        if np.isin(self.copies[0], threads).any():
            raise PtxError("threads end before they have waited for their asynchronous copies")
        self.alive["warp"] -= np.bincount(self.warp[threads], minlength=self.alive["warp"].size)
        self.alive["block"] -= np.bincount(self.block[threads], minlength=self.alive["block"].size)
        for number in list(self.waiting):  # who may be complete now
            self._go(number, self.waiting.pop(number))

    def pass_barrier(self, is_of_warp: bool) -> None:
        self.warp_epoch[self.there] += 1
        if not is_of_warp:
            self.block_epoch[self.there] += 1
        self.order.share((self.warp if is_of_warp else self.block)[self.there])

    def shuffle(self, mode: str, value, b, c, mask):
        if np.any(mask != np.uint32(0xFFFFFFFF)):
            raise PtxError("a shuffle of some lanes")
        value = spread(value, self.there.shape)
        lane = self.lane[self.there]
        b = (b & 31).astype(np.int64)
        clamp = (c & 31).astype(np.int64)
        segment = (c >> 8 & 31).astype(np.int64)
        lowest = lane & segment
        limit = (lane & segment) | (clamp & ~segment)
        source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": lowest | (b & ~segment)}[mode]
        source = np.where(source >= limit if mode == "up" else source <= limit, source, lane)
        if lane.size % WARP == 0 and (lane.reshape(-1, WARP) == LANES).all():
            return value[np.arange(lane.size) - lane + source]
        warp = self.warp[self.there] - self.warp[self.there[0]]
        table = np.zeros((warp[-1] + 1, WARP), np.uint32)
        present = np.zeros((warp[-1] + 1, WARP), np.bool_)
        table[warp, lane] = value
        present[warp, lane] = True
        if not present[warp, source].all():
            raise PtxError("a shuffle from a lane that is not there")
        return table[warp, source]

    def multiply(self, a, b, c, kind):
        """Return c (16, 8) + a (16, 16) @ b (16, 8), in float64; jit.py's mma has the lanes' parts."""
        size = self.there.size
        if size % WARP or (self.lane[self.there].reshape(-1, WARP) != LANES).any():
            raise PtxError("an mma without some lanes of the warp")
        a, b, c = (np.stack([spread(x, (size,)) for x in part], -1) for part in (a, b, c))
        a = pairs(a, kind).reshape(-1, 8, 4, 2, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(-1, 16, 16)
        b = pairs(b, kind).reshape(-1, 8, 4, 2, 2).transpose(0, 3, 2, 4, 1).reshape(-1, 16, 8)
        c = c.astype(np.float64).reshape(-1, 8, 4, 2, 2).transpose(0, 3, 1, 2, 4).reshape(-1, 16, 8)
        d = (c + a @ b).astype(np.float32)
        return d.reshape(-1, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(size, 4).T

    def special(self, name: str, i):
        value = self.specials[name]
        return value[i].astype(np.uint32) if isinstance(value, np.ndarray) else np.uint32(value)

    def place(self, space: str, address, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of accesses in the memory of a space, and that memory."""
        address = spread(address, self.there.shape).astype(np.int64)
        if np.any(address & (size - 1)):
            raise PtxError(f"{size} bytes at a {space} address off their boundary")
        if space == "global":
            if not self.memory.holds(address, size):
                raise PtxError(f"{size} bytes at a global address outside each array")
            return address - self.memory.start, self.memory.bytes
        limit = self.shared_bytes if space == "shared" else self.program.local_bytes
        if np.any((address < 0) | (address + size > limit)):
            raise PtxError(f"{size} bytes at a {space} address outside")
        if space == "shared":
            return address + self.block[self.there] * self.window, self.shared
        return address + self.there * self.program.local_bytes, self.local

    def load(self, space: str, address, kind, count: int) -> list[np.ndarray]:
        size = np.dtype(kind).itemsize
        at, memory = self.place(space, address, size * count)
        if space == "shared":
            self.races.read(at, size * count, self.there)
        words, first = memory.view(kind), at // size
        values = [words[first + n] for n in range(count)]
        if space == "global":
            self._note_read(at, size * count)
            is_unordered = self.order.are_unordered(at, size * count)
            for value in values:
                value.view(f"u{size}")[is_unordered] = np.iinfo(f"u{size}").max
        return values

    def store(self, space: str, address, kind, values: list) -> None:
        size = np.dtype(kind).itemsize
        at, memory = self.place(space, address, size * len(values))
        if space == "shared":
            self.races.write(at, size * len(values), self.there)
        elif space == "global":
            self._note_write(at, size * len(values))
            self.order.write(at, size * len(values))
        words, first = memory.view(kind), at // size
        for n, value in enumerate(values):
            words[first + n] = value

    def atom(self, space: str, address, kind, value, how: str, is_arrival: bool) -> np.ndarray:
        size = np.dtype(kind).itemsize
        at, memory = self.place(space, address, size)
        words = memory.view(kind)
        value = np.broadcast_to(value, self.there.shape)
        old = np.empty(self.there.shape, kind)
        change = {"add": lambda a, b: a + b, "exch": lambda a, b: b, "max": max, "min": min}[how]
        for n, place in enumerate(at // size):  # one after another
            old[n] = words[place]
            words[place] = change(words[place], value[n])
        if space == "shared":
            self.races.write(at, size, self.there, is_atomic=True)
        else:
            self._note_write(at, size)
            self.order.write(at, size, is_atomic=True)
            if is_arrival:
                self.order.arrive(at, old.astype(np.int64))
        return old

    def prefetch(self, address, size) -> None:
        address, size = (spread(x, self.there.shape).astype(np.int64) for x in (address, size))
        if np.any(size > 1) and np.any((address | size) & 15):
            raise PtxError("a run to prefetch off boundaries of 16 bytes")
        if not self.memory.holds(address, size):
            raise PtxError("a prefetch outside each array")

    def copy_async(self, to, source, size) -> None:
        if size != 16:
            raise PtxError("an asynchronous copy of other than 16 bytes")
        (to, _), (source, _) = self.place("shared", to, 16), self.place("global", source, 16)
        self._note_read(source, 16)
        if self.order.are_unordered(source, 16).any():
            raise PtxError("a copy of a number that another thread writes")
        self.races.write(to, 16, self.there)
        self.shared[to[:, None] + np.arange(16)] = SPOILT
        self.copies = np.hstack([self.copies, [self.there, self.committed[self.there], to, source]])

    def commit_copies(self) -> None:
        self.committed[self.there] += 1

    def wait_for_copies(self, pending: int) -> None:
        """Finish all but the last `pending` of the groups that each thread has committed."""
        waits = np.zeros(self.count, np.bool_)
        waits[self.there] = True
        threads, groups, _, _ = self.copies
        is_done = waits[threads] & (groups < self.committed[threads] - pending)
        threads, _, to, source = self.copies[:, is_done]
        self.copies = self.copies[:, ~is_done]
        self.races.write(to, 16, threads)
        self.shared[to[:, None] + np.arange(16)] = self.memory.bytes[source[:, None] + np.arange(16)]

    def wait_for_kernel_before(self) -> None:
        self.has_waited[self.there] = True
        if self.touched:
            self.touched.has_waited = True

    def _note_read(self, at: np.ndarray, size: int) -> None:
        if self.touched and not self.has_waited[self.there].all():
            self.touched.read_early.update(self._words(at[~self.has_waited[self.there]], size))

    def _note_write(self, at: np.ndarray, size: int) -> None:
        if self.touched:
            if not self.has_waited[self.there].all():
                raise PtxError("something is written before the kernel has waited for the one before it")
            self.touched.written.update(self._words(at, size))

    def _words(self, at: np.ndarray, size: int) -> list[int]:
        return ((at[:, None] + np.arange(0, size, 4)) // 4).ravel().tolist()


class Accesses:
    """The last thread to access each unit of a memory, and the barriers of its block and warp until then."""

    unit = 4  # bytes

    def __init__(self, machine: Machine, size: int):
        self.machine = machine
        count = size // self.unit + 1
        self.last = np.zeros(count, np.int32)
        self.epochs = np.zeros((2, count), np.int32)  # last: 1 + thread

    def note(self, units, threads) -> None:
        self.last[units] = threads + 1
        self.epochs[:, units] = self.machine.block_epoch[threads], self.machine.warp_epoch[threads]

    def unordered(self, units, threads) -> np.ndarray:
        """Return whether another thread accessed each unit, with no barrier between."""
        m, last = self.machine, self.last[units] - 1
        is_other = (last >= 0) & (last != threads)
        if is_other.any():
            is_other &= (m.warp[last] != m.warp[threads]) | (self.epochs[1, units] == m.warp_epoch[threads])
            is_other &= (m.block[last] != m.block[threads]) | (
                self.epochs[0, units] == m.block_epoch[threads]
            )
        return is_other

    def units(self, at, size: int, threads) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the units from each place on, and the thread of each."""
        count = max(size // self.unit, 1)
        return (at[:, None] // self.unit + np.arange(count)).ravel(), np.repeat(threads, count)


class SharedWords(Accesses):
    """The writers of words of shared memory, and the readers."""

    def __init__(self, machine: Machine, size: int):
        super().__init__(machine, size)
        self.readers, self.differ = (
            Accesses(machine, size),
            np.zeros(self.last.size, np.bool_),
        )  # in several warps
        self.is_atomic = np.zeros(self.last.size, np.bool_)  # the last write

    def read(self, at, size: int, threads) -> None:
        m = self.machine
        readers = self.readers
        (words, threads) = self.units(at, size, threads)
        if self.unordered(words, threads).any():
            raise PtxError(
                "a word of shared memory is read that another thread writes, with no barrier between"
            )
        self.differ[words] &= readers.epochs[0, words] == m.block_epoch[threads]
        self.differ[words[readers.unordered(words, threads)]] = True
        readers.note(words, threads)
        # Other warps may read the word in this very instruction.
        self.differ[words[m.warp[readers.last[words] - 1] != m.warp[threads]]] = True

    def write(self, at, size: int, threads, is_atomic: bool = False) -> None:
        words, threads = self.units(at, size, threads)
        differ = self.differ[words] & (self.readers.epochs[0, words] == self.machine.block_epoch[threads])
        if differ.any() or self.readers.unordered(words, threads).any():
            raise PtxError(
                "a word of shared memory is written that another thread reads, with no barrier between"
            )
        is_disputed = self.unordered(words, threads) & ~(is_atomic & self.is_atomic[words])
        self.note(words, threads)
        self.is_atomic[words] = is_atomic
        if is_disputed.any() or (not is_atomic and (self.last[words] != threads + 1).any()):
            raise PtxError("two threads write a word of shared memory, with no barrier between")


class GlobalUnits(Accesses):
    """The writers of global memory, and the arrivals that published it.

    An arrival, atom.acq_rel, publishes what its thread has written, and its warp or block before a barrier, to the
    later arrivals at the same counter, and to their warp or block after a barrier.
    """

    def __init__(self, machine: Machine, size: int):
        self.unit = machine.program.least_stored
        super().__init__(machine, size)
        self.published = np.zeros(
            (2, self.last.size), np.int64
        )  # 1 + the counter's place, and its value before
        self.seen = np.zeros((2, machine.count), np.int64)  # the same of each thread's last arrival

    def are_unordered(self, at, size: int) -> np.ndarray:
        units, threads = self._units(at, size)
        found = self.unordered(units, threads)
        if found.any():
            counter, count = self.published[:, units]
            found &= (counter == 0) | (counter != self.seen[0, threads]) | (count >= self.seen[1, threads])
        return found.reshape(len(at), -1).any(1)

    def write(self, at, size: int, is_atomic: bool = False) -> None:
        units, threads = self._units(at, size)
        is_disputed = self.are_unordered(at, size).any()
        self.note(units, threads)
        self.published[0, units] = 0
        if not is_atomic and (is_disputed or (self.last[units] != threads + 1).any()):
            raise PtxError("two threads write a number, with neither a barrier nor an arrival between")

    def arrive(self, at, old) -> None:
        m = self.machine
        threads = self.machine.there
        (counters, _) = self._units(at, 1)
        units = np.flatnonzero((self.last > 0) & (self.published[0] == 0))
        last = self.last[units] - 1
        for group, epochs, written in (
            (m.block, m.block_epoch, self.epochs[0]),
            (m.warp, m.warp_epoch, self.epochs[1]),
            (m.all, m.warp_epoch, np.zeros_like(self.last)),
        ):
            arrival = np.full(group[-1] + 1, -1)
            arrival[group[threads]] = np.arange(threads.size)
            number = arrival[group[last]]
            is_published = (number >= 0) & (written[units] != epochs[threads[number]])
            number = number[is_published]
            self.published[:, units[is_published]] = counters[number] + 1, old[number]
        self.seen[:, threads] = counters + 1, old

    def share(self, groups) -> None:
        """Let all threads of a group, which a barrier is for, see what one of them has seen."""
        threads = self.machine.there
        has_seen = self.seen[0, threads] > 0
        if has_seen.any():
            of_group = np.zeros((2, groups.max() + 1), np.int64)
            of_group[:, groups[has_seen]] = self.seen[:, threads[has_seen]]
            self.seen[:, threads] = of_group[:, groups]

    def _units(self, at, size: int) -> tuple[np.ndarray, np.ndarray]:
        memory = self.machine.memory
        return self.units(memory.place_of(at + memory.start), size, self.machine.there)


def spoilt(size: int) -> np.ndarray:
    return np.full(size, SPOILT, np.uint8)


def spread(value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """np.broadcast_to, which takes longer than an instruction, for values that are not of this shape already."""
    return value if getattr(value, "shape", None) == shape else np.broadcast_to(value, shape)


def merged(some: np.ndarray | None, others: np.ndarray) -> np.ndarray:
    return others if some is None else np.sort(np.concatenate([some, others]))


def pairs(words: np.ndarray, kind: str) -> np.ndarray:
    """Return the two numbers of 16 bits in each word as float64, (..., words, 2)."""
    halves = np.ascontiguousarray(words)[..., None].view(np.uint16)
    return (halves.view(np.float16) if kind == "f16" else from_bfloat16(halves)).astype(np.float64)
