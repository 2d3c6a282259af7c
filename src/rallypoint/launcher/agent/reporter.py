"""Reporter of a run: its events, its reports and its run folder."""

from __future__ import annotations

import os
import resource
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from rallypoint.clock import Clock
from rallypoint.diagnosis import render, root_cause
from rallypoint.diagnosis.causes.wording import ending
from rallypoint.diagnosis.evidence import Ended, NodeEvidence
from rallypoint.diagnosis.report import Help, Report, Said
from rallypoint.host import termination_log
from rallypoint.launcher import exception_capture
from rallypoint.launcher.agent.console import Console, say_directly
from rallypoint.launcher.agent.evidence_gatherer import ERROR_FILES_TIMEOUT
from rallypoint.launcher.plan import Plan
from rallypoint.launcher.protocol import Exited, NotForked
from rallypoint.record import preload_history
from rallypoint.record.disk_writer import DiskWriter
from rallypoint.record.events import Event, EventLog, What
from rallypoint.record.run_folder import RunFolder, default_root, open_run_folder
from rallypoint.record.run_list import LauncherAddress
from rallypoint.record.torchrun_files import hand_on
from rallypoint.units import size
from rallypoint.world import Seat, ranks_phrase

# Seconds in which the run folder is made, until a line says what is waited for.
DISK_PATIENCE = 5.0
# Seconds at the very end in which what is still to be written must be on its disk. A busy one needs
# tenths.
DISK_TIMEOUT = 5.0
# Seconds for the list of parts to preload, a file of some hundred bytes. Beside a disk that takes
# longer, the next start finds them again.
LEARNT_TIMEOUT = 1.0


# Bytes of address space below which the import of torch may fail: it maps a few hundred MiB, with
# CUDA's libraries several GiB.
TORCH_SPACE = 8 << 30


def open_folder(plan: Plan) -> RunFolder:
    """Make the run folder. A disk that has died holds this thread, so a line says what is waited
    for.
    """
    text = f"rallypoint: waiting for the disk of {plan.run_dir}: it does not answer; --run-dir names a folder on another one"
    notice = threading.Timer(DISK_PATIENCE, say_directly, (text,))
    notice.daemon = True
    notice.start()
    try:
        return open_run_folder(plan.run_dir, plan.job, say_directly, asked_for=plan.run_dir_asked)
    finally:
        notice.cancel()
        notice.join()


class Reporter:
    """Record of a run, and the reports that come of it: shown by the console, kept in the run
    folder.
    """

    def __init__(
        self, plan: Plan, seat: Seat, clock: Clock, folder: RunFolder, writer: DiskWriter, console: Console, *, offset: float = 0.0
    ) -> None:  # fmt: skip
        """`writer`: writes to the folder, whose disk may be a network's. `offset`: seconds to add
        to a time of this node's for that of node 0.
        """
        self._plan = plan
        self._clock = clock
        self._folder = folder
        self._writer = writer
        self._console = console
        self._events = EventLog(folder, writer)
        self._earlier: tuple[Report, ...] = ()  # reports of earlier attempts
        self._reports: tuple[Report, ...] = ()  # of this one, its cause first
        self._error_files: dict[int, str] = {}  # of this attempt, by rank: what `@record` wrote
        self.told: set[int] = set()  # ranks of this attempt that have failed, as gathered so far
        folder.write_plan(plan)
        of_several: dict[str, Any] = {
            "host": os.uname().nodename,
            "first": seat.ranks.start,
            "offset": offset,
        }
        self.event(
            "job-started",
            job=plan.job,
            program=exception_capture.sayable(plan.program.target),
            world_size=seat.world.size,
            **(of_several if seat.world.nodes > 1 else {}),
        )

    @property
    def run_dir(self) -> str:
        """Path of the run folder, "" when there is none."""
        return self._folder.path

    @property
    def reports(self) -> tuple[Report, ...]:
        """Reports of all attempts, each attempt's cause first."""
        return (*self._earlier, *self._reports)

    def announce(self, socket: str) -> None:
        """Write down where the launcher can be asked."""
        self._folder.announce(LauncherAddress(socket, os.uname().nodename, os.getpid()))
        if self._plan.run_dir_asked:
            self._folder.list_in(default_root(os.environ))

    def event(
        self, what: What, *, rank: int | None = None, because: str = "", **details: Any
    ) -> None:
        """Write down that something happened."""
        self._events.write(Event(self._clock.elapsed(), what, rank, because, details))

    def begin_attempt(self, number: int, because: str) -> None:
        """Begin the record of an attempt; reports so far are an earlier one's. A caller of `launch`
        has no exception that tells of them.
        """
        self.event("attempt-started", because=because, attempt=number)
        for report in self._reports if self._plan.task is not None else ():
            self._console.say(f"rallypoint: {report.headline}, {report.where}")
        self._earlier, self._reports = self.reports, ()
        self._error_files, self.told = {}, set()

    # --- notices, which end nothing

    def report_stall(self, report: Report) -> None:
        """Show that no rank has moved for as long as `--stall` says."""
        self.event("stalled", code=report.code, headline=report.headline)
        if self._plan.error_format == "json":
            self._console.pump.say(render.json((report,)))
        else:
            self._console.print_reports((report,), before="\n")

    def report_moved(self, ranks: Sequence[int]) -> None:
        """Say that ranks which had not moved for long have moved."""
        self.event("stall-over", ranks=list(ranks))
        self._console.say(
            f"rallypoint: the job goes on: {ranks_phrase(ranks)} {'has' if len(ranks) == 1 else 'have'} moved"
        )

    def report_roll_call(self, lines: Sequence[str], because: str) -> None:
        """Say what a roll call has shown."""
        self.event("roll-call", because=because, lines=tuple(lines))
        self._console.remark("\n".join((f"rallypoint: {lines[0]}", *lines[1:])))

    # --- reports

    def has_gathered(self, here: NodeEvidence) -> None:
        """Keep of this node's evidence what later questions need, whoever judges it."""
        self.told |= {rank.rank for rank in here.ranks if root_cause.has_failed(rank)}
        self._error_files |= {one.rank: one.error_file for one in here.ranks if one.error_file}

    def show(
        self,
        reports: tuple[Report, ...],
        followed: Sequence[str] = (),
        *,
        here: str = "",
        brief: str = "",
    ) -> tuple[Report, ...]:
        """Print and keep reports; return all of this attempt, the cause first. `followed`: lines
        about ranks that lost one of those at fault. `here`: this node's own part, of several.
        `brief`: the line to print instead, on a screen where another node shows the reports.
        """
        if here and reports:
            reports = (replace(reports[0], here=here), *reports[1:])
        self._console.live(None)
        for line in followed:
            self._console.say(f"rallypoint: {line}")
        for report in reports:
            self.event("report", code=report.code, headline=report.headline)
        if brief and reports:
            self._console.say(f"rallypoint: {brief}")
        elif self._plan.task is None and reports:  # else the caller's exception says it
            same = root_cause.same_again(first := reports[0])
            before = [root_cause.same_again(one) for one in self._earlier[-1:]]
            if self._plan.error_format == "json":
                self._console.pump.say(render.json(reports))
            elif len(reports) == 1 and same and same in before:
                where, logs = first.where.partition(",")[0], ", ".join(first.logs)
                self._console.say(
                    f"rallypoint: the same again: {first.headline}, {where}; logs: {logs}"
                )
            else:
                self._console.print_reports(reports, before="" if self.reports else "\n")
        self._reports = kept = root_cause.cause_first((*self._reports, *reports))
        self._writer.submit(lambda: self._folder.write_report(kept))
        return kept

    def import_failed(self, module: str, because: str, traceback: str = "") -> Report:
        """Return the report on torch, or a preload module, that cannot be imported.

        `because`: the exception, or how its import ended the process.
        """
        option = "preload" if self._plan.task is not None else "--preload"
        asked = module in self._plan.preload
        lines = tuple(traceback.rstrip().splitlines()[-10:])
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]  # -1: none
        return Report(
            code="start-failed",
            headline=f"{module} cannot be imported",
            where="before any worker started",
            why=f"{option} asks for it: {because}" if asked else because,
            evidence=(
                (f"ulimit -v lets a process map {size(limit)} in all: torch may need more",)
                if 0 < limit < TORCH_SPACE
                else ()
            ),
            said=(Said("the template", lines),)
            if len(lines) > 1
            else (),  # a module that is not there: `why` has said it
            help=(Help("try it alone", f"{sys.executable} -c 'import {module}'"),),
        )

    def host_failed(self, message: Exited) -> Report:
        """Return the report on a c10d host that imported torch itself, and ended without serving."""
        how = ending(Ended(message.code, message.signal))
        return Report(
            code="start-failed",
            headline=f"the server of torch's store could not start: {how}",
            why="its process imports torch, and then serves the place where the ranks meet",
            help=(
                Help(
                    "see whether torch can be imported",
                    f"{sys.executable} -c 'import torch.distributed'",
                ),
            ),
        )

    def not_forked(self, message: NotForked) -> Report:
        """Return the report on a process that could not be started."""
        reason = message.unclean or os.strerror(message.errno)
        who = f"rank {message.rank}" if message.rank >= 0 else "the c10d host"
        helps = (
            (Help("look at the limits", "ulimit -a; cat /sys/fs/cgroup/pids.max"),)
            if message.errno
            else ()
        )
        return Report(
            code="start-failed", headline=f"{who} could not be started: {reason}", help=helps
        )

    # --- the end

    def keep_learnt(self, parts: Sequence[str], spoilt: Mapping[str, str]) -> bool:
        """Keep for the next start of this program which parts of torch to import once; return
        whether they could be written.
        """
        plan, now = self._plan, self._clock.wall()
        if not plan.memory or not (parts or spoilt):
            return False
        try:
            self._writer.ask(
                lambda: preload_history.add(
                    plan.memory, plan.program.target, plan.torch, parts, spoilt, now
                ),
                LEARNT_TIMEOUT,
            )
        except (
            OSError
        ):  # a disk that is full, or may only be read: the caller says what to type instead
            return False
        return True

    def close(self, status: int | None, *, interrupted: Callable[[], bool]) -> None:
        """Write the end of the run, and close the console and every file. `interrupted`: see
        `Console.close`.
        """
        if status:
            self._hand_on_error(status)
            if self._reports and self._plan.task is None:  # else the process goes on
                termination_log.write(render.first_line(self._reports[0]), os.environ)
        self.event("job-ended", status=status)
        self._console.close(interrupted=interrupted)
        self._writer.submit(self._events.close)
        self._writer.submit(self._folder.close)
        self._writer.end()
        if not self._writer.finish(DISK_TIMEOUT):
            say_directly(
                f"rallypoint: the disk of {self.run_dir} gave no answer within {DISK_TIMEOUT:g} s: the record of this run is not whole"
            )
        elif self._writer.error is not None:
            say_directly(
                f"rallypoint: writing to {self.run_dir} failed: {self._writer.error!r}; the record may be incomplete"
            )

    def _hand_on_error(self, status: int) -> None:
        """Copy the cause to TORCHELASTIC_ERROR_FILE, for a launcher that has started this one with
        it.
        """
        path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        found = [
            self._error_files[rank]
            for rank in (self._reports[0].ranks if self._reports else ())
            if rank in self._error_files
        ]
        if not path or not found or self._plan.task is not None:
            return
        try:
            why = self._writer.ask(lambda: hand_on(found[0], status, path), ERROR_FILES_TIMEOUT)
        except TimeoutError:
            why = f"no answer within {ERROR_FILES_TIMEOUT:g} s"
        if why:
            self._console.say(
                f"rallypoint: TORCHELASTIC_ERROR_FILE {path} cannot be written: {why}"
            )
