"""Runs that there are in a folder of runs: which go on, where their launchers can be asked, and
which are removed to make room for others.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import shutil
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from rallypoint.host.kernel_files import text_of
from rallypoint.record.disk_writer import DiskWriter
from rallypoint.record.kept_file import at_once

KEPT_RUNS = 20
"""Runs kept in the default folder: an afternoon of trying things; at a few megabytes of log each, a
small place."""

KEPT_BYTES = 1 << 30
"""Bytes that all kept runs together may take in the default folder: it is in a home, which may have
a quota of a few gigabytes."""

RECENT_RUNS = 5
"""The last runs, which are kept whether they failed or not. Of older ones those that failed are
kept longer: somebody may still ask why."""

NODE = re.compile(r"node\d+")
"""Names of the run folders in the folder of a job on several nodes."""

LINK_TIMEOUT = 1.0
"""Seconds for the disk of a run that is listed elsewhere to say whether it goes on. Somebody waits
for the list."""

_FLOCK = struct.Struct("@hhqqi")
"""struct flock of fcntl(2): type, whence, start, length, pid."""

locked_here: set[str] = set()
"""Folders that this process has locked: a record lock does not keep its own process out, and
closing any descriptor of the file would drop it (fcntl(2)), so these are never looked at."""


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


def job_folder(path: str) -> str:
    """Return the folder of the job of a run folder: of one of several nodes the one above it."""
    above, name = os.path.split(path)
    return above if NODE.fullmatch(name) else path


def root_of(path: str) -> str:
    """Return the folder of runs in which this run folder is."""
    return os.path.dirname(job_folder(path))


def name_of(path: str) -> str:
    """Return the name by which commands find a run folder: of one of several nodes `<job>/node1`."""
    return os.path.relpath(path, root_of(path))


def past_runs(root: str) -> list[PastRun]:
    """Return the runs in a folder of runs, newest first; one for each node where a job had several.
    What is not a run of ours is not listed."""
    runs = []
    for name in _names(root):
        path = os.path.join(root, name)
        job, started = job_in(path)
        if isinstance(job, str) and (
            name in (job, os.path.join(job, os.path.basename(name))) or name.startswith(f"{job}-")
        ):
            runs.append(PastRun(name, path, started, is_running(path)))
    return sorted(runs, key=lambda run: (run.started, run.job), reverse=True)


def job_in(path: str) -> tuple[object, float]:
    """Return the name of a run folder's job, and when its plan was written; None where there is no
    plan of ours."""
    try:
        with open(os.path.join(path, "plan.json"), "rb", opener=at_once) as file:
            plan = msgspec.json.decode(file.read() or b"")
            return plan.get("job"), os.fstat(file.fileno()).st_mtime
    except (OSError, AttributeError, msgspec.DecodeError):
        return None, 0.0


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
    if path in locked_here:
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


def elsewhere_of(root: str) -> str:
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
    with contextlib.suppress(OSError), os.scandir(elsewhere_of(root)) as links:
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
    if path in locked_here:
        return None
    try:
        return msgspec.json.decode(text_of(path, "running"), type=LauncherAddress)
    except msgspec.DecodeError:  # of nothing, too
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
        with open(os.path.join(path, "events.jsonl"), "rb", opener=at_once) as file:
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
