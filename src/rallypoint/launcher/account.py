"""The account of a run: what is shown, kept and reported."""

from __future__ import annotations

import os
import shlex
import signal
import stat
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rallypoint.clock import Clock
from rallypoint.diagnosis import causes, evidence, meeting_point, reading, render, rollcall, rules, stacks
from rallypoint.diagnosis.evidence import CUDA_START, HelperLost, JobEvidence, Meeting, MemoryEvidence, Raised, RankEvidence
from rallypoint.diagnosis.report import Help, Report, Said
from rallypoint.diagnosis.rollcall import Misfit
from rallypoint.errors import RallypointError
from rallypoint.host import devices, signals, terminal
from rallypoint.host.devices import Found
from rallypoint.host.processes import Status, command_line
from rallypoint.host.reach import Reached
from rallypoint.host.terminal import is_in_background
from rallypoint.launcher import exits, variables, words
from rallypoint.launcher.channel import ImportFailed, NotForked, Ready
from rallypoint.launcher.handles import RankHandle
from rallypoint.launcher.plan import STDERR, STDOUT, Plan
from rallypoint.launcher.supervisor import State
from rallypoint.record import learnt
from rallypoint.record.events import Event, EventLog, What
from rallypoint.record.logs import LogPump, worker_columns
from rallypoint.record.run_folder import Door, default_root, open_run_folder
from rallypoint.record.torchrun_files import TorchrunFiles, hand_on
from rallypoint.record.writer import Writer
from rallypoint.world import ranks_phrase

DISK_PATIENCE = 5.0  # seconds in which the run folder is made, until a line says what is waited for
# Seconds that the report waits for the ranks' words to be read; they lie in pipes, a millisecond away, unless the terminal takes nothing.
SETTLE_TIMEOUT = 0.1
# An import that takes this long (seconds) on several ranks is worth a line about --preload.
SLOW_IMPORT = 1.0
# Seconds that a report which speaks of GPUs waits for the driver's own account of them; what files say comes at once.
DEVICES_TIMEOUT = 1.5
# Seconds at the very end in which what is still to be written must be on its disk. A busy one needs tenths.
DISK_TIMEOUT = 5.0
# Seconds that a report waits for the files in which `@record` writes a rank's error: small, on the same disk, and mostly not there.
ERROR_FILES_TIMEOUT = 0.5
# Seconds for what was learnt, a file of some hundred bytes. Beside a disk that takes longer, the next start learns it again.
LEARNT_TIMEOUT = 1.0
# Processes of the ranks' own that are named when they failed unseen: what fits on a screen beside the ranks' words.
CHILDREN_MOST = 6


class Account:
    """Owns the run folder, the log pump and the words of the launcher. All that it prints goes through the pump, in order."""

    def __init__(self, plan: Plan, clock: Clock, outputs: tuple[int, int] = (1, 2)) -> None:
        """`outputs`: the descriptors that people read, for stdout and stderr."""
        self._plan = plan
        self._clock = clock
        self._ranks = [seat.rank for seat in plan.world.seats()]
        # A disk that has died holds this thread, and nobody can end that: the least is to say for what it waits.
        text = f"rallypoint: waiting for the disk of {plan.run_dir}: it does not answer; --run-dir names a folder on another one"
        notice = threading.Timer(DISK_PATIENCE, _say_past_the_pump, (text,))
        notice.daemon = True
        notice.start()
        try:
            self._folder = open_run_folder(plan.run_dir, plan.job, _say_past_the_pump, asked_for=plan.run_dir_asked)
        finally:
            notice.cancel()
            notice.join()
        self._writer = Writer()  # to the run folder: its disk may be a network's, and gone tomorrow
        self._disk_is_silent = False
        self._events = EventLog(self._folder, self._writer)
        self._files: TorchrunFiles | None = None
        logs = plan.logs
        if logs.log_dir:
            self._files = TorchrunFiles(logs.log_dir, plan.environment.get("TORCHELASTIC_RUN_ID", "none"), plan.world.local_size)
        self._pump = LogPump(
            self._folder.path if len(self._ranks) > 1 or self._kept_alone() else "",
            self._ranks,
            console=set(logs.console),
            prefixes=logs.prefixes,
            stdout_fd=outputs[0],
            stderr_fd=outputs[1],
        )
        self._same_output = _same_file(*outputs)
        self._errors_fd = outputs[1]
        self._live = ""
        self._handed = False  # a single rank has the terminal itself
        self._before = evidence.memory_counters()
        self._began = clock.monotonic()
        self._earlier: tuple[Report, ...] = ()  # reports of earlier attempts
        self._reports: tuple[Report, ...] = ()  # of this one, its cause first
        self._late: set[str] = set()
        self._errors: dict[int, str] = {}  # of this attempt, by rank: what `@record` wrote
        self._folder.write_plan(plan)
        self.event("job-started", job=plan.job, program=words.sayable(plan.program.target), world_size=plan.world.size)

    def _kept_alone(self) -> bool:
        """Whether a single rank's output goes through us: only when a copy was asked for, else it has the terminal itself."""
        return any(self._plan.logs.tee) or self._plan.run_dir_asked or self._plan.task is not None

    # --- what is shown

    def start(self, plan: Plan) -> None:
        """Start carrying words; say what is to be said once."""
        self._pump.start()
        if not plan.quiet:
            for note in plan.notes:
                self.say(f"rallypoint: {note}")
            self.live(f"rallypoint: {_count(plan.world.size)} · importing torch")

    def say(self, text: str) -> None:
        """Write lines of the launcher's own on stderr, after what the ranks have said by now. Names in them may be the ranks' choice."""
        self._pump.say(render.printable(text))

    def _print(self, rendered: str) -> None:
        """Write what is made for this terminal already, with its colours."""
        self._pump.say(rendered)

    def live(self, text: str | None) -> None:
        """The live line on a terminal; None takes it away."""
        if not self._plan.quiet and (text or "") != self._live:
            self._live = text or ""
            self._pump.live(text)

    def show_phases(self, ranks: Sequence[RankHandle], state: State) -> None:
        """The live start-up line: how many ranks are where. Gone once they run, or when the program joins nothing."""
        if state is State.PREPARING or self._handed or not self._pump.terminal:
            return
        waiting = sum(handle.waiting for handle in ranks)
        before = sum(handle.phase in ("preparing", "started") for handle in ranks)
        importing = sum(handle.phase == "importing" for handle in ranks)
        if state is not State.RUNNING or not (waiting or before):
            self.live(None)
            return
        parts = [(before, "starting"), (importing, "importing"), (waiting, "waiting in init_process_group")]
        self.live(" · ".join([f"rallypoint: {_count(len(ranks))}", *(f"{number} {what}" for number, what in parts if number)]))

    def say_differs(self, meeting: Meeting, held: str) -> None:
        """The program chose its own meeting point."""
        port = held.rpartition(":")[2]
        unused = f"; the held port {port} is not used" if port else ""
        if meeting.method.startswith("env://"):
            host, _, own = meeting.address.rpartition(":")
            address = [] if rollcall.is_loopback(host) else [f"MASTER_ADDR={host}"]  # the held one is, by another name
            self.say(
                f"rallypoint: {meeting.line} sets {' and '.join([*address, *([f'MASTER_PORT={own}'] if own != port else [])])}{unused}"
            )
        else:
            self.say(f"rallypoint: {meeting.line} names {meeting.method}{unused}")

    def say_nobody_there(self, meeting: Meeting, seen: Reached) -> None:
        """Why ranks that have just come to a meeting point of the program's own can meet nobody there."""
        self.say(f"rallypoint: {meeting_point.in_short(seen, meeting.line)}")

    def say_stalled(self, report: Report) -> None:
        """No rank has moved for as long as `--stall` says. A notice: it ends nothing, and is no report of the job's end."""
        self.event("stalled", code=report.code, headline=report.headline)
        self._print(render.json((report,)) if self._plan.error_format == "json" else "\n" + self._as_text((report,)))

    def say_moved(self, ranks: Sequence[int]) -> None:
        """The ranks that have moved after all."""
        self.event("stall-over", ranks=list(ranks))
        self.say(f"rallypoint: the job goes on: {ranks_phrase(ranks)} {'has' if len(ranks) == 1 else 'have'} moved")

    def say_roll_call(
        self, ranks: Sequence[RankHandle], size: int, asked: Sequence[RankHandle], because: str, seen: Reached | None = None
    ) -> None:
        """Who of `size` ranks waits in init_process_group, and where the others are. Nothing when nobody waits any more, or a person is
        at a debugger: the stacks of those `asked` show that, too, whichever debugger it is. `seen`: what is at their meeting point."""
        standing = [_standing(handle, asked=handle in asked) for handle in ranks]
        frames = [frame for one in standing for frame in one.stack]
        if any(stacks.debugged(one.stack) for one in standing):
            return
        told = {one.rank for one in standing if one.stack}
        states = {one.rank: one.silence() for one in ranks if one.alive and one.rank not in told and (one in asked or one.halted())}
        root = self._folder_of_task() or stacks.root_of(self._plan.program.target, frames)
        waiting = [handle.rank for handle in ranks if handle.waiting]
        lines = rollcall.lines(standing, waiting, states, size, self._clock.elapsed(), root)
        if not lines:
            return
        if seen is not None and meeting_point.explains(seen):
            line = next((one.meeting.line for one in standing if meeting_point.waits_at(one, seen) and one.meeting is not None), "")
            lines += (f"  {meeting_point.in_short(seen, line)}",)
        self.event("roll-call", because=because, lines=lines)
        if not self._plan.quiet:
            self.say("\n".join((f"rallypoint: {lines[0]}", *lines[1:])))

    def say_spawns(self, line: str) -> None:
        """A program that starts ranks of its own, started several times."""
        self._print(self._as_text((causes.spawn_inside_run(line, self._plan.world.size, self._plan.program.target),)))

    def say_leftovers(self, rank: int, members: Sequence[Status]) -> None:
        """What a successful rank left running; not `multiprocessing`'s own helpers, which see the rank's end and leave by themselves."""
        words = {one.pid: command_line(one.pid) for one in members}  # "" for one that is ending: its memory is gone already
        left = [one for one in members if words[one.pid] and not words[one.pid].partition(" -c ")[2].startswith("from multiprocessing.")]
        if not left:
            return
        names = ", ".join(f"{words[one.pid][:60]} (pid {one.pid})" for one in left[:3])
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        what, they = ("a process", "it is") if len(left) == 1 else (f"{len(left)} processes", "they are")
        self.say(f"rallypoint: rank {rank} exited cleanly but left {what} running: {names}{more}; {they} stopped when the job ends")

    def say_left_behind(self, ended: Sequence[int], left: Sequence[int], seconds: float) -> None:
        """Ranks that have not moved since the others ended well."""
        if self._plan.quiet:
            return
        has, have = ("has" if len(ranks) == 1 else "have" for ranks in (ended, left))
        how = "returned" if self._plan.task is not None else "ended with exit code 0"
        still = f"{ranks_phrase(sorted(left))} {have} not moved for {seconds:.0f} s"
        self.say(f"rallypoint: {ranks_phrase(sorted(ended))} {has} {how}, and {still}; to see where: rallypoint stacks")

    def say_children(self, ranks: Sequence[RankHandle]) -> None:
        """Processes that the ranks' programs had started, and that failed without anybody there having looked. Not of a rank that was
        stopped: so were they."""
        told = {handle.rank: handle.children for handle in ranks if handle.children is not None and not handle.sent}
        found = [(rank, child) for rank, failed in told.items() for child in failed.children]
        if not found:
            return
        number = len(found) + sum(failed.more for failed in told.values())
        count = f"{number} processes" if number > 1 else "a process"
        whose = "its program" if len(told) == 1 else "their program"
        lines = [f"rallypoint: {count} that {ranks_phrase(list(told))} had started failed, and {whose} never looked at the exit code:"]
        for rank, child in found[:CHILDREN_MOST]:
            who = f"{child.name} of rank {rank}" if len(told) > 1 else child.name
            how = f"died: {signals.name(child.signal)}" if child.signal else f"exited with code {child.code}"
            lines.append(f"  {who}, pid {child.pid}{f', started at {child.line}' if child.line else ''}: {how}")
        if number > CHILDREN_MOST:
            lines.append(f"  and {number - CHILDREN_MOST} more")
        again = {child.line for _, child in found if child.unguarded and child.code == exits.RAISED}
        lines += [f"  {line} runs again in every new process: rallypoint explain main-unguarded" for line in sorted(again)]
        self.say("\n".join(lines))

    def say_waiting(self, ranks: Sequence[int], seconds: float, hurry: str) -> None:
        """Ranks that were asked to end, and have not yet."""
        if not self._plan.quiet:
            them = "it" if len(ranks) == 1 else "them"
            self.say(f"rallypoint: waiting up to {seconds:g} s for {ranks_phrase(ranks)} to end; {hurry} kills {them}")

    def say_killed(self, ranks: Sequence[int], because: str, *, asked: bool) -> None:
        """Ranks get SIGKILL: what they were about to write is lost. `asked`: they were asked to end before, and have not."""
        were = "was" if len(ranks) == 1 else "were"
        how = f"did not end and {were} killed" if asked else f"{were} killed at once"
        self.say(f"rallypoint: {ranks_phrase(ranks)} {how}: {because}")

    def say_notice(self, name: str, handed: Sequence[int], others: Sequence[int]) -> None:
        """A signal that was handed to these ranks; to `others` not, who have no handler for it."""
        parts = [f"handed to {ranks_phrase(handed)}"] if handed else []
        has, them = ("has", "it") if len(others) == 1 else ("have", "them")
        parts += [f"{ranks_phrase(others)} {has} no handler for it, and rallypoint.preempted() tells {them}"] if others else []
        self.say(f"rallypoint: {name} came, and the job goes on: {'; '.join(parts) or 'no rank runs yet'}")

    def say_raised_while_stopped(self, rank: int, raised: Raised) -> None:
        """What a rank raised when the job was being stopped: the report was made before that, and its traceback is in its log."""
        if not self._plan.quiet:
            self.say(f"rallypoint: rank {rank} raised, while it was stopped: {words.sayable(reading.in_short(raised))[:200]}")

    def say_immortal(self, left: Sequence[Status]) -> None:
        """Processes that SIGKILL did not end."""
        for one in left:
            self.say(f"rallypoint: pid {one.pid} ({one.name}) would not die: state {one.state}")

    def say_unclean(self, ready: Ready, line: str) -> None:
        """The template may not be forked: a notice, since the job goes on without. `line`: what spoilt it, "" when not known."""
        report = causes.cuda_in_template(ready.module, line, ready.unclean)
        self._print(self._as_text((report,)))

    def say_late(self, name: str, line: str) -> None:
        """The program sets a variable that has been read already. Once for each, not for every rank."""
        if name in self._late:
            return
        self._late.add(name)
        if variables.is_of_parts(name):  # also for a caller of `launch`: nothing else shows why it has no effect
            export = "export it, or preload=['none']" if self._plan.task is not None else "export it, or --preload none"
            early = " and ".join(self._plan.parts)
            self.say(f"rallypoint: {line or 'the program'} sets {name} after {early} was imported in the template: {export}")
        elif not self._plan.quiet:
            self.say(f"rallypoint: {line or 'the program'} sets {name} after torch was imported in the template: export it, or --fresh")

    # --- what is kept

    @property
    def run_dir(self) -> str:
        """The run folder, "" when there is none."""
        return self._folder.path

    def announce(self, socket: str) -> None:
        """Write down where the launcher can be asked."""
        self._folder.announce(Door(socket, os.uname().nodename, os.getpid()))
        if self._plan.run_dir_asked:
            self._folder.list_in(default_root(os.environ))

    def event(self, what: What, *, rank: int | None = None, because: str = "", **details: Any) -> None:
        """Write down that something happened."""
        self._events.write(Event(self._clock.elapsed(), what, rank, because, details))

    def stamped(self, raised: Raised) -> Raised:
        """The same with its time: the worker does not know when the job began."""
        return msgspec.structs.replace(raised, at=self._clock.elapsed())

    def note(self, rank: int, text: str) -> None:
        """A rank's words on stderr that came by the control channel: into its log and into its file of `-t`, not onto the screen."""
        self._pump.note(rank, text)

    def ranks_are_interrupted(self) -> None:
        """From now on ranks may be asked for their stacks, by a signal: what torch writes of that alone is not shown."""
        self._pump.interrupts = True

    def log_line(self, rank: int) -> int:
        """The line of a rank's log where its next words go."""
        self._pump.settle(SETTLE_TIMEOUT)
        return self._pump.log_position(rank)[1] + 1

    def settle(self, timeout: float) -> bool:
        """Read and show all that the ranks, which have ended, wrote. False when it took longer than this many seconds."""
        return self._pump.drain(timeout) or self._pump.error is not None

    def begin_attempt(self, number: int, because: str) -> None:
        """A new attempt: the logs go on below a line."""
        self.event("attempt-started", because=because, attempt=number)
        self._earlier, self._reports = self.reports, ()
        self._errors = {}
        if number:
            self._pump.attempt(number)
            size = self._plan.world.size
            who = {1: "the rank", 2: "both ranks"}.get(size, f"all {size} ranks")
            self.say(f"rallypoint: restarting {who}, attempt {number} of {self._plan.max_restarts}")
        if self._files:
            self._files.begin(number)
            role = self._plan.environment.get("ROLE_NAME", "default")
            if self._plan.logs.stdout_filters:
                self._pump.duplicate("stdout", self._files.filtered(number, "stdout"), self._plan.logs.stdout_filters, role)
            if self._plan.logs.stderr_filters:
                self._pump.duplicate("stderr", self._files.filtered(number, "stderr"), self._plan.logs.stderr_filters, role)

    def error_file(self, attempt: int, handle: RankHandle) -> str:
        """Where `@record` may write a rank's error, "" when there is no place."""
        if self._files:
            return self._files.error_file(attempt, handle.local_rank)
        return self._folder.file(f"rank{handle.rank}-attempt{attempt}-error.json")

    # --- descriptors

    def streams(self, attempt: int, handle: RankHandle) -> tuple[list[int], int]:
        """A rank's stdin, stdout and stderr, to be passed on and closed with `close_streams`; and the terminal for its debugger, or -1.

        Where our stdout and stderr are one thing, the rank gets one pipe for both, so that its lines keep their order.
        """
        mine = handle.rank == self._plan.debug_rank and self._plan.task is None
        mine = mine and _is_open(0) and not is_in_background(0)
        stdin = os.dup(0) if mine else os.open(os.devnull, os.O_RDONLY)
        terminal = 0 if mine and os.isatty(0) and len(self._ranks) > 1 else -1
        redirects, tee = self._plan.logs.redirects[handle.local_rank], self._plan.logs.tee[handle.local_rank]
        shown = handle.local_rank in self._plan.logs.console
        if len(self._ranks) == 1 and not redirects and not self._kept_alone() and shown:
            self.live(None)  # from here on the terminal is the program's, and nothing of ours may be drawn over its words
            self._pump.settle(SETTLE_TIMEOUT)
            self._handed = True
            return [stdin, _dup_or_null(1), _dup_or_null(2)], terminal
        if self._same_output and not redirects and not tee:
            reader, writer = os.pipe2(os.O_CLOEXEC)
            self._pump.attach(handle.rank, "both", reader)
            return [stdin, writer, os.dup(writer)], terminal
        outputs = [self._stream(attempt, handle, bit, redirects, tee) for bit in (STDOUT, STDERR)]
        return [stdin, *outputs], terminal

    def _stream(self, attempt: int, handle: RankHandle, bit: int, redirects: int, tee: int) -> int:
        name: Any = "stdout" if bit == STDOUT else "stderr"
        if redirects & bit and not self._files:  # --log-dir /dev/null
            return os.open(os.devnull, os.O_WRONLY)
        file = self._files.open(attempt, handle.local_rank, name) if self._files and (redirects | tee) & bit else None
        if file is not None and not tee & bit:
            return file
        reader, writer = os.pipe2(os.O_CLOEXEC)
        self._pump.attach(handle.rank, name, reader, tee=file)
        return writer

    def close_streams(self, fds: Sequence[int]) -> None:
        """They are the worker's now."""
        for fd in fds:
            os.close(fd)

    def columns(self) -> int:
        """Columns that a rank's line has on our terminal, for COLUMNS; 0 when it is none or the ranks see it themselves."""
        return worker_columns(self._ranks, prefixes=self._plan.logs.prefixes) if len(self._ranks) > 1 else 0

    # --- what is reported

    def share_a_device(self, ranks: Sequence[RankHandle]) -> bool:
        """Whether ranks of one group of NCCL's would use the same GPU."""
        return bool(rules.devices_shared([(one.rank, one.meeting) for one in ranks if one.meeting], len(ranks)))

    def needs_all(self, handle: RankHandle) -> bool:
        """Whether the group that a rank joins, or joined last, is one of all ranks."""
        return handle.meeting is not None and rollcall.whole(handle.meeting, self._plan.world.size)

    def absent(self, ranks: Sequence[RankHandle], size: int) -> tuple[int, ...]:
        """The ranks that others wait for in an init_process_group of `size`."""
        standing = [_standing(handle, asked=False) for handle in ranks]
        return rollcall.absent(standing, [handle.rank for handle in ranks if handle.waiting], size)

    def is_consequence(self, raised: Raised) -> bool:
        """Whether an exception speaks of a lost peer. (Asked here, since the rules are imported while the template imports torch.)"""
        return rules.is_consequence(raised)

    def has_lost_a_peer(self, handle: RankHandle) -> bool:
        """Whether something that a rank raised, or caught, speaks of one."""
        return any(self.is_consequence(one) for one in (*handle.caught.values(), *([handle.raised] if handle.raised else [])))

    def unmet(self, ranks: Sequence[RankHandle]) -> tuple[str, int] | None:
        """The host and port that a rank could not reach, or lost, by what it raised; None when none speaks of that."""
        for one in ranks:
            said = self._pump.tail(one.rank)
            untold = one.raised is None and one.ended is not None and one.ended.code == 1  # --plain
            written = reading.exception_in(said) if untold else None
            for error in (one.raised, *one.caught.values(), written):
                if error is not None:
                    place = meeting_point.where(error, one.meeting) or meeting_point.store_of(error, said)
                    if place is not None:
                        return place
        return None

    def has_given_up(self, rank: int, port: int) -> bool:
        """Whether a rank's torch said that its time for an answer from the store at that port is up."""
        return meeting_point.gave_up(self._pump.tail(rank), port)

    def import_failed(self, message: ImportFailed) -> Report:
        """torch, or a preload module, cannot be imported."""
        raised = message.raised
        asked = message.module in self._plan.preload
        option = "preload" if self._plan.task is not None else "--preload"
        why = f"{option} asks for it: {raised.type}: {raised.message}" if asked else f"{raised.type}: {raised.message}"
        helps = (Help("try it alone", f"{sys.executable} -c 'import {message.module}'"),)
        lines = tuple(raised.traceback.rstrip().splitlines()[-10:])
        said = (Said("the template", lines),) if len(lines) > 1 else ()  # a module that is not there: `why` has said it
        return Report(
            code="start-failed", headline=f"{message.module} cannot be imported", where="before any worker started", why=why,
            said=said, help=helps,
        )  # fmt: skip

    def not_forked(self, message: NotForked) -> Report:
        """A process could not be started."""
        reason = message.unclean or os.strerror(message.errno)
        who = f"rank {message.rank}" if message.rank >= 0 else "the c10d host"
        helps = (Help("look at the limits on processes and memory", "ulimit -a"),) if message.errno else ()
        return Report(code="start-failed", headline=f"{who} could not be started: {reason}", help=helps)

    @property
    def reports(self) -> tuple[Report, ...]:
        """Those of all attempts, each attempt's cause first."""
        return (*self._earlier, *self._reports)

    def report_problem(self, problem: RallypointError | Report) -> tuple[Report, ...]:
        """Why nothing could be started."""
        report = problem if isinstance(problem, Report) else render.report_of(problem)
        return self._show((report,))

    def report(
        self,
        ranks: Sequence[RankHandle],
        *,
        world_size: int,
        attempt: int,
        held: str,
        interrupted_by: str,
        overdue: float,
        helper: HelperLost | None,
        because: str,
        reached: Reached | None = None,
        misfit: Misfit | None = None,
    ) -> tuple[Report, ...]:
        """Diagnose what the ranks told, print what is new in it, keep it; all reports of this attempt, the cause first. With a `misfit`
        that is what went wrong: whatever the ranks say of it came after."""
        self._pump.settle(SETTLE_TIMEOUT)
        heard = self._plan.on_failure != "continue" or bool(interrupted_by or overdue)  # else nobody was asked where he is
        told = tuple(handle.rank for handle in ranks if handle.told)
        waits = any(handle.phase == "joining" for handle in ranks)
        looked_at = ranks if not heard else [handle for handle in ranks if not handle.told]
        job = JobEvidence(
            program=words.sayable(self._plan.program.target),
            world_size=world_size,
            ranks=tuple(
                self._rank(handle, written, heard=heard, waits=waits)
                for handle, written in zip(looked_at, self._written(looked_at), strict=True)
            ),
            attempt=attempt,
            max_restarts=self._plan.max_restarts,
            held_address=held,
            interrupted_by=interrupted_by,
            overdue=overdue,
            stop_reason=because,
            memory=self._memory(ranks, helper),
            helper=helper,
            holders=_holders(ranks),
            run_dir=self._folder.path,
            on_failure=self._plan.on_failure,
            function=self._plan.task is not None,
            behind=self._plan.behind,
            moved=self._plan.moved,
            folder=self._folder_of_task(),
            devices=self._devices(ranks),
            python=shlex.quote(sys.executable) if sys.executable else "",
            reached=reached,
            now=self._clock.elapsed(),
        )
        failed = {rank.rank for rank in job.ranks if rules.has_failed(rank)}
        self._errors |= {one.rank: one.error_file for one in job.ranks if one.error_file}
        for handle in ranks:
            handle.told = handle.told or handle.rank in failed
        if misfit is not None:
            return self._show((rollcall.report(misfit, job),))
        if not told or heard:
            return self._show(rules.diagnose(job))
        news = rules.news(job, told, tuple({rank for report in self._reports for rank in report.ranks}))
        for line in news.followed:
            self.say(f"rallypoint: {line}")
        return self._show(news.reports)

    def _folder_of_task(self) -> str:
        """The folder that a caller of `launch` is in: paths are shown relative to it. "" for a program, whose own place tells."""
        return os.path.join(self._plan.task.folder, "") if self._plan.task is not None else ""

    def _show(self, reports: tuple[Report, ...]) -> tuple[Report, ...]:
        """Print and keep these; all of this attempt."""
        self.live(None)
        first = not self.reports
        for report in reports:
            self.event("report", code=report.code, headline=report.headline)
        if self._plan.task is not None or not reports:
            pass  # the caller's exception says it
        elif self._plan.error_format == "json":
            self._print(render.json(reports))
        elif len(reports) == 1 and (same := rules.same_again(reports[0])) and same in map(rules.same_again, self._earlier[-1:]):
            again = reports[0]
            self.say(f"rallypoint: the same again: {again.headline}, {again.where.partition(',')[0]}; logs: {', '.join(again.logs)}")
        else:
            self._print(("\n" if first else "") + self._as_text(reports))
        self._reports = kept = rules.cause_first((*self._reports, *reports))
        self._writer.submit(lambda: self._folder.write_report(kept))
        return kept

    def _as_text(self, reports: Sequence[Report]) -> str:
        return render.text(reports, width=terminal.prose_columns(terminal.columns(self._errors_fd)), color=_wants_color())

    def _rank(self, handle: RankHandle, written: str = "", *, heard: bool, waits: bool) -> RankEvidence:
        """`written`: in its error file. `heard`: the living ones were asked where they are, for this report; else what they have
        answered, perhaps hours ago, is not where they are. `waits`: some rank is in init_process_group."""
        says = heard or handle.ended is not None
        log, lines = self._pump.log_position(handle.log_rank)
        tail = self._pump.tail(handle.log_rank)
        return RankEvidence(
            rank=handle.rank,
            local_rank=handle.local_rank,
            pid=handle.pid,
            phase=handle.phase,
            phase_at=handle.phase_at,
            ended=handle.ended,
            raised=handle.raised,
            # Programs try whether there is a GPU, and go on without: an error of that counts only while others wait for this rank to join.
            handled=tuple(one for one in handle.caught.values() if one.call != CUDA_START or (waits and handle.joined_at is None)),
            meeting=handle.meeting,
            unanswered=handle.unanswered,
            sent=tuple(handle.sent),
            stack=handle.stack() if says else (),
            stack_text=handle.last_words() if says else "",
            said=tail,
            said_traceback=handle.traceback_printed,
            log=log,
            log_line=handle.log_line or max(1, lines - len(tail) + 1),
            resident=handle.resident,
            left_at=handle.left_at,
            left_when=handle.left_when,
            left_saying=handle.left_saying,
            closed_at=handle.closed_at,
            closed_line=handle.closed_line,
            error_file=written,
            not_executed=handle.not_executed,
            cuda_forks=tuple(handle.cuda_forks),
        )

    def _written(self, ranks: Sequence[RankHandle]) -> list[str]:
        """The error files of these ranks; "" for one that has none, and for all once the disk has given no answer."""
        paths = [handle.error_file for handle in ranks]
        try:
            if not self._disk_is_silent:  # one question for all, and one deadline: 64 ranks have 64 files
                return self._writer.ask(lambda: [_read_error_file(path) if path else "" for path in paths], ERROR_FILES_TIMEOUT)
        except TimeoutError:
            self._disk_is_silent = True
        return ["" for _ in ranks]

    def _devices(self, ranks: Sequence[RankHandle]) -> Found | None:
        """The GPUs of this machine, when an error speaks of them. Whom the ranks have started is one of theirs, not a stranger."""
        seen = [error for handle in ranks for error in (handle.raised, *handle.caught.values()) if error is not None]
        if not any(reading.about_devices(error.type, error.message) for error in seen) and not self.share_a_device(ranks):
            return None
        environ = {**os.environ, **self._plan.environment, **self._plan.rank_environment[0]}
        return devices.find(environ, devices.look_closely(DEVICES_TIMEOUT))

    def _memory(self, ranks: Sequence[RankHandle], helper: HelperLost | None) -> MemoryEvidence:
        killed = any(handle.ended and handle.ended.signal == signal.SIGKILL and not handle.sent for handle in ranks)
        for error in (handle.raised for handle in ranks if handle.raised is not None):
            loader = reading.loader_killed(error) or reading.says_loader_killed(error.traceback.splitlines())
            killed = killed or (loader is not None and loader[1] == signal.SIGKILL)
        killed = killed or (helper is not None and helper.ended.signal == signal.SIGKILL)
        pids, read = evidence.kernel_oom_kills(self._began) if killed else ((), False)
        return evidence.difference(self._before, evidence.memory_counters(), pids, read)

    def keep_learnt(self, parts: Sequence[str], spoilt: Mapping[str, str]) -> bool:
        """Keep for the next start of this program which parts of torch to import once. Whether that could be written."""
        plan, now = self._plan, self._clock.wall()
        if not plan.memory or not (parts or spoilt):
            return False
        try:
            self._writer.ask(lambda: learnt.add(plan.memory, plan.program.target, plan.torch, parts, spoilt, now), LEARNT_TIMEOUT)
        except OSError:  # a disk that is full, or may only be read: the caller says what to type instead
            return False
        return True

    def say_imports(self, ranks: Sequence[RankHandle], known: Sequence[str]) -> None:
        """Name a package that several ranks spent long on importing; not what is `known`, which they will not import the next time."""
        found: dict[str, list[float]] = {}
        for handle in ranks:
            for name, seconds in handle.imports.items():
                found.setdefault(name, []).append(seconds)
        middles = {name: sorted(times)[len(times) // 2] for name, times in found.items()}
        slow = {name: times for name, times in found.items() if len(times) > 1 and name not in known and middles[name] >= SLOW_IMPORT}
        if slow and not self._plan.quiet:
            name, times = max(slow.items(), key=lambda item: sum(item[1]))
            self.say(f"rallypoint: {name} was imported {len(times)} times, {middles[name]:.1f} s each: --preload {name}")

    def close(self, status: int | None, left: Sequence[Status], *, interrupted: Callable[[], bool]) -> None:
        """The last words; every file closed. A reader that pauses (`| less`, Ctrl-S) is waited for until `interrupted` says true."""
        self.live(None)
        self.say_immortal(left)
        if status:
            self._hand_on_error(status)
        self.event("job-ended", status=status)
        self._pump.wait_for_reader(interrupted)
        self._pump.close()
        if self._pump.error is not None:
            print(f"rallypoint: the log pump failed: {self._pump.error!r}; the ranks' words may be incomplete", file=sys.stderr)
        self._writer.submit(self._events.close)
        self._writer.submit(self._folder.close)
        if not self._writer.finish(DISK_TIMEOUT):
            _say_past_the_pump(
                f"rallypoint: the disk of {self._folder.path} gave no answer within {DISK_TIMEOUT:g} s: the record of this run is not whole"
            )
        elif self._writer.error is not None:
            _say_past_the_pump(f"rallypoint: writing to {self._folder.path} failed: {self._writer.error!r}; the record may be incomplete")

    def _hand_on_error(self, status: int) -> None:
        """Give the cause to whoever has started the launcher with a TORCHELASTIC_ERROR_FILE of its own."""
        path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        found = [self._errors[rank] for rank in (self._reports[0].ranks if self._reports else ()) if rank in self._errors]
        if not path or not found or self._plan.task is not None:
            return
        try:
            why = self._writer.ask(lambda: hand_on(found[0], status, path), ERROR_FILES_TIMEOUT)
        except TimeoutError:
            why = f"no answer within {ERROR_FILES_TIMEOUT:g} s"
        if why:
            self.say(f"rallypoint: TORCHELASTIC_ERROR_FILE {path} cannot be written: {why}")


def _standing(handle: RankHandle, *, asked: bool) -> RankEvidence:
    """What the roll call needs of a rank. `asked`: it was asked where it stands, just now."""
    return RankEvidence(
        rank=handle.rank, local_rank=handle.local_rank, pid=handle.pid, phase=handle.phase, phase_at=handle.phase_at, ended=handle.ended,
        handled=tuple(handle.caught.values()), meeting=handle.meeting, stack=handle.stack() if asked else (),
    )  # fmt: skip


def _say_past_the_pump(text: str) -> None:
    if sys.stderr:  # it may have been closed at the start
        sys.stderr.write(text + "\n")  # in one go: `print` writes the newline by itself, and the pump may write between the two


def _count(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks != 1)}"


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _dup_or_null(fd: int) -> int:
    return os.dup(fd) if _is_open(fd) else os.open(os.devnull, os.O_WRONLY)


def _same_file(one: int, other: int) -> bool:
    """Whether two descriptors lead to one place. Not for regular files that were opened twice: their ends would overwrite each other."""
    try:
        first, second = os.fstat(one), os.fstat(other)
    except OSError:
        return False
    return os.path.samestat(first, second) and not (stat.S_ISCHR(first.st_mode) and first.st_rdev == os.makedev(1, 3))


def _wants_color() -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (_is_open(2) and os.isatty(2) and os.environ.get("TERM", "dumb") != "dumb")


def _read_error_file(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read(1 << 20)
    except OSError:
        return ""


def _holders(ranks: Sequence[RankHandle]) -> tuple[str, ...]:
    """Who holds the port that a rank could not bind."""
    for handle in ranks:
        for raised in (*([handle.raised] if handle.raised else []), *handle.caught.values()):
            if reading.port_in_use(raised.message):
                from rallypoint.host import ports

                port = reading.port_named(raised.message) or _port_of(handle)
                found = ports.holders(port) if port else ()
                serving = {holder.pid for holder in found if holder.state == "listening" and holder.pid}
                # Whom it serves says nothing more, and among them are the job's own ranks, which took it for their store.
                return tuple(dict.fromkeys(holder.line() for holder in found if holder.state != "connected" or holder.pid not in serving))
    return ()


def _port_of(handle: RankHandle) -> int:
    text = handle.meeting.address.rpartition(":")[2] if handle.meeting else ""
    return int(text) if text.isdigit() else 0
