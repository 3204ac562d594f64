"""The team's protocol under stress: every item once, no phase before the last is over, whoever turns up."""

import contextlib
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.simd.vector_ir import address
from tinygpt.kernels.cpu.team import (
    GROUP,
    OPEN,
    PHASE,
    Team,
    TeamThreads,
    atomic_add,
    begin_step,
    claim,
    complete,
    finish_phase,
    join_step,
    new_teams,
    pause,
)

PATIENCE = 60  # seconds before something that must happen, some time, has failed to
MEMBERS = [1, 2, 4, 7]  # more than this machine's cores may be among them


# A step: phase after phase, each value made of all values of the phase before it.


@jit
def take_steps(team, leads, counts, values, visits, busy, work):
    """The leader takes one step, a follower one after another. counts (phases,), values and visits (phases, items).

    visits: how often each item was done. busy (members,): how many items each member, named by its scratch, did.
    work: pauses an item, times its number modulo 4, so that threads finish in any order.
    """
    if leads:
        begin_step(team)
        take_phases(team, counts, values, visits, busy, work)
        return
    while join_step(team):
        take_phases(team, counts, values, visits, busy, work)


@jit
def take_phases(team, counts, values, visits, busy, work):
    for phase in range(counts.size):
        item = claim(team, counts[phase])
        while item >= 0:
            for _ in range(work * (item % 4)):
                pause()
            before = values[phase - 1, : counts[phase - 1]].sum() if phase else values[-1, 0]
            values[phase, item] = (31 * before + 7 * item + phase) % 1000003
            atomic_add(address(visits[phase]) + item * 8, np.int64(1))
            atomic_add(address(busy) + np.int64(team.scratch[0]) * 8, np.int64(1))
            complete(team, counts[phase])
            item = claim(team, counts[phase])
        finish_phase(team)


class Task:
    """The arrays of a step, and how many steps were asked for."""

    def __init__(self, counts, members: int, work: int = 20):
        self.counts = np.array(counts, np.int64)
        self.values = np.zeros((len(counts) + 1, max(counts)), np.int64)
        self.visits = np.zeros_like(self.values)
        self.busy = np.zeros(members, np.int64)
        self.work = work
        self.steps = 0

    @property
    def arrays(self):
        return self.counts, self.values, self.visits, self.busy, self.work

    def run(self, team: TeamThreads) -> None:
        """One step: from a new start, so that what an earlier step left would be seen."""
        self.steps += 1
        self.values[:] = -1
        self.values[-1, 0] = self.steps
        team.run(take_steps, *self.arrays)

    def check(self) -> None:
        before = self.steps
        for phase, count in enumerate(self.counts):
            expected = (31 * before + 7 * np.arange(count) + phase) % 1000003
            np.testing.assert_array_equal(self.values[phase, :count], expected, f"phase {phase}")
            before = int(expected.sum())
            assert (self.visits[phase, :count] == self.steps).all()
            assert not self.visits[phase, count:].any()
        assert self.busy.sum() == self.steps * self.counts.sum()


def random_task(members: int, phases: int = 40, seed: int = 0, work: int = 20) -> Task:
    return Task(np.random.default_rng(seed).integers(1, 30, phases), members, work)


def new_team(members: int) -> TeamThreads:
    scratch = np.zeros((members, 16), np.float32)
    scratch[:, 0] = np.arange(members)
    return TeamThreads(members, scratch)


def members_apart(members: int) -> list[Team]:
    """What members know of each other, without threads of their own."""
    return new_teams(np.arange(members, dtype=np.float32)[:, np.newaxis])


def wait_until(condition) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


def wait_until_asleep(team: TeamThreads) -> None:
    followers = team._shared.followers
    wait_until(lambda: all(follower.is_asleep and not follower.wake.is_set() for follower in followers))


@pytest.fixture
def team(request):
    team = new_team(request.param)
    yield team
    team.close()


def teams_of(*members: int):
    return pytest.mark.parametrize("team", members, indirect=True)


def members_of(team: TeamThreads) -> int:
    return 1 + len(team._shared.followers)


@teams_of(*MEMBERS)
def test_every_item_once_and_no_phase_overlaps(team):
    for seed in range(5):
        task = random_task(members_of(team), seed=seed)
        for _ in range(20):
            task.run(team)
            task.check()


@teams_of(2, 4)
def test_followers_take_their_share(team):
    """Not at once on a busy machine, but some time each member gets an item."""
    task = Task([64] * 5, members_of(team), work=200)

    def everyone_has_worked() -> bool:
        task.run(team)
        return (task.busy > 0).all()

    wait_until(everyone_has_worked)
    task.check()


@contextlib.contextmanager
def nobody_wakes(team: TeamThreads):
    for follower in team._shared.followers:
        follower.wake.set = lambda: None
    yield
    for follower in team._shared.followers:
        del follower.wake.set  # closing must reach them


@teams_of(4)
def test_followers_that_never_wake(team):
    task = random_task(4)
    with nobody_wakes(team):
        for _ in range(10):
            task.run(team)
            task.check()
    assert task.busy[1:].tolist() == [0, 0, 0]


@pytest.mark.parametrize("late_by", [0, 1, 100])
def test_followers_that_come_late(late_by):
    """They find a board that is far on, and join without having seen what was before."""
    lead, *others = members_apart(3)
    task, stop = random_task(3), threading.Event()

    def follow(team: Team) -> None:
        while not stop.is_set():
            take_steps(team, False, *task.arrays)

    leader = SimpleNamespace(run=lambda function, *arguments: function(lead, True, *arguments))
    pool, followers = ThreadPoolExecutor(2), []
    for step in range(late_by + 50):
        if step == late_by:
            followers = [pool.submit(follow, team) for team in others]
        task.run(leader)
    stop.set()
    for follower in followers:
        follower.result(PATIENCE)
    pool.shutdown()
    task.check()


def test_one_that_fell_asleep_in_a_phase_falls_through_to_the_others():
    """Its phase is long over: it gets no item of another phase, and catches up one phase at a time."""
    lead, late = members_apart(2)
    task = Task([3] * 6, 2)
    begin_step(lead)
    assert join_step(late)
    take_phases(lead, *task.arrays)
    assert late.own[PHASE] < lead.own[PHASE]
    for _ in range(6):
        assert claim(late, 3) == -1
        finish_phase(late)
    assert late.own[PHASE] == lead.own[PHASE]
    assert not join_step(late)
    begin_step(lead)
    assert join_step(late)


def claims(team: Team, items: int, count: int) -> list[int]:
    found = []
    for _ in range(count):
        found.append(claim(team, items))
        complete(team, items)
    return found


def test_each_has_a_share_of_neighbours_and_takes_what_is_left_in_others():
    """Of those that are begun at once; of one that nobody begins when it has waited for a while."""
    lead, absent, third = members_apart(3)
    begin_step(lead)
    assert join_step(third)
    assert claims(third, 10, 1) == [7]
    assert claims(lead, 10, 4) == [0, 1, 2, 3]
    assert claims(lead, 10, 2) == [8, 9]  # of the third's
    assert claims(third, 10, 3) == [4, 5, 6]  # of the absent one's
    assert claim(lead, 10) == claim(third, 10) == -1
    assert join_step(absent)
    assert claim(absent, 10) == -1
    for team in (lead, absent, third):
        finish_phase(team)
    assert claims(absent, 10, 1) == [4]


@pytest.mark.parametrize("items", [1, 5, 16, 17, 100])
def test_any_number_of_items_and_members(items):
    """Whoever is alone does all of them, of every member of every group."""
    lead, *_ = members_apart(2 * GROUP + 3)
    begin_step(lead)
    for phase in (1, 2):
        assert sorted(claims(lead, items, items)) == list(range(items))
        assert claim(lead, items) == -1
        assert lead.board[OPEN] == phase + 1
        finish_phase(lead)


def test_one_that_comes_too_late_takes_nothing_whatever_it_believes_of_the_phase():
    lead, late = members_apart(2)
    begin_step(lead)
    assert join_step(late)
    assert claims(lead, 2, 2) == [0, 1]
    assert claim(lead, 2) == -1
    assert claim(late, 1000) == -1  # of which its share would have most


@teams_of(2, 4)
def test_another_task_never_meets_the_old_arguments(team):
    """Right after a step followers are awake, with its arguments: they must not take the next one with them."""
    members = members_of(team)
    tasks = [random_task(members, phases, seed=phases, work=2) for phases in (3, 17, 8)]
    chosen = np.random.default_rng(0).integers(3, size=150)
    for i in chosen:
        tasks[i].run(team)
        for task in (task for task in tasks if task.steps):
            task.check()
    assert [task.steps for task in tasks] == np.bincount(chosen).tolist()


def test_a_follower_that_missed_a_step_does_not_take_it_up_with_another_task():
    """The other task may have more phases: they would reach into the next step's."""
    team = new_team(2)
    tasks = [random_task(2, phases) for phases in (3, 17)]
    (follower,) = team._shared.followers
    with nobody_wakes(team):
        tasks[0].run(team)
        team._shared.set_task((take_steps, *tasks[1].arrays), team.leader)
        assert not join_step(follower.team)
        tasks[1].run(team)
        assert join_step(follower.team)


def test_a_sleeping_follower_keeps_no_old_task_alive():
    team = new_team(3)
    task = random_task(3)
    other = random_task(3)
    task.run(team)
    wait_until_asleep(team)
    values = weakref.ref(task.values)
    del task
    with nobody_wakes(team):
        other.run(team)
        gc.collect()
        assert values() is None


@teams_of(4)
def test_followers_sleep_when_no_step_comes_and_wake_again(team):
    task = Task([64] * 5, 4, work=200)
    for _ in range(3):
        task.run(team)
        wait_until_asleep(team)
        done_asleep = task.busy[1:].sum()

        def someone_woke(done_asleep=done_asleep) -> bool:
            task.run(team)
            return task.busy[1:].sum() > done_asleep

        wait_until(someone_woke)
    task.check()


def test_a_follower_that_gave_up_as_a_step_began_takes_it_after_all():
    """Between two steps it finds none for a while, and wants the GIL to fall asleep; but the leader has the GIL, takes
    it to be awake, and wakes nobody."""
    has_begun = [threading.Event() for _ in range(2)]
    has_come = [threading.Event() for _ in range(2)]
    team = new_team(2)

    def take_steps(team, leads, has_begun, has_come):
        if leads:
            number = int(has_begun[0].is_set())
            has_begun[number].set()
            assert has_come[number].wait(PATIENCE), f"nobody follows step {number}"
        elif has_come[0].is_set():
            has_come[1].set()
        else:
            has_come[0].set()
            has_begun[1].wait(PATIENCE)  # it gives up while the next step begins

    take_steps.bound = lambda *arguments: partial(take_steps, *arguments)
    for _ in range(2):
        team.run(take_steps, has_begun, has_come)
    wait_until_asleep(team)
    team.close()


@pytest.mark.parametrize("end", ["close", "forget", "never used"])
def test_a_team_that_ends_ends_its_threads_and_lets_go_of_arguments(end):
    gc.freeze()  # what other tests have left need not be searched
    before = set(threading.enumerate())
    team, task = new_team(4), random_task(4)
    threads = [thread for thread in threading.enumerate() if thread not in before]
    assert [thread.name for thread in threads] == ["tinygpt-follower"] * 3
    assert all(thread.daemon for thread in threads)  # they must not keep the process alive
    if end != "never used":
        task.run(team)
    values, kept = weakref.ref(task.values), None
    if end == "close":
        team.close()
        team.close()
        kept = team
    del team, task
    gc.collect()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    gc.collect()
    assert values() is None
    del kept
