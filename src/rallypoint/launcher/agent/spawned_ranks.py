"""The processes that a job's only rank starts with `torch.multiprocessing.spawn`, as the agent sees
them: whether they can meet.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence

from rallypoint.diagnosis.evidence import Ended
from rallypoint.launcher.agent.evidence_collection import RollCall
from rallypoint.launcher.agent.hang_monitor import HangMonitor
from rallypoint.launcher.agent.job import Job
from rallypoint.launcher.agent.process_handles import RankHandle
from rallypoint.launcher.agent.query_socket import ROOM
from rallypoint.launcher.agent.rendezvous_monitor import RendezvousMonitor
from rallypoint.launcher.agent.supervisor import CallRoll
from rallypoint.launcher.protocol import AtPhase, Meets, OfSpawned


class SpawnedRanks:
    """Those of one attempt at a time. They take the place of the rank that started them where the
    launcher says who waits, and where.
    """

    def __init__(
        self,
        job: Job,
        rendezvous: RendezvousMonitor,
        roll_call: RollCall,
        hang_monitor: HangMonitor,
    ) -> None:
        self._job = job
        self._rendezvous = rendezvous
        self._roll_call = roll_call
        self._hang_monitor = hang_monitor
        self._too_many_in: object = (
            None  # the attempt in which there were more than this process may have descriptors for
        )

    def tells(self, starter: RankHandle, message: OfSpawned, fds: Sequence[int]) -> None:
        """One of them has begun (then its pidfd and its evidence come along), or is on its way into
        its group.
        """
        if len(fds) == 2:
            self._begun(starter, message, fds[0], fds[1])
            return
        for fd in fds:
            os.close(fd)
        handle = next((one for one in self._job.spawned if one.pid == message.pid), None)
        match message.told:
            case _ if handle is None or not handle.alive:
                return
            case Meets(meeting):
                handle.meeting = meeting
            case AtPhase(phase):
                handle.phase, handle.phase_at = phase, self._job.loop.now
                if phase == "joining":
                    self._rendezvous.joining()
                    self._job.loop.by(
                        "spawned", handle.phase_at + self._job.plan.roll_call, self._call
                    )

    def _begun(self, starter: RankHandle, message: OfSpawned, pidfd: int, evidence: int) -> None:
        spawned = self._job.attempt.spawned
        for former in [
            one
            for one in spawned
            if not one.alive and (not self._job.spawned or one.rank == message.index)
        ]:
            former.close()  # of an earlier call of the program's
            spawned.remove(former)
        # The kernel gives the lowest free number. With some of them nobody could say who is
        # missing: all are let go.
        if max(pidfd, evidence) >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - ROOM:
            self._too_many_in = self._job.attempt
            self.close()
        if self._too_many_in is self._job.attempt:
            os.close(pidfd)
            os.close(evidence)
            return
        handle = RankHandle(message.index, message.index)
        handle.adopt(message.pid, pidfd, evidence, starter.rank)
        handle.phase, handle.phase_at = "running", self._job.loop.now
        spawned.append(handle)
        spawned.sort(key=lambda one: one.rank)
        self._job.attempt.spawned_size = message.size
        self._job.loop.watch(pidfd, lambda: self._ended(handle))
        self._hang_monitor.begin()

    def _ended(self, handle: RankHandle) -> None:
        """How it ended the rank knows: it raises unless that was with 0."""
        self._job.loop.unwatch(handle.pidfd)
        handle.ended = Ended(at=self._job.loop.now)

    def _call(self, now: float) -> None:
        """Some have waited for the others as long as a roll call takes; again after twice that
        time.
        """
        waiting = [one for one in self._job.spawned if one.waiting]
        if waiting and self._job.is_running:
            self._roll_call.begin(
                CallRoll("processes that the program spawned wait in init_process_group")
            )
            since = now - min(one.phase_at for one in waiting)
            self._job.loop.at("spawned", now + since, self._call)

    def close(self) -> None:
        """Give every descriptor back; nothing that is seen is of them any more."""
        for handle in self._job.attempt.spawned:
            if handle.ended is None:
                self._job.loop.unwatch(handle.pidfd)
            handle.close()
        self._job.attempt.spawned.clear()
