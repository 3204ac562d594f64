"""A team of threads that goes through a step together, phase by phase, without locks.

All threads run the same function. Each kernel in it is a phase of items. A thread takes the items of its share, the
same neighbors in every step, then others. A phase ends when its items are done: a sleeping thread is not missed, and
joins later. Phases are numbered on through all steps.

Words of the `board`, on cache lines of their own: PUBLISHED, the step's first phase; OPEN, the open phase; DONE, its
finished items; for each share phase << SHIFT | taken items; for each GROUP of shares its finished items.
"""

import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from llvmlite import ir

from .jit import Kernel, kernel
from .simd.vector_ir import I32, I64, address, declare, emits, zeros

LINE = 16  # words, 128 bytes: Apple's lines, and pairs of Intel's
# Indices into the board; groups follow the shares.
PUBLISHED, OPEN, DONE, SHARES = (i * LINE for i in range(4))
GROUP = 8  # shares whose items are counted together first
# Indices into a thread's own words.
PHASE = 0  # that it is in
JOINED = 1  # the phase at which it joined the step
NUMBER = 2  # of the thread
MEMBERS = 3  # of the team
ITEMS = 4  # of the phase
UNCOUNTED = 5  # own items that are done
TAKEN_FROM = 6  # the share of the item in work, if another's
LOOKS = 7  # in vain, at others' shares
CLAIMED = 8  # items
LAST_YIELD = 9  # its time
SHIFT = np.int64(24)  # 16 million items a phase, 2**39 phases
MASK = (np.int64(1) << SHIFT) - np.int64(1)
ZERO = np.int64(0)
ONE = np.int64(1)
EIGHT = np.int64(8)
NO_ITEM, NOT_BEGUN = np.int64(-1), np.int64(-2)  # in place of an item

ROWS_PER_ITEM = 4  # claiming costs about as much as a row, below 1 us

PATIENCE = 30  # looks before a thread begins another's share
SPINS = 4000  # pauses, about 50 us, before a waiting thread yields its core
IDLE_SPINS = 60000  # before a thread sleeps: longer than Python between two calls
YIELD_TICKS = 5_000_000  # ticks, about 2 ms, a time slice of Linux: yielding more often costs the core


class Team(NamedTuple):
    board: np.ndarray  # int64, shared
    own: np.ndarray  # (LINE,) int64
    scratch: np.ndarray  # float32


def new_teams(scratch: np.ndarray) -> list[Team]:
    members = len(scratch)
    board = zeros((SHARES + (members + -(-members // GROUP)) * LINE,), np.int64)
    own = zeros((members, LINE), np.int64)
    board[OPEN], own[:, NUMBER], own[:, MEMBERS], own[:, TAKEN_FROM] = 1, np.arange(members), members, NO_ITEM
    return [Team(board, own[i], scratch[i]) for i in range(members)]


@kernel
def claim(team, items):
    """Claim an item of this phase, 0 <= item < items. Return -1 if none is left for this thread."""
    own = team.own
    if atomic_load(address(team.board) + OPEN * EIGHT) != own[PHASE]:  # `items` may be another phase's
        return NO_ITEM
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
    """Count a claimed item as done; the last one of a phase opens the next."""
    own = team.own
    if own[TAKEN_FROM] == NO_ITEM:
        own[UNCOUNTED] += ONE
    else:
        share, own[TAKEN_FROM] = own[TAKEN_FROM], NO_ITEM
        _count(team, share, ONE)


@kernel
def _take(team, share, may_begin):
    """Take the next item of a share. Return NO_ITEM, or NOT_BEGUN if its own thread has not begun."""
    own = team.own
    word_at = address(team.board) + (SHARES + share * LINE) * EIGHT
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
    return NO_ITEM


@kernel
def _first_item(own, share):
    return (share * own[ITEMS] + own[MEMBERS] - ONE) // own[MEMBERS]


@kernel
def _take_from_others(team):
    own = team.own
    is_open = address(team.board) + OPEN * EIGHT
    may_follow = True
    while may_follow:
        may_follow = False
        for i in range(1, own[MEMBERS]):
            if atomic_load(is_open) != own[PHASE]:
                return NO_ITEM
            share = (own[NUMBER] + i) % own[MEMBERS]
            item = _take(team, share, own[LOOKS] >= PATIENCE)
            if item >= ZERO:
                own[TAKEN_FROM] = share
                return item
            may_follow = may_follow or item == NOT_BEGUN
        own[LOOKS] += ONE
        pause()
    return NO_ITEM


@kernel
def _count_own(team):
    own = team.own
    if own[UNCOUNTED] > ZERO:
        count, own[UNCOUNTED] = own[UNCOUNTED], ZERO
        _count(team, own[NUMBER], count)


@kernel
def _count(team, share, count):
    own = team.own
    board = address(team.board)
    group = share // GROUP
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
    """Claim some of `rows` rows. Return their bounds; the first is -1 if none are left."""
    item = claim(team, _row_items(rows))
    return item * ROWS_PER_ITEM if item >= 0 else item, min((item + 1) * ROWS_PER_ITEM, rows)


@kernel
def complete_rows(team, rows):
    complete(team, _row_items(rows))


@kernel
def _row_items(rows):
    return max((rows + ROWS_PER_ITEM - 1) // ROWS_PER_ITEM, 1)


@kernel
def finish_phase(team):
    _count_own(team)
    is_open = address(team.board) + OPEN * EIGHT
    spins = 0
    while atomic_load(is_open) <= team.own[PHASE]:
        spins += 1
        _relax(spins)
    team.own[PHASE] += ONE
    team.own[LOOKS] = ZERO
    _let_others_run(team)


@kernel
def _let_others_run(team):
    now = ticks()
    if not ZERO <= now - team.own[LAST_YIELD] <= YIELD_TICKS:  # cores' clocks may differ
        team.own[LAST_YIELD] = now
        yield_core()


@kernel
def begin_step(team):
    first = atomic_load(address(team.board) + OPEN * EIGHT)
    team.own[PHASE] = first
    atomic_store(address(team.board) + PUBLISHED * EIGHT, first)


@kernel
def join_step(team):
    """Wait a while for a new step. Return whether it came. On busy cores the thread looks once in many time slices."""
    published = address(team.board) + PUBLISHED * EIGHT
    begun = ticks()
    for spins in range(IDLE_SPINS):
        first = atomic_load(published)
        if first != team.own[JOINED]:
            team.own[JOINED] = team.own[PHASE] = first
            return True
        _relax(spins)
        if spins > SPINS and ticks() - begun > YIELD_TICKS:
            break
    return False


@kernel
def _relax(spins):
    pause()
    if spins > SPINS and spins % 16 == 0:
        yield_core()


def _pointer(builder, address):
    return builder.inttoptr(address, I64.as_pointer())


@emits("int64", "intp")
def atomic_load(builder, address):
    return builder.load_atomic(_pointer(builder, address), "seq_cst", 8)


@emits("void", "intp", "int64")
def atomic_store(builder, address, value):
    builder.store_atomic(value, _pointer(builder, address), "seq_cst", 8)


@emits("int64", "intp", "int64")
def atomic_add(builder, address, value):
    return builder.atomic_rmw("add", _pointer(builder, address), value, "seq_cst")


@emits("boolean", "intp", "int64", "int64")
def compare_exchange(builder, address, expected, new):
    pointer = _pointer(builder, address)
    return builder.extract_value(builder.cmpxchg(pointer, expected, new, "seq_cst", "seq_cst"), 1)


@emits("void")
def pause(builder):
    triple = builder.module.triple
    if "x86" in triple:
        builder.call(declare(builder, "llvm.x86.sse2.pause", ir.VoidType(), []), [])
    elif triple.startswith(("aarch64", "arm64")):  # isb takes 20 cycles, `yield` none
        builder.call(declare(builder, "llvm.aarch64.isb", ir.VoidType(), [I32]), [I32(15)])


@emits("int64")
def ticks(builder):
    """Return a clock of 1 to 5 GHz, possibly the core's own, or 0 without a clock."""
    if "x86" not in builder.module.triple:  # ARM's counter is privileged
        return I64(0)
    return builder.call(declare(builder, "llvm.readcyclecounter", I64, []), [])


@emits("void")
def yield_core(builder):
    name = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
    builder.call(declare(builder, name, I32, []), [])


class TeamThreads:
    """A leader, the calling thread, and followers. A step is right with any number of followers present."""

    def __init__(self, threads: int, scratch: np.ndarray):
        self.leader, *others = new_teams(scratch)
        self._shared = _Shared([_Follower(team) for team in others])
        for follower in self._shared.followers:
            threading.Thread(
                target=follower.run, args=(self._shared,), name="tinygpt-follower", daemon=True
            ).start()
        self._finalizer = weakref.finalize(self, self._shared.close)

    def run(self, take_steps: Kernel, *arguments) -> None:
        """Run take_steps(team, True, *arguments) here, and with False in the followers.

        It holds no GIL. Steps with the same arguments find the followers awake.
        """
        lead = self._shared.set_task((take_steps, *arguments), self.leader)
        self._shared.is_in_step = True  # before the look at sleepers: a follower does both in the other order
        try:
            for follower in self._shared.followers:
                if follower.is_asleep:
                    follower.wake.set()
            lead()
        finally:
            self._shared.is_in_step = False

    def close(self) -> None:
        self._finalizer()


class _Follower:
    def __init__(self, team: Team):
        self.team = team
        self.wake = threading.Event()
        self.is_asleep = True

    def run(self, shared: "_Shared") -> None:
        while True:
            self.wake.wait()
            self.wake.clear()
            with shared.changed:
                if shared.is_closed:
                    return
                self.is_asleep = False
                take_steps, *arguments = shared.task
            follow = take_steps.bound(self.team, False, *arguments)
            while not self.is_asleep:
                follow()
                with shared.changed:
                    # The leader may have begun a step while this thread waited for the GIL.
                    self.is_asleep = True
                    self.is_asleep = not shared.is_in_step
                    shared.changed.notify_all()
            del take_steps, arguments, follow


class _Shared:
    """The followers' state, without a reference to TeamThreads, so that a forgotten team is collected."""

    def __init__(self, followers: list[_Follower]):
        self.followers = followers
        self.changed = threading.Condition()
        self.task: tuple | None = None
        self.lead: Callable | None = None  # of the task
        self.is_in_step = False
        self.is_closed = False
        self.process = os.getpid()

    def set_task(self, task: tuple, leader: Team) -> Callable[[], None]:
        """Return the leader's call."""
        if self.task is not None and all(a is b for a, b in zip(self.task, task, strict=True)):
            return self.lead
        with self.changed:
            # An awake follower would take the next step with the old arguments.
            self.changed.wait_for(lambda: all(follower.is_asleep for follower in self.followers))
            for follower in self.followers:
                follower.team.own[JOINED] = follower.team.board[PUBLISHED]
            self.task = task
            take_steps, *arguments = task
            self.lead = take_steps.bound(leader, True, *arguments)
            return self.lead

    def close(self) -> None:
        if self.process != os.getpid():  # a forked child has no followers
            return
        with self.changed:
            self.is_closed, self.task, self.lead = True, None, None
        for follower in self.followers:
            follower.wake.set()
