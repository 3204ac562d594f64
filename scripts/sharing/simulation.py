"""A phase that threads share, event by event: every item and every atomic operation takes its time in turn."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from tinygpt.kernels.cpu.runtime.team import GROUP


class Line:
    """A cache line that threads operate on one after another, and the number that it holds."""

    def __init__(self, clock: "Clock"):
        self._clock, self._waiting = clock, deque()
        self._owner, self._is_busy = -1, False
        self.value, self.operations = 0, 0

    def operate(
        self, thread: int, amount: int, done: Callable[[int | None], None], expected: int | None = None
    ) -> None:
        """Add to the number, if it is what was expected; `done` hears of what it was, or None."""
        self._waiting.append((thread, amount, done, expected))
        if not self._is_busy:
            self._begin()

    def _begin(self) -> None:
        self._is_busy, thread = True, self._waiting[0][0]
        self._clock.after(self._clock.cost(self._owner == thread), self._end)

    def _end(self) -> None:
        thread, amount, done, expected = self._waiting.popleft()
        self._owner, self._is_busy, self.operations = thread, False, self.operations + 1
        before = self.value if expected in (None, self.value) else None
        self.value += 0 if before is None else amount
        if self._waiting:
            self._begin()
        done(before)


class Clock:
    """What happens when."""

    def __init__(self, own: float, transfer: float):
        self._own, self._transfer = own, transfer
        self._events: list[tuple[float, int, Callable]] = []
        self._number, self.now = 0, 0.0

    def cost(self, is_own: bool) -> float:
        return self._own if is_own else self._transfer

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, what))

    def run(self) -> None:
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()


class SharedPhase:
    """A phase as team.py has it, from its opening on: a share for each thread, and counts in groups."""

    def __init__(self, items: int, seconds: float, threads: int, clock: Clock, group: int):
        self._items, self._seconds, self._threads, self._clock, self._group = items, seconds, threads, clock, group
        self.shares = [Line(clock) for _ in range(threads)]
        self.groups = [Line(clock) for _ in range(-(-threads // group))]
        self.done = Line(clock)
        self.over = 0.0
        for thread in range(threads):
            clock.after(clock.cost(False), partial(self._claim, thread, thread, 0))  # it sees that the phase is open

    def _first(self, share: int) -> int:
        return -(-share * self._items // self._threads)

    def _size(self, share: int) -> int:
        return self._first(share + 1) - self._first(share)

    def _claim(self, thread: int, share: int, uncounted: int) -> None:
        """Take an item of a share, or of the next that has one; `uncounted` are done of its own."""
        line, size = self.shares[share], self._size(share)
        if line.value < size:
            line.operate(thread, 1, partial(self._claimed, thread, share, uncounted), line.value)
            return
        if share == thread and uncounted:
            self._count(thread, share, uncounted)
        others = ((thread + i) % self._threads for i in range(1, self._threads))
        begun = (other for other in others if 0 < self.shares[other].value < self._size(other))
        if (other := next(begun, None)) is not None:
            self._clock.after(self._clock.cost(False), partial(self._claim_begun, thread, other))

    def _claim_begun(self, thread: int, share: int) -> None:
        """What has been seen to be left may be taken by now."""
        self._claim(thread, share if self.shares[share].value < self._size(share) else thread, 0)

    def _claimed(self, thread: int, share: int, uncounted: int, before: int | None) -> None:
        if before is None:
            self._claim(thread, share, uncounted)
        else:
            self._clock.after(self._seconds, partial(self._complete, thread, share, uncounted))

    def _complete(self, thread: int, share: int, uncounted: int) -> None:
        if share == thread:
            self._claim(thread, thread, uncounted + 1)
        else:
            self._count(thread, share, 1)
            self._claim(thread, thread, 0)

    def _count(self, thread: int, share: int, count: int) -> None:
        group = share // self._group
        last = min((group + 1) * self._group, self._threads)
        of_group = self._first(last) - self._first(group * self._group)

        def counted(before: int) -> None:
            if before + count == of_group:
                self.done.operate(thread, of_group, partial(self._open_next, of_group))

        self.groups[group].operate(thread, count, counted)

    def _open_next(self, count: int, before: int) -> None:
        if before + count == self._items:
            self.over = self._clock.now + self._clock.cost(False)

    @property
    def lines(self) -> list[Line]:
        return [*self.shares, *self.groups, self.done]


class OneCounterPhase:
    """A phase if all threads claimed from one word, and counted each item in another."""

    def __init__(self, items: int, seconds: float, threads: int, clock: Clock):
        self._items, self._seconds, self._clock = items, seconds, clock
        self.claims, self.done, self.over = Line(clock), Line(clock), 0.0
        for thread in range(threads):
            clock.after(clock.cost(False), partial(self._claim, thread))

    def _claim(self, thread: int) -> None:
        if self.claims.value < self._items:
            self.claims.operate(thread, 1, partial(self._claimed, thread), self.claims.value)

    def _claimed(self, thread: int, before: int | None) -> None:
        if before is None:
            self._claim(thread)
        else:
            self._clock.after(self._seconds, partial(self.done.operate, thread, 1, partial(self._counted, thread)))

    def _counted(self, thread: int, before: int) -> None:
        if before + 1 == self._items:
            self.over = self._clock.now + self._clock.cost(False)
        self._clock.after(self._clock.cost(False), partial(self._claim, thread))

    @property
    def lines(self) -> list[Line]:
        return [self.claims, self.done]


@dataclass(frozen=True)
class Outcome:
    """Of a phase or a step: seconds, and how many atomic operations there were."""

    seconds: float
    ideal: float  # with all threads at work all the time
    uneven: float  # lost because items are whole, though claiming them be free
    operations: int
    busiest: int  # of them, on the line that has most

    @property
    def claiming(self) -> float:
        """Seconds lost to atomic operations, and to seeing that a phase is open."""
        return self.seconds - self.ideal - self.uneven


@cache
def run_phase(
    items: int, seconds: float, threads: int, own: float, transfer: float, has_one_counter: bool = False
) -> Outcome:
    """A phase from its opening to the next one's, with all threads waiting for it."""
    clock = Clock(own, transfer if threads > 1 else own)
    kind = OneCounterPhase if has_one_counter else partial(SharedPhase, group=GROUP)
    phase = kind(items, seconds, threads, clock)
    clock.run()
    ideal, rounds = items * seconds / threads, -(-items // threads)
    counts = [line.operations for line in phase.lines]
    return Outcome(phase.over, ideal, rounds * seconds - ideal, sum(counts), max(counts))
