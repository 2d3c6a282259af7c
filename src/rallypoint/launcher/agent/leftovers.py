"""Processes that a successful rank left running: named once, and stopped when the job ends."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence

from rallypoint.host import processes, system_calls
from rallypoint.launcher.agent.job import Job
from rallypoint.launcher.agent.process_handles import RankHandle

# Seconds that a successful rank's children may take to notice its end (multiprocessing's resource
# tracker, a closing pipe) before they count as left running.
LEFTOVER_PATIENCE = 0.5


class Leftovers:
    """Of ranks that are not reaped: until then nobody else can have the number of their group."""

    def __init__(self, job: Job, reap: Callable[[RankHandle], None]) -> None:
        """`reap`: for a rank of which nothing is left after all."""
        self._job = job
        self._reap = reap

    def found(self, handle: RankHandle) -> None:
        """This rank has ended well, and its group still has members."""
        handle.left_at_exit = self._job.loop.now
        self._job.loop.by("leftovers", handle.left_at_exit + LEFTOVER_PATIENCE, self._tell)

    def _tell(self, now: float) -> None:
        """Name what has been left running for a while now, once each; reap those whose helpers have
        gone by themselves.
        """
        for handle in self._job.ranks:
            if handle.left_at_exit is None or handle.reaped:
                continue
            if now < handle.left_at_exit + LEFTOVER_PATIENCE and self._job.is_running:
                self._job.loop.by("leftovers", handle.left_at_exit + LEFTOVER_PATIENCE, self._tell)
                continue
            handle.left_at_exit = None
            members = processes.group_members(handle.pid)
            if members:
                self._job.console.say_leftovers(handle.rank, members)
                self._job.reporter.event(
                    "left-running", rank=handle.rank, pids=[one.pid for one in members]
                )
            else:
                self._reap(handle)

    def end(self, handles: Sequence[RankHandle], hurries: Mapping[int, Callable[[], bool]]) -> None:
        """Every rank has ended: SIGTERM for what is left, and the grace; SIGKILL is the caller's.
        What cuts the grace short: a descriptor that becomes readable and whose function says so."""
        for handle in handles:
            if handle.left_at_exit is not None:  # not named yet
                self._await_members(handle)
        self._tell(self._job.loop.now)
        handles = [handle for handle in handles if not handle.reaped]
        pidfds = _held(one.pid for handle in handles for one in processes.group_members(handle.pid))
        if not pidfds:
            return
        for handle in handles:
            processes.send_group(handle.pid, signal.SIGTERM)
        poll, waiting = select.poll(), set(pidfds)
        for fd in (*pidfds, *hurries):
            poll.register(fd, select.POLLIN)
        overdue = self._job.loop.due("overdue")
        until = min(
            self._job.loop.now + self._job.plan.grace, math.inf if overdue is None else overdue
        )
        while waiting and (remaining := until - self._job.loop.now) > 0:
            for fd, _ in poll.poll(remaining * 1000 + 1):
                if fd not in hurries:
                    poll.unregister(fd)
                    waiting.discard(fd)
                elif hurries[fd]():
                    until = 0.0
        _give_back(pidfds)

    def _await_members(self, handle: RankHandle) -> None:
        """Give what a rank left the rest of its patience to end by itself."""
        until = (handle.left_at_exit or 0.0) + LEFTOVER_PATIENCE
        pidfds = _held(one.pid for one in processes.group_members(handle.pid))
        processes.wait_for_ends(pidfds, max(0.0, until - self._job.loop.now))
        _give_back(pidfds)


def _held(pids: Iterable[int]) -> list[int]:
    """pidfds of those that still are."""
    pidfds = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pidfds.append(system_calls.pidfd_open(pid))
    return pidfds


def _give_back(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
