"""Console of a run: what a person sees while it goes on, the launcher's own lines and the
ranks'.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Callable, Sequence

from rallypoint.diagnosis import catalogue, classify, render
from rallypoint.diagnosis.evidence import Meeting, Raised
from rallypoint.diagnosis.report import Report
from rallypoint.host import signals, terminal
from rallypoint.host.loopback import is_loopback
from rallypoint.host.process_status import ProcessStatus, command_line
from rallypoint.launcher import exception_capture, exits, late_variables
from rallypoint.launcher.agent.process_handles import RankHandle
from rallypoint.launcher.agent.supervisor import State
from rallypoint.launcher.plan import Plan, prefixes
from rallypoint.record.log_pump import LogPump, is_same_file
from rallypoint.world import Seat, ranks_phrase

# Seconds that the launcher waits for words of the ranks that lie in pipes. Reading them takes a
# millisecond, unless the terminal takes nothing.
SETTLE_TIMEOUT = 0.1
# An import that takes this long (seconds) on several ranks is worth a line about --preload.
SLOW_IMPORT = 1.0
# Processes of the ranks' own that are named when they failed unseen: what fits on a screen beside
# the ranks' words.
CHILDREN_MOST = 6
# How a text names processes: ours, torch's "worker (pid(s) 7, 8) exited", multiprocessing's "pid=7".
_PIDS = re.compile(r"\b(?:process|pids?(?:\(s\))?)[\s=]+(\d+(?:,\s\d+)*)")


class Console:
    """Screen of a run. All that the launcher prints goes through the log pump, in order with the
    ranks' words.
    """

    def __init__(
        self, plan: Plan, seat: Seat, logs_in: str, outputs: tuple[int, int] = (1, 2)
    ) -> None:
        """`logs_in`: the run folder. `outputs`: the descriptors that people read, for stdout and
        stderr.
        """
        self._plan = plan
        self._size = seat.world.size
        self.pump = LogPump(
            logs_in if seat.world.size > 1 or keeps_copy(plan) else "",
            seat.ranks,
            several=seat.world.size > 1,
            console=set(plan.logs.console),
            prefixes=prefixes(plan, seat),
            stdout_fd=outputs[0],
            stderr_fd=outputs[1],
        )
        self.same_output = is_same_file(*outputs)
        self._errors_fd = outputs[1]
        self._live = ""
        self._given_away = False  # a single rank has the terminal itself
        self._late_variables: set[str] = set()  # that a line was said of

    def start(self) -> None:
        """Begin to carry the ranks' words, and say the plan's notes. With several nodes they were
        said before this one joined.
        """
        self.pump.start()
        if not self._plan.quiet:
            for note in self._plan.notes if self._plan.nodes is None else ():
                self.say(f"rallypoint: {note}")
            self.live(f"rallypoint: {_count(self._plan.slots)} · importing torch")

    def say(self, text: str) -> None:
        """Write lines of the launcher's own on stderr, after the ranks' words so far. Names in them
        may be the ranks' choice.
        """
        self.pump.say(render.printable(text))

    def remark(self, text: str) -> None:
        """Say it unless the job is to be quiet."""
        if not self._plan.quiet:
            self.say(text)

    def print_reports(self, reports: Sequence[Report], before: str = "") -> None:
        """Write reports as wide as the terminal, below `before`."""
        width = terminal.prose_columns(terminal.columns(self._errors_fd))
        self.pump.say(
            before + render.text(reports, width=width, color=terminal.wants_color(os.isatty(2)))
        )

    def live(self, text: str | None) -> None:
        """Show the live line on a terminal; None takes it away."""
        if not self._plan.quiet and (text or "") != self._live:
            self._live = text or ""
            self.pump.live(text)

    def give_away(self) -> None:
        """Leave the terminal to a single rank, or to a debugger: nothing of the launcher's may be
        drawn over its words.
        """
        self.live(None)
        self.pump.settle(SETTLE_TIMEOUT)
        self._given_away = True

    def show_phases(self, ranks: Sequence[RankHandle], state: State) -> None:
        """Show how many ranks are where while the job starts. Ends when they run, or when the
        program joins nothing.
        """
        if state is State.PREPARING or self._given_away or not self.pump.terminal:
            return
        waiting = sum(handle.waiting for handle in ranks)
        before = sum(handle.phase in ("preparing", "started") for handle in ranks)
        if state is not State.RUNNING or not (waiting or before):
            self.live(None)
            return
        parts = [
            (before, "starting"),
            (sum(handle.phase == "importing" for handle in ranks), "importing"),
            (waiting, "waiting in init_process_group"),
        ]
        self.live(
            " · ".join(
                [
                    f"rallypoint: {_count(len(ranks))}",
                    *(f"{number} {what}" for number, what in parts if number),
                ]
            )
        )

    def say_differs(self, meeting: Meeting, held: str) -> None:
        """Say that the program chose a meeting point of its own."""
        port = held.rpartition(":")[2]
        unused = f"; the held port {port} is not used" if port else ""
        if meeting.method.startswith("env://"):
            host, _, own = meeting.address.rpartition(":")
            # the held one is the loopback, by another name
            address = [] if is_loopback(host) else [f"MASTER_ADDR={host}"]
            self.say(
                f"rallypoint: {meeting.line} sets {' and '.join([*address, *([f'MASTER_PORT={own}'] if own != port else [])])}{unused}"
            )
        else:
            self.say(f"rallypoint: {meeting.line} names {meeting.method}{unused}")

    def say_spawns(self, line: str) -> None:
        """Say that a program which starts ranks of its own was started several times."""
        self.print_reports(
            (catalogue.spawn_inside_run(line, self._size, self._plan.program.target),)
        )

    def say_leftovers(self, rank: int, members: Sequence[ProcessStatus]) -> None:
        """Say what a successful rank left running. `multiprocessing`'s own helpers leave by
        themselves and are not named.
        """
        left = [
            f"{words[:60]} (pid {one.pid})"
            for one in members
            # "" for one that is ending: its memory is gone already
            if (words := command_line(one.pid))
            and not words.partition(" -c ")[2].startswith("from multiprocessing.")
        ]
        if not left:
            return
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        what, they = (
            ("a process", "it is") if len(left) == 1 else (f"{len(left)} processes", "they are")
        )
        self.say(
            f"rallypoint: rank {rank} exited cleanly but left {what} running: {', '.join(left[:3])}{more}; {they} stopped when the job ends"
        )

    def say_left_behind(self, ended: Sequence[int], left: Sequence[int], seconds: float) -> None:
        """Say which ranks have not moved since the others ended well."""
        has, have = ("has" if len(ranks) == 1 else "have" for ranks in (ended, left))
        how = "returned" if self._plan.task is not None else "ended with exit code 0"
        still = f"{ranks_phrase(sorted(left))} {have} not moved for {seconds:.0f} s"
        self.remark(
            f"rallypoint: {ranks_phrase(sorted(ended))} {has} {how}, and {still}; to see where: rallypoint stacks"
        )

    def say_children(self, ranks: Sequence[RankHandle], reports: Sequence[Report]) -> None:
        """Say which processes of the ranks' programs failed without the program noticing: not of
        those that `reports`, or what a rank raised, name.
        """
        words = [error.traceback for handle in ranks for error in handle.errors()]
        pids = [found for text in (render.text(reports), *words) for found in _PIDS.findall(text)]
        named = re.findall(r"\d+", " ".join(pids))
        found = [
            (handle.rank, child)
            for handle in ranks
            for child in handle.children.children
            if str(child.pid) not in named
        ]
        if not found:
            return
        whose = sorted({rank for rank, _ in found})
        number = len(found) + sum(handle.children.more for handle in ranks if handle.rank in whose)
        count = f"{number} processes" if number > 1 else "a process"
        lines = [
            f"rallypoint: {count} that {ranks_phrase(whose)} had started failed, "
            f"and {'its' if len(whose) == 1 else 'their'} program never looked at the exit code:"
        ]
        for rank, child in found[:CHILDREN_MOST]:
            who = f"{child.name} of rank {rank}" if len(whose) > 1 else child.name
            how = (
                f"died: {signals.name(child.signal)}"
                if child.signal
                else f"exited with code {child.code}"
            )
            lines.append(
                f"  {who}, pid {child.pid}{f', started at {child.line}' if child.line else ''}: {how}"
            )
        if number > CHILDREN_MOST:
            lines.append(f"  and {number - CHILDREN_MOST} more")
        again = {child.line for _, child in found if child.unguarded and child.code == exits.RAISED}
        lines += [
            f"  {line} runs again in every new process: rallypoint explain main-unguarded"
            for line in sorted(again)
        ]
        self.say("\n".join(lines))

    def say_waiting(self, ranks: Sequence[int], seconds: float, hurry: str) -> None:
        """Say which ranks were asked to end and have not ended yet, also to a caller of `launch`,
        which is told nothing else before the end.
        """
        if self._plan.quiet and self._plan.task is None:
            return
        them = "it" if len(ranks) == 1 else "them"
        self.say(
            f"rallypoint: waiting up to {seconds:g} s for {ranks_phrase(ranks)} to end; {hurry} kills {them}"
        )

    def say_killed(self, ranks: Sequence[int], because: str, *, asked: bool) -> None:
        """Say that ranks get SIGKILL and lose what they were about to write. `asked`: they were
        asked to end before.
        """
        were = "was" if len(ranks) == 1 else "were"
        how = f"did not end and {were} killed" if asked else f"{were} killed at once"
        self.say(f"rallypoint: {ranks_phrase(ranks)} {how}: {because}")

    def say_hopeless(self, times: int, attempt: int) -> None:
        """Say that the same failure has come so often that the ranks are not started again."""
        self.say(
            f"rallypoint: the same failure {times} times, soon after each start: not started again (attempt {attempt} of {self._plan.max_restarts})"
        )

    def say_notice(
        self, name: str, handed: Sequence[int], others: Sequence[int], until: str = ""
    ) -> None:
        """Say that a notice came and was handed to ranks, except `others`, which have no handler
        for it. `until`: words about the time that is left.
        """
        parts = [until] if until else []
        parts += [f"handed to {ranks_phrase(handed)}"] if handed else []
        has, them = ("has", "it") if len(others) == 1 else ("have", "them")
        if others:
            parts.append(
                f"{ranks_phrase(others)} {has} no handler for it, and rallypoint.preempted() tells {them}"
            )
        self.remark(
            f"rallypoint: {name} came, and the job goes on: {'; '.join(parts) or 'no rank runs now'}"
        )

    def say_raised_while_stopped(self, rank: int, raised: Raised) -> None:
        """Say what a rank raised after the report, while it was stopped. Its traceback is in its
        log.
        """
        error = exception_capture.sayable(classify.in_short(raised))[:200]
        self.remark(f"rallypoint: rank {rank} raised, while it was stopped: {error}")

    def say_immortal(self, left: Sequence[ProcessStatus]) -> None:
        """Say which processes SIGKILL did not end."""
        for one in left:
            self.say(f"rallypoint: pid {one.pid} ({one.name}) would not die: state {one.state}")

    def say_unclean(self, module: str, unclean: str) -> None:
        """Say that the template may not be forked; the job goes on without it."""
        self.print_reports((catalogue.cuda_in_template(module, "", unclean),))

    def say_late(self, name: str, line: str) -> None:
        """Say, once for each variable, that the program sets it after it was read."""
        if name in self._late_variables:
            return
        self._late_variables.add(name)
        if late_variables.is_of_parts(
            name
        ):  # also for a caller of `launch`: nothing else shows why it has no effect
            export = (
                "export it, or preload=['none']"
                if self._plan.task is not None
                else "export it, or --preload none"
            )
            early = " and ".join(self._plan.parts or self._plan.preload)
            self.say(
                f"rallypoint: {line or 'the program'} sets {name} after {early} was imported in the template: {export}"
            )
        else:
            self.remark(
                f"rallypoint: {line or 'the program'} sets {name} after torch was imported in the template: export it, or --fresh"
            )

    def say_imports(self, ranks: Sequence[RankHandle], parts: Sequence[str]) -> None:
        """Say which package several ranks spent long on importing. `parts`: of torch, that may be
        imported early, and could not be remembered; the others of torch are learnt, or better left
        to the ranks.
        """
        found: dict[str, list[float]] = {}
        for handle in ranks:
            for name, seconds in handle.imports.items():
                found.setdefault(name, []).append(seconds)
        middles = {name: sorted(times)[len(times) // 2] for name, times in found.items()}
        slow = {
            name: times
            for name, times in found.items()
            if len(times) > 1
            and middles[name] >= SLOW_IMPORT
            and (name in parts or not name.startswith("torch."))
        }
        if slow:
            name, times = max(slow.items(), key=lambda item: sum(item[1]))
            self.remark(
                f"rallypoint: {name} was imported {len(times)} times, {middles[name]:.1f} s each: --preload {name}"
            )

    def begin_attempt(self, seat: Seat) -> None:
        """Say that the ranks start again; the logs go on below a line."""
        number, size = seat.attempt, seat.world.size
        if number:
            self._size = size
            self.pump.attempt(number, seat.ranks, prefixes(self._plan, seat))
            who = {1: "the rank", 2: "both ranks"}.get(size, f"all {size} ranks")
            self.say(f"rallypoint: restarting {who}, attempt {number} of {self._plan.max_restarts}")

    def log_line(self, local_rank: int) -> int:
        """Return the line of a rank's log where its next words go."""
        self.pump.settle(SETTLE_TIMEOUT)
        return self.pump.log_position(local_rank)[1] + 1

    def settle(self, timeout: float) -> bool:
        """Show all that the ranks, which have ended, wrote. False when it took longer than this
        many seconds.
        """
        return self.pump.drain(timeout) or self.pump.error is not None

    def close(self, *, interrupted: Callable[[], bool]) -> None:
        """End the screen. A reader that pauses (`| less`, Ctrl-S) is waited for until `interrupted`
        returns true.
        """
        self.pump.wait_for_reader(interrupted)
        self.pump.close()
        if self.pump.error is not None:
            say_directly(
                f"rallypoint: the log pump failed: {self.pump.error!r}; the ranks' words may be incomplete"
            )


def keeps_copy(plan: Plan) -> bool:
    """Return whether a single rank's output goes through the launcher: only when a copy was asked
    for. Else the rank has the terminal.
    """
    return any(plan.logs.tee) or plan.run_dir_asked or plan.task is not None


def shares_screen(errors_fd: int = 2) -> bool:
    """Return whether what is written on stderr leaves this node, where a cluster carries the words
    of all nodes to one screen: a file of this node's own is no screen.
    """
    try:
        return not stat.S_ISREG(os.fstat(errors_fd).st_mode)
    except OSError:
        return False  # closed: nobody sees it


def say_directly(text: str) -> None:
    """Write a line on stderr where there is no log pump (any more)."""
    if sys.stderr:  # it may have been closed at the start
        sys.stderr.write(
            render.printable(text) + "\n"
            # in one call: `print` writes the newline by itself, and the pump may write between the
            # two
        )


def _count(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks != 1)}"
