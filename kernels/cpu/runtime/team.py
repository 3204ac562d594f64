"""A team of threads that goes through a step together, phase by phase, with no lock and no thread pool's library.

Every thread of the team runs the same function over the same arguments. Each kernel in it is one phase: it has a
number of items, each thread claims the next item that nobody has, and goes on to the next phase when all items
are done. Nobody waits for a thread, only for an item that a thread has claimed: one that was put to sleep by the
system, woke late or never started, is simply not missed. When it comes back it falls through what the others have
finished and joins them. So two engines on two cores slow each other down, and do not stop each other.

Shared is the `board`, three words on cache lines of their own:
    published   the number of the step's first phase
    claims      phase << SHIFT | items claimed in it
    done        phase << SHIFT | items done in it
Phases are numbered on through all steps. Whoever does the last item of a phase opens the next one.
"""

import sys
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tinygpt.kernels.cpu.jit import kernel
from tinygpt.kernels.cpu.simd.memory import zeros
from tinygpt.kernels.cpu.simd.vector_ir import address, declare

PUBLISHED, CLAIMS, DONE = 0, 8, 16  # indices into the board: 64 bytes apart
BOARD_SIZE = 24
PHASE, JOINED = 0, 1  # indices into a thread's own phase array
SHIFT = np.int64(24)  # up to 16 million items a phase; 2**39 phases last for years
MASK = (np.int64(1) << SHIFT) - np.int64(1)
ONE = np.int64(1)

ROWS_PER_ITEM = 4  # of a phase over rows: a row takes less than a microsecond, about what claiming it costs

SPINS = 4000  # pauses, some 50 us, before a waiting thread lets others have its core
IDLE_SPINS = 20000  # and before one without a step goes to sleep


class Team(NamedTuple):
    """What one thread knows of its team."""

    board: np.ndarray  # (BOARD_SIZE,) int64, shared
    phase: np.ndarray  # (8,) int64, its own, on a cache line: PHASE it is in, first phase of the step it JOINED
    scratch: np.ndarray  # float32, its own, for whatever a kernel needs


def new_board() -> np.ndarray:
    """A board before its first step, on a cache line's boundary. Phase 1 is open."""
    board = zeros((BOARD_SIZE,), np.int64)
    board[CLAIMS] = board[DONE] = ONE << SHIFT
    return board


@kernel
def claim(team, items):
    """The next item of this phase, 0 <= item < items, or -1 if there is none left for this thread."""
    claims = address(team.board) + CLAIMS * 8
    while True:
        word = atomic_load(claims)
        item = word & MASK
        if word >> SHIFT != team.phase[PHASE] or item >= items:
            return np.int64(-1)
        if compare_exchange(claims, word, word + ONE):
            return item


@kernel
def complete(team, items):
    """Say that a claimed item is done; the last one of a phase opens the next."""
    done = address(team.board) + DONE * 8
    if atomic_add(done, ONE) & MASK == items - ONE:
        following = (team.phase[PHASE] + ONE) << SHIFT
        atomic_store(done, following)
        atomic_store(address(team.board) + CLAIMS * 8, following)


@kernel
def claim_rows(team, rows):
    """For a phase over `rows` rows: the bounds of the next few; the first bound is -1 if none are left."""
    item = claim(team, _row_items(rows))
    return item * ROWS_PER_ITEM if item >= 0 else item, min((item + 1) * ROWS_PER_ITEM, rows)


@kernel
def complete_rows(team, rows):
    """Say that rows that `claim_rows` gave are done."""
    complete(team, _row_items(rows))


@kernel
def _row_items(rows):
    return max((rows + ROWS_PER_ITEM - 1) // ROWS_PER_ITEM, 1)


@kernel
def finish_phase(team):
    """Wait until every item of this phase is done, and go on to the next."""
    claims, spins = address(team.board) + CLAIMS * 8, 0
    while atomic_load(claims) >> SHIFT <= team.phase[PHASE]:
        spins += 1
        _relax(spins)
    team.phase[PHASE] += ONE


@kernel
def begin_step(team):
    """For the thread that leads: start at the phase that is open, and let the others in."""
    first = atomic_load(address(team.board) + CLAIMS * 8) >> SHIFT
    team.phase[PHASE] = first
    atomic_store(address(team.board) + PUBLISHED * 8, first)


@kernel
def join_step(team):
    """For the others: wait a while for a step that this thread has not joined yet; whether one came."""
    published = address(team.board) + PUBLISHED * 8
    for spins in range(IDLE_SPINS):
        first = atomic_load(published)
        if first != team.phase[JOINED]:
            team.phase[JOINED] = team.phase[PHASE] = first
            return True
        _relax(spins)
    return False


@kernel
def _relax(spins):
    pause()
    if spins > SPINS and spins % 16 == 0:
        yield_core()


def _pointer(builder, address):
    return builder.inttoptr(address, ir.IntType(64).as_pointer())


@intrinsic
def atomic_load(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.load_atomic(_pointer(builder, args[0]), "seq_cst", 8)

    return types.int64(types.intp), codegen


@intrinsic
def atomic_store(typingctx, address, value):
    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], _pointer(builder, args[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), codegen


@intrinsic
def atomic_add(typingctx, address, value):
    """The value before the addition."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", _pointer(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.intp, types.int64), codegen


@intrinsic
def compare_exchange(typingctx, address, expected, new):
    """Replace `expected` by `new`; False if another value stands there."""

    def codegen(context, builder, signature, args):
        pointer = _pointer(builder, args[0])
        return builder.extract_value(builder.cmpxchg(pointer, args[1], args[2], "seq_cst", "seq_cst"), 1)

    return types.boolean(types.intp, types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):
    """Tell the core that this is a waiting loop."""

    def codegen(context, builder, signature, args):
        triple = builder.module.triple
        if "x86" in triple:
            builder.call(declare(builder, "llvm.x86.sse2.pause", ir.VoidType(), []), [])
        elif triple.startswith(("aarch64", "arm64")):  # its own hint is over at once; this one takes some 20 cycles
            every = ir.IntType(32)
            builder.call(declare(builder, "llvm.aarch64.isb", ir.VoidType(), [every]), [ir.Constant(every, 15)])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def yield_core(typingctx):
    """Let another thread run on this core, if one wants to."""

    def codegen(context, builder, signature, args):
        function = ir.FunctionType(ir.IntType(32), [])
        name = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
        builder.call(builder.module.globals.get(name) or ir.Function(builder.module, function, name), [])
        return context.get_dummy_value()

    return types.void(), codegen
