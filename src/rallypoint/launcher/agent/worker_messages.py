"""Messages of the workers: what a rank tells of its program, written down and passed on to the
parts that judge it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rallypoint.diagnosis.evidence import Raised
from rallypoint.launcher import late_variables, protocol
from rallypoint.launcher.agent import supervisor
from rallypoint.launcher.agent.job import Job
from rallypoint.launcher.agent.preloaded_parts import PreloadedParts
from rallypoint.launcher.agent.process_handles import RankHandle
from rallypoint.launcher.agent.rendezvous_monitor import RendezvousMonitor
from rallypoint.launcher.agent.spawned_ranks import SpawnedRanks
from rallypoint.launcher.protocol import (
    AtPhase,
    Caught,
    ChildrenFailed,
    ClosesGroup,
    Debugging,
    ForksCuda,
    Imported,
    ImportedPart,
    Leaving,
    Meets,
    NotExecuted,
    OfSpawned,
    Outcome,
    Packet,
    SetLate,
    Spawns,
    Uncatch,
    Uncaught,
)


class WorkerMessages:
    """Reader of the ranks' control channels."""

    def __init__(
        self,
        job: Job,
        rendezvous: RendezvousMonitor,
        spawned: SpawnedRanks,
        parts: PreloadedParts,
        tell_caller: Callable[[Outcome, Sequence[int]], None],
    ) -> None:
        """`tell_caller` hands the outcome of a function to the caller of `launch`."""
        self._job = job
        self._rendezvous = rendezvous
        self._spawned = spawned
        self._parts = parts
        self._tell_caller = tell_caller
        self._spawns_told = False

    def receive(self, handle: RankHandle, *, waits: bool = True) -> bool:
        """Act on one packet; False when there is none (any more)."""
        try:
            message, fds = protocol.receive(
                handle.control, flags=0 if waits else socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return False
        if message is None:
            self._job.loop.unwatch(handle.control.fileno())
            return False
        self._act(handle, message, fds)
        return True

    def _act(self, handle: RankHandle, message: Packet, fds: Sequence[int]) -> None:
        job, reporter, now = self._job, self._job.reporter, self._job.loop.now
        match message:
            case AtPhase(phase):
                self._on_phase(handle, phase)
            case Caught(serial, raised):
                handle.caught[serial] = self._stamped(raised)
                handle.failed_to_join = handle.failed_to_join or raised.call == "init_process_group"
                leaving: dict[str, Any] = {"on_its_way": True} if raised.on_its_way else {}
                reporter.event(
                    "handled-error",
                    rank=handle.rank,
                    type=raised.type,
                    message=raised.message[:500],
                    call=raised.call,
                    **leaving,
                )
                job.feed(supervisor.Erred(handle.rank, raised.call))
            case Uncatch(serial):
                handle.caught.pop(serial, None)
            case Uncaught():
                self._on_uncaught(handle, message)
            case Leaving():
                handle.left_at, handle.left_saying, handle.left_when = (
                    message.line,
                    message.words,
                    now,
                )
            case Debugging(waits):
                handle.debugging = waits
                job.feed(supervisor.Debugged(handle.rank, waits))
            case ClosesGroup(line):
                handle.closed_at, handle.closed_line = now, line
                reporter.event("group-closed", rank=handle.rank, line=line)
            case Meets():
                handle.closed_at, handle.closed_line = 0.0, ""
                self._rendezvous.meets(handle, message)
            case Spawns(line):
                self._on_spawns(handle, line)
            case OfSpawned():
                self._spawned.tells(handle, message, fds)
            case ForksCuda(line, first):
                handle.cuda_forks.append((line, first))
            case ChildrenFailed():
                handle.children = message
                reporter.event(
                    "children-failed", rank=handle.rank, pids=[one.pid for one in message.children]
                )
            case Imported(name, seconds):
                handle.imports[name] = seconds
            case ImportedPart(name):
                handle.parts.append(name)
            case SetLate(name, line):
                job.console.say_late(name, line)
                if late_variables.is_of_parts(name):
                    self._parts.leave_out(
                        self._parts.early, f"the program sets {name}, which it reads"
                    )
            case NotExecuted(number):
                handle.not_executed = number
            case Outcome():
                self._tell_caller(message, fds)
                for fd in fds:
                    os.close(fd)

    def _on_phase(self, handle: RankHandle, phase: protocol.Phase) -> None:
        job = self._job
        handle.phase, handle.phase_at, handle.failed_to_join = phase, job.loop.now, False
        if phase == "running" and handle.joined_at is None and handle.meeting is not None:
            handle.joined_at = handle.phase_at
        job.reporter.event("phase", rank=handle.rank, phase=phase)
        job.feed(supervisor.PhaseEntered(handle.rank, phase, job.evidence.needs_all(handle)))
        if phase == "joining":
            self._rendezvous.joining()

    def _on_uncaught(self, handle: RankHandle, message: Uncaught) -> None:
        job, raised = self._job, message.raised
        handle.raised, handle.traceback_printed = self._stamped(raised), message.printed
        job.reporter.event(
            "raised", rank=handle.rank, type=raised.type, message=raised.message[:500]
        )
        handle.log_line = job.console.log_line(handle.rank)
        if not message.printed:
            job.console.note(handle.rank, raised.traceback)
        if message.keyboard and handle.sent:  # our own SIGINT
            return
        if job.supervisor.is_stopping_from_outside:
            job.console.say_raised_while_stopped(handle.rank, handle.raised)
        job.feed(
            supervisor.RankRaised(
                handle.rank,
                job.evidence.is_consequence(raised),
                f"rank {handle.rank} raised {raised.type}",
            )
        )

    def _stamped(self, raised: Raised) -> Raised:
        """Return it with its time: the worker does not know when the job began."""
        return msgspec.structs.replace(raised, at=self._job.loop.now)

    def _on_spawns(self, handle: RankHandle, line: str) -> None:
        if self._job.plan.world.size == 1:
            if handle.joined_at is None:
                self._job.attempt.release()
            handle.released()
        elif not self._spawns_told:
            self._spawns_told = True
            self._job.console.say_spawns(line)
