"""`rallypoint stop [RUN]`: end a running job in good order."""

from __future__ import annotations

import contextlib
import os
import shlex

from rallypoint.cli import stacks
from rallypoint.cli.args import CommandLine
from rallypoint.cli.output import write_out
from rallypoint.errors import EnvironmentProblem
from rallypoint.world import ranks_phrase

SLACK = 10.0
"""Seconds beyond those that the launcher gives the ranks in which it must be over: it ends what
they left, and writes down their last words.
"""


def main(line: CommandLine) -> int:
    """End a job; return the exit status: 0 when it is over."""
    line.values()
    path, others = stacks.chosen(line.words, "stop")
    write_out(f"{stop(path)}\n")
    if others:
        write_out(f"still running: {', '.join(others)}\n")
    return 0


def stop(path: str) -> str:
    """Have the job of this run folder stopped, and wait until it is over; return what to say of it.

    Raises as `stacks.reaching` does, and `EnvironmentProblem` when the job does not end.
    """
    from rallypoint.launcher.agent import query_socket
    from rallypoint.record import past_run, run_list
    from rallypoint.record.run_folder import default_root

    name = run_list.name_of(path)
    known = run_list.root_of(path) == default_root(os.environ)
    word = shlex.quote(name if known else path)
    with stacks.reaching(path, "stop") as door, query_socket.stop(door.socket) as (stopping, line):
        if stopping.again:
            said = f"job {name} was being stopped, and what is left of it is killed"
        elif stopping.ranks:
            said = f"stopping job {name}: SIGTERM to {ranks_phrase(stopping.ranks)}, which may take up to {stopping.grace:g} s"
        else:
            said = f"stopping job {name}, of which no rank runs"
        write_out(f"{said}\n")
        line.settimeout(stopping.longest + SLACK)
        with contextlib.suppress(OSError):  # too late, or the launcher was killed: looked at below
            line.recv(1)
    if not stacks.ends(path, door.pid):
        raise EnvironmentProblem(
            "launcher-silent",
            f"job {name} has been asked to stop, and its launcher still runs",
            help=(
                ("see where its ranks are", f"rallypoint stacks {word}"),
                ("or kill what is left", f"rallypoint stop {word}"),
            ),
        )
    status = past_run.read(path).status
    left = f"with exit status {status}"
    if status is None:
        left = "without writing down its exit status"
    return f"job {name} has ended {left}; to see it: rallypoint show {word}"
