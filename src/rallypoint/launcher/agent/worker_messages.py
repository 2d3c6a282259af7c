"""Messages of the workers: what a rank tells of its program, written down and passed on to the
parts that judge it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from rallypoint.diagnosis import classify, rendezvous_mismatch
from rallypoint.diagnosis.evidence import Raised
from rallypoint.launcher import late_variables, protocol
from rallypoint.launcher.agent import supervisor
from rallypoint.launcher.agent.job import Job
from rallypoint.launcher.agent.process_handles import RankHandle
from rallypoint.launcher.protocol import (
    AtPhase,
    Caught,
    ChildrenFailed,
    ClosesGroup,
    Debugging,
    ForksCuda,
    Handles,
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
    ThreadEnded,
    Uncatch,
    Uncaught,
)


class WorkerMessages:
    """Reader of the ranks' control channels."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._spawns_told = False

    def receive(self, handle: RankHandle, *, waits: bool = True) -> bool:
        """Act on one packet; return False when there is none (any more)."""
        flags = 0 if waits else socket.MSG_DONTWAIT
        try:
            message, fds = protocol.receive(handle.control, flags=flags)
        except BlockingIOError:
            return False
        if message is None:
            self._job.loop.unwatch(handle.control.fileno())
            return False
        self._act(handle, message, fds)
        return True

    def _act(self, handle: RankHandle, message: Packet, fds: Sequence[int]) -> None:
        job, event, now = self._job, self._job.reporter.event, self._job.loop.now
        match message:
            case AtPhase(phase, threads):
                handle.threads = threads
                self._on_phase(handle, phase)
            case Caught(serial, raised):
                self._on_caught(handle, serial, replace(raised, at=now))
            case ThreadEnded(raised):
                handle.in_thread = handle.in_thread or replace(raised, at=now)
            case Handles(raised):
                handle.handles = raised and replace(raised, at=now)
            case Uncatch(serial):
                handle.caught.pop(serial, None)
            case Uncaught(raised):
                self._on_uncaught(handle, message, replace(raised, at=now))
            case Leaving(0, line):
                handle.exit_line = line
            case Leaving():
                handle.left_when = now
                handle.left_at, handle.left_saying = message.line, message.words
            case Debugging(waits):
                handle.debugging = waits
                if waits:
                    job.console.give_away()
                    handle.terminal_left()
                job.feed(supervisor.Debugged(handle.rank, waits))
            case ClosesGroup(line):
                handle.closed_at, handle.closed_line = now, line
                event("group-closed", rank=handle.rank, line=line)
            case Meets():
                handle.closed_at, handle.closed_line = 0.0, ""
                job.rendezvous.meets(handle, message)
            case Spawns(line):
                self._on_spawns(handle, line)
            case OfSpawned():
                job.spawn_monitor.tells(handle, message, fds)
            case ForksCuda(line, first):
                handle.cuda_forks.append((line, first))
            case ChildrenFailed(children) if not handle.sent:  # else they were ended with it
                handle.children = message
                event("children-failed", rank=handle.rank, pids=[one.pid for one in children])
            case Imported(name, seconds):
                handle.imports[name] = seconds
            case ImportedPart(name):
                handle.parts.append(name)
            case SetLate(name, line):
                job.console.say_late(name, line)
                if late_variables.is_of_parts(name):
                    job.parts.leave_out(job.parts.early, f"the program sets {name}, which it reads")
            case NotExecuted(number):
                handle.not_executed = number
            case Outcome() if job.request is not None:
                if job.others is not None:
                    job.others.pass_result(message, fds)
                job.request.tell(message, fds)
                for fd in fds:
                    os.close(fd)

    def _on_phase(self, handle: RankHandle, phase: protocol.Phase) -> None:
        job = self._job
        handle.phase, handle.phase_at, handle.failed_to_join = phase, job.loop.now, False
        if phase == "running" and handle.joined_at is None and handle.meeting is not None:
            handle.joined_at = handle.phase_at
        job.reporter.event("phase", rank=handle.rank, phase=phase)
        whole = handle.meeting is not None and rendezvous_mismatch.whole(
            handle.meeting, job.seat.world.size
        )
        job.feed(supervisor.PhaseEntered(handle.rank, phase, whole))
        if phase == "joining":
            job.rendezvous.joining()

    def _on_caught(self, handle: RankHandle, serial: int, raised: Raised) -> None:
        handle.caught[serial], call = raised, raised.call
        handle.failed_to_join = handle.failed_to_join or call == "init_process_group"
        told: dict[str, Any] = {"type": raised.type, "message": raised.message[:500], "call": call}
        if raised.on_its_way:
            told["on_its_way"] = True
        self._job.reporter.event("handled-error", rank=handle.rank, **told)
        self._job.feed(supervisor.Erred(handle.rank, call))

    def _on_uncaught(self, handle: RankHandle, message: Uncaught, raised: Raised) -> None:
        job = self._job
        handle.raised, handle.traceback_printed = raised, message.printed
        handle.dead_child = None if handle.sent else message.failed_child
        job.reporter.event(
            "raised", rank=handle.rank, type=raised.type, message=raised.message[:500]
        )
        handle.log_line = job.console.log_line(handle.local_rank)
        if not message.printed:
            job.console.pump.note(handle.local_rank, raised.traceback)
        if message.keyboard and handle.sent:  # our own SIGINT
            return
        if job.supervisor.is_stopping_from_outside:
            job.console.say_raised_while_stopped(handle.rank, raised)
        because = f"rank {handle.rank} raised {raised.type}"
        job.feed(supervisor.RankRaised(handle.rank, classify.is_consequence(raised), because))

    def _on_spawns(self, handle: RankHandle, line: str) -> None:
        if self._job.seat.world.size == 1:
            if handle.joined_at is None:
                self._job.attempt.release()
            handle.released()
        elif not self._spawns_told:
            self._spawns_told = True
            self._job.console.say_spawns(line)
