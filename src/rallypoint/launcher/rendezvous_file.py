"""A job's place on a file system that machines share: one job at a time has it, and its record
says where that job's ranks meet.

The place is a folder; in it are records `1.json`, `2.json`, ...: the highest is of the job that had
the place last. A record appears whole, by link(2), which also over NFS succeeds for one of all
processes that try it at once. A process that finds the highest record's job gone makes the next
record; no number is used twice, because the highest record stays (marked as ended) until there is a
higher one. So two that start at once agree, without a lock: none is left behind by a job that is
killed, and none is missed on a file system that has no locks.

A job is gone when its launcher's process is: the same boot of the same machine and the same pid
with another start time, or no such pid. Of another machine's process this cannot be seen, and then
the place is taken.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import stat
from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import msgspec

from rallypoint.clock import Clock
from rallypoint.errors import EnvironmentProblem
from rallypoint.host import process_status, processes, system_calls
from rallypoint.host.kernel_files import text_of
from rallypoint.host.port_holder import user_name
from rallypoint.record.disk_writer import DiskWriter

TRIES = 16
"""Maximum looks at the place, each because another job was quicker. A second look is rare."""

DISK_TIMEOUT = 10.0
"""Seconds for a file system to answer at all. One that is mounted when it is first asked for takes
a few; a dead one takes for ever.
"""

GIVE_BACK_TIMEOUT = 2.0
"""Seconds for the same when the job is over and a person waits for the prompt."""

HIDDEN = -1
"""Start of a process that exists, and that /proc shows only to its own user (hidepid)."""

_RECORD = re.compile(r"([1-9]\d*)\.json")
_LARGEST = 1 << 16  # bytes of a record; one has some three hundred

Fate = Literal["runs", "gone", "unknown"]


class ProcessIdentity(msgspec.Struct, frozen=True):
    """Identity of a process, by which others can tell that it is gone."""

    host: str
    machine: str  # /etc/machine-id: two machines may have one host name; "" where there is none
    boot: str  # a new one at every start of the machine
    pids: str  # the pid namespace; a pid means nothing in another
    pid: int
    ticks: int  # its start, in clock ticks after the boot: with the pid the identity of a process


class Record(msgspec.Struct, frozen=True):
    """Record of the job that has the place."""

    job: str
    owner: ProcessIdentity
    user: str
    since: float  # seconds since 1970, on the owner's clock
    attempt: int = 0
    address: str = ""  # where the ranks of this attempt meet; "" before they do
    ended: bool = False
    format: int = 1


def fate(record: Record, here: ProcessIdentity, started: Callable[[int], int | None]) -> Fate:
    """Tell whether a record's job still runs, seen from `here`. `started` returns the start of a
    process in ticks, `HIDDEN`, or None when there is no such process."""
    owner = record.owner
    if record.ended:
        return "gone"
    # A sandbox may have no number of a boot: then all machines have the same, "".
    if owner.boot == here.boot and (here.boot or owner.host == here.host):
        if owner.pids != here.pids:
            return "unknown"
        began = started(owner.pid)
        return "unknown" if began == HIDDEN else "runs" if began == owner.ticks else "gone"
    if owner.host == here.host and owner.machine == here.machine != "":
        return "gone"  # this machine, before it was started again
    return "unknown"


class RendezvousFile:
    """The record of this job, which has the place."""

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
        """Record where the ranks of this attempt meet. Raises EnvironmentProblem when it cannot be
        written, or the disk gives no answer for `DISK_TIMEOUT` seconds."""
        record = msgspec.structs.replace(self._record, attempt=attempt, address=address)
        try:
            self._writer.ask(lambda: self._change(record), DISK_TIMEOUT)
        except TimeoutError:
            raise _silent(self._folder, DISK_TIMEOUT) from None

    def give_back(self, *, remove: bool = False) -> None:
        """Mark the job as ended, or remove the place. May be called twice; raises nothing, and takes
        `GIVE_BACK_TIMEOUT` seconds at most: without the mark the next job finds this one's process
        gone."""
        record = msgspec.structs.replace(self._record, address="", ended=True)
        do = self._remove if remove else lambda: self._change(record)
        with contextlib.suppress(EnvironmentProblem, TimeoutError):
            self._writer.ask(do, GIVE_BACK_TIMEOUT)

    def _remove(self) -> None:
        with contextlib.suppress(OSError):  # another's file is in it, or it has gone
            os.unlink(self.path)
            os.rmdir(self._folder)

    def _change(self, record: Record) -> None:
        try:
            # A place that was removed by hand may be another job's by now.
            if _read(self.path) == self._record:
                temporary = _written(self._folder, record)
                try:
                    os.replace(temporary, self.path)
                except OSError:
                    os.unlink(temporary)
                    raise
                self._record = record
        except FileNotFoundError:
            return
        except OSError as error:
            raise _unwritable(self._folder, error) from error


def wait_for_disk(
    folder: str, timeout: float = DISK_TIMEOUT, ask: Callable[[str], object] = os.path.exists
) -> None:
    """Refuse a place whose file system does not answer within `timeout` seconds.

    A dead network file system holds the process that asks it, deaf to SIGKILL: so a child asks. The
    caller must have one thread.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, the kernel would reap the child
    child = processes.in_child(lambda: ask(folder))
    pidfd = system_calls.pidfd_open(child)
    try:
        if processes.wait_for_ends([pidfd], timeout):
            os.waitpid(child, 0)
            return
        processes.send(pidfd, signal.SIGKILL)  # it ends when the file system comes back
    finally:
        os.close(pidfd)
    raise _silent(folder, timeout)


def make_above(folder: str) -> None:
    """Make the folders above a place that is this job's alone. Raises EnvironmentProblem as `take`."""
    try:
        os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def look(folder: str) -> None:
    """Refuse a place that cannot be made, before anything is started."""
    above = os.path.dirname(folder) or "/"
    place, name = above, f"the folder {above}, in which the meeting place is to be made,"
    try:  # one look: another job may just be making the folder
        is_folder = stat.S_ISDIR(os.stat(folder).st_mode)
    except OSError:
        is_folder = None
    if is_folder:
        place, name = folder, f"the meeting place {folder}"
    elif is_folder is not None or os.path.islink(folder):
        raise _refused(
            f"the meeting place {folder} is a file, and not one that a launcher made",
            'init_method="file:///..." of torch leaves such files; --rdzv-endpoint makes a folder',
            ("name one that is not there yet", f"--rdzv-endpoint file://{folder}-place"),
        )
    if not is_folder and not os.path.isdir(place):
        raise _refused(
            f"{name} does not exist",
            "on a machine where it should be there, its file system is not mounted",
            ("make it", f"mkdir -p {above}"),
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise _refused(f"{name} may not be written by this user")


def take(folder: str, job: str) -> RendezvousFile:
    """Take the place for this job, whose launcher is this process. A dead job's is taken over.

    Raises EnvironmentProblem: "rendezvous-in-use" names the job that has it,
    "rendezvous-unwritable" why it cannot be had at all.
    """
    look(folder)
    record = Record(job, own_identity(), user_name(os.geteuid()), Clock().wall())
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


def address_in(folder: str) -> str:
    """Return the address that the job which has the place wrote there; "" when there is none, or
    the job has ended. Raises EnvironmentProblem as `take`.
    """
    look(folder)
    try:
        last = max(_numbers(folder), default=0)
        record = _read(os.path.join(folder, f"{last}.json")) if last else None
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise _unwritable(folder, error) from error
    return record.address if record is not None and not record.ended else ""


def _try(folder: str, record: Record) -> RendezvousFile | None:
    """Try once to have the next record; return None when another job was quicker."""
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
        # The link is ours: over NFS a lost answer is asked for again, and the second one says that
        # the name is taken (link(2)).
    finally:
        os.unlink(temporary)
    numbers = _numbers(folder)
    if max(numbers) > number:  # a whole job has passed since the look: it used this number, too
        with contextlib.suppress(FileNotFoundError):  # the next one has removed it with older ones
            os.unlink(path)
        return None
    for old in numbers:
        if old < number:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, f"{old}.json"))
    return RendezvousFile(folder, number, record)


def own_identity() -> ProcessIdentity:
    """Return the identity of this process."""
    found = process_status.status("self")
    return ProcessIdentity(
        host=socket.gethostname(),
        machine=text_of("/etc/machine-id").strip(),
        boot=text_of("/proc/sys/kernel/random/boot_id").strip(),
        pids=os.readlink("/proc/self/ns/pid"),
        pid=os.getpid(),
        ticks=found.started if found is not None else 0,
    )


def _started(pid: int) -> int | None:
    try:
        found = process_status.status(pid)
        if found is None:
            os.kill(pid, 0)
    except PermissionError:  # another user's, which /proc hides
        return HIDDEN
    except ProcessLookupError:
        return None
    return found.started if found is not None and found.state != "Z" else None


def _numbers(folder: str) -> list[int]:
    return [int(match[1]) for name in os.listdir(folder) if (match := _RECORD.fullmatch(name))]


def _read(path: str) -> Record | None:
    """Return a record; None when it was removed meanwhile. Raises EnvironmentProblem for a file
    that is no record: it is not ours to replace."""
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(_LARGEST), type=Record)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        folder, name = os.path.split(path)
        raise _refused(
            f"the meeting place {folder} holds {name}, which no launcher wrote",
            str(error),
            ("name a place of the job's own", "--rdzv-endpoint file:///shared/folder/name"),
        ) from error


def _written(folder: str, record: Record) -> str:
    """Write a record into a new file, safe on the disk; return its path."""
    path = os.path.join(folder, f".{record.owner.pid}-{secrets.token_hex(6)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(path, flags, 0o644), "wb") as file:
        try:
            file.write(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            os.unlink(path)
            raise
    return path


def _refused(headline: str, why: str = "", *help: tuple[str, str]) -> EnvironmentProblem:
    leave_out = (
        "on one node leave --rdzv-endpoint out: its ranks need no meeting place of their own"
    )
    return EnvironmentProblem(
        "rendezvous-unwritable",
        headline,
        why=(why,) if why else (),
        help=(*help, (leave_out, "")),
    )


def _in_use(folder: str, record: Record, how: Fate, now: float) -> EnvironmentProblem:
    owner = record.owner
    ago = timedelta(seconds=max(0, round(now - record.since)))  # clocks of two machines may differ
    who = f"pid {owner.pid} on {owner.host}, started by {record.user} {ago} ago"
    why = [f"job {record.job}: {who}"]
    if record.address:
        why.append(f"its ranks meet at {record.address}, attempt {record.attempt}")
    help = [("give this job a place of its own", f"--rdzv-endpoint file://{folder}-2")]
    whose = f"a job that is running: {who}"
    if how == "unknown":
        # on another machine, in another container of this one, or of a user whose processes /proc hides
        whose = f"{owner.host}, and from here it cannot be seen whether its job still runs"
        why.append("nodes of one job say how many they are: --nnodes 2")
        help.append(("or, when that job is known to be gone, remove the place", f"rm -r {folder}"))
    return EnvironmentProblem(
        "rendezvous-in-use",
        f"the meeting place {folder} belongs to {whose}",
        why=tuple(why),
        help=tuple(help),
    )


def _silent(folder: str, timeout: float) -> EnvironmentProblem:
    return _refused(
        f"the file system of the meeting place {folder} gave no answer within {timeout:g} s",
        "a server that is gone holds everybody who asks it",
        ("see what is mounted there, without asking it", "cat /proc/mounts"),
    )


def _unwritable(folder: str, error: OSError) -> EnvironmentProblem:
    why = os.strerror(error.errno or 0)
    return _refused(f"the meeting place {folder} cannot be written: {why}")
