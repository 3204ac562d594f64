"""A team of threads that goes through a step together, phase by phase, with no lock and no thread pool's library.

Every thread of the team runs the same function over the same arguments. Each kernel in it is one phase. It has a number
of items, and each thread has a share of them, neighbours in memory and the same in every step. A thread takes its share
item by item, then what others have not begun of theirs, and goes on to the next phase when all items are done. Nobody
waits for a thread, only for what a thread has begun, or has done and not yet counted: one that was put to sleep by the
system, woke late or never started, is simply not missed. When it comes back it falls through what the others have
finished and joins them. So two engines on two cores slow each other down, and do not stop each other.

Shared is the `board`, words that lie on cache lines of their own:
    PUBLISHED   the number of the step's first phase
    OPEN        the phase that is open
    DONE        items of it that are done, in shares of which all are
    a share's   phase << SHIFT | items of the share that are taken in it
    a group's   items that are done in GROUP shares
Phases are numbered on through all steps. Whoever completes the last item of a phase opens the next one. A share's word
is its own thread's until the others are out of work, and a group's that of a few: no line goes through all threads for
each item.
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

LINE = 16  # words: 128 bytes, as Apple's lines are that long, and Intel's are fetched by twos
PUBLISHED, OPEN, DONE, SHARES = (i * LINE for i in range(4))  # indices into the board; groups follow the shares
GROUP = 8  # shares whose items are counted together first
# Indices into a thread's own words: the phase it is in, the first one of the step it joined, which one of how many
# members it is; of its phase: the items, those of its share that are done and not yet counted, the share that its item
# was left in or -1, and its looks at the others' shares in vain; how many items it has done in all, and when it last
# let others run.
PHASE, JOINED, NUMBER, MEMBERS, ITEMS, UNCOUNTED, TAKEN_FROM, LOOKS, CLAIMED, LET_RUN = range(10)
SHIFT = np.int64(24)  # up to 16 million items a phase; 2**39 phases last for years
MASK = (np.int64(1) << SHIFT) - np.int64(1)
ZERO, ONE, EIGHT = np.int64(0), np.int64(1), np.int64(8)
NOTHING, NOT_BEGUN = np.int64(-1), np.int64(-2)  # in place of an item

ROWS_PER_ITEM = 4  # of a phase over rows: a row takes less than a microsecond, about what claiming it costs

PATIENCE = 30  # looks at all shares, of 2 threads about a microsecond, before one begins those of others in a phase
SPINS = 4000  # pauses, some 50 us, before a waiting thread lets others have its core
IDLE_SPINS = 60000  # and before one without a step goes to sleep: longer than Python takes between two calls
TURN = 5_000_000  # ticks, some 2 ms, about the least that Linux gives a thread: to give way more often costs the core


class Team(NamedTuple):
    """What one thread knows of its team."""

    board: np.ndarray  # int64, shared: three LINEs, one a share and one a group of shares
    own: np.ndarray  # (LINE,) int64, its own words
    scratch: np.ndarray  # float32, its own, for whatever a kernel needs


def new_teams(scratch: np.ndarray) -> list[Team]:
    """What each member of a team knows before its first step. scratch (members, ...) float32: each one's own."""
    members = len(scratch)
    board = zeros((SHARES + (members + -(-members // GROUP)) * LINE,), np.int64)
    own = zeros((members, LINE), np.int64)
    board[OPEN], own[:, NUMBER], own[:, MEMBERS], own[:, TAKEN_FROM] = 1, np.arange(members), members, NOTHING
    return [Team(board, own[i], scratch[i]) for i in range(members)]


@kernel
def claim(team, items):
    """An item of this phase that nobody has, 0 <= item < items, or -1 if there is none left for this thread."""
    own = team.own
    if atomic_load(address(team.board) + OPEN * EIGHT) != own[PHASE]:  # `items` may be another phase's by now
        return NOTHING
    own[ITEMS] = items
    item = _take(team, own[NUMBER], True)
    if item < ZERO:
        _count_own(team)
        item = _take_from_others(team)
    if item >= ZERO:
        own[CLAIMED] += ONE
    return item


@kernel
def complete(team, items):
    """Say that a claimed item is done; the last one of a phase opens the next."""
    own = team.own
    if own[TAKEN_FROM] == NOTHING:
        own[UNCOUNTED] += ONE
    else:
        share, own[TAKEN_FROM] = own[TAKEN_FROM], NOTHING
        _count(team, share, ONE)


@kernel
def _take(team, share, may_begin):
    """The next item of a share; NOTHING if all are taken, NOT_BEGUN if none is and the share must be begun."""
    own, word_at = team.own, address(team.board) + (SHARES + share * LINE) * EIGHT
    first = _first_item(own, share)
    size = _first_item(own, share + ONE) - first
    while size > ZERO:
        word = atomic_load(word_at)
        phase, taken = word >> SHIFT, word & MASK
        if phase < own[PHASE]:
            if not may_begin:
                return NOT_BEGUN
            taken = ZERO
        if phase > own[PHASE] or taken >= size:
            break
        if compare_exchange(word_at, word, (own[PHASE] << SHIFT) + taken + ONE):
            return first + taken
    return NOTHING


@kernel
def _first_item(own, share):
    """Where a share begins: the first ones are longer, and a phase of one item is the leader's, who is there."""
    return (share * own[ITEMS] + own[MEMBERS] - ONE) // own[MEMBERS]


@kernel
def _take_from_others(team):
    """An item of another share: of one that is begun, or, as its thread may be asleep, of any after some patience."""
    own, is_open = team.own, address(team.board) + OPEN * EIGHT
    may_follow = True
    while may_follow:
        may_follow = False
        for i in range(1, own[MEMBERS]):
            if atomic_load(is_open) != own[PHASE]:
                return NOTHING
            share = (own[NUMBER] + i) % own[MEMBERS]
            item = _take(team, share, own[LOOKS] >= PATIENCE)
            if item >= ZERO:
                own[TAKEN_FROM] = share
                return item
            may_follow = may_follow or item == NOT_BEGUN
        own[LOOKS] += ONE
        pause()
    return NOTHING


@kernel
def _count_own(team):
    own = team.own
    if own[UNCOUNTED] > ZERO:
        count, own[UNCOUNTED] = own[UNCOUNTED], ZERO
        _count(team, own[NUMBER], count)


@kernel
def _count(team, share, count):
    """So many more items of a share are done: in its group, and where that is complete, in all."""
    own, board, group = team.own, address(team.board), share // GROUP
    group_at = board + (SHARES + (own[MEMBERS] + group) * LINE) * EIGHT
    last = min((group + ONE) * GROUP, own[MEMBERS])
    of_group = _first_item(own, last) - _first_item(own, group * GROUP)
    if atomic_add(group_at, count) + count == of_group:
        atomic_store(group_at, ZERO)
        if atomic_add(board + DONE * EIGHT, of_group) + of_group == own[ITEMS]:
            atomic_store(board + DONE * EIGHT, ZERO)
            atomic_store(board + OPEN * EIGHT, own[PHASE] + ONE)


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
    _count_own(team)
    is_open, spins = address(team.board) + OPEN * EIGHT, 0
    while atomic_load(is_open) <= team.own[PHASE]:
        spins += 1
        _relax(spins)
    team.own[PHASE] += ONE
    team.own[LOOKS] = ZERO
    _let_others_run(team)


@kernel
def _let_others_run(team):
    """Now and then, between two phases: a thread that the system takes the core from amid an item holds up its team."""
    now = ticks()
    if not ZERO <= now - team.own[LET_RUN] <= TURN:  # the clock of a machine that was moved may jump back
        team.own[LET_RUN] = now
        yield_core()


@kernel
def begin_step(team):
    """For the thread that leads: start at the phase that is open, and let the others in."""
    first = atomic_load(address(team.board) + OPEN * EIGHT)
    team.own[PHASE] = first
    atomic_store(address(team.board) + PUBLISHED * EIGHT, first)


@kernel
def join_step(team):
    """For the others: wait a while for a step that this thread has not joined yet; whether one came."""
    published = address(team.board) + PUBLISHED * EIGHT
    for spins in range(IDLE_SPINS):
        first = atomic_load(published)
        if first != team.own[JOINED]:
            team.own[JOINED] = team.own[PHASE] = first
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
def ticks(typingctx):
    """A clock of 1 to 5 thousand million ticks a second, of this core alone on some machines; 0: none is known."""

    def codegen(context, builder, signature, args):
        if "x86" not in builder.module.triple:  # what LLVM would read on ARM is the system's alone
            return ir.Constant(ir.IntType(64), 0)
        return builder.call(declare(builder, "llvm.readcyclecounter", ir.IntType(64), []), [])

    return types.int64(), codegen


@intrinsic
def yield_core(typingctx):
    """Let another thread run on this core, if one wants to."""

    def codegen(context, builder, signature, args):
        function = ir.FunctionType(ir.IntType(32), [])
        name = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
        builder.call(builder.module.globals.get(name) or ir.Function(builder.module, function, name), [])
        return context.get_dummy_value()

    return types.void(), codegen
