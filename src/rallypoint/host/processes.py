"""Start, watch, stop and reap; no orphan, grandchildren included."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping

from rallypoint.errors import EnvironmentProblem, UsageError
from rallypoint.host import memory_files, process_status, system_calls
from rallypoint.host.process_status import ProcessStatus

KILL_DEADLINE = 2.0
"""Seconds in which a SIGKILLed process must be gone; longer only when it stands in the kernel (D
state), which nobody can shorten."""

LOOK_AGAIN = 0.1
"""Seconds in which those that were SIGKILLed may end before others are looked for: one of them may
not end at all."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# Prepared once: in a forked worker every object that is made on the way writes to pages that are
# shared until then.
_libc_prctl = ctypes.CDLL(None, use_errno=True).prctl
_libc_prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


def _prctl(option: int, argument: int) -> None:
    if _libc_prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def become_subreaper() -> None:
    """Make orphans among our descendants our children from now on, not init's (prctl(2))."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def prepare_to_supervise() -> tuple[int, int]:
    """Make this process fit to look after others: it is told of every end, gets their orphans, and
    may open as many files as it can. Returns the limit on open files that it had, which is for
    those others.

    `EnvironmentProblem` as `check_machine`.

    A rank costs us five descriptors; the soft limit of 1024 would end at 200 ranks.
    """
    check_machine()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = limit
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # ignored, the kernel would reap our children before we have asked how they ended
    become_subreaper()
    return limit


def files_exhausted(said: object) -> EnvironmentProblem:
    """Return the error that too many open files of ours are. `said`: what the kernel said."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return EnvironmentProblem(
        "files-exhausted",
        f"rallypoint has as many files open as it may have: {said}",
        why=(f"ulimit -n is {most}; the launcher keeps about six descriptors for each rank",),
        help=(("raise the limit in the shell that starts the job", "ulimit -n 65536"),),
    )


def check_machine() -> None:
    """Check at the start, with one error: in the middle of a job each of these would look like a
    fault of ours. `EnvironmentProblem` when the kernel, or a sandbox's filter of system calls,
    lacks what a launcher needs, or when the hard limit on open files is below 32."""
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 32:  # a job that fails must say why
        raise files_exhausted(os.strerror(errno.EMFILE))
    lacking: list[str] = []
    for names, attempt in (
        ("pidfd_open and pidfd_send_signal", _try_pidfd),
        ("memfd_create", lambda: os.close(memory_files.create("rallypoint-check"))),
        ("/dev/null", lambda: os.close(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))),
        ("/proc/self/fd", lambda: os.listdir("/proc/self/fd")),
        ("prlimit", lambda: resource.prlimit(os.getpid(), resource.RLIMIT_NOFILE)),
    ):
        try:
            attempt()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            lacking.append(f"{names}: {os.strerror(error.errno or 0)}")
    if lacking:
        raise EnvironmentProblem(
            "start-failed",
            "this machine, or the sandbox around this process, lacks what the launcher needs",
            why=(
                *lacking,
                f"this is Linux {os.uname().release}; 5.4 and later have all system calls that are needed",
            ),
            help=(
                (
                    "see which of them the sandbox, its filter (seccomp) or the kernel withholds",
                    "uname -r; grep Seccomp /proc/self/status; ls /dev/null /proc",
                ),
            ),
        )


def _try_pidfd() -> None:
    pidfd = system_calls.pidfd_open(os.getpid())
    try:
        system_calls.pidfd_send_signal(pidfd, 0)
    finally:
        os.close(pidfd)


def open_standard_descriptors() -> None:
    """Open what was closed when we started as /dev/null: else a pipe or socket of ours would get
    its number, and a rank's words."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(
                os.open(os.devnull, os.O_RDWR), True
            )  # the lowest free number: this one


def die_with(parent: int) -> None:
    """SIGKILL for this process when `parent`, which must be its parent, ends.

    The kernel's promise is not retroactive, so a parent that is gone already is looked for
    afterwards. It is a second line only: not inherited by children, cleared by a set-user-id exec,
    and fired by the end of the parent's starting *thread*.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def continue_at_end_of_parent() -> None:
    """Let SIGCONT come when the parent ends, in place of `die_with`: a process that was stopped
    must notice that end, too."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def family(
    marker: bytes, sessions: Iterable[int], *, ancestor: int = 0, spare: Iterable[int] = ()
) -> list[ProcessStatus]:
    """Return every living process that belongs to a job: in a session that one of its ranks leads,
    started with its marker after this process, or a descendant of `ancestor` (which is left out
    itself).

    The marker finds what a rank moved into a session of its own (setsid, a daemon). Beneath a
    subreaper that has started nothing but the job, `ancestor` finds what was started with an empty
    environment, and a job inside the job. Left out are `spare`, this process, and processes of
    other users that /proc hides from this one.
    """
    ours, left_out = set(sessions), {os.getpid(), ancestor, *spare}
    everyone = {one.pid: one for one in process_status.everyone()}
    this, found = everyone.get(os.getpid()), []
    # To read the environment of every process of a machine takes as long as all the rest.
    since = this.started if this is not None else 0
    for one in everyone.values():
        if one.pid in left_out or one.state in "ZX":
            continue
        if (
            one.session in ours
            or (marker and one.started >= since and process_status.has_marker(one.pid, marker))
            or (ancestor and _descends(one, ancestor, everyone))
        ):
            found.append(one)
    return found


def _descends(one: ProcessStatus, ancestor: int, everyone: Mapping[int, ProcessStatus]) -> bool:
    seen: set[int] = set()  # the table was not read in one moment
    parent: ProcessStatus | None = one
    while parent is not None and parent.pid not in seen:
        seen.add(parent.pid)
        if parent.parent == ancestor:
            return True
        parent = everyone.get(parent.parent)
    return False


def kill_family(
    marker: bytes,
    sessions: Iterable[int],
    *,
    deadline: float = KILL_DEADLINE,
    ancestor: int = 0,
    spare: Iterable[int] = (),
) -> list[ProcessStatus]:
    """SIGKILL for every process of a job until none is left; returns those that would not die
    within `deadline` seconds. Those that clean up after the others (`unlinks`) end by themselves.

    Each is held by pidfd and looked at again before the signal, so a number that was freed and
    given to a stranger is not hit. Repeated until a look finds none: a process may fork while we
    look.
    """
    sessions, until = set(sessions), time.monotonic() + deadline
    while True:
        living = family(marker, sessions, ancestor=ancestor, spare=spare)
        living = [one for one in living if one.state == "T" or not unlinks(one.pid)]
        if not living or time.monotonic() > until:
            return living
        held: list[int] = []
        for one in living:
            # It is gone, whatever the kernel calls that (EINVAL before Linux 6.15, where its number
            # is still a session's); or no descriptor is left, and it has its turn at a later look.
            with contextlib.suppress(OSError):
                held.append(system_calls.pidfd_open(one.pid))
                again = process_status.status(one.pid)
                if again is not None and again.started == one.started:
                    send(held[-1], signal.SIGKILL)
        wait_for_ends(held, min(LOOK_AGAIN, until - time.monotonic()))
        for pidfd in held:
            os.close(pidfd)


def unlinks(pid: int) -> bool:
    """Tell whether this is a process of multiprocessing's, joblib's or torch's that removes the
    shared memory and semaphores of others when these have ended, and ends itself then.
    """
    line = process_status.command_line(pid)
    return "resource_tracker import main" in line or line == "torch_shm_manager"


def wait_for_ends(pidfds: Iterable[int], timeout: float) -> bool:
    """Wait until all these processes have ended; False when the timeout (seconds) came first."""
    poll, until = select.poll(), time.monotonic() + timeout
    waiting = set(pidfds)
    for pidfd in waiting:
        poll.register(pidfd, select.POLLIN)
    while waiting:
        remaining = until - time.monotonic()
        if remaining <= 0:
            return False
        for pidfd, _ in poll.poll(remaining * 1000 + 1):
            poll.unregister(pidfd)
            waiting.discard(pidfd)
    return True


def send(pidfd: int, number: int) -> bool:
    """Signal exactly the process behind a pidfd; False when it has ended."""
    try:
        system_calls.pidfd_send_signal(pidfd, number)
    except (
        ProcessLookupError,
        PermissionError,
    ):  # PermissionError: it became somebody else's (sudo); the caller sees that it lives on
        return False
    return True


def send_group(leader: int, number: int) -> bool:
    """Signal the group of a process that we started and that is not reaped (so that the number is
    still its own); the process alone where it has not made its group yet. False when it is gone.

    ValueError for a number that is no process of ours: 0 would be our own group, and our caller's.
    """
    if leader <= 1:
        raise ValueError(f"{leader} leads no group of ours")
    for kill in (os.killpg, os.kill):
        try:
            kill(leader, number)
        except ProcessLookupError:
            continue
        return True
    return False


def group_members(leader: int) -> list[ProcessStatus]:
    """Return the living processes of a session that `leader` (ended or not) led, itself left
    out."""
    return [
        one
        for one in process_status.everyone()
        if one.session == leader and one.pid != leader and one.state not in "ZX"
    ]


def reap(pid: int, pidfd: int, timeout: float = KILL_DEADLINE) -> tuple[int, int] | None:
    """Wait for a child's end and reap it: (exit code, signal); None when `timeout` seconds were not
    enough. Closes `pidfd`."""
    has_ended = wait_for_ends([pidfd], timeout)
    os.close(pidfd)
    if not has_ended:
        return None
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
    return (
        ended(info) if info else process_status.end_of_unreaped(pid)
    )  # a debugger that had it comes first


def ended(info: os.waitid_result) -> tuple[int, int]:
    """(exit code, signal) of a waitid result; one of them is 0."""
    if info.si_code == os.CLD_EXITED:
        return info.si_status, 0
    return 0, info.si_status


def in_child(run: Callable[[], object]) -> int:
    """Fork; the child runs `run` and leaves with os._exit, whatever happens. Returns the child's
    pid.

    Only for a process with one thread: what other threads hold at the fork stays held in the child
    for ever.
    """
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    return pid


def close_others(keep: Iterable[int]) -> None:
    """Close every descriptor of this process but these."""
    kept = set(keep)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed already
                os.close(int(name))


def working_folder() -> str:
    """Return the working directory. Raises UsageError when it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError(
            "usage",
            "the working directory has been removed",
            help=(("go to one that exists", "cd ~"),),
        ) from None
