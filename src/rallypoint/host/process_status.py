"""Processes as /proc shows them: state, threads, signals, sockets, command line. Disturbs nobody."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from typing import NamedTuple

_RESTART_SYSCALL = "219" if os.uname().machine == "x86_64" else "128"


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


def children(pid: int) -> list[int]:
    """Return the pids of the children that a process's main thread has started, ended ones
    included; none when /proc does not tell."""
    try:
        with open(f"{_PROC}/{pid}/task/{pid}/children", "rb") as file:
            return [int(child) for child in file.read().split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        return [one.pid for one in everyone() if one.parent == pid]


class ProcessStatus(NamedTuple):
    """Contents of /proc/PID/stat of a process; times in clock ticks."""

    pid: int
    name: str
    state: str  # R running, S sleeping, D in the kernel, T stopped, Z ended but not reaped
    parent: int
    session: int
    cpu: int  # user and system time together
    started: int  # after boot: with the pid the identity of a process


def status(pid: int | str) -> ProcessStatus | None:
    """Return the process's status, or None when there is none."""
    try:
        with open(f"{_PROC}/{pid}/stat", "rb", buffering=0) as file:  # of thousands, several times
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    head, _, tail = text.rpartition(b")")
    number, _, command = head.partition(b"(")
    fields = tail.split()
    return ProcessStatus(
        int(number), command.decode("utf-8", "replace"), fields[0].decode(), int(fields[1]), int(fields[3]),
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
        with open(f"{_PROC}/{name}", "rb", buffering=0) as file:
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
    """Return the command line of a process as one line, "" when it cannot be read."""
    return str(re.sub(rb"[\0\s]+", b" ", _content(f"{pid}/cmdline")).strip(), "utf-8", "replace")


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
        if text := _content(f"{pid}/task/{pid}/{source}"):
            return text.decode("ascii", "replace"), found.cpu
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


def everyone() -> Iterator[ProcessStatus]:
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


def end_of_unreaped(pid: int) -> tuple[int, int] | None:
    """Return (exit code, signal) of a process that has ended and that its parent has not reaped
    yet; None when that cannot be told."""
    try:
        owner = os.stat(f"{_PROC}/{pid}").st_uid
    except OSError:
        return None
    fields = _content(f"{pid}/stat").rpartition(b")")[2].split()
    if fields[:1] != [b"Z"] or (
        os.geteuid() and owner != os.geteuid()
    ):  # of another user's process the kernel shows 0
        return None
    number = int(fields[49])  # exit_code of proc_pid_stat(5), in the form of wait(2)
    return os.waitstatus_to_exitcode(number) if os.WIFEXITED(number) else 0, os.WTERMSIG(number)


def failed_child(pid: int) -> tuple[int, int, int] | None:
    """Return pid, exit code and signal of a child of a process that has failed, and that the process
    has not reaped yet; None when there is none. One that SIGTERM ended has not failed: its parent
    wanted that.
    """
    for child in children(pid):
        code, number = end_of_unreaped(child) or (0, 0)
        if code or number not in (0, signal.SIGTERM):
            return child, code, number
    return None
