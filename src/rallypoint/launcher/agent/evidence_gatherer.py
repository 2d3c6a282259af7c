"""Evidence about a job for the rules of diagnosis, gathered from what the ranks have told and what
this machine shows.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Sequence

from rallypoint.clock import Clock
from rallypoint.diagnosis import (
    classify,
    evidence,
    reachability,
    rendezvous_mismatch,
    root_cause,
    stacks,
    tracebacks,
)
from rallypoint.diagnosis.evidence import (
    CUDA_START,
    HelperLost,
    MemoryEvidence,
    NodeEvidence,
    RankEvidence,
)
from rallypoint.host import devices
from rallypoint.host.devices import Found
from rallypoint.host.kernel_files import text_of
from rallypoint.host.probe import Reached
from rallypoint.launcher import job_diagnosis
from rallypoint.launcher.agent.console import SETTLE_TIMEOUT, Console
from rallypoint.launcher.agent.process_handles import RankHandle
from rallypoint.launcher.plan import Plan
from rallypoint.record.disk_writer import DiskWriter

# Seconds that a report which speaks of GPUs waits for the driver's list of them; files are read at
# once.
DEVICES_TIMEOUT = 1.5
# Seconds that a report waits for the files in which `@record` writes a rank's error: small, on the
# run folder's disk, and mostly not there.
ERROR_FILES_TIMEOUT = 0.5


# Fields that a rank's handle and its evidence have alike.
_AS_TOLD = (
    "rank",
    "local_rank",
    "pid",
    "phase",
    "phase_at",
    "ended",
    "raised",
    "in_thread",
    "handles",
    "meeting",
    "unanswered",
    "resident",
    "halted_by",
    "exit_line",
    "left_at",
    "left_when",
    "left_saying",
    "closed_at",
    "closed_line",
    "not_executed",
)


class EvidenceGatherer:
    """Reader of the ranks' handles for the rules of diagnosis. It judges nothing and shows
    nothing.
    """

    def __init__(
        self, plan: Plan, clock: Clock, run_dir: str, writer: DiskWriter, console: Console
    ) -> None:
        self._plan = plan
        self._clock = clock
        self._run_dir = run_dir
        self._writer = writer
        self._console = console
        self._disk_is_silent = False
        self.begin()

    def begin(self) -> None:
        """Begin an attempt: what the kernel has killed so far is not of it."""
        self._before = evidence.memory_counters()
        self._began = self._clock.monotonic()

    # --- single questions, asked while the job runs

    def absent(self, ranks: Sequence[RankHandle], size: int) -> tuple[int, ...]:
        """Return the ranks that others wait for in an init_process_group of `size`."""
        here = [_position(handle, asked=False) for handle in ranks]
        return rendezvous_mismatch.absent(
            here, [handle.rank for handle in ranks if handle.waiting], size
        )

    def unmet(self, ranks: Sequence[RankHandle]) -> tuple[str, int] | None:
        """Return the host and port that a rank could not reach, or lost, by its errors; None when
        no error speaks of that.
        """
        for one in ranks:
            said = self._console.pump.tail(one.log_rank)
            untold = one.raised is None and one.ended is not None and one.ended.code == 1  # --plain
            written = tracebacks.exception_in(said) if untold else None
            for error in (*one.errors(), *([written] if written is not None else [])):
                place = reachability.where(error, one.meeting) or reachability.store_of(error, said)
                if place is not None:
                    return place
        return None

    def roll_call(
        self,
        ranks: Sequence[RankHandle],
        size: int,
        asked: Sequence[RankHandle],
        seen: Reached | None,
        *,
        spawned: bool,
    ) -> tuple[str, ...]:
        """Return lines that say which of `size` ranks wait in init_process_group, and where the
        others are.

        () when no rank waits any more, or a person is at a debugger, which the stacks of those
        `asked` show. `seen`: what is at their meeting point. `spawned`: mp.spawn has started them.
        """
        here, states = positions(ranks, asked)
        if any(stacks.debugged(one.stack) for one in here):
            return ()
        root = job_diagnosis.folder_of_task(self._plan) or stacks.root_of(
            self._plan.program.target, [frame for one in here for frame in one.stack]
        )
        waiting = [handle.rank for handle in ranks if handle.waiting]
        now = self._clock.elapsed()
        lines = rendezvous_mismatch.lines(here, waiting, states, size, now, root, spawned=spawned)
        if lines and seen is not None and reachability.explains(seen):
            there = [one.meeting for one in here if reachability.waits_at(one, seen)]
            line = next((meeting.line for meeting in there if meeting is not None), "")
            lines += (f"  {reachability.in_short(seen, line)}",)
        return lines

    # --- for a report

    def gather(
        self,
        ranks: Sequence[RankHandle],
        *,
        asked: bool,
        told: Collection[int],
        helper: HelperLost | None = None,
        reached: Reached | None = None,
        node: int = 0,
    ) -> NodeEvidence:
        """Return the evidence of this node: its ranks, and what this machine shows. `asked`: the
        living ranks were asked for their stacks. `told`: ranks whose failure stands in a report.
        """
        self._console.pump.settle(SETTLE_TIMEOUT)
        waits = any(handle.phase == "joining" for handle in ranks)
        looked_at = [handle for handle in ranks if not (asked and handle.rank in told)]
        files = self._error_files(looked_at)
        now = self._clock.elapsed()
        found = tuple(
            self._rank(handle, file, asked=asked, waits=waits)
            for handle, file in zip(looked_at, files, strict=True)
        )
        return NodeEvidence(
            ranks=found,
            node=node,
            host=os.uname().nodename,
            memory=self._memory(ranks, helper, found),
            devices=self._devices(ranks),
            holders=_holders(ranks),
            helper=helper,
            reached=reached,
            run_dir=self._run_dir,
            now=now,
            began=self._clock.wall() - now,
        )

    def _rank(
        self, handle: RankHandle, written: str = "", *, asked: bool, waits: bool
    ) -> RankEvidence:
        """Return the evidence of one rank. `written`: its error file. `asked`: as for `gather`;
        without it an answer of a living rank, perhaps hours old, is not where it is now. `waits`:
        some rank is in init_process_group."""
        has_said = asked or handle.ended is not None
        log, lines, silent = self._console.pump.log_position(handle.log_rank)
        tail = self._console.pump.tail(handle.log_rank)
        # Programs try whether there is a GPU, and go on without: an error of that counts only while
        # others wait for this rank to join.
        tries = not waits or handle.joined_at is not None
        return RankEvidence(
            dead_child=handle.dead_child or handle.failed_child(),
            **{name: getattr(handle, name) for name in _AS_TOLD},
            handled=tuple(
                one for one in handle.caught.values() if one.call != CUDA_START or not tries
            ),
            sent=tuple(handle.sent),
            stack=handle.stack() if has_said else (),
            stack_text=handle.last_words() if has_said else "",
            said=tail,
            silent=silent,
            said_traceback=handle.traceback_printed,
            log=log,
            log_line=handle.log_line or max(1, lines - len(tail) + 1),
            error_file=written,
            cuda_forks=tuple(handle.cuda_forks),
        )

    def _error_files(self, ranks: Sequence[RankHandle]) -> list[str]:
        """Read the error files of these ranks: "" for one that has none, and for all once the disk
        has given no answer.
        """
        paths = [handle.error_file for handle in ranks]
        try:  # one question for all, and one deadline: 64 ranks have 64 files
            if not self._disk_is_silent:
                return self._writer.ask(
                    lambda: [text_of(path, most=1 << 20) for path in paths], ERROR_FILES_TIMEOUT
                )
        except TimeoutError:
            self._disk_is_silent = True
        return [""] * len(paths)

    def _devices(self, ranks: Sequence[RankHandle]) -> Found | None:
        """Return the GPUs of this machine when an error speaks of them."""
        about = any(classify.about_devices(error) for handle in ranks for error in handle.errors())
        if not about and not share_a_device(ranks):
            return None
        environ = {**os.environ, **self._plan.environment, **self._plan.rank_environment[0]}
        return devices.find(environ, devices.look_closely(DEVICES_TIMEOUT))

    def _memory(
        self,
        ranks: Sequence[RankHandle],
        helper: HelperLost | None,
        found: Sequence[RankEvidence],
    ) -> MemoryEvidence:
        killed = any(
            handle.ended and handle.ended.signal == signal.SIGKILL and "SIGKILL" not in handle.sent
            for handle in ranks
        )
        for error in (handle.raised for handle in ranks if handle.raised is not None):
            loader = classify.loader_killed(error) or classify.says_loader_killed(
                error.traceback.splitlines()
            )
            killed |= loader is not None and loader[1] == signal.SIGKILL
            killed |= classify.fits("pool-broken", error)
        killed |= any(one.dead_child and one.dead_child[2] == signal.SIGKILL for one in found)
        killed |= helper is not None and helper.ended.signal == signal.SIGKILL
        pids, read = evidence.kernel_oom_kills(self._began) if killed else ((), False)
        return evidence.difference(self._before, evidence.memory_counters(), pids, read)


def share_a_device(ranks: Sequence[RankHandle]) -> bool:
    """Return whether ranks of one NCCL group would use the same GPU."""
    meetings = [(one.rank, one.meeting) for one in ranks if one.meeting]
    return bool(root_cause.devices_shared(meetings, len(ranks)))


def positions(
    ranks: Sequence[RankHandle], asked: Sequence[RankHandle]
) -> tuple[tuple[RankEvidence, ...], dict[int, str]]:
    """Return where ranks are, and why those that were `asked` and did not tell are silent."""
    here = tuple(_position(handle, asked=handle in asked) for handle in ranks)
    told = {one.rank for one in here if one.stack}
    states = {
        one.rank: one.silence()
        for one in ranks
        if one.alive and one.rank not in told and (one in asked or one.halted())
    }
    return here, states


def _position(handle: RankHandle, *, asked: bool) -> RankEvidence:
    """Return what a roll call needs of a rank. `asked`: it has just been asked for its stack."""
    return RankEvidence(
        rank=handle.rank, local_rank=handle.local_rank, pid=handle.pid, phase=handle.phase, phase_at=handle.phase_at, ended=handle.ended,
        handled=tuple(handle.caught.values()), meeting=handle.meeting, stack=handle.stack() if asked else (),
    )  # fmt: skip


def _holders(ranks: Sequence[RankHandle]) -> tuple[str, ...]:
    """Return lines about the processes that hold the port which a rank could not bind."""
    for handle in ranks:
        for raised in handle.errors():
            if classify.says("port-in-use", raised.message):
                from rallypoint.host import ports

                # a socket of the program's own may be at any other port
                meeting = _port_of(handle) if raised.call else 0
                port = classify.port_named(raised.message) or meeting
                found = ports.holders(port) if port else ()
                serving = {
                    holder.pid for holder in found if holder.state == "listening" and holder.pid
                }
                # Its clients say nothing more, and the job's own ranks are among them.
                return tuple(
                    dict.fromkeys(
                        holder.line()
                        for holder in found
                        if holder.state != "connected" or holder.pid not in serving
                    )
                )
    return ()


def _port_of(handle: RankHandle) -> int:
    text = handle.meeting.address.rpartition(":")[2] if handle.meeting else ""
    return int(text) if text.isdigit() else 0
