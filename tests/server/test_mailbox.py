"""How often the event loop hands out what steps have made, and to whom at once."""

import pytest

from tinygpt.engine.step_loop import STREAM_SECONDS
from tinygpt.server.work import mailbox as module
from tinygpt.server.work.mailbox import MAX_REST, REST, Inbox, Mailbox


class Loop:
    """In place of an event loop: notes what it is to call, and when."""

    def __init__(self):
        self.called, self.later = [], []

    def call_soon_threadsafe(self, call):
        self.called.append(call)

    def call_later(self, seconds, call):
        self.later.append((seconds, call))


class Readers:
    """Three of them, each of whom takes `seconds` of the loop's time for what it is given."""

    def __init__(self, monkeypatch, seconds: float = 0.0005):
        self.loop, self.seconds, self.now = Loop(), seconds, 0.0
        self.mailbox, self.inboxes = Mailbox(self.loop), [Inbox() for _ in range(3)]
        self.read = [[] for _ in self.inboxes]
        for i, inbox in enumerate(self.inboxes):
            inbox.read_by(lambda items, i=i: self._take(i, items))
        monkeypatch.setattr(module.time, "thread_time", lambda: self.now)

    def _take(self, i, items):
        self.now += self.seconds
        self.read[i].append(items)

    def post(self, *items, is_urgent=False):
        for i, item in items:
            self.mailbox.post(self.inboxes[i], item, is_urgent)

    def deliver(self):
        """What the loop was called for."""
        [call] = self.loop.called
        self.loop.called.clear()
        call()

    def end_rest(self):
        [(_, call)] = self.loop.later
        self.loop.later.clear()
        call()


@pytest.fixture
def readers(monkeypatch):
    return Readers(monkeypatch)


def test_a_step_wakes_the_loop_once_and_each_reader_once(readers):
    for token in (1, 2):
        readers.post(*((i, token) for i in range(3)))
    readers.deliver()
    assert readers.read == [[[1, 2]]] * 3


def test_what_comes_before_its_reader_waits_for_him():
    inbox, found = Inbox(), []
    for item in (1, 2):
        inbox.put(item)
        inbox.deliver()
    inbox.read_by(found.append)
    inbox.put(3)
    inbox.deliver()
    assert found == [[1, 2], [3]]


def test_the_loop_rests_the_longer_the_more_there_was_to_deliver(readers):
    readers.post((0, "a"), (1, "b"))
    readers.deliver()
    assert readers.loop.later == [(pytest.approx(2 * 0.0005 * REST), readers.mailbox._end_rest)]
    readers.seconds = 1.0
    readers.post((0, "c"))
    readers.end_rest()
    [(seconds, _)] = readers.loop.later
    assert seconds == MAX_REST < STREAM_SECONDS


def test_what_is_posted_while_the_loop_rests_wakes_nobody_and_comes_at_once_behind_it(readers):
    readers.post((0, 1), (1, 1))
    readers.deliver()
    for token in (2, 3, 4):
        readers.post((0, token), (1, token))
    assert not readers.loop.called
    readers.end_rest()
    assert readers.read[:2] == [[[1], [2, 3, 4]]] * 2


def test_a_rest_in_which_nothing_came_ends_and_the_next_one_wakes_the_loop(readers):
    readers.post((0, 1))
    readers.deliver()
    readers.end_rest()
    assert readers.read[0] == [[1]]
    assert not readers.loop.later
    readers.post((0, 2))
    readers.deliver()
    assert readers.read[0] == [[1], [2]]


def test_what_is_urgent_comes_within_the_rest_behind_what_came_before_it_and_alone(readers):
    readers.post((0, 1), (1, 1))
    readers.deliver()
    readers.post((0, 2), (1, 2))
    readers.post((0, "end"), is_urgent=True)
    readers.deliver()
    assert readers.read[:2] == [[[1], [2, "end"]], [[1]]]
    readers.end_rest()
    assert readers.read[:2] == [[[1], [2, "end"]], [[1], [2]]]


def test_a_reader_of_urgent_news_hears_what_comes_later_too(readers):
    readers.post((0, 1))
    readers.deliver()
    readers.post((0, 2), is_urgent=True)
    readers.post((0, 3), is_urgent=True)  # no second call: the first one has not been made
    readers.deliver()
    readers.post((0, 4), is_urgent=True)
    readers.deliver()
    assert readers.read[0] == [[1], [2, 3], [4]]
