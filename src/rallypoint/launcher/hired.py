"""The first moments of a standby (`standby.py`): its template is started before anything else is imported.

The template's import of torch is what the first call of `launch` waits for, and all else can be done meanwhile.
"""

from __future__ import annotations

import datetime
import os
import signal
import socket
from typing import NamedTuple

from rallypoint.host import processes, system_calls
from rallypoint.launcher import channel, crew, guard
from rallypoint.launcher.channel import Hiring
from rallypoint.launcher.plan import Program


class Terms(NamedTuple):
    """What a standby begins with."""

    line: socket.socket  # to the caller
    caller: int  # its pidfd
    preload: tuple[str, ...]
    began: datetime.datetime
    suffix: str  # a few random characters; with `began` they make the job's id
    job: str
    files_limit: tuple[int, int]  # for the ranks
    crew: crew.Crew


def main(line_fd: int, hiring_fd: int) -> None:
    """The life of a standby. `line_fd`: a socket to the caller; `hiring_fd`: a memfd with a `Hiring`."""
    processes.open_standard_descriptors()
    hiring = channel.read_struct(hiring_fd, Hiring)
    line = socket.socket(fileno=line_fd)
    os.set_inheritable(line_fd, False)
    processes.close_others({0, 1, 2, line_fd})
    try:
        caller = system_calls.pidfd_open(hiring.caller)
    except ProcessLookupError:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # sent to this process alone: whoever did that means it, and the guard cleans up
    files_limit = processes.prepare_to_supervise()
    began, suffix = datetime.datetime.now(), os.urandom(2).hex()
    job = f"{began:%Y%m%d-%H%M%S}-{suffix}"
    ours = crew.Crew(guard.start(f"RALLYPOINT_JOB={job}".encode()))
    try:
        os.getcwd()
    except OSError:  # the caller's folder was removed; MKL ends a process that stands nowhere
        os.chdir("/")
    ours.use(
        crew.start_template(
            Program("function", ""),
            hiring.preload,
            {**os.environ, "RALLYPOINT_JOB": job},
            imports=True,
            hooks=True,
            paths=hiring.paths or None,
            files_limit=files_limit,
            guard=ours.guard,
        )
    )
    from rallypoint.launcher import standby  # while the template imports torch

    standby.serve(Terms(line, caller, hiring.preload, began, suffix, job, files_limit, ours))
