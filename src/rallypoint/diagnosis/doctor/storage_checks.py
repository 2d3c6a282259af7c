"""Checks of /dev/shm and of the folders that a job writes to: run folder, temporary files,
sockets."""

from __future__ import annotations

import errno
import os
import re
import shlex
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from rallypoint.diagnosis.doctor.finding import Finding, fault, note, ok
from rallypoint.errors import EnvironmentProblem
from rallypoint.host import unix_sockets
from rallypoint.record.run_folder import default_root
from rallypoint.units import size

SHM = "/dev/shm"
"""Folder through which DataLoader workers pass batches, and NCCL what it says between GPUs."""

SHM_SMALL = 1 << 30
"""Bytes: eight loader workers with two batches of 64 MiB each. Containers have 64 MiB by
default."""

SHM_TOO_LITTLE = 32 << 20
"""Bytes: with less not even NCCL's segments for two GPUs, or one batch of images, fit."""

ROOM = 256 << 20
"""Bytes: logs of a talkative job for a day. Only the program knows where its checkpoints go."""

FEW_INODES = 1000
"""Files that may still be made: a run folder has ten, the temporary folder of a busy job some
hundred."""

PROBE_BYTES = 4096
"""Bytes written for real: on a full disk, or over a quota, a file can still be made and not be
filled."""

SOCKET = "doctor.sock"
"""Name of the socket that is made: longer than those of the stores and launchers."""

_FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT)))


class Shm(NamedTuple):
    """State of /dev/shm. Bytes."""

    problem: str = ""  # why it cannot be used, in the system's words; "" when it can
    total: int = 0
    free: int = 0
    left: int = 0  # files of torch whose process has ended
    left_bytes: int = 0


def shm() -> list[Finding]:
    """Check /dev/shm."""
    return [judge_shm(look_at_shm())]


def look_at_shm(place: str = SHM) -> Shm:
    try:
        found = os.statvfs(place)
        # Not the mode: a read-only mount, and a user who is not its owner, must be told as well.
        os.close(os.open(place, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError as error:
        return Shm(os.strerror(error.errno or 0))
    left = []
    for name in os.listdir(place):
        named = re.fullmatch(r"torch_(\d+)_.+", name)  # torch_<pid>_<random>
        if named and not os.path.exists(f"/proc/{named[1]}"):
            with suppress(OSError):  # removed meanwhile
                left.append(os.lstat(os.path.join(place, name)).st_blocks * 512)
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return Shm("", total, free, len(left), sum(left))


def judge_shm(shm: Shm) -> Finding:
    if shm.problem:
        return fault(
            "shm-small",
            f"{SHM} cannot be used: {shm.problem}",
            ("mount it", f"sudo mount -t tmpfs -o size=8g,mode=1777 tmpfs {SHM}"),
            ("in a container, give it one", "docker run --shm-size=8g"),
        )
    shown = f"{SHM} has {size(shm.total)}, {size(shm.free)} of it free"
    if shm.free >= SHM_SMALL:
        return ok(shown)
    why: list[str] = []
    help = [
        ("give the container more", "docker run --shm-size=8g"),
        ("or, as root", f"mount -o remount,size=8g {SHM}"),
    ]
    if shm.left_bytes:
        why.append(
            f"{shm.left} segments of torch's, {size(shm.left_bytes)}, are named after processes that are not here"
        )
        remove = "look at what processes that are gone have left, and remove it"
        help.insert(0, (remove, f"ls -l {SHM}/torch_*"))
    if shm.free < SHM_TOO_LITTLE:
        return fault("shm-small", shown, *help, why=tuple(why))
    why.append(
        "DataLoader workers die of SIGBUS, or raise No space left on device, when it is full"
    )
    return note("shm-small", shown, *help, why=tuple(why))


class Folder(NamedTuple):
    """State of one folder."""

    use: str  # "run folders" or "temporary files"
    path: str
    problem: str = ""  # why nothing can be written there, in the system's words
    free: int = 0  # bytes
    inodes: int = -1  # files that may still be made; -1: as many as there is room for


def folders() -> list[Finding]:
    """Check the folders that a job writes to, and that a Unix socket can be made."""
    used = look_at_folders(os.environ)
    named = os.environ.get("TMPDIR", "")
    unusable = named if named and not os.access(named, os.W_OK | os.X_OK) else ""
    try:
        sock, path = unix_sockets.private_socket(SOCKET)
    except EnvironmentProblem as problem:
        return judge_folders(used, "", problem.why, unusable)
    sock.close()
    unix_sockets.remove(path)
    return judge_folders(used, os.path.dirname(os.path.dirname(path)), passed_over=unusable)


def look_at_folders(environ: Mapping[str, str]) -> list[Folder]:
    try:
        temporary = look_at_folder("temporary files", tempfile.gettempdir())
    except FileNotFoundError as error:  # not even the working directory can be written
        temporary = Folder("temporary files", "/tmp", error.strerror or str(error))
    return [look_at_folder("run folders", default_root(environ)), temporary]


def look_at_folder(use: str, path: str) -> Folder:
    """Write a file there, or in the nearest folder above that exists, which is where it would be
    made; nothing is left."""
    there = path
    while not os.path.lexists(there) and there != os.path.dirname(there):
        there = os.path.dirname(there)
    try:
        with tempfile.TemporaryFile(dir=there, prefix="rallypoint-doctor-") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())  # NFS and quotas say it only now
        found = os.statvfs(there)
    except OSError as error:
        return Folder(use, path, os.strerror(error.errno or 0))
    inodes = found.f_favail if found.f_files else -1
    return Folder(use, path, "", found.f_bavail * found.f_frsize, inodes)


def judge_folders(
    used: list[Folder],
    sockets: str = "",
    no_sockets: tuple[str, ...] = (),
    passed_over: str = "",
) -> list[Finding]:
    """`sockets`: the folder in which a socket was made; `no_sockets`: why none could be, a line for
    each place; `passed_over`: the folder that TMPDIR names, if nothing can be written there."""
    found = [finding for folder in used for finding in _judge_folder(folder)]
    if passed_over:
        reason = os.strerror(errno.EACCES if os.path.exists(passed_over) else errno.ENOENT)
        help = ("make it, or name another", f"mkdir -p {shlex.quote(passed_over)}")
        fact = f"TMPDIR={passed_over} cannot be used and is passed over: {reason}"
        found.append(note("folder-unusable", fact, help))
    if no_sockets:
        found.append(
            fault(
                "socket-unavailable",
                "there is no folder here in which a Unix socket can be made",
                ("name a folder of your own with a short path", "export TMPDIR=/dev/shm"),
                why=no_sockets,
            )
        )
    listed = "; ".join(
        f"{folder.use} in {folder.path} ({size(folder.free)} free)" for folder in used
    )
    return found or [ok(f"{listed}; sockets in {sockets}")]


def _judge_folder(folder: Folder) -> list[Finding]:
    path = shlex.quote(folder.path)
    full = ("see what fills it", f"df -h {path}; df -i {path}")
    is_run = folder.use == "run folders"
    other = ("or name another folder", "--run-dir DIR" if is_run else "export TMPDIR=DIR")
    is_full = folder.problem in _FULL
    if folder.problem:
        fact = f"{folder.use} cannot be written, {folder.path}: {folder.problem}"
        if is_run:  # a job goes on without a record
            mend = "make room there" if is_full else "let this user write there"
            keep = (f"{mend}, or keep them elsewhere", "export XDG_STATE_HOME=DIR")
            return [note("run-folder-unwritable", fact, keep, other)]
        return [fault("folder-unusable", fact, *([full] if is_full else []), other)]
    left = f"{size(folder.free)} are free" if folder.free < ROOM else ""
    if 0 <= folder.inodes < FEW_INODES:
        left = left or f"{folder.inodes} more files can be made"
    if not left:
        return []
    return [note("folder-unusable", f"{folder.use} in {folder.path}: {left}", full, other)]
