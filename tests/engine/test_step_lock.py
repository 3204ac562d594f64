"""Turns: one thread at a time, a step serves all who wait for one, other work comes first."""

import contextlib
import threading
import time

import pytest

from tinygpt.engine.step_lock import Turn
from tinygpt.errors import RequestError


def in_thread(function):
    """Run it in another thread; its result, once it is there."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    return thread, results


def wait_until(is_true) -> None:
    end = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.001)


def is_waited_for(turn: Turn) -> bool:
    return bool(turn._changed._waiters)


def test_a_free_turn_begins():
    turn = Turn(lambda: None)
    for _ in range(3):
        assert turn.begin_or_wait()
        turn.end()


def test_another_threads_turn_serves_who_waits():
    turn = Turn(lambda: None)
    assert turn.begin_or_wait()
    thread, results = in_thread(turn.begin_or_wait)
    wait_until(lambda: is_waited_for(turn))
    turn.end()
    thread.join(30)
    assert results == [False]
    assert turn.begin_or_wait()  # nobody has it


def test_other_work_comes_before_the_next_step():
    turn, order = Turn(lambda: None), []

    def work():
        with turn.taken():
            order.append("work")

    def step():
        while not turn.begin_or_wait():
            pass
        order.append("step")
        turn.end()

    assert turn.begin_or_wait()
    worker, _ = in_thread(work)
    wait_until(lambda: turn._num_queued == 1)
    turn.end()
    step()  # although the worker may still be asleep
    worker.join(30)
    assert order == ["work", "step"]


def test_who_gives_up_waiting_leaves_the_turn_free(monkeypatch):
    turn = Turn(lambda: None)

    def interrupt(predicate):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(turn._changed, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt), turn.taken():
            pass
    assert turn.begin_or_wait()


def test_nobody_waits_for_itself():
    turn = Turn(lambda: None)
    with turn.taken():
        for begin in (turn.begin_or_wait, turn.taken().__enter__):
            with pytest.raises(RequestError, match="may submit requests, but not run them"):
                begin()
    assert turn.begin_or_wait()


def test_tidying_waits_for_the_end_of_a_turn():
    tidied = []
    turn = Turn(lambda: tidied.append(turn._owner))
    turn.tidy()
    with turn.taken():
        turn.tidy()
        assert len(tidied) == 1
    assert tidied == [None, None]


def test_tidying_is_not_entered_again():
    """As by an iterator that a garbage collection closes in the middle of it."""
    depths = []

    def tidy():
        depths.append(len(depths))
        turn.tidy()

    turn = Turn(tidy)
    turn.tidy()
    with turn.taken():
        pass
    assert depths == [0, 1]


def test_who_waits_wakes_even_if_tidying_fails():
    def fail():
        raise MemoryError

    turn = Turn(fail)
    assert turn.begin_or_wait()
    thread, results = in_thread(turn.begin_or_wait)
    wait_until(lambda: is_waited_for(turn))
    for _ in range(2):  # the second time it is not its turn
        with contextlib.suppress(MemoryError):
            turn.end()
    thread.join(30)
    assert results == [False]
    assert turn.begin_or_wait()


def test_nobody_ends_anothers_turn():
    turn = Turn(lambda: None)
    assert turn.begin_or_wait()
    thread, _ = in_thread(turn.end)
    thread.join(30)
    assert turn._owner == threading.get_ident()


def test_a_turn_ends_with_an_error():
    turn = Turn(lambda: None)
    with pytest.raises(KeyError), turn.taken():
        raise KeyError
    assert turn.begin_or_wait()
