"""Who is told of kernels that compile, and how long a thread has waited for them."""

import logging
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

from tinygpt.kernels import compiling
from tinygpt.kernels.compiling import ANNOUNCEMENT, ANNOUNCER, Announcer, CompileClock, begin_wait, end_wait, looked_for


class Heard:
    """All that a listener is told."""

    def __init__(self):
        self.told = []

    def begin(self, name):
        self.told.append(name)

    def end(self):
        self.told.append(None)


@pytest.fixture
def now(monkeypatch) -> SimpleNamespace:
    """A clock that the test sets."""
    now = SimpleNamespace(seconds=0.0, perf_counter=lambda: now.seconds)
    monkeypatch.setattr(compiling, "time", now)
    return now


def wait(now: SimpleNamespace, seconds: float) -> None:
    begin_wait()
    now.seconds += seconds
    end_wait()


def test_the_log_says_it_once_and_names_every_kernel_for_those_who_debug(caplog):
    caplog.set_level(logging.DEBUG)
    announcer = Announcer()
    for name in ("one", "two"):
        announcer.begin(name)
        announcer.end()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [ANNOUNCEMENT]
    assert "once" in ANNOUNCEMENT
    assert "tinygpt.warmup()" in ANNOUNCEMENT
    assert all(record.name.startswith("tinygpt") for record in caplog.records)
    assert ["one" in message or "two" in message for message in caplog.messages] == [False, True, True]


def test_a_listener_takes_the_place_of_the_log(caplog):
    announcer, first, second = Announcer(), Heard(), Heard()
    with announcer.told(first):
        announcer.begin("outer")
        with announcer.told(second):
            announcer.begin("inner")
            announcer.end()
        announcer.end()
    assert not caplog.records
    assert (first.told, second.told) == (["outer", "inner", None, None], ["inner", None])
    announcer.begin("alone")
    assert [record.getMessage() for record in caplog.records] == [ANNOUNCEMENT]
    assert len(first.told) == 4


def test_who_did_not_hear_the_beginning_does_not_hear_the_end():
    announcer, first, late = Announcer(), Heard(), Heard()
    with announcer.told(first):
        announcer.begin("early")
        with announcer.told(late):
            announcer.end()
            announcer.end()  # of nothing
    assert (first.told, late.told) == (["early", None], [])


def test_threads_end_their_own_kernels():
    announcer, heard = Announcer(), Heard()
    with announcer.told(heard):
        announcer.begin("here")
        thread = threading.Thread(target=announcer.end)
        thread.start()
        thread.join()
        assert heard.told == ["here"]
        announcer.end()
    assert heard.told == ["here", None]


def test_what_is_broken_off_ends_with_its_block(now):
    clock, heard = CompileClock(), Heard()
    with clock.watching(), ANNOUNCER.told(heard):
        ANNOUNCER.begin("outer")
        with suppress(ValueError), looked_for():
            ANNOUNCER.begin("inner")
            now.seconds += 3
            raise ValueError
        assert heard.told == ["outer", "inner", None]
        assert clock.seconds(0, 30) == 3
        ANNOUNCER.end()
    assert heard.told[3:] == [None]


def test_waits_are_counted_from_the_outermost(now):
    clock = CompileClock()
    with clock.watching():
        now.seconds = 10
        begin_wait()
        wait(now, 3)
        now.seconds += 2
        end_wait()
    now.seconds = 20
    wait(now, 7)  # nobody watches
    assert clock.seconds(0, 30) == 5
    assert clock.since(0) == 27 - 5


def test_only_what_lies_between_the_moments_counts(now):
    clock = CompileClock()
    with clock.watching():
        now.seconds = 10
        wait(now, 5)
        now.seconds = 20
        wait(now, 5)
    found = [clock.seconds(*moments) for moments in ((0, 10), (0, 12), (12, 13), (13, 22), (25, 30), (0, 30))]
    assert found == [0, 2, 1, 4, 0, 10]
    assert clock.seconds(None, 30) == clock.seconds(0, None) == 0


class CountingMoment(float):
    """A moment that counts what it is compared with."""

    num_compared = 0

    def _counted(compare):
        def call(self, other):
            self.num_compared += 1
            return compare(self, other)

        return call

    __lt__, __le__, __gt__, __ge__ = map(_counted, (float.__lt__, float.__le__, float.__gt__, float.__ge__))


def test_a_step_looks_at_no_wait_that_is_long_over(now):
    """Every step asks, for as long as the process lives."""
    clock = CompileClock()
    with clock.watching():
        for _ in range(1000):
            wait(now, 1)
        warm = CountingMoment(now.seconds)
        now.seconds += 2
        assert clock.since(warm) == 2
        late = CountingMoment(now.seconds)
        wait(now, 1)
        wait(now, 1)
        assert clock.seconds(late, now.seconds) == 2
    assert (warm.num_compared, late.num_compared) == (1, 5)


def test_another_thread_is_not_watched(now):
    clock = CompileClock()
    with clock.watching():
        thread = threading.Thread(target=wait, args=(now, 5))
        thread.start()
        thread.join()
    assert clock.seconds(0, 30) == 0


def test_an_engine_within_another_keeps_both_waiting(now):
    outer, inner = CompileClock(), CompileClock()
    with outer.watching():
        with inner.watching():
            wait(now, 5)
        wait(now, 1)
    assert (outer.seconds(0, 30), inner.seconds(0, 30)) == (6, 5)


def test_a_wait_that_is_broken_off_ends_with_the_block(now):
    """Ctrl-C may come between a lock's event and the lock."""
    clock = CompileClock()
    with suppress(KeyboardInterrupt), clock.watching():
        begin_wait()
        begin_wait()
        now.seconds = 4
        raise KeyboardInterrupt
    now.seconds = 10
    with clock.watching():
        wait(now, 1)
    assert clock.seconds(0, 30) == 5
