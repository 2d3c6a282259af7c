"""Start of a standby (`standby.py`): its template is started before anything else is imported.

The first call of `launch` waits for the template's import of torch; everything else is done
meanwhile.
"""

from __future__ import annotations

import os
import signal
import socket
from types import FrameType
from typing import NamedTuple

from rallypoint.clock import Clock
from rallypoint.host import processes, system_calls
from rallypoint.launcher import spawn


class Terms(NamedTuple):
    """Descriptors, identity and limits with which a standby begins."""

    line: socket.socket  # to the caller
    caller: int  # its pidfd
    began: float  # wall clock
    suffix: str  # a few random characters; with `began` they make the job's id
    files_limit: tuple[int, int]  # for the ranks
    template: tuple[int, socket.socket]  # the pid of one that imports torch, and the line to it


def main(line_fd: int, caller_pid: int) -> None:
    """Serve as a standby. `line_fd`: a socket to the caller."""
    processes.open_standard_descriptors()
    line = socket.socket(fileno=line_fd)
    os.set_inheritable(line_fd, False)
    processes.close_others({0, 1, 2, line_fd})
    try:
        caller = system_calls.pidfd_open(caller_pid)
    except ProcessLookupError:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        # A signal that is sent to this process alone ends it, and the guard cleans up.
        signal.signal(number, signal.SIG_DFL)
    _outlive_notices()
    processes.continue_at_end_of_parent()
    files_limit = processes.prepare_to_supervise()
    clock = Clock()
    suffix = os.urandom(8).hex()
    job = f"{clock.date('%Y%m%d-%H%M%S')}-{suffix}"
    ours = {"RALLYPOINT_FAMILY": suffix, "RALLYPOINT_JOB": job}
    template = spawn.start_template({**os.environ, **ours}, imports=True)
    from rallypoint.launcher.launch import standby  # while the template imports torch

    with line:
        standby.serve(Terms(line, caller, clock.started, suffix, files_limit, template))


def _outlive_notices() -> None:
    """Survive SIGUSR1 and SIGUSR2, which a batch system may send to every process of a job.

    They get a handler, and are not ignored or blocked: ranks would inherit that. A signal that the
    caller ignores stays ignored. (Slurm's `--signal` sends them.)
    """
    for number in spawn.NOTICES:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _do_nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, spawn.NOTICES)  # blocked by the caller, until now


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing: only the ranks act on a notice."""
