"""`rallypoint stacks`: where every rank of a running job is, grouped, the odd ones first."""

from __future__ import annotations

import contextlib
import linecache
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rallypoint.cli.args import CommandLine
from rallypoint.cli.output import width, write_out
from rallypoint.errors import EnvironmentProblem, UsageError
from rallypoint.host.kernel_files import text_of

if TYPE_CHECKING:
    from rallypoint.diagnosis.rank_snapshot import Standing
    from rallypoint.record.run_list import LauncherAddress

ENDS_WITHIN = 2.0
"""Seconds for a launcher that has closed its socket to be gone: it ends what its ranks have left,
and writes down the rest of their words.
"""

SOURCE_BYTES_MOST = 2 * 1024 * 1024
"""Bytes of a file whose lines are shown: a larger one is generated, and its lines say nothing."""


def main(line: CommandLine) -> int:
    """Show where the ranks are; return the exit status: 0 when they were shown."""
    values = line.values()
    path, others = chosen(line.words, "stacks")
    found = ask(path)
    write_out(as_json(found) if values["error_format"] == "json" else as_text(found, others))
    return 0


def chosen(words: Sequence[str], command: str = "stacks") -> tuple[str, tuple[str, ...]]:
    """Return the folder of the run that `rallypoint COMMAND` is for, and the names of the other
    ones that run when it was not named. `UsageError` when there is none, or it is over.
    """
    from rallypoint.record import past_run, run_folder, run_list

    if len(words) > 1:
        help = (("name one", f"rallypoint {command} {words[0]}"),)
        raise UsageError("usage", f"{command} takes one run, and got {len(words)}", help=help)
    root = run_folder.default_root(os.environ)
    # Where nodes share a home, those of other machines are seen, too.
    running = sorted(run_list.running_runs(root), key=lambda run: _is_elsewhere(run.path))
    word = words[0] if words else ""
    folder = os.path.realpath(word) if word else ""
    # A job whose folder is elsewhere is called by that, and has a name as well: RALLYPOINT_JOB
    # of its ranks, and in port-in-use.
    for run in running:
        known = run.job, past_run.read(run.path).plan.job
        job = run_list.job_folder(run.path)
        if not word or word in known or folder == os.path.realpath(job):
            others = (one.job for one in running[1:] if run_list.job_folder(one.path) != job)
            return run.path, () if word else tuple(others)
    if not word or not os.path.isdir(word):
        _refuse_without_folder(word)
    if not word:
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
    path = past_run.find(root, word, command)
    if not run_list.is_running(path):
        raise UsageError(
            "usage",
            f"the job of {word} is over: no launcher has its run folder {path}",
            help=(("see how it ended", f"rallypoint show {shlex.quote(word)}"),),
        )
    return path, ()


def _is_elsewhere(path: str) -> bool:
    """Tell whether the launcher that has this run folder is on another machine."""
    from rallypoint.record import run_list

    door = run_list.door_of(path)
    return door is not None and door.host != os.uname().nodename


def _refuse_without_folder(word: str) -> None:
    """Raise `EnvironmentProblem` when a job of that name runs without its run folder."""
    from rallypoint.launcher.agent import query_socket

    name = os.path.basename(word.rstrip(os.sep))
    lines = text_of("/proc/net/unix", most=-1).splitlines()
    for path in sorted({line.split()[-1] for line in lines if line.endswith("/door.sock")}):
        with contextlib.suppress(
            query_socket.DoorClosed, query_socket.LauncherSilent, query_socket.OtherVersion
        ):
            found = query_socket.ask_name(path)
            if name in found.job and not os.path.isdir(found.run_dir):
                raise _unanswered(
                    f"job {found.job} runs, and its run folder is gone: removed, or never made",
                    "",
                    ("end it in good order, as rallypoint stop does", f"kill {found.launcher}"),
                )


def ask(path: str) -> Standing:
    """Ask the launcher whose run folder this is. Raises as `reaching` does."""
    from rallypoint.launcher.agent import query_socket

    with reaching(path, "stacks") as door:
        return query_socket.ask(door.socket)


@contextlib.contextmanager
def reaching(path: str, command: str) -> Iterator[LauncherAddress]:
    """Yield the address of the launcher whose run folder this is, for `rallypoint COMMAND`.

    When `query_socket` raises inside that nobody answers it becomes `EnvironmentProblem`
    (`launcher-silent`); `UsageError` when the job has just ended.
    """
    from rallypoint.launcher.agent import query_socket
    from rallypoint.record import run_list

    name = run_list.name_of(path)
    again = f"rallypoint {command} {shlex.quote(name)}"
    over = UsageError(
        "usage",
        f"job {name} has just ended",
        help=(("see how", f"rallypoint show {shlex.quote(name)}"),),
    )
    door = run_list.door_of(path)
    if door is None:
        if not run_list.is_running(path):
            raise over
        events = shlex.quote(os.path.join(path, "events.jsonl"))
        raise _unanswered(
            f"the launcher of job {name} has no socket at which it could be asked",
            "it has just begun, found no folder for a socket, or is of a version that has none",
            ("ask again in a moment, or see what it wrote down", f"tail {events}"),
        )
    here = os.uname().nodename
    if door.host != here:
        there = ("ask there", f"ssh {door.host} {again}")
        raise _unanswered(f"job {name} runs on {door.host}, and this is {here}", "", there)
    launcher = f"the launcher of job {name} (pid {door.pid})"
    try:
        yield door
    except query_socket.DoorClosed as closed:
        if ends(path, door.pid):
            raise over from None
        if isinstance(closed, query_socket.SentAway):
            raise _unanswered(
                f"{launcher} took the question and closed the connection",
                "it has hardly any descriptor left, its job is ending, or too many others ask at the same time",
                ("ask again", again),
            ) from None
        raise _unanswered(
            f"{launcher} runs, and its socket is not here",
            f"{door.socket} is gone, or belongs to another user, or the launcher is in a container that has a /tmp of its own",
            ("ask as the user and in the container that started it", again),
        ) from None
    except query_socket.OtherVersion:
        with contextlib.suppress(OSError):
            python = os.readlink(f"/proc/{door.pid}/exe")
            again = f"{python} -m {again}"
        raise _unanswered(
            f"the launcher of job {name} speaks otherwise: it was started by another version of rallypoint",
            "",
            ("ask with the rallypoint that started it", again),
        ) from None
    except query_socket.LauncherSilent as silent:
        raise _silent(name, silent.pid or door.pid, again) from None


def _unanswered(headline: str, why: str, help: tuple[str, str]) -> EnvironmentProblem:
    return EnvironmentProblem("launcher-silent", headline, why=(why,) if why else (), help=(help,))


def ends(path: str, launcher: int) -> bool:
    """Tell whether the launcher is gone, or so within a moment: it closes its socket before it
    is.
    """
    from rallypoint.host import processes, system_calls
    from rallypoint.record import run_list

    if run_list.is_running(path):
        try:
            pidfd = system_calls.pidfd_open(launcher)
        except OSError:  # it has just ended, or is in another container
            return not run_list.is_running(path)
        processes.wait_for_ends([pidfd], ENDS_WITHIN)
        os.close(pidfd)
    return not run_list.is_running(path)


def _silent(name: str, pid: int, again: str) -> EnvironmentProblem:
    """Return what /proc says of a launcher that did not answer."""
    from rallypoint.host import process_status
    from rallypoint.launcher.agent.query_socket import VISIT_DEADLINE

    found = process_status.activity(pid)
    state = found.state if found is not None else ""
    if state == "T":
        return _unanswered(
            f"the launcher of job {name} (pid {pid}) is stopped by a signal, and answers nobody",
            "its state in /proc is T: somebody sent SIGSTOP, or pressed Ctrl-Z; its ranks may go on",
            ("let it go on", f"kill -CONT {pid}"),
        )
    held = {"t": "it is held by a debugger", "D": "it is stuck in the kernel (state D)"}
    return _unanswered(
        f"the launcher of job {name} (pid {pid}) did not answer within {VISIT_DEADLINE:g} s",
        held.get(state, "it lives, and is busy or waits for something else"),
        ("ask again", again),
    )


def as_text(found: Standing, others: Sequence[str]) -> str:
    """Return the ranks for people. `others`: jobs that run, too."""
    from rallypoint.diagnosis import rank_snapshot, render

    wide = width(sys.stdout)
    text = rank_snapshot.text(found, width=wide, source=_source_line, others=others)
    return render.printable(text) + "\n"


def as_json(found: Standing) -> str:
    """Return the ranks as one object, for a program."""
    from rallypoint.diagnosis import rank_snapshot
    from rallypoint.record.kept_file import as_json as encoded

    return encoded(rank_snapshot.as_data(found)).decode() + "\n"


def _source_line(file: str, number: int) -> str:
    """Return the text of a program's line as it is in the file now, "" when it is not there."""
    try:
        if os.path.getsize(file) > SOURCE_BYTES_MOST:
            return ""
    except OSError:
        return ""
    return linecache.getline(file, number).strip()
