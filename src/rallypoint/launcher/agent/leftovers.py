"""Processes that a successful rank left running: named once, and stopped when the job ends."""

from __future__ import annotations

import contextlib
import math
import select
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence

from rallypoint.host import processes, system_calls
from rallypoint.host.fd_passing import OwnedFds
from rallypoint.launcher.agent.job import Job
from rallypoint.launcher.agent.process_handles import RankHandle

# Seconds that a successful rank's children may take to notice its end (multiprocessing's resource
# tracker, a closing pipe) before they count as left running.
LEFTOVER_PATIENCE = 0.5

# Seconds that all resource trackers get for unlinking, when the ranks have ended. It takes some
# milliseconds; a process that has left the group may keep one waiting.
TRACKER_PATIENCE = 1.0


class Leftovers:
    """Processes in the groups of ranks that are not reaped: until then no other process can have
    the number of such a group.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def found(self, handle: RankHandle) -> None:
        """Handle a rank that has ended well, and whose group still has members."""
        handle.left_at_exit = self._job.loop.now
        self._job.loop.by("leftovers", handle.left_at_exit + LEFTOVER_PATIENCE, self._tell)

    def _tell(self, now: float) -> None:
        """Name what has been left running for a while now, once each; reap ranks whose helpers have
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
            if not members:
                self._job.endings.reap(handle)
                continue
            self._job.console.say_leftovers(handle.rank, members)
            self._job.reporter.event(
                "left-running", rank=handle.rank, pids=[one.pid for one in members]
            )

    def wait_for_trackers(self, handles: Iterable[RankHandle]) -> None:
        """Wait until the trackers of these ranks, which have ended, have ended, too."""
        members = (one.pid for handle in handles for one in processes.group_members(handle.pid))
        with _opened(filter(processes.unlinks, members)) as ends:
            processes.wait_for_ends(ends.fds, TRACKER_PATIENCE)

    def end(self, handles: Sequence[RankHandle], hurries: Mapping[int, Callable[[], bool]]) -> None:
        """Send SIGTERM to what these ranks, which have ended, left, and give it the grace; SIGKILL
        is the caller's. `hurries`: descriptors that cut the grace short when they become readable
        and their function says so."""
        loop = self._job.loop
        for handle in handles:
            if handle.left_at_exit is not None:  # not named yet: it may still end by itself
                until = handle.left_at_exit + LEFTOVER_PATIENCE
                with _held([handle]) as pidfds:
                    processes.wait_for_ends(pidfds.fds, until - loop.now)
        self._tell(loop.now)
        handles = [handle for handle in handles if not handle.reaped]
        with _held(handles) as pidfds:
            for handle in handles if pidfds.fds else ():
                processes.send_group(handle.pid, signal.SIGTERM)
                processes.send_group(handle.pid, signal.SIGCONT)  # as in RankHandle.signal_group
            poll, waiting = select.poll(), set(pidfds.fds)
            for fd in (*waiting, *hurries):
                poll.register(fd, select.POLLIN)
            overdue = loop.due("overdue")
            until = min(loop.now + self._job.plan.grace, math.inf if overdue is None else overdue)
            while waiting and (remaining := until - loop.now) > 0:
                for fd, _ in poll.poll(remaining * 1000 + 1):
                    if fd not in hurries:
                        poll.unregister(fd)
                        waiting.discard(fd)
                    elif hurries[fd]():
                        until = 0.0


def _held(handles: Iterable[RankHandle]) -> OwnedFds:
    """Open pidfds of all members of these ranks' groups that still are there."""
    return _opened(one.pid for handle in handles for one in processes.group_members(handle.pid))


def _opened(pids: Iterable[int]) -> OwnedFds:
    pidfds = OwnedFds()
    for pid in [*pids]:  # to find them takes descriptors, too
        with contextlib.suppress(OSError):  # gone, or no descriptor is left: SIGKILL comes later
            pidfds.add(system_calls.pidfd_open(pid))
    return pidfds
