"""`rallypoint stacks`: where every rank of a running job is, grouped, the odd ones first."""

from __future__ import annotations

import contextlib
import linecache
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rallypoint.cli import args
from rallypoint.cli.args import CommandLine
from rallypoint.cli.commands import STACKS
from rallypoint.cli.output import width, write_out
from rallypoint.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from rallypoint.diagnosis.rank_snapshot import Standing
    from rallypoint.record.run_folder import LauncherAddress

# Seconds for a launcher that has closed its door to be gone: it ends what its ranks have left, and
# writes down the rest of their words.
ENDS_WITHIN = 2.0
SOURCE_BYTES_MOST = 2 * 1024 * 1024  # a larger file is generated, and its lines say nothing


def main(argv: list[str]) -> int:
    """`rallypoint stacks` with its arguments; the exit status: 0 when the ranks were shown."""

    def act(line: CommandLine) -> int:
        values, words = args.values(line, STACKS), line.words
        if len(words) > 1:
            raise UsageError(
                "usage",
                f"stacks takes one run, and got {len(words)}",
                help=(("ask one", f"rallypoint stacks {words[0]}"),),
            )
        path, others = chosen(words, "stacks")
        found = ask(path)
        write_out(as_json(found) if values["error_format"] == "json" else as_text(found, others))
        return 0

    return args.invoke(STACKS, argv, act)


def chosen(words: Sequence[str], command: str = "stacks") -> tuple[str, tuple[str, ...]]:
    """The folder of the run that `rallypoint COMMAND` is for, and the names of the other ones that
    run when it was not named. `UsageError` when there is none, or it is over."""
    from rallypoint.record import past_run, run_folder

    root = run_folder.default_root(os.environ)
    running = run_folder.running_runs(root)
    if words:
        # A job whose folder is elsewhere is called by that, and has a name as well: RALLYPOINT_JOB
        # of its ranks, and in port-in-use.
        named = next(
            (
                run.path
                for run in running
                if words[0] in (run.job, past_run.read(run.path).plan.job)
            ),
            "",
        )
        path = named or past_run.find(root, words[0], command)
        if not run_folder.is_running(path):
            raise UsageError(
                "usage",
                f"the job of {words[0]} is over: no launcher has its run folder {path}",
                help=(("see how it ended", f"rallypoint show {shlex.quote(words[0])}"),),
            )
        return path, ()
    if not running:
        raise UsageError(
            "usage",
            "no job of this user is running here",
            why=(f"looked in {root}, and for jobs with --run-dir beside it",),
            help=(
                (
                    "name the folder of one that was started with another home",
                    f"rallypoint {command} DIR",
                ),
                ("see the last one that ran", "rallypoint show"),
            ),
        )
    return running[0].path, tuple(run.job for run in running[1:])


def ask(path: str) -> Standing:
    """Ask the launcher whose run folder this is. Raises as `reaching` does."""
    from rallypoint.launcher.agent import query_socket

    with reaching(path, "stacks") as door:
        return query_socket.ask(door.socket)


@contextlib.contextmanager
def reaching(path: str, command: str) -> Iterator[LauncherAddress]:
    """The door of the launcher whose run folder this is, for `rallypoint COMMAND`. When `visits`
    raises in there that nobody answers it becomes `EnvironmentProblem` (`launcher-silent`);
    `UsageError` when the job has just ended."""
    from rallypoint.launcher.agent import query_socket
    from rallypoint.record import run_folder

    name = os.path.basename(path)
    door = run_folder.door_of(path)
    if door is None:
        if not run_folder.is_running(path):
            raise over(name)
        raise EnvironmentProblem(
            "launcher-silent",
            f"the launcher of job {name} has no door at which it could be asked",
            why=(
                "it has just begun, found no folder for a socket, or is of a version that has none",
            ),
            help=(
                (
                    "ask again in a moment, or see what it wrote down",
                    f"tail {shlex.quote(os.path.join(path, 'events.jsonl'))}",
                ),
            ),
        )
    if door.host != os.uname().nodename:
        raise EnvironmentProblem(
            "launcher-silent",
            f"job {name} runs on {door.host}, and this is {os.uname().nodename}",
            help=(("ask there", f"ssh {door.host} rallypoint {command} {shlex.quote(name)}"),),
        )
    try:
        yield door
    except query_socket.DoorClosed as closed:
        if ends(path, door.pid):
            raise over(name) from None
        if isinstance(closed, query_socket.SentAway):
            raise EnvironmentProblem(
                "launcher-silent",
                f"the launcher of job {name} (pid {door.pid}) took the question and closed the connection",
                why=(
                    "it has hardly any descriptor left, its job is ending, or too many others ask at the same time",
                ),
                help=(
                    (
                        "see how many it may open, and has open",
                        f"grep files /proc/{door.pid}/limits; ls /proc/{door.pid}/fd | wc -l",
                    ),
                ),
            ) from None
        raise EnvironmentProblem(
            "launcher-silent",
            f"the launcher of job {name} (pid {door.pid}) runs, and its socket is not here",
            why=(
                f"{door.socket} is gone, or belongs to another user, or the launcher is in a container that has a /tmp of its own",
            ),
            help=(
                (
                    "ask as the user and in the container that started it",
                    f"rallypoint {command} {shlex.quote(name)}",
                ),
            ),
        ) from None
    except query_socket.OtherVersion:
        raise EnvironmentProblem(
            "launcher-silent",
            f"the launcher of job {name} speaks otherwise: it was started by another version of rallypoint",
            help=(
                (
                    "ask with the rallypoint that started it",
                    f"{_python_of(door.pid)} -m rallypoint {command} {shlex.quote(name)}",
                ),
            ),
        ) from None
    except query_socket.LauncherSilent as silent:
        raise _silent(name, silent.pid or door.pid, query_socket.VISIT_DEADLINE, command) from None


def ends(path: str, launcher: int) -> bool:
    """Whether the launcher is gone, or so within a moment: it closes its door before it is."""
    from rallypoint.host import processes, system_calls
    from rallypoint.record import run_folder

    if run_folder.is_running(path):
        try:
            pidfd = system_calls.pidfd_open(launcher)
        except OSError:  # it has just ended, or is in another container
            pidfd = -1
        if pidfd >= 0:
            processes.wait_for_ends([pidfd], ENDS_WITHIN)
            os.close(pidfd)
    return not run_folder.is_running(path)


def over(name: str) -> UsageError:
    """What is said of a job that has ended while it was asked."""
    return UsageError(
        "usage",
        f"job {name} has just ended",
        help=(("see how", f"rallypoint show {shlex.quote(name)}"),),
    )


def _silent(name: str, pid: int, waited: float, command: str) -> EnvironmentProblem:
    """What /proc says of a launcher that did not answer."""
    from rallypoint.host import processes

    found = processes.activity(pid)
    state = found.state if found is not None else ""
    headline = f"the launcher of job {name} (pid {pid}) did not answer within {waited:g} s"
    if state == "T":
        return EnvironmentProblem(
            "launcher-silent",
            f"the launcher of job {name} (pid {pid}) is stopped by a signal, and answers nobody",
            why=(
                "its state in /proc is T: somebody sent SIGSTOP, or pressed Ctrl-Z; its ranks may go on",
            ),
            help=(("let it go on", f"kill -CONT {pid}"),),
        )
    if state == "D":
        wait = processes.kernel_wait(pid)
        why = ("it is stuck in the kernel (state D)" + (f", in {wait}" if wait else ""),)
        return EnvironmentProblem(
            "launcher-silent",
            headline,
            why=why,
            help=(("see what it waits for", f"sudo cat /proc/{pid}/stack"),),
        )
    said = (
        "it is held by a debugger"
        if state == "t"
        else "it lives, and is busy or waits for something else"
    )
    return EnvironmentProblem(
        "launcher-silent",
        headline,
        why=(said,),
        help=(("ask again", f"rallypoint {command} {shlex.quote(name)}"),),
    )


def _python_of(pid: int) -> str:
    """The interpreter that a process runs."""
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return "python"


def as_text(found: Standing, others: Sequence[str]) -> str:
    """For people. `others`: jobs that run, too."""
    from rallypoint.diagnosis import rank_snapshot, render

    text = rank_snapshot.text(
        found, width=width(sys.stdout) if sys.stdout else 92, source=_source_line, others=others
    )
    return render.printable(text) + "\n"


def as_json(found: Standing) -> str:
    """One object, for a program."""
    from rallypoint.diagnosis import rank_snapshot
    from rallypoint.record.run_folder import as_json as encoded

    return encoded(rank_snapshot.as_data(found)).decode() + "\n"


def _source_line(file: str, number: int) -> str:
    """The text of a program's line as it is in the file now, "" when it is not there."""
    try:
        if os.path.getsize(file) > SOURCE_BYTES_MOST:
            return ""
    except OSError:
        return ""
    return linecache.getline(file, number).strip()
