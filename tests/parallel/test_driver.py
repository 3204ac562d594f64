"""Orders of rank 0: one after another, none after a failure, and an end for the others however its program ends.

Ranks are threads here (support/thread_world.py). Most tests need no model: what the others hear is enough.
"""

import threading
from concurrent.futures import Future

import numpy as np
import pytest

from support.thread_world import Aborted, Threads, running
from tinygpt.engine.model_source import EngineConfig
from tinygpt.errors import RequestError, Terminated, TinyGPTError
from tinygpt.parallel.driver import NO_PLAN, Command, RankZeroDriver, plan_size
from tinygpt.weights.config import ModelConfig

SIZES = EngineConfig(max_num_seqs=2).for_model(ModelConfig(n_layer=1, n_embd=4, n_head=4, vocab_size=7), 8)
PATIENCE = 60  # seconds for another thread


class Heard:
    """A rank that follows no order, and notes all of them."""

    def __init__(self):
        self.orders: list[Command] = []

    def follow(self, world) -> None:
        size = NO_PLAN
        while Command.END not in self.orders:
            plan = np.zeros(size, np.int32)
            world.broadcast(plan)
            self.orders.append(Command(plan[0]))
            if plan[0] in (Command.OPEN, Command.CLOSE):
                size = plan_size(SIZES) if plan[0] == Command.OPEN else NO_PLAN


@pytest.fixture
def stage():
    """A lead, and what one other rank hears of it."""
    threads, heard = Threads(2), Heard()
    lead = RankZeroDriver(running(threads, heard.follow))
    yield lead, heard, threads
    lead.end()


def open_model(lead: RankZeroDriver) -> None:
    with lead.order(opens_model=True):
        lead.tell(Command.OPEN)
        lead.note_model(SIZES)


def orders(threads: Threads, heard: Heard) -> list[Command]:
    """What was heard until the end, which has come."""
    for follower in threads.followers:
        follower.join(PATIENCE)
    assert not any(follower.is_alive() for follower in threads.followers)
    return heard.orders


def test_an_order_waits_for_another_threads(stage):
    """Each is a broadcast and more: what two threads send must not be mixed."""
    lead, heard, threads = stage
    open_model(lead)
    is_begun, second = threading.Event(), Future()

    def other() -> None:
        is_begun.wait(PATIENCE)
        with lead.order():
            second.set_result(list(done))
            lead.tell(Command.READ_POSITIONS)

    done = []
    thread = threading.Thread(target=other)
    thread.start()
    with lead.order():
        lead.tell(Command.COPY_POSITIONS)
        is_begun.set()
        thread.join(0.05)  # the other would get in here
        assert not second.done()
        lead.tell(Command.COPY_POSITIONS)
        done.append("first")
    assert second.result(PATIENCE) == ["first"]
    thread.join(PATIENCE)
    lead.end()
    assert orders(threads, heard) == [
        Command.OPEN,
        Command.COPY_POSITIONS,
        Command.COPY_POSITIONS,
        Command.READ_POSITIONS,
        Command.CLOSE,
        Command.END,
    ]


def test_the_end_waits_for_the_order_of_another_thread(stage):
    """A program that ends while its engine's thread takes a step: the step is no failure."""
    lead, heard, threads = stage
    open_model(lead)
    is_begun, may_go_on = threading.Event(), threading.Event()

    def other() -> None:
        with lead.order():
            is_begun.set()
            may_go_on.wait(PATIENCE)
            lead.tell(Command.FORWARD)

    thread = threading.Thread(target=other)
    thread.start()
    assert is_begun.wait(PATIENCE)
    end = threading.Thread(target=lead.end)
    end.start()
    may_go_on.set()
    end.join(PATIENCE)
    expected = [Command.OPEN, Command.FORWARD, Command.CLOSE, Command.END]
    assert (orders(threads, heard), threads.aborted) == (expected, None)
    with pytest.raises(TinyGPTError, match="have ended"), lead.order():
        pass


@pytest.mark.parametrize(
    ("error", "said", "status"),
    [
        (OSError("the disk is on fire"), "error: rank 0 of 2, on here: OSError('the disk is on fire')", 1),
        (MemoryError(), "error: rank 0 of 2, on here: MemoryError()", 1),
        (SystemExit(3), "error: rank 0 of 2, on here: SystemExit(3)", 1),
        (KeyboardInterrupt(), "interrupted", 130),
        (Terminated(), "terminated", 143),
    ],
)
def test_an_order_that_fails_ends_all_ranks_with_one_sentence(capfd, stage, error, said, status):
    lead, heard, threads = stage
    open_model(lead)

    def order() -> None:
        with lead.order():
            lead.tell(Command.FORWARD)
            raise error

    with pytest.raises(Aborted):
        order()
    assert threads.aborted == status
    assert orders(threads, heard) == [Command.OPEN, Command.FORWARD]
    assert capfd.readouterr().err == f"tinygpt: {said}\n"


@pytest.mark.parametrize("has_model", [False, True])
def test_an_interrupt_at_the_end_ends_all_ranks(stage, monkeypatch, has_model):
    lead, _, threads = stage
    if has_model:
        open_model(lead)

    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(lead, "tell", interrupted)
    with pytest.raises(Aborted):
        lead.end()
    assert threads.aborted == 130


def test_a_second_model_is_refused_until_the_first_is_closed(stage):
    lead, heard, threads = stage
    open_model(lead)
    with pytest.raises(RequestError, match="another LLM of several ranks is open"):
        open_model(lead)
    lead.close_model()
    open_model(lead)
    lead.end()
    assert orders(threads, heard) == [Command.OPEN, Command.CLOSE, Command.OPEN, Command.CLOSE, Command.END]
