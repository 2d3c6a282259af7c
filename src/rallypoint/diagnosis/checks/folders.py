"""The folders that a job writes to: its run folder, the temporary one, the one for sockets."""

from __future__ import annotations

import errno
import os
import shlex
import tempfile
from collections.abc import Mapping
from typing import NamedTuple

from rallypoint.diagnosis.checks.finding import Finding, fault, note, ok, size
from rallypoint.errors import EnvironmentProblem
from rallypoint.host import sockets
from rallypoint.record.run_folder import default_root

ROOM = 256 << 20
"""Bytes: logs of a talkative job for a day. Checkpoints need their own, in folders that only the program knows."""

FEW_FILES = 1000
"""Files that may still be made: a run folder has some ten, and the temporary folder of a busy job some hundred."""

PROBE_BYTES = 4096
"""Written for real: on a full disk, or over a quota, a file can still be made and not be filled."""


SOCKET = "doctor.sock"
"""The name of the socket that is made: longer than those of the stores and launchers."""


_FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT)))


class Folder(NamedTuple):
    """One folder."""

    use: str  # "run folders"
    path: str
    problem: str = ""  # why nothing can be written there, in the system's words
    free: int = 0  # bytes
    files: int = -1  # that may still be made; -1: as many as there is room for


class PassedOver(NamedTuple):
    """A folder that a variable names, and that will not do."""

    variable: str
    path: str
    problem: str


class Facts(NamedTuple):
    """The folders, and whether a Unix socket can be made."""

    folders: tuple[Folder, ...]
    sockets: str = ""  # the folder of the socket that was made
    no_sockets: tuple[str, ...] = ()  # why none could be: a line for each place
    passed_over: tuple[PassedOver, ...] = ()


def check() -> tuple[Finding, ...]:
    return judge(look(os.environ))


def look(environ: Mapping[str, str]) -> Facts:
    folders = (_look_at("run folders", default_root(environ)), _temporary())
    named = [_passed_over(name, path) for name in ("XDG_RUNTIME_DIR", "TMPDIR") if (path := environ.get(name))]
    passed_over = tuple(one for one in named if one is not None)
    try:
        sock, path = sockets.private_socket(SOCKET)
    except EnvironmentProblem as problem:
        return Facts(folders, no_sockets=problem.why, passed_over=passed_over)
    sock.close()
    sockets.remove(path)
    return Facts(folders, os.path.dirname(os.path.dirname(path)), passed_over=passed_over)


def _temporary() -> Folder:
    """Where Python, and what goes by its rules, puts temporary files."""
    try:
        return _look_at("temporary files", tempfile.gettempdir())
    except FileNotFoundError as error:  # not even the working directory would do
        return Folder("temporary files", "/tmp", error.strerror or str(error))


def _passed_over(name: str, path: str) -> PassedOver | None:
    """Why a folder that a variable names is not used: nobody says so, and what was to be there is somewhere else."""
    longest = os.path.join(os.path.abspath(path), f"rallypoint-{'0' * 12}", SOCKET)
    if not os.path.isdir(path):
        return PassedOver(name, path, os.strerror(errno.ENOTDIR if os.path.lexists(path) else errno.ENOENT))
    if problem := _look_at(name, path).problem:
        return PassedOver(name, path, problem)
    if len(os.fsencode(longest)) > sockets.LONGEST_PATH:
        size = len(os.fsencode(longest))
        return PassedOver(
            name, path, f"a Unix socket's path in it would have {size} bytes, and at most {sockets.LONGEST_PATH} are possible"
        )
    return None


def _look_at(use: str, path: str) -> Folder:
    """Write a file there, or in the nearest folder above that exists, which is where it would be made; nothing is left."""
    there = path
    while not os.path.isdir(there) and not os.path.lexists(there) and there != os.path.dirname(there):
        there = os.path.dirname(there)
    try:
        with tempfile.TemporaryFile(dir=there, prefix="rallypoint-doctor-") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())  # NFS and quotas say it only now
        found = os.statvfs(there)
    except OSError as error:
        return Folder(use, path, os.strerror(error.errno or 0))
    return Folder(use, path, "", found.f_bavail * found.f_frsize, found.f_favail if found.f_files else -1)


def judge(facts: Facts) -> tuple[Finding, ...]:
    found = [finding for folder in facts.folders for finding in _judge(folder)]
    for one in facts.passed_over:
        if "a Unix socket" in one.problem:
            help = ("name one with a shorter path", f"export {one.variable}=DIR")
        elif one.problem in _FULL:
            help = ("make room there, or name another", f"df -h {shlex.quote(one.path)}; df -i {shlex.quote(one.path)}")
        elif os.path.isdir(one.path):
            help = ("name one that this user may write to", f"export {one.variable}=DIR")
        else:
            help = ("make it, or name another", f"mkdir -p {shlex.quote(one.path)}")
        found.append(note("folder-unusable", f"{one.variable}={one.path} cannot be used and is passed over: {one.problem}", help))
    if facts.no_sockets:
        found.append(
            fault(
                "socket-unavailable",
                "there is no folder here in which a Unix socket can be made",
                ("name a folder of your own with a short path", "export TMPDIR=/dev/shm"),
                why=facts.no_sockets,
            )
        )
    if found:
        return tuple(found)
    listed = "; ".join(f"{folder.use} in {folder.path} ({size(folder.free)} free)" for folder in facts.folders)
    return (ok(f"{listed}; sockets in {facts.sockets}"),)


def _judge(folder: Folder) -> list[Finding]:
    run = folder.use == "run folders"
    name = "--run-dir DIR" if run else "export TMPDIR=DIR"
    if folder.problem and run:  # a job goes on without a record
        full = folder.problem in _FULL
        mend = "make room there" if full else "let this user write there"
        help = ((f"{mend}, or keep them elsewhere", "export XDG_STATE_HOME=DIR"), ("or name a folder for one run", name))
        return [note("run-folder-unwritable", f"{folder.use} cannot be written, {folder.path}: {folder.problem}", *help)]
    if folder.problem:
        fill = (("see what fills it", f"df -h {shlex.quote(folder.path)}; df -i {shlex.quote(folder.path)}"),) * (folder.problem in _FULL)
        another = ("or name another folder" if fill else "name another folder", name)
        return [fault("folder-unusable", f"{folder.use} cannot be written, {folder.path}: {folder.problem}", *fill, another)]
    if folder.free < ROOM or 0 <= folder.files < FEW_FILES:
        left = f"{size(folder.free)} are free" if folder.free < ROOM else f"{folder.files} more files can be made"
        help = (
            ("see what fills it", f"df -h {shlex.quote(folder.path)}; df -i {shlex.quote(folder.path)}"),
            ("or name another folder", name),
        )
        return [note("folder-unusable", f"{folder.use} in {folder.path}: {left}", *help)]
    return []
