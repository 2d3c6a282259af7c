"""Endings of the ranks: how each ended, what is left of its process group, and the processes that
the agent has to reap.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping

from rallypoint.diagnosis import classify
from rallypoint.diagnosis.causes.wording import crash_words
from rallypoint.diagnosis.evidence import Ended
from rallypoint.host import process_status, processes, signals
from rallypoint.launcher.agent import supervisor
from rallypoint.launcher.agent.job import Job
from rallypoint.launcher.agent.leftovers import Leftovers
from rallypoint.launcher.agent.process_handles import RankHandle
from rallypoint.launcher.agent.supervisor import CleanGroup, SignalGroup, State
from rallypoint.launcher.protocol import Exited, Reap, Reaped

# Seconds in which the template tells of a rank's end, which the kernel shows at the same time: more
# than a stopped template has before it is continued.
TOLD_PATIENCE = 2.0


class RankEndings:
    """Owner of everything that follows when a rank is stopped or ends."""

    def __init__(self, job: Job, *, adopts_strangers: bool) -> None:
        """`adopts_strangers`: this process has children that are not the job's."""
        self._job = job
        self._adopts_strangers = adopts_strangers
        self._order = 0
        self._template_is_silent = False
        self._leftovers = Leftovers(job)

    # --- stopping

    def signal_group(self, action: SignalGroup) -> None:
        """Signal a rank's process group. A rank without a process is taken for ended, and none is
        started any more.
        """
        job, handle = self._job, self._job.rank(action.rank)
        if handle is not None and handle.alive:
            what = "killed" if action.signal == "SIGKILL" else "stop-sent"
            job.reporter.event(what, rank=action.rank, because=action.because, signal=action.signal)  # type: ignore[arg-type]
            handle.signal_group(action.signal, job.loop.now)
        elif handle is None or not handle.pid:
            job.starter.stop()
            if handle is not None:
                handle.sent.append(action.signal)
            # One that is being forked is killed when the template tells its pid.
            if handle is None or not handle.ordered:
                self.never_started(action.rank)

    def never_started(self, rank: int) -> None:
        """Take a rank that was not started yet for ended."""
        handle = self._job.rank(rank)
        if handle is not None:
            handle.ordered = False
            handle.ended = Ended(signal=signal.SIGTERM, at=self._job.loop.now, order=self._order)
        self._job.feed(supervisor.RankEnded(rank, 0, signal.SIGTERM, False, "it was never started"))

    # --- the end of a rank

    def on_exited(self, message: Exited) -> None:
        """Handle the template's message that a child has ended."""
        job, handle = self._job, self._of_pid(message.pid)
        if handle is not None:
            if handle.ended is None:  # else the template was late: see `_take_end`
                self._on_end(handle, message.code, message.signal)
            return
        # a c10d host: this attempt's, or an earlier one's that was ended
        job.helpers.guard.forget(message.pid)
        job.template.order(Reap(message.pid))
        host = job.attempt.host
        is_ours = host is not None and host.pid == message.pid and host.pidfd >= 0
        if host is not None and is_ours and any(one.alive for one in job.ranks):
            host.end()
            by_itself = not message.signal or crash_words(message.signal)
            if by_itself and not host.served and not job.template.imports:
                report = job.reporter.host_failed(message)
                job.impossible(report, report.headline)
            else:
                job.helper_lost("c10d host", message.pid, message.code, message.signal)

    def on_untold_end(self, handle: RankHandle) -> None:
        """Wait for the template's word on an end that the kernel shows, with a deadline: a debugger
        may hold the template.
        """
        loop = self._job.loop
        loop.unwatch(handle.pidfd)
        name, until = f"end of rank {handle.rank}", loop.now + TOLD_PATIENCE
        loop.at(name, until, lambda now: self._take_end(handle))

    def _take_end(self, handle: RankHandle) -> None:
        template = process_status.status(self._job.template.pid)
        if handle.ended is None and (end := process_status.end_of_unreaped(handle.pid)) is not None:
            if not self._template_is_silent and template is not None:
                self._job.console.say(
                    f"rallypoint: the template (pid {template.pid}) does not tell that ranks have ended: state {template.state}"
                )
            self._template_is_silent = True
            self._on_end(handle, *end)

    def _on_end(self, handle: RankHandle, code: int, number: int) -> None:
        job = self._job
        while job.messages.receive(handle, waits=False):  # its last words come before its end
            pass
        job.loop.unwatch(handle.control.fileno())
        job.loop.unwatch(handle.pidfd)
        if job.state is State.RUNNING:
            # its answer is one to `rallypoint stacks`, a stall or a roll call, perhaps hours ago
            handle.disregard()
        handle.ended = Ended(code, number, job.loop.now, self._order)
        self._order += 1
        how = {"signal": signals.name(number)} if number else {"code": code}
        job.reporter.event("ended", rank=handle.rank, **how)
        lost_peer = any(map(classify.is_consequence, handle.errors()))
        # An abort, SIGPIPE and a plain exit code may be a program's answer to a lost peer; other
        # signals and recorded exceptions are not.
        sure = number not in (0, signal.SIGABRT, signal.SIGPIPE) or (
            handle.raised is not None and not lost_peer
        )
        because = f"rank {handle.rank} ended with {signals.name(number) if number else f'exit code {code}'}"
        job.feed(supervisor.RankEnded(handle.rank, code, number, sure and not handle.sent, because))

    def clean_group(self, action: CleanGroup) -> None:
        """End what is left of a rank's group, or leave it until the job's end, and reap the
        rank.
        """
        handle = self._job.rank(action.rank)
        if handle is None or not handle.pid:  # it was never started
            return
        members = processes.group_members(handle.pid) if self._has_left() else []
        if members and not action.kill:
            self._leftovers.found(handle)
            return
        if members:
            processes.kill_family(b"", [handle.pid], deadline=processes.LOOK_AGAIN)
        # A tracker is waited for at the job's end, by the number of its group.
        if not any(processes.unlinks(one.pid) for one in members):
            self.reap(handle)

    # --- what is left

    def _has_left(self) -> bool:
        """Tell whether ended ranks may have left processes: these come to the template, which has
        no other children than ranks and the c10d host. To look at every process of a machine takes
        long.
        """
        job, host = self._job, self._job.attempt.host
        ours = {one.pid for one in job.ranks} | ({host.pid} if host else set())
        template = job.template
        return template.pidfd < 0 or not ours.issuperset(process_status.children(template.pid))

    def end_leftovers(self, hurries: Mapping[int, Callable[[], bool]] | None) -> None:
        """End what the ranks, which have all ended, left running. `hurries`: what ends the grace;
        None: there is none.
        """
        if hurries is not None:
            self._leftovers.end(self._unreaped(), hurries)
        self._leftovers.wait_for_trackers(self._unreaped())
        self._job.console.say_immortal(self.kill_family())
        self.reap_ranks()

    def _unreaped(self) -> list[RankHandle]:
        return [handle for handle in self._job.ranks if handle.pid and not handle.reaped]

    def kill_family(self, *, also_helpers: bool = False) -> list[process_status.ProcessStatus]:
        """SIGKILL all that the unreaped ranks started, and whatever else of the job descends from
        this process.

        Its own helpers are spared, unless `also_helpers` (the guard still is). Returns the
        processes that did not end.
        """
        job, host = self._job, self._job.attempt.host
        if not also_helpers and not self._has_left() and not any(one.alive for one in job.ranks):
            return []
        spared = [job.helpers.guard.pid]
        if not also_helpers:
            spared += [job.template.pid, *([host.pid] if host else [])]
        ancestor = job.template.pid
        if job.template.pidfd < 0:  # it has ended, and left us what was beneath it
            ancestor = 0 if self._adopts_strangers else os.getpid()
        sessions = [handle.pid for handle in self._unreaped()]
        return processes.kill_family(job.helpers.marker, sessions, ancestor=ancestor, spare=spared)

    # --- reaping

    def _of_pid(self, pid: int) -> RankHandle | None:
        return next((handle for handle in self._job.ranks if handle.pid == pid), None)

    def reap(self, handle: RankHandle) -> None:
        """Free its process id: only after its group was signalled, since that frees the group's
        number, too.
        """
        if handle.reaped or not handle.pid:
            return
        handle.reaped = True
        self._job.helpers.guard.forget(handle.pid)  # from here on the number may be a stranger's
        if self._job.lost is None or self._job.lost.name != "template":
            self._job.template.order(Reap(handle.pid))

    def reap_ranks(self) -> None:
        """Reap every rank that is not reaped yet."""
        for handle in self._unreaped():
            self.reap(handle)

    def on_reaped(self, message: Reaped) -> None:
        """Write down what a reaped rank has used."""
        handle = self._of_pid(message.pid)
        if handle is not None:
            self._job.reporter.event(
                "reaped",
                rank=handle.rank,
                user=round(message.user_time, 3),
                system=round(message.system_time, 3),
                resident=message.resident_max,
            )

    def reap_orphans(self) -> None:
        """Reap the job's processes that have lost their parent and come to this one. Template and
        guard are looked after apart.
        """
        for info in _ended_children(self._job.template.pid, self._job.helpers.guard.pid):
            handle = self._of_pid(info.si_pid)
            if handle is not None and handle.ended is None:
                self._on_end(handle, *processes.ended(info))
            if handle is not None:
                processes.send_group(handle.pid, signal.SIGKILL)
            _reap(info.si_pid)

    def reap_everything(self) -> None:
        """Reap all children at the very end, but the guard: nobody asks how they ended any more."""
        for info in _ended_children(self._job.helpers.guard.pid):
            _reap(info.si_pid)


def _ended_children(*but: int) -> Iterator[os.waitid_result]:
    """Yield this process's children that have ended, until it has none or the next is one of
    `but`, whose pidfd is watched.
    """
    with contextlib.suppress(ChildProcessError):
        while info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            if info.si_pid in but:
                return
            yield info


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # a look's own child, which its thread waits for
        os.waitid(os.P_PID, pid, os.WEXITED)
