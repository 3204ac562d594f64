"""The Python side of a team: threads that wait for steps, and sleep if none come."""

import os
import threading
import weakref
from collections.abc import Callable

import numpy as np

from tinygpt.kernels.cpu.runtime.team import JOINED, PUBLISHED, Team, new_teams


class TeamThreads:
    """`threads` members: the calling thread leads, the others follow in threads of their own.

    A step is right with any number of followers present.
    """

    def __init__(self, threads: int, scratch: np.ndarray):
        self.leader, *others = new_teams(scratch)
        self._shared = _Shared([_Follower(team) for team in others])
        for follower in self._shared.followers:
            threading.Thread(target=follower.run, args=(self._shared,), name="tinygpt-follower", daemon=True).start()
        self._finalizer = weakref.finalize(self, self._shared.close)

    def run(self, take_steps: Callable, *arguments) -> None:
        """Run take_steps(team, True, *arguments) here, and with False in the followers.

        It is compiled and holds no GIL. Steps with the same arguments find the followers awake.
        """
        self._shared.set_task((take_steps, *arguments))
        self._shared.is_in_step = True  # before looking for sleepers: a follower says so, then looks here
        try:
            for follower in self._shared.followers:
                if follower.is_asleep:
                    follower.wake.set()
            take_steps(self.leader, True, *arguments)
        finally:
            self._shared.is_in_step = False

    def close(self) -> None:
        self._finalizer()


class _Follower:
    """A thread: asleep until woken, then follows steps until none comes for a while."""

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
            while not self.is_asleep:
                take_steps(self.team, False, *arguments)
                with shared.changed:
                    # The leader may have begun a step while this thread waited for the GIL.
                    self.is_asleep = True
                    self.is_asleep = not shared.is_in_step
                    shared.changed.notify_all()
            del take_steps, arguments


class _Shared:
    """The followers' state. It does not refer to TeamThreads, so that a forgotten team is collected."""

    def __init__(self, followers: list[_Follower]):
        self.followers = followers
        self.changed = threading.Condition()
        self.task: tuple | None = None
        self.is_in_step = False
        self.is_closed = False
        self.process = os.getpid()

    def set_task(self, task: tuple) -> None:
        if self.task is not None and all(a is b for a, b in zip(self.task, task, strict=True)):
            return
        with self.changed:
            # An awake follower would take the next step with the old arguments.
            self.changed.wait_for(lambda: all(follower.is_asleep for follower in self.followers))
            for follower in self.followers:
                follower.team.own[JOINED] = follower.team.board[PUBLISHED]
            self.task = task

    def close(self) -> None:
        if self.process != os.getpid():  # a forked child has no followers, and the lock may stay locked
            return
        with self.changed:
            self.is_closed, self.task = True, None
        for follower in self.followers:
            follower.wake.set()
