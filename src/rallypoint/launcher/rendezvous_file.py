"""A job's place on a file system that machines share: one job at a time has it, and it says where
that job's ranks meet.

The place is a folder; in it stand records `1.json`, `2.json`, ...: the highest is who had the place
last. A record appears whole, by link(2), which also over NFS succeeds for one of all who try it at
once. Who finds that the highest one's job is gone makes the next; none is ever made twice, because
the highest one stays (marked as ended) until there is a higher one. So two that start at once
agree, without a lock: none is left behind by a job that is killed, and none is missed on a file
system that has no locks.

Whether a job is gone is seen from the launcher's process: the same boot of the same machine and the
same pid with the same start time. Of another machine's it cannot be seen, and then the place is
taken.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
from collections.abc import Callable
from typing import Literal

import msgspec

from rallypoint.clock import Clock
from rallypoint.errors import EnvironmentProblem
from rallypoint.host import processes, system_calls
from rallypoint.record.disk_writer import DiskWriter

TRIES = 16
"""How often the place is looked at again because somebody was quicker. Each time that is another
job, which then has it: a second look is already rare."""

DISK_TIMEOUT = 10.0
"""Seconds for a file system to answer at all. One that is mounted when it is first asked for takes
a few; a dead one takes for ever.
"""

GIVE_BACK_TIMEOUT = 2.0
"""Seconds for it at the very end, when the job is over and a person waits for the prompt."""

HIDDEN = -1
"""Instead of a process's start: it exists, and /proc shows it only to its own user (mounted with
hidepid).
"""

_RECORD = re.compile(r"([1-9]\d*)\.json")
_LARGEST = 1 << 16  # bytes of a record; one has some three hundred

Fate = Literal["runs", "gone", "unknown"]


class ProcessIdentity(msgspec.Struct, frozen=True):
    """Where a process is, as far as others need it to tell whether it still exists."""

    host: str
    machine: str  # /etc/machine-id: two machines may have one host name; "" where there is none
    boot: str  # a new one at every start of the machine
    pids: str  # the pid namespace; a pid means nothing in another
    pid: int
    ticks: int  # its start, in clock ticks after the boot: with the pid the identity of a process


class Record(msgspec.Struct, frozen=True):
    """What stands in the place."""

    job: str
    owner: ProcessIdentity
    user: str
    since: float  # seconds since 1970, on the owner's clock
    attempt: int = 0
    address: str = ""  # where the ranks of this attempt meet; "" before they do
    ended: bool = False
    format: int = 1


def fate(record: Record, here: ProcessIdentity, started: Callable[[int], int | None]) -> Fate:
    """Whether a record's job still runs, seen from `here`; `started`: the start of a process in
    ticks, `HIDDEN`, or None when there is no such process. Pure."""
    owner = record.owner
    if record.ended:
        return "gone"
    if owner.boot == here.boot:
        if owner.pids != here.pids:
            return "unknown"
        began = started(owner.pid)
        return "unknown" if began == HIDDEN else "runs" if began == owner.ticks else "gone"
    if owner.host == here.host and owner.machine == here.machine != "":
        return "gone"  # this machine, before it was started again
    return "unknown"


class RendezvousFile:
    """The place, while it is ours."""

    def __init__(self, folder: str, number: int, record: Record) -> None:
        self.path = os.path.join(folder, f"{number}.json")
        self._folder = folder
        self._record = record
        self._writer = DiskWriter()

    def __repr__(self) -> str:
        record = self._record
        where = record.address or "no address yet"
        return f"<RendezvousFile {self._folder}: job {record.job}, attempt {record.attempt}, at {where}>"

    def publish(self, attempt: int, address: str) -> None:
        """Say where the ranks of this attempt meet. `EnvironmentProblem` when it cannot be written
        (a full disk), or the disk gives no answer for `DISK_TIMEOUT` seconds: no rank runs yet, or
        any more."""
        try:
            self._writer.ask(
                lambda: self._change(
                    msgspec.structs.replace(self._record, attempt=attempt, address=address)
                ),
                DISK_TIMEOUT,
            )
        except TimeoutError:
            raise _silent(self._folder, DISK_TIMEOUT) from None

    def give_back(self) -> None:
        """The job is over. May be called twice; raises nothing, and takes `GIVE_BACK_TIMEOUT`
        seconds at most: who cannot write any more is found to be gone all the same."""
        with contextlib.suppress(EnvironmentProblem, TimeoutError):
            self._writer.ask(
                lambda: self._change(msgspec.structs.replace(self._record, address="", ended=True)),
                GIVE_BACK_TIMEOUT,
            )

    def _change(self, record: Record) -> None:
        try:
            if _read(self.path) != self._record:
                # somebody removed the place by hand, and perhaps another job has it: it is ours no
                # longer
                return
            temporary = _written(self._folder, record)
            try:
                os.replace(temporary, self.path)
            except OSError:
                os.unlink(temporary)
                raise
        except FileNotFoundError:
            return
        except OSError as error:
            raise _unwritable(self._folder, error) from error
        self._record = record


def wait_for_disk(
    folder: str, timeout: float = DISK_TIMEOUT, ask: Callable[[str], object] = os.path.exists
) -> None:
    """Refuse a place whose file system does not answer ("rendezvous-unwritable"), after `timeout`
    seconds.

    The kernel holds whoever asks a dead network file system, deaf to SIGKILL: so a child asks. The
    caller must have one thread.
    """

    def visit() -> None:
        ask(folder)

    child = processes.in_child(visit)
    pidfd = system_calls.pidfd_open(child)
    try:
        if processes.wait_for_ends([pidfd], timeout):
            os.waitpid(child, 0)
            return
        processes.send(
            pidfd, signal.SIGKILL
        )  # when it comes back to life; who that is then is the kernel's affair
    finally:
        os.close(pidfd)
    raise _silent(folder, timeout)


def look(folder: str) -> None:
    """Refuse a place that cannot be made, before anything is started. `EnvironmentProblem`
    ("rendezvous-unwritable").
    """
    above = os.path.dirname(folder) or "/"
    if os.path.isdir(folder):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise EnvironmentProblem(
                "rendezvous-unwritable",
                f"the meeting place {folder} may not be written by this user",
                help=_LEAVE_OUT,
            )
    elif os.path.lexists(folder):
        raise EnvironmentProblem(
            "rendezvous-unwritable",
            f"the meeting place {folder} is a file, and not one that a launcher made",
            why=(
                'init_method="file:///..." of torch leaves such files; --rdzv-endpoint makes a folder',
            ),
            help=(
                ("name one that is not there yet", f"--rdzv-endpoint file://{folder}-place"),
                *_LEAVE_OUT,
            ),
        )
    elif not os.path.isdir(above):
        raise EnvironmentProblem(
            "rendezvous-unwritable",
            f"the folder {above}, in which the meeting place is to be made, does not exist",
            why=("on a machine where it should be there, its file system is not mounted",),
            help=(("make it", f"mkdir -p {above}"), *_LEAVE_OUT),
        )
    elif not os.access(above, os.W_OK | os.X_OK):
        raise EnvironmentProblem(
            "rendezvous-unwritable",
            f"the folder {above}, in which the meeting place is to be made, may not be written by this user",
            help=_LEAVE_OUT,
        )


def take(folder: str, job: str) -> RendezvousFile:
    """Have the place for this job, whose launcher is this process. A dead job's is taken over.

    Raises `EnvironmentProblem`: "rendezvous-in-use" names who has it, "rendezvous-unwritable" why
    it cannot be had at all.
    """
    look(folder)
    here = own_identity()
    record = Record(job, here, _user(), Clock().wall())
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        for _ in range(TRIES):
            place = _try(folder, record)
            if place is not None:
                return place
    except OSError as error:
        raise _unwritable(folder, error) from error
    raise EnvironmentProblem(
        "rendezvous-in-use",
        f"other jobs take the meeting place {folder} one after the other: tried {TRIES} times",
    )


def _try(folder: str, record: Record) -> RendezvousFile | None:
    """One look at who is there, and one attempt to be the next; None when somebody was quicker."""
    last = max(_numbers(folder), default=0)
    if last:
        former = _read(os.path.join(folder, f"{last}.json"))
        if former is None:
            return None
        how = fate(former, record.owner, _started)
        if how != "gone":
            raise _in_use(folder, former, how, record.since)
    number = last + 1
    path = os.path.join(folder, f"{number}.json")
    temporary = _written(folder, record)
    try:
        os.link(temporary, path)
    except FileExistsError:
        if os.stat(temporary).st_nlink == 1:
            return None
        # It is ours: over NFS an answer that is lost is asked for again, and the second one says
        # that the name is taken (link(2)).
    finally:
        os.unlink(temporary)
    numbers = _numbers(folder)
    if (
        max(numbers, default=0) > number
    ):  # we slept through a whole job: the number was used, and removed, since we looked
        os.unlink(path)
        return None
    for old in numbers:
        if old < number:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, f"{old}.json"))
    return RendezvousFile(folder, number, record)


def own_identity() -> ProcessIdentity:
    """This process's."""
    found = processes.status("self")
    return ProcessIdentity(
        host=socket.gethostname(),
        machine=_text("/etc/machine-id"),
        boot=_text("/proc/sys/kernel/random/boot_id"),
        pids=os.readlink("/proc/self/ns/pid"),
        pid=os.getpid(),
        ticks=found.started if found is not None else 0,
    )


def _started(pid: int) -> int | None:
    try:
        found = processes.status(pid)
        if found is None:
            os.kill(pid, 0)
    except PermissionError:  # from either: somebody else's, and /proc hides those
        return HIDDEN
    except ProcessLookupError:
        return None
    return found.started if found is not None and found.state != "Z" else None


def _numbers(folder: str) -> list[int]:
    return [int(match[1]) for name in os.listdir(folder) if (match := _RECORD.fullmatch(name))]


def _read(path: str) -> Record | None:
    """A record; None when it was removed meanwhile. `EnvironmentProblem` for what is none: it is
    not ours to replace.
    """
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(_LARGEST), type=Record)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise EnvironmentProblem(
            "rendezvous-unwritable",
            f"the meeting place {os.path.dirname(path)} holds {os.path.basename(path)}, which no launcher wrote",
            why=(str(error),),
            help=(("name a place of the job's own", "--rdzv-endpoint file:///shared/folder/name"),),
        ) from error


def _written(folder: str, record: Record) -> str:
    """A new file with the record in it, safe on the disk; its path."""
    path = os.path.join(folder, f".{record.owner.pid}-{secrets.token_hex(6)}")
    with open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "wb"
    ) as file:
        try:
            file.write(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            os.unlink(path)
            raise
    return path


_LEAVE_OUT = (
    ("leave --rdzv-endpoint out: ranks on one node need no meeting place of their own", ""),
)


def _in_use(folder: str, record: Record, how: Fate, now: float) -> EnvironmentProblem:
    owner = record.owner
    another = (("give this job a place of its own", f"--rdzv-endpoint file://{folder}-2"),)
    who = f"pid {owner.pid} on {owner.host}, started by {record.user} {_ago(now - record.since)}"
    meets = (
        (f"its ranks meet at {record.address}, attempt {record.attempt}",) if record.address else ()
    )
    if how == "runs":
        return EnvironmentProblem(
            "rendezvous-in-use",
            f"the meeting place {folder} belongs to a job that is running: {who}",
            why=(f"job {record.job}", *meets),
            help=another,
        )
    where = owner.host
    if owner.boot == _text("/proc/sys/kernel/random/boot_id"):
        hidden = owner.pids == os.readlink("/proc/self/ns/pid")
        where = (
            f"user {record.user}, whose processes /proc hides (hidepid)"
            if hidden
            else "another container of this machine"
        )
    return EnvironmentProblem(
        "rendezvous-in-use",
        f"the meeting place {folder} belongs to {where}, and from here it cannot be seen whether its job still runs",
        why=(
            f"job {record.job}: {who}",
            *meets,
            "joining a job that runs elsewhere comes with multi-node support",
        ),
        help=(
            *another,
            ("or, when that job is known to be gone, remove the place", f"rm -r {folder}"),
        ),
    )


def _silent(folder: str, timeout: float) -> EnvironmentProblem:
    return EnvironmentProblem(
        "rendezvous-unwritable",
        f"the file system of the meeting place {folder} gave no answer within {timeout:g} s",
        why=("a server that is gone holds everybody who asks it",),
        help=(("see what is mounted there, without asking it", "cat /proc/mounts"), *_LEAVE_OUT),
    )


def _unwritable(folder: str, error: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(
        "rendezvous-unwritable",
        f"the meeting place {folder} cannot be written: {os.strerror(error.errno or 0)}",
        help=_LEAVE_OUT,
    )


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _ago(seconds: float) -> str:
    """How long ago, for people; clocks of two machines may differ."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
