"""Turns: one thread at a time, a step serves all who wait for one, other work comes first."""

import contextlib
import threading
import time

import pytest

from tinygpt.engine.step_lock import StepLock
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


def is_waited_for(lock: StepLock) -> bool:
    return bool(lock._changed._waiters)


def test_a_free_lock_begins():
    lock = StepLock(lambda: None)
    for _ in range(3):
        assert lock.acquire_or_wait()
        lock.release()


def test_another_threads_step_serves_who_waits():
    lock = StepLock(lambda: None)
    assert lock.acquire_or_wait()
    thread, results = in_thread(lock.acquire_or_wait)
    wait_until(lambda: is_waited_for(lock))
    lock.release()
    thread.join(30)
    assert results == [False]
    assert lock.acquire_or_wait()  # nobody has it


def test_other_work_comes_before_the_next_step():
    lock, order = StepLock(lambda: None), []

    def work():
        with lock.held():
            order.append("work")

    def step():
        while not lock.acquire_or_wait():
            pass
        order.append("step")
        lock.release()

    assert lock.acquire_or_wait()
    worker, _ = in_thread(work)
    wait_until(lambda: lock._num_queued == 1)
    lock.release()
    step()  # although the worker may still be asleep
    worker.join(30)
    assert order == ["work", "step"]


def test_who_gives_up_waiting_leaves_the_lock_free(monkeypatch):
    lock = StepLock(lambda: None)

    def interrupt(predicate):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lock._changed, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt), lock.held():
            pass
    assert lock.acquire_or_wait()


def test_nobody_waits_for_itself():
    lock = StepLock(lambda: None)
    with lock.held():
        for begin in (lock.acquire_or_wait, lock.held().__enter__):
            with pytest.raises(RequestError, match="may submit requests, but not run them"):
                begin()
    assert lock.acquire_or_wait()


def test_tidying_waits_for_a_release():
    tidied = []
    lock = StepLock(lambda: tidied.append(lock._owner))
    lock.tidy()
    with lock.held():
        lock.tidy()
        assert len(tidied) == 1
    assert tidied == [None, None]


def test_tidying_is_not_entered_again():
    """As by an iterator that a garbage collection closes in the middle of it."""
    depths = []

    def tidy():
        depths.append(len(depths))
        lock.tidy()

    lock = StepLock(tidy)
    lock.tidy()
    with lock.held():
        pass
    assert depths == [0, 1]


def test_who_waits_wakes_even_if_tidying_fails():
    def fail():
        raise MemoryError

    lock = StepLock(fail)
    assert lock.acquire_or_wait()
    thread, results = in_thread(lock.acquire_or_wait)
    wait_until(lambda: is_waited_for(lock))
    for _ in range(2):  # the second time it is not its turn
        with contextlib.suppress(MemoryError):
            lock.release()
    thread.join(30)
    assert results == [False]
    assert lock.acquire_or_wait()


def test_nobody_releases_anothers_lock():
    lock = StepLock(lambda: None)
    assert lock.acquire_or_wait()
    thread, _ = in_thread(lock.release)
    thread.join(30)
    assert lock._owner == threading.get_ident()


def test_a_lock_is_released_after_an_error():
    lock = StepLock(lambda: None)
    with pytest.raises(KeyError), lock.held():
        raise KeyError
    assert lock.acquire_or_wait()
