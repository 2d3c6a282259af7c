"""Processes that a job's only rank starts with `torch.multiprocessing.spawn`, as the agent sees
them: what they tell on their way into their group.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence

from rallypoint.diagnosis.evidence import Ended
from rallypoint.launcher.agent import evidence_collection
from rallypoint.launcher.agent.job import Job
from rallypoint.launcher.agent.process_handles import RankHandle
from rallypoint.launcher.agent.query_socket import ROOM
from rallypoint.launcher.protocol import AtPhase, Meets, OfSpawned


class SpawnedRanks:
    """Spawned processes of one attempt at a time. They take the place of the rank that started them
    where the launcher says which rank waits, and where.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        # the attempt in which there were more than this process may have descriptors for
        self._too_many_in: object = None

    def tells(self, starter: RankHandle, message: OfSpawned, fds: Sequence[int]) -> None:
        """Handle a message of a spawned process: it has begun (then its pidfd and its evidence come
        along), or is on its way into its group.
        """
        if len(fds) == 2:
            self._begin(starter, message, fds[0], fds[1])
            return
        for fd in fds:
            os.close(fd)
        job = self._job
        handle = next((one for one in job.spawned if one.pid == message.pid and one.alive), None)
        match message.told:
            case _ if handle is None:
                return
            case Meets(meeting):
                handle.meeting = meeting
            case AtPhase(phase):
                handle.phase, handle.phase_at = phase, job.loop.now
                if phase == "joining":
                    job.rendezvous.joining()
                    job.loop.by("spawned", handle.phase_at + job.plan.roll_call, self._call_roll)

    def _begin(self, starter: RankHandle, message: OfSpawned, pidfd: int, evidence: int) -> None:
        job, spawned = self._job, self._job.attempt.spawned
        for former in [*spawned]:  # of an earlier call of the program's
            if not former.alive and (not job.spawned or former.rank == message.index):
                former.close()
                spawned.remove(former)
        # The kernel gives the lowest free number. With some of the processes nobody could say which
        # one is missing: all are let go.
        if max(pidfd, evidence) >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - ROOM:
            self._too_many_in = job.attempt
            self.close()
        if self._too_many_in is job.attempt:
            os.close(pidfd)
            os.close(evidence)
            return
        handle = RankHandle(message.index, message.index)
        handle.adopt(message.pid, pidfd, evidence, starter.local_rank)
        handle.phase, handle.phase_at = "running", job.loop.now
        spawned.append(handle)
        spawned.sort(key=lambda one: one.rank)
        job.attempt.spawned_size = message.size
        job.loop.watch(pidfd, lambda: self._on_end(handle))
        job.hang_monitor.begin()

    def _on_end(self, handle: RankHandle) -> None:
        """Note an end. The rank knows how it was: it raises unless that was with 0."""
        self._job.loop.unwatch(handle.pidfd)
        handle.ended = Ended(at=self._job.loop.now)

    def _call_roll(self, now: float) -> None:
        """Call the roll when some have waited for the others so long; again after twice that
        time.
        """
        waiting = [one for one in self._job.spawned if one.waiting]
        if waiting and self._job.is_running:
            because = "processes that the program spawned wait in init_process_group"
            evidence_collection.call_roll(self._job, because)
            since = now - min(one.phase_at for one in waiting)
            self._job.loop.at("spawned", now + since, self._call_roll)

    def close(self) -> None:
        """Give every descriptor back; nothing that is seen is of them any more."""
        for handle in self._job.attempt.spawned:
            if handle.ended is None:
                self._job.loop.unwatch(handle.pidfd)
            handle.close()
        self._job.attempt.spawned.clear()
