"""The Python side of a team: the threads that wait for steps, and sleep when none come."""

import os
import threading
import weakref
from collections.abc import Callable
from itertools import zip_longest

import numpy as np

from tinygpt.kernels.cpu.runtime.nodes import homes_of_threads, stay_on
from tinygpt.kernels.cpu.runtime.team import JOINED, PUBLISHED, Team, new_teams


class TeamThreads:
    """`threads` members: the calling thread leads, the others follow in threads of their own.

    A step is right with any number of followers present, so none is ever waited for.
    """

    def __init__(self, threads: int, scratch: np.ndarray):
        """scratch (threads, ...) float32: each member's own."""
        self._scratch = scratch
        self._start()

    def _start(self) -> None:
        teams, homes = new_teams(self._scratch), homes_of_threads(len(self._scratch))
        self.leader = teams[0]
        self._shared = _Shared([_Follower(*each) for each in zip_longest(teams[1:], homes[1:])])
        for follower in self._shared.followers:
            threading.Thread(target=follower.run, args=(self._shared,), name="tinygpt-follower", daemon=True).start()
        self._finalizer = weakref.finalize(self, self._shared.close)

    def run(self, take_steps: Callable, *arguments) -> None:
        """Take a step: take_steps(team, True, *arguments) here, while followers run it with False.

        It is compiled and holds no GIL. Steps with the same arguments find the followers awake.
        """
        if self._shared.process != os.getpid():  # a fork takes the calling thread along, and none of the followers
            self._finalizer.detach()
            self._start()
        self._shared.set_task((take_steps, *arguments))
        self._shared.is_in_step = True  # before looking who is asleep: they say that they are, and then look here
        try:
            for follower in self._shared.followers:
                if follower.is_asleep:
                    follower.wake.set()
            take_steps(self.leader, True, *arguments)
        finally:
            self._shared.is_in_step = False

    def close(self) -> None:
        """End the threads, and let go of the last step's arguments."""
        self._finalizer()


class _Follower:
    """One thread: asleep until woken, then following step after step until none comes for a while."""

    def __init__(self, team: Team, home: frozenset[int] | None):
        """home: the CPUs to stay on; None is any."""
        self.team, self._home = team, home
        self.wake = threading.Event()
        self.is_asleep = True

    def run(self, shared: "_Shared") -> None:
        if self._home is not None:
            stay_on(self._home)
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
                    # While this thread waited for the GIL, the leader may have begun a step and taken it to be awake.
                    self.is_asleep = True
                    self.is_asleep = not shared.is_in_step
                    shared.changed.notify_all()
            del take_steps, arguments


class _Shared:
    """What the followers read. Does not know its TeamThreads: forgotten ones are collected, and the threads end."""

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
            # One that is awake would take the next step with the old arguments.
            self.changed.wait_for(lambda: all(follower.is_asleep for follower in self.followers))
            for follower in self.followers:
                follower.team.own[JOINED] = follower.team.board[PUBLISHED]
            self.task = task

    def close(self) -> None:
        if self.process != os.getpid():  # there are no followers, and the lock may stay locked
            return
        with self.changed:
            self.is_closed, self.task = True, None
        for follower in self.followers:
            follower.wake.set()
