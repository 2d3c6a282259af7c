"""One folder for each run: what was planned, what happened, what every rank said.

    <run>/plan.json  events.jsonl  report.json  rank0.log ...  running

A job on several nodes has a folder, and in that a run folder `node<k>` for each node.

`running` is locked by the launcher while the run lasts; the lock dies with it, so a run that was
killed is not taken for a running one. Everything is private to the user. A folder that cannot be
had, or a disk that fills up, costs the record and not the job.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import re
import secrets
import shlex
import shutil
import stat
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from rallypoint.errors import Advice, EnvironmentProblem, UsageError
from rallypoint.host.state_folder import state_folder
from rallypoint.record.disk_writer import DiskWriter

KEPT_RUNS = 20
"""Runs kept in the default folder: an afternoon of trying things; at a few megabytes of log each, a
small place."""

KEPT_BYTES = 1 << 30
"""Bytes that all kept runs together may take in the default folder: it is in a home, which may have
a quota of a few gigabytes."""

RECENT_RUNS = 5
"""The last runs, which are kept whether they failed or not. Of older ones those that failed are
kept longer: somebody may still ask why."""

OURS = re.compile(r"rank\d+\.log|events\.jsonl|plan\.json|report\.json|running")
"""The names of the files that a run folder consists of. Nothing else in it is ever touched."""

NODE = re.compile(r"node\d+")
"""Names of the run folders in the folder of a job on several nodes."""

SECRET = re.compile(
    r"secret|token(?!i[sz])|passw|passphrase|passcode|pgpass|credential|(?:api|access|private)_?key|authorization|cookie|webhook"
    r"|(?:database|db|redis|mongo(?:db)?|broker|amqp|mysql|postgres(?:ql)?)_ur[il]"
    r"|(?<![a-z0-9])(?:pass|pw|pat|keys?|dsn|auth|creds?|jwt|bearer)(?![a-z0-9])|(?<=[^a-z0-9])pwd(?![a-z0-9])",
    re.IGNORECASE,
)
"""Pattern in the name of a variable that is not shown with its value. Short words count only by
themselves: DB_PASS and OPENAI_KEY, not COMPASS and MONKEY; PWD and OLDPWD are folders, MYSQL_PWD is
not, and TOKENIZERS_PARALLELISM is no token."""

SECRET_VALUE = re.compile(
    r"://[^/?#\s]*@|-----BEGIN [A-Z ]*PRIVATE KEY|\bBearer\s|[?&;](?:password|pwd|token)=",
    re.IGNORECASE,
)
"""Pattern in a value that is not shown, whatever its name: a URL with a user or a password in it, a
private key, a header."""

LINK_TIMEOUT = 1.0
"""Seconds for the disk of a run that is listed elsewhere to say whether it goes on. Somebody waits
for the list."""

WHOLE, CUT = 0o600, 0o400
"""Modes of a kept file. One that was given up is made read-only: the only mark that a full disk has
room for."""

_FLOCK = struct.Struct("@hhqqi")
"""struct flock of fcntl(2): type, whence, start, length, pid."""

_locked_here: set[str] = set()
"""Folders that this process has locked: a record lock does not keep its own process out, and
closing any descriptor of the file would drop it (fcntl(2)), so these are never looked at."""


def default_root(environ: Mapping[str, str]) -> str:
    """Return the folder of all runs: `$XDG_STATE_HOME/rallypoint/runs`, else
    `~/.local/state/rallypoint/runs`."""
    return os.path.join(state_folder(environ), "runs")


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with `***` for every value that looks like a secret, by its name or by
    itself."""
    return {
        name: "***" if SECRET.search(name) or SECRET_VALUE.search(value) else value
        for name, value in environment.items()
    }


def reason_of(error: OSError) -> str:
    """Return the system's words. A file where a folder should be is "File exists" to mkdir; it is
    said as what it is."""
    number = errno.ENOTDIR if error.errno == errno.EEXIST else error.errno
    return os.strerror(number) if number else str(error)


def writable(error: OSError, path: str, option: str) -> Advice:
    """Return the help for a folder that cannot be written: a full disk is not mended by
    permissions."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        above = shlex.quote(os.path.dirname(os.path.abspath(path)))
        return ("see what fills that disk", f"df -h {above}; df -i {above}"), (
            "or name a folder on another one",
            option,
        )
    return (("name a folder that you may write to", option),)


def as_json(value: Any) -> bytes:
    """JSON, also of text that is not UTF-8 (arguments, paths): what cannot be written stands as
    `?`."""
    try:
        return msgspec.json.encode(value, enc_hook=str)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value, enc_hook=str), ensure_ascii=False).encode(
            "utf-8", "replace"
        )


class Trouble:
    """Teller that says once that a file cannot be written: one line for the first, one more if it
    is not the only one."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told = 0
        self._lock = threading.Lock()  # each disk has a thread of its own

    def __call__(self, path: str, error: OSError, lost: str) -> None:
        with self._lock:
            self._told += 1
            told = self._told
        reason = reason_of(error)
        if told == 1:
            self._say(f"rallypoint: cannot write {path}: {reason}; {lost}")
        elif told == 2:
            self._say(
                f"rallypoint: cannot write {path} either: {reason}; {lost}. Further such files are not named"
            )


class KeptFile:
    """A file that is appended to for as long as that works. The first error is told to `trouble`,
    and no other follows."""

    def __init__(
        self,
        path: str,
        trouble: Trouble,
        lost: str = "its output is no longer kept",
        fd: int | None = None,
    ) -> None:
        self.path = path
        self.given_up = False
        """True when what came last is not in it."""
        self._lock = threading.Lock()  # of `given_up`
        self._trouble = trouble
        self._lost = lost
        self._fd = fd
        self._ours = fd is None
        if fd is None:
            try:
                self._fd = os.open(
                    path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, WHOLE
                )
            except OSError as error:
                self.given_up = True
                trouble(path, error, lost)

    def write(self, data: bytes) -> bool:
        """Write all of it, unbuffered. False when the file was given up, now or before."""
        rest = memoryview(data)
        while rest and self._fd is not None:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except OSError as error:
                if self.give_up():
                    self._trouble(self.path, error, self._lost)
            if self.given_up:  # by this error, or by a thread that waited too long for this disk
                self._cut()
        return self._fd is not None

    def give_up(self) -> bool:
        """Note that nothing more of what comes will be in it. From any thread; False when that was
        known, and told, already."""
        with self._lock:
            before, self.given_up = self.given_up, True
        return not before

    def _cut(self) -> None:
        # A file system that has no modes, or is gone, has no mark. Never a device that somebody has
        # put in its place.
        with contextlib.suppress(OSError):
            if self._ours and self._fd is not None and stat.S_ISREG(os.fstat(self._fd).st_mode):
                os.fchmod(self._fd, CUT)
        self.close()

    def close(self) -> None:
        """May be called twice."""
        fd, self._fd = self._fd, None
        if fd is not None:
            # Some file systems (NFS, quota) say only now that the data did not fit; write() said
            # what it could.
            with contextlib.suppress(OSError):
                os.close(fd)


class RunFolder:
    """The folder of this run; `path` is "" when there is none, and then everything asked of it is a
    no-op."""

    def __init__(self, path: str, lock: int | None, trouble: Trouble) -> None:
        self.path = path
        self.trouble = trouble
        self._lock = lock
        self._listed = ""  # the link to it in a folder of runs

    def __repr__(self) -> str:
        state = "closed" if self._lock is None else "open"
        return f"<RunFolder {self.path}: {state}>" if self.path else "<RunFolder: none>"

    def file(self, name: str) -> str:
        """Return the path of a file in it, "" when there is no folder."""
        return os.path.join(self.path, name) if self.path else ""

    def write_plan(self, plan: Any) -> None:
        """`plan.json`: the plan as it is, values of variables that look like secrets as `***`. Call
        before anything starts."""
        shown = msgspec.to_builtins(plan)
        for name in ("environment", "rank_environment"):
            value = shown.get(name)
            if isinstance(value, dict):
                shown[name] = without_secrets(value)
            elif isinstance(value, (list, tuple)):
                shown[name] = [without_secrets(each) for each in value]
        self.write_json("plan.json", shown)

    def write_report(self, reports: Any) -> None:
        """`report.json`: the reports, first cause first."""
        self.write_json("report.json", reports)

    def announce(self, door: LauncherAddress) -> None:
        """Say in `running` where the launcher can be asked. A disk that takes nothing costs the
        answers, not the job."""
        if self._lock is None:
            return
        try:
            os.pwrite(self._lock, msgspec.json.encode(door) + b"\n", 0)
        except OSError as error:
            self.trouble(self.file("running"), error, "rallypoint stacks will not find this job")

    def list_in(self, root: str) -> None:
        """Let `running_runs(root)` find it, though it is not there. Where nothing can be written it
        is not found without its name."""
        if self._lock is None or root in (os.path.dirname(self.path), _above(self.path)):
            return
        folder = _elsewhere(root)
        link = os.path.join(folder, f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            os.symlink(self.path, link)
            self._listed = link

    def write_json(self, name: str, value: Any) -> None:
        """Write a file whole or not at all: a reader never sees half of it."""
        if not self.path:
            return
        path = self.file(name)
        text = msgspec.json.format(as_json(value), indent=2) + b"\n"
        try:
            write_whole(path, text)
        except OSError as error:
            self.trouble(path, error, "it is not kept")

    def close(self) -> None:
        """Note that the run is over, and give the lock back. May be called twice."""
        if self._lock is None:
            return
        lock, self._lock = self._lock, None
        _locked_here.discard(self.path)
        if self._listed:
            with contextlib.suppress(OSError):
                os.unlink(self._listed)
        with contextlib.suppress(FileNotFoundError):  # the user removed the folder meanwhile
            os.unlink(self.file("running"))
        os.close(lock)


class LauncherAddress(msgspec.Struct, frozen=True):
    """Address at which a running job's launcher can be asked. Stands in `running`."""

    socket: str  # path of a Unix socket
    host: str  # the machine's name: the folder may be on a file system that several machines share
    pid: int  # of the launcher


class PastRun(NamedTuple):
    """A run found in the default folder."""

    job: str  # by which people call it: its name there, or its folder where that is elsewhere
    path: str
    started: float  # seconds since 1970
    running: bool


def open_run_folder(
    path: str, job: str, say: Callable[[str], None], *, asked_for: bool
) -> RunFolder:
    """Make and lock the folder of a run.

    Not `asked_for` (the default place): when it cannot be made, one line is said and the run goes
    on without a folder; older runs beside it are removed (`remove_old_runs`), and `latest` points
    here. The run folder of one of several nodes is `<job>/node<k>`.

    `asked_for` (--run-dir): a folder that is absent or empty is used; in one that holds an earlier
    run, that run is replaced (as when a command is typed again), other files in it are left alone.
    Raises `UsageError` `run-folder-used` when a file of ours would overwrite one that no run of
    ours wrote, `run-folder-in-use` when a job that still runs has it, `EnvironmentProblem`
    `run-folder-unwritable` when it cannot be made.
    """
    path = os.path.abspath(path)
    root = _above(path)
    trouble = Trouble(say)
    try:
        for above in (root, os.path.dirname(path)):
            os.makedirs(above, mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        folder = RunFolder(path, _take(path), trouble)
        try:
            write_whole(folder.file("plan.json"), msgspec.json.encode({"job": job}))
        except OSError:
            folder.close()
            raise
    except OSError as error:
        reason = reason_of(error)
        if asked_for:
            raise EnvironmentProblem(
                "run-folder-unwritable",
                f"the run folder {path} cannot be written: {reason}",
                help=writable(error, path, "--run-dir DIR"),
            ) from error
        say(f"rallypoint: no record of this run is kept: {path}: {reason}")
        return RunFolder("", None, trouble)
    if not asked_for:
        _point_latest(root, path)
        remove_old_runs(root)
    return folder


def _above(path: str) -> str:
    """Return the folder of runs in which this run folder is."""
    above, name = os.path.split(path)
    return os.path.dirname(above) if NODE.fullmatch(name) else above


def name_of(path: str) -> str:
    """Return the name by which commands find a run folder: of one of several nodes `<job>/node1`."""
    return os.path.relpath(path, _above(path))


def past_runs(root: str) -> list[PastRun]:
    """Return the runs in a folder of runs, newest first; one for each node where a job had several.
    What is not a run of ours is not listed."""
    runs = []
    for name in _names(root):
        path = os.path.join(root, name)
        try:
            with open(os.path.join(path, "plan.json"), "rb") as file:
                plan = msgspec.json.decode(file.read())
                started = os.fstat(file.fileno()).st_mtime
        except (OSError, msgspec.DecodeError):
            continue
        if (
            isinstance(plan, dict)
            and isinstance(job := plan.get("job"), str)
            and (
                name in (job, os.path.join(job, os.path.basename(name)))
                or name.startswith(f"{job}-")
            )
        ):
            runs.append(PastRun(name, path, started, is_running(path)))
    return sorted(runs, key=lambda run: (run.started, run.job), reverse=True)


def _names(root: str) -> Iterator[str]:
    """Yield what may be a run folder in a folder of runs."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(root) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield entry.name
                with contextlib.suppress(OSError):  # another user's, or gone
                    nodes = filter(NODE.fullmatch, os.listdir(entry.path))
                    yield from [os.path.join(entry.name, node) for node in nodes]


def is_running(path: str) -> bool:
    """Tell whether the launcher of this run is alive: it holds the lock on `running`."""
    path = os.path.abspath(path)
    if path in _locked_here:
        return True
    try:
        fd = os.open(os.path.join(path, "running"), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    # asked, not tried: for as long as the trial had it, a launcher that starts would be refused its
    # own folder
    try:
        reply = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        return bool(_FLOCK.unpack(reply)[0] != fcntl.F_UNLCK)
    except (
        OSError
    ):  # a file system without locks (ENOLCK): nobody can tell, and what runs must not be removed
        return True
    finally:
        os.close(fd)


def running_runs(root: str) -> list[PastRun]:
    """Return the runs in a folder of runs that go on, and those with a folder of
    their own (`--run-dir`), newest first."""
    found = [*(run for run in past_runs(root) if run.running), *_running_elsewhere(root)]
    return sorted(found, key=lambda run: (run.started, run.job), reverse=True)


def _elsewhere(root: str) -> str:
    """Return the folder of links to runs that go on and are not in this folder of runs."""
    return os.path.join(os.path.dirname(root), "elsewhere")


def _running_elsewhere(root: str) -> list[PastRun]:
    """Return what is linked there; the links of launchers that were killed go. A disk that gives no
    answer is not waited for.

    Machines that share a home share this folder, and a path of another one's may lead nowhere here:
    its links are not ours to judge.
    """
    here = os.uname().nodename
    found = []
    with contextlib.suppress(OSError), os.scandir(_elsewhere(root)) as links:
        for link in links:
            with contextlib.suppress(OSError):  # TimeoutError is one, too
                run = DiskWriter().ask(
                    functools.partial(_running_at, os.readlink(link.path)), LINK_TIMEOUT
                )
                if run is not None:
                    found.append(run)
                elif link.name.rsplit("-", 2)[0] == here:
                    os.unlink(link.path)
    return found


def _running_at(path: str) -> PastRun | None:
    return (
        PastRun(path, path, os.stat(os.path.join(path, "plan.json")).st_mtime, True)
        if is_running(path)
        else None
    )


def door_of(path: str) -> LauncherAddress | None:
    """Return where the launcher of a running run can be asked; None when it says so nowhere (it is
    over, has just begun, or is of another version), and in that launcher itself, which would lose
    its lock by reading it."""
    path = os.path.abspath(path)
    if path in _locked_here:
        return None
    try:
        with open(os.path.join(path, "running"), "rb") as file:
            return msgspec.json.decode(file.read(), type=LauncherAddress)
    except (OSError, msgspec.DecodeError):
        return None


def _is_of_here(path: str) -> bool:
    """Tell whether this machine may say that a run is over: on a file system without common locks,
    one that goes on elsewhere looks so. A launcher that has ended takes its door away; what one has
    left that was killed elsewhere is left to that machine."""
    door = door_of(path)
    return door is None or door.host == os.uname().nodename


def remove_old_runs(root: str, keep: int = KEPT_RUNS, most: int | None = None) -> list[str]:
    """Remove runs of a folder of runs until at most `keep` that are over remain, and all take
    `most` bytes (None: `bytes_to_keep`). Those that went well go first, the oldest before the
    others, and recent ones last. Never one that is running, nor the last one that is over, nor what
    is no run of ours. Returns what went."""
    most = bytes_to_keep(os.environ) if most is None else most
    jobs: dict[str, list[PastRun]] = {}  # newest first; the nodes of one job are one
    for run in past_runs(root):
        jobs.setdefault(os.path.join(root, run.job.split(os.sep)[0]), []).append(run)
    sizes = {path: _size(path) for path in jobs}
    over = [
        path
        for path, runs in jobs.items()
        if not any(run.running or not _is_of_here(run.path) for run in runs)
    ]
    count, total = len(over), sum(sizes.values())
    recent, older = over[:RECENT_RUNS], over[RECENT_RUNS:]
    older.reverse()
    older.sort(
        key=lambda path: not all(_went_well(run.path) for run in jobs[path])
    )  # stable: the oldest come first among those that went well, and among the others
    removed = []
    for path in (*older, *recent[:0:-1]):
        if count <= keep and total <= most:
            break
        # Two launchers may be at it at once, and a file may be open on NFS: what cannot go now goes
        # next time.
        shutil.rmtree(path, ignore_errors=True)
        removed.append(path)
        count, total = count - 1, total - sizes[path]
    return removed


def bytes_to_keep(environ: Mapping[str, str]) -> int:
    """Return what `RALLYPOINT_KEPT_BYTES` says, in bytes or as 500MiB or 2GiB; `KEPT_BYTES` when it
    says nothing that can be understood."""
    match = re.fullmatch(
        r"(\d+(?:\.\d+)?) ?([KMGT]i?B?)?",
        environ.get("RALLYPOINT_KEPT_BYTES", "").strip(),
        re.IGNORECASE,
    )
    if match is None:
        return KEPT_BYTES
    return int(
        float(match[1]) * (1 << 10 * (1 + "KMGT".index(match[2][0].upper())) if match[2] else 1)
    )


def _went_well(path: str) -> bool:
    """Tell whether its job ended with status 0. What is not known counts as a failure: a launcher
    that was killed, for instance."""
    try:
        with open(os.path.join(path, "events.jsonl"), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            last = msgspec.json.decode(file.read().splitlines()[-1])
        return bool(last["what"] == "job-ended" and last["details"]["status"] == 0)
    except (OSError, IndexError, KeyError, TypeError, msgspec.DecodeError):
        return False


def _size(path: str) -> int:
    """Return bytes on the disk."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def discard(path: str) -> None:
    """Remove a run that is over and of no interest to anybody. `latest` goes back to the one before
    it."""
    shutil.rmtree(path, ignore_errors=True)
    root = os.path.dirname(path)
    with contextlib.suppress(OSError):  # there is none, or it is another's by now
        if os.readlink(os.path.join(root, "latest")) == os.path.basename(path):
            others = past_runs(root)
            if others:
                _point_latest(root, others[0].path)
            else:
                os.unlink(os.path.join(root, "latest"))


def _take(path: str) -> int:
    """Lock the folder and clear what an earlier run left in it."""
    names = [name for name in os.listdir(path) if OURS.fullmatch(name)]
    if names and names != ["running"] and not _has_plan_of_ours(path):
        raise UsageError(
            "run-folder-used",
            f"{os.path.join(path, names[0])} is there already and no run wrote it",
            help=(("name a folder that is empty or not there yet", "--run-dir DIR"),),
        )
    running, lock = os.path.join(path, "running"), -1
    if path not in _locked_here:
        lock = os.open(running, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if lock < 0 or not _lock(lock):
        if lock >= 0:
            os.close(lock)
        raise UsageError(
            "run-folder-in-use",
            f"the run folder {path} belongs to a job that is still running",
            help=(("name another folder for this run", "--run-dir DIR"),),
        )
    for name in names:
        if name != "running":
            os.unlink(os.path.join(path, name))
    os.ftruncate(lock, 0)  # what a launcher that was killed had said in it
    _locked_here.add(path)
    return lock


def _has_plan_of_ours(path: str) -> bool:
    try:
        with open(os.path.join(path, "plan.json"), "rb") as file:
            plan = msgspec.json.decode(file.read())
    except (OSError, msgspec.DecodeError):
        return False
    return isinstance(plan, dict) and "job" in plan


def _lock(fd: int) -> bool:
    """Take the record lock if nobody has it. On a file system without locks (ENOLCK) nobody can
    tell: taken as free."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def write_whole(path: str, text: bytes) -> None:
    """Write a private file whole or not at all. Raises OSError."""
    # a container that shares the folder has the same numbers
    temporary = f"{path}.{os.getpid()}-{secrets.token_hex(4)}.new"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _point_latest(root: str, path: str) -> None:
    """`latest` -> this run, replaced in one step. A file system without symbolic links goes without
    it."""
    link = os.path.join(root, "latest")
    temporary = f"{link}.{os.getpid()}"
    with contextlib.suppress(OSError):
        os.symlink(os.path.relpath(path, root), temporary)
        os.replace(temporary, link)
