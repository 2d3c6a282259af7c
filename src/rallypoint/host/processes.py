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
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from rallypoint.errors import EnvironmentProblem
from rallypoint.host import system_calls

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_RESTART_SYSCALL = "219" if os.uname().machine == "x86_64" else "128"

# Prepared once: in a forked worker every object that is made on the way writes to pages that are
# shared until then.
_libc_prctl = ctypes.CDLL(None, use_errno=True).prctl
_libc_prctl.argtypes = [
    ctypes.c_int,
    ctypes.c_ulong,
    ctypes.c_ulong,
    ctypes.c_ulong,
    ctypes.c_ulong,
]


def _where_proc_is() -> str:
    """Return "/proc", or a folder that does not exist where /proc shows other processes than ours.

    After `unshare --pid` without a new mount of /proc its numbers are of another pid namespace:
    whoever they are, they are not the processes that this one has started, and must not be
    signalled. An unreadable file is "not known" everywhere below.
    """
    try:
        return (
            "/proc"
            if os.readlink("/proc/self") == str(os.getpid())
            else "/proc/of-another-namespace"
        )
    except OSError:
        return "/proc"


_PROC = _where_proc_is()


def sees_processes() -> bool:
    """Tell whether /proc shows the processes that this one starts."""
    return os.path.exists(f"{_PROC}/{os.getpid()}")


def _prctl(option: int, argument: int) -> None:
    if _libc_prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def become_subreaper() -> None:
    """Make orphans among our descendants our children from now on, not init's (prctl(2))."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Return the pids of this process's children, ended ones included; none when /proc does not
    tell. For one with one thread."""
    me = os.getpid()
    try:
        with open(f"{_PROC}/{me}/task/{me}/children", "rb") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        return [one.pid for one in _everyone() if one.parent == me]


def prepare_to_supervise() -> tuple[int, int]:
    """Make this process fit to look after others: it is told of every end, gets their orphans, and
    may open as many files as it can. Returns the limit on open files that it had, which is for
    those others.

    `EnvironmentProblem` when the kernel, or a sandbox's filter of system calls, lacks what this
    needs.

    A rank costs us five descriptors; the soft limit of 1024 would end at 200 ranks.
    """
    _check_system_calls()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = limit
    if soft != resource.RLIM_INFINITY and soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # ignored, the kernel would reap our children before we have asked how they ended
    become_subreaper()
    return limit


def _check_system_calls() -> None:
    """Check at the start, with one error: in the middle of a job each of these would look like a
    fault of ours."""
    lacking: list[str] = []
    for names, attempt in (
        ("pidfd_open and pidfd_send_signal", _try_pidfd),
        ("memfd_create", lambda: os.close(memory_file("rallypoint-check"))),
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


class ProcessStatus(NamedTuple):
    """Contents of /proc/PID/stat of a process; times in clock ticks."""

    pid: int
    name: str
    state: str  # R running, S sleeping, D in the kernel, T stopped, Z ended but not reaped
    parent: int
    group: int
    session: int
    cpu: int  # user and system time together
    started: int  # after boot: with the pid the identity of a process


def status(pid: int | str) -> ProcessStatus | None:
    """Return the process's status, or None when there is none."""
    try:
        with open(f"{_PROC}/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    head, _, tail = text.rpartition(b")")
    number, _, command = head.partition(b"(")
    fields = tail.split()
    return ProcessStatus(
        int(number), command.decode("utf-8", "replace"), fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]),
        int(fields[11]) + int(fields[12]), int(fields[19]),
    )  # fmt: skip


class Activity(NamedTuple):
    """Snapshot of a process's main thread at one moment. Two of them say whether it has run in
    between."""

    # R running, S asleep, D in the kernel, T stopped, t held by a debugger, Z ended but not reaped
    state: str
    cpu: int  # clock ticks that it has used
    waits: int  # times it has given up the processor by itself
    switches: int  # times it has left the processor in any way


def activity(pid: int) -> Activity | None:
    """Return the main thread's activity, or None when there is no such process, or /proc does not
    tell. Disturbs nobody: two small files."""
    try:
        found = status(f"{pid}/task/{pid}")
    except OSError:
        return None
    counts = _switches(_task_status(pid, pid))
    if found is None or len(counts) != 2:
        return None
    return Activity(found.state, found.cpu, counts[0], sum(counts))


def kernel_wait(pid: int) -> str:
    """Return the kernel function that the main thread sleeps in ("futex_do_wait"); "" when it runs,
    or this user may not know."""
    name = _content(f"{pid}/task/{pid}/wchan").decode("ascii", "replace").strip()
    return "" if name == "0" else name


def _content(name: str) -> bytes:
    """Return the content of a file below /proc, b"" when it cannot be read."""
    try:
        with open(f"{_PROC}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _task_status(pid: int, thread: int) -> dict[bytes, bytes]:
    """Return /proc/PID/task/TID/status, empty when it cannot be read."""
    pairs = (line.partition(b":") for line in _content(f"{pid}/task/{thread}/status").splitlines())
    return {key: value.strip() for key, _, value in pairs}


def _switches(found: dict[bytes, bytes]) -> list[int]:
    """Return how often a thread has left the processor by itself, and how often by force."""
    return [int(value) for key, value in found.items() if key.endswith(b"_ctxt_switches")]


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used with all its threads, to a hundredth; 0.0 when it is
    gone, or /proc does not tell."""
    try:
        found = status(pid)
    except OSError:
        return 0.0
    return found.cpu / os.sysconf("SC_CLK_TCK") if found is not None else 0.0


def is_stopped(pid: int) -> bool:
    """Tell whether a process stands still, by SIGSTOP or Ctrl-Z. False for what cannot be seen."""
    try:
        found = status(pid)
    except OSError:  # somebody else's, and /proc hides those; or no descriptor is left to read it
        return False
    return found is not None and found.state == "T"


def command_line(pid: int) -> str:
    """Return the command line of a process with its spaces, "" when it cannot be read."""
    return _content(f"{pid}/cmdline").replace(b"\0", b" ").strip().decode("utf-8", "replace")


def resident(pid: int) -> int:
    """Return bytes of a process that are in memory, 0 when it is gone."""
    pages = _content(f"{pid}/statm").split()[1:2]
    return int(pages[0]) * os.sysconf("SC_PAGESIZE") if pages else 0


def handles(pid: int, number: int) -> bool:
    """Tell whether a process has a handler for a signal (SigCgt): without one nobody would answer
    it."""
    return bool(_signal_mask(pid, pid, b"SigCgt") & (1 << (number - 1)))


def blocks(pid: int, number: int) -> bool:
    """Tell whether the main thread of a process holds a signal back (SigBlk)."""
    return bool(_signal_mask(pid, pid, b"SigBlk") & (1 << (number - 1)))


def is_pending(pid: int, number: int) -> bool:
    """Tell whether a signal that was sent to the process has not been taken by any of its threads
    yet."""
    return bool(_signal_mask(pid, pid, b"ShdPnd") & (1 << (number - 1)))


def is_handling(pid: int, number: int) -> bool:
    """Tell whether a signal that was sent is still pending, or its handler still runs in some
    thread (it blocks its own signal)."""
    bit = 1 << (number - 1)
    if is_pending(pid, number):
        return True
    return any(
        (_signal_mask(pid, thread, b"SigBlk") | _signal_mask(pid, thread, b"SigPnd")) & bit
        for thread in _threads(pid)
    )


def _signal_mask(pid: int, thread: int, key: bytes) -> int:
    return int(_task_status(pid, thread).get(key, b"0"), 16)


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"{_PROC}/{pid}/task")]
    except OSError:  # it has ended
        return []


def main_thread_place(pid: int) -> tuple[str, int] | None:
    """Return where the main thread stands in the kernel: (system call with its arguments, CPU ticks
    so far), None when it runs or is gone.

    Two equal answers a moment apart: it sat in one call all the while and cannot have run a
    handler. Reading needs the rights of ptrace, which an ancestor has; without them the wait
    channel stands in.
    """
    found = status(f"{pid}/task/{pid}")
    if found is None or found.state not in "SD":
        return None
    for source in ("syscall", "wchan"):
        try:
            with open(f"{_PROC}/{pid}/task/{pid}/{source}", "rb") as file:
                return file.read().decode("ascii", "replace"), found.cpu
        except OSError:
            continue
    return None


def is_same_call(before: str, after: str) -> bool:
    """Tell whether two places of a main thread (`main_thread_place`) are one call, with one stack.

    A signal to the process may wake the main thread and be taken by another one. What is left of
    the call is then restart_syscall(2).
    """
    (first, _, rest), (second, _, now) = before.partition(" "), after.partition(" ")
    return before == after or (rest != "" and rest == now and _RESTART_SYSCALL in (first, second))


class ThreadActivity(NamedTuple):
    """Snapshot of one thread at one moment."""

    name: str
    state: str
    switches: int  # times it has left the processor in any way


def other_threads(pid: int) -> dict[int, ThreadActivity]:
    """Return the activity of every thread of a process but the main one, by thread id; empty for
    what cannot be seen."""
    found = {}
    for thread in _threads(pid):
        if thread != pid and (told := _task_status(pid, thread)):
            name = told[b"Name"].decode("utf-8", "replace")
            state = told[b"State"][:1].decode()
            found[thread] = ThreadActivity(name, state, sum(_switches(told)))
    return found


def threads(pid: int | str = "self") -> int:
    """Return how many threads a process has.

    A listing may miss one while another thread ends; the folder's number of links (proc(5)) does
    not, where the kernel gives it.
    """
    folder = "/proc/self/task" if pid == "self" else f"{_PROC}/{pid}/task"
    return max(len(os.listdir(folder)), os.stat(folder).st_nlink - 2)


def sockets(pid: int) -> set[int]:
    """Return the inodes of the sockets that a process has open; empty for what cannot be seen."""
    found: set[int] = set()
    try:
        for entry in os.scandir(f"{_PROC}/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                target = os.readlink(entry.path)
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
    except OSError:
        return set()
    return found


def has_marker(pid: int, marker: bytes) -> bool:
    """Tell whether a process was started with `marker` ("NAME=value") in its environment. False
    also where it may not be read."""
    return marker in _content(f"{pid}/environ").split(b"\0")


def family(
    marker: bytes, sessions: Iterable[int], *, ancestor: int = 0, spare: Iterable[int] = ()
) -> list[ProcessStatus]:
    """Return every living process that belongs to a job: in a session that one of its ranks leads,
    started with its marker, or a descendant of `ancestor` (which is left out itself).

    The marker finds what a rank moved into a session of its own (setsid, a daemon). Beneath a
    subreaper that has started nothing but the job, `ancestor` finds what was started with an empty
    environment, and a job inside the job. Left out are `spare`, this process, and processes of
    other users that /proc hides from this one.
    """
    ours, left_out = set(sessions), {os.getpid(), ancestor, *spare}
    everyone = {one.pid: one for one in _everyone()}
    found = []
    for one in everyone.values():
        if one.pid in left_out or one.state in "ZX":
            continue
        if (
            one.session in ours
            or (marker and has_marker(one.pid, marker))
            or (ancestor and _descends(one, ancestor, everyone))
        ):
            found.append(one)
    return found


def _everyone() -> Iterator[ProcessStatus]:
    """Yield all processes that this one may see; none when /proc is not there, or shows another pid
    namespace."""
    try:
        entries = os.listdir(_PROC)
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.isdigit():
            with contextlib.suppress(
                PermissionError
            ):  # of another user, and /proc is mounted with hidepid=1
                if (one := status(entry)) is not None:
                    yield one


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
    deadline: float,
    ancestor: int = 0,
    spare: Iterable[int] = (),
) -> list[ProcessStatus]:
    """SIGKILL for every process of a job until none is left; returns those that would not die
    within `deadline` seconds.

    Each is held by pidfd and looked at again before the signal, so a number that was freed and
    given to a stranger is not hit. Repeated until a look finds none: a process may fork while we
    look.
    """
    sessions, until = set(sessions), time.monotonic() + deadline
    while True:
        living = family(marker, sessions, ancestor=ancestor, spare=spare)
        if not living or time.monotonic() > until:
            return living
        held: list[int] = []
        for one in living:
            try:
                pidfd = system_calls.pidfd_open(one.pid)
            except (
                ProcessLookupError,
                FileNotFoundError,
            ):  # FileNotFoundError: the number is a thread's by now
                continue
            held.append(pidfd)
            again = status(one.pid)
            if again is not None and again.started == one.started:
                send(pidfd, signal.SIGKILL)
        wait_for_ends(held, until - time.monotonic())
        for pidfd in held:
            os.close(pidfd)


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
    still its own).

    ValueError for a number that is no process of ours: 0 would be our own group, and our caller's.
    """
    if leader <= 1:
        raise ValueError(f"{leader} leads no group of ours")
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        return False
    return True


def group_members(leader: int) -> list[ProcessStatus]:
    """Return the living processes of a session that `leader` (ended or not) led, itself left
    out."""
    return [
        one
        for one in _everyone()
        if one.session == leader and one.pid != leader and one.state not in "ZX"
    ]


def end_of_unreaped(pid: int) -> tuple[int, int] | None:
    """Return (exit code, signal) of a process that has ended and that its parent has not reaped
    yet; None when that cannot be told."""
    try:
        owner = os.stat(f"{_PROC}/{pid}").st_uid
        with open(f"{_PROC}/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if fields[0] != b"Z" or (
        os.geteuid() and owner != os.geteuid()
    ):  # of another user's process the kernel shows 0
        return None
    number = int(fields[49])  # exit_code of proc_pid_stat(5), in the form of wait(2)
    return os.waitstatus_to_exitcode(number) if os.WIFEXITED(number) else 0, os.WTERMSIG(number)


def reap(pid: int, pidfd: int, timeout: float) -> tuple[int, int] | None:
    """Wait for a child's end and reap it: (exit code, signal); None when `timeout` seconds were not
    enough. Closes `pidfd`."""
    has_ended = wait_for_ends([pidfd], timeout)
    os.close(pidfd)
    if not has_ended:
        return None
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
    return ended(info) if info else end_of_unreaped(pid)  # a debugger that had it comes first


def ended(info: os.waitid_result) -> tuple[int, int]:
    """(exit code, signal) of a waitid result; one of them is 0."""
    if info.si_code == os.CLD_EXITED:
        return info.si_status, 0
    return 0, info.si_status


def memory_file(label: str) -> int:
    """Return a memfd (close-on-exec): a file without a name that is gone with its last user."""
    return system_calls.memfd_create(label, system_calls.MFD_CLOEXEC)


def sealed_memory_file(label: str, content: bytes) -> int:
    """Return a memfd with this content, which no receiver can change any more. Read it with
    `os.pread`: its offset is shared."""
    import fcntl

    fd = system_calls.memfd_create(label, system_calls.MFD_CLOEXEC | system_calls.MFD_ALLOW_SEALING)
    os.write(fd, content)
    seals = (
        system_calls.F_SEAL_WRITE
        | system_calls.F_SEAL_GROW
        | system_calls.F_SEAL_SHRINK
        | system_calls.F_SEAL_SEAL
    )
    fcntl.fcntl(fd, system_calls.F_ADD_SEALS, seals)
    return fd


def in_child(run: Callable[[], None]) -> int:
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
