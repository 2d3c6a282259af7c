"""Unix sockets that only this user reaches, in folders that do not outlive their process.

Each socket has a fresh folder (0700), because a path can be protected and an abstract name cannot.
The owner holds a record lock on a file in it: the kernel drops it with the process, whatever ends
that, and it means the same in every PID namespace that shares the folder (a pid would not). What
dead owners left is swept when the next socket is made.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import re
import socket
import stat
import struct
from typing import Any

from rallypoint.errors import EnvironmentProblem
from rallypoint.host.fd_passing import close_fds
from rallypoint.host.kernel_files import text_of

NOSIGNAL, CLOEXEC, TRUNCATED = (
    int(socket.MSG_NOSIGNAL),
    int(socket.MSG_CMSG_CLOEXEC),
    int(socket.MSG_CTRUNC),
)
"""Flags of the calls that send and receive, as plain numbers: an operator on the enum's members is
Python code of two microseconds, and was a tenth of a small request of the store."""

LONGEST_PATH = 107
"""Bytes of a socket's path: `sun_path` has 108, with the final zero (unix(7))."""

BACKLOG = 4096
"""Connections that may wait to be accepted: as many as ranks on a node, which may all come before
the server looks."""

_FOLDER = re.compile(r"rallypoint-[0-9a-f]{12}")
_LOCK = "lock"

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)

_MAPPED = bytes(10) + b"\xff\xff"
"""Beginning of an IPv4 address where a socket of IPv6 has it."""

_held: dict[str, tuple[int, int]] = {}
"""Folders of this process: the lock's descriptor, and the pid, which a forked child does not share.
Never looked at by a sweep: closing any descriptor of the lock file would drop the lock (fcntl(2)).
Entered before the folder is made: two threads may make one."""


def descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors that came beside bytes (SCM_RIGHTS)."""
    fds = array.array("i")
    for level, kind, raw in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
    return fds.tolist()


def private_socket(name: str) -> tuple[socket.socket, str]:
    """Return a listening stream socket named `name` in a folder of its own, and its path.
    `remove(path)` when it is no longer needed.

    The folder is made below XDG_RUNTIME_DIR, TMPDIR or /tmp, the first that will do.
    `EnvironmentProblem` ("socket-unavailable") when none does. The path is always text that can be
    written as UTF-8.
    """
    reasons = []
    for place, said in _places():
        _sweep(place)
        try:
            return _make(place, name)
        except OSError as error:
            reasons.append(f"{said}: {os.strerror(error.errno) if error.errno else error}")
    raise EnvironmentProblem(
        "socket-unavailable",
        "there is no folder here in which a Unix socket can be made",
        why=tuple(reasons),
        help=(("name a folder of your own with a short path", "export TMPDIR=/dev/shm"),),
    )


def listener_of(sock: socket.socket) -> int:
    """Return the pid that listened at the other end of a connected Unix socket; 0 for another
    kind, and when it cannot be seen from here."""
    if sock.family != socket.AF_UNIX:
        return 0
    try:
        return _credentials(sock)[0]
    except OSError:
        return 0


def is_same_user(sock: socket.socket) -> bool:
    """Tell whether the process at the other end of a connected Unix socket is this user's, or
    root's."""
    return uid_of(sock) in (0, os.geteuid())


def uid_of(sock: socket.socket) -> int:
    """Return the user at the other end of a connected Unix socket, -1 when it cannot be seen."""
    try:
        return _credentials(sock)[1]
    except OSError:
        return -1


def way_of(family: int, name: Any) -> str:
    """Name one end of a connection as both sides can tell it: "unix", or "tcp 192.0.2.1 29500".
    `name` is what `getpeername` returns on one side and `getsockname` on the other: the same,
    unless somebody in between passes the connection on."""
    if family == socket.AF_UNIX:
        return "unix"
    host, port = (
        str(name[0]).partition("%")[0],
        name[1],
    )  # a scope (fe80::1%eth0) is called differently on either side
    if family == socket.AF_INET6:
        packed = socket.inet_pton(socket.AF_INET6, host)
        if packed.startswith(_MAPPED):
            host = socket.inet_ntop(socket.AF_INET, packed[len(_MAPPED) :])
    return f"tcp {host} {port}"


def _credentials(sock: socket.socket) -> tuple[int, int]:
    """Return pid and uid of the other end (unix(7))."""
    pid, uid, _ = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return int(pid), int(uid)


def remove(path: str) -> None:
    """Remove a socket of `private_socket` and its folder; nothing when they are gone.

    The socket itself is not closed: others may hold it. Does nothing in a forked child of the
    process that made it.
    """
    folder = os.path.dirname(path)
    if _held.get(folder, (-1, os.getpid()))[1] == os.getpid():
        _release(folder)


def _release(folder: str) -> None:
    lock, _ = _held.pop(folder, (-1, 0))
    _delete(folder)
    close_fds(lock)


def _places() -> list[tuple[str, str]]:
    """Return where to try, and how to name it in an error."""
    found = []
    for name, place in (
        ("XDG_RUNTIME_DIR", os.environ.get("XDG_RUNTIME_DIR")),
        ("TMPDIR", os.environ.get("TMPDIR")),
    ):
        if place and os.path.isabs(
            place
        ):  # a relative one is to be ignored (XDG), and would mean something else elsewhere
            found.append((place, f"{name}={os.fsencode(place).decode('utf-8', 'replace')}"))
    return [*found, ("/tmp", "/tmp")]


def _make(place: str, name: str) -> tuple[socket.socket, str]:
    """OSError when this place will not do; then nothing of it is left."""
    folder = os.path.join(place, f"rallypoint-{'0' * 12}")
    path = os.path.join(folder, name)
    try:
        length = len(path.encode())
    except UnicodeEncodeError:
        raise OSError("its name is not UTF-8") from None
    if length > LONGEST_PATH:
        raise OSError(f"{path} has {length} bytes, and a socket's path at most {LONGEST_PATH}")
    folder = _claim(place)
    path = os.path.join(folder, name)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        _release(folder)
        raise
    return sock, path


def _claim(place: str) -> str:
    """Make a fresh folder and its lock. Another process's sweep may take it between two of these
    lines; then another is made."""
    # A sweep happens once in a process's start: two in a row that hit this are unheard of.
    for _ in range(100):
        folder = os.path.join(place, f"rallypoint-{os.urandom(6).hex()}")
        _held[folder] = (-1, os.getpid())
        try:
            os.mkdir(folder, 0o700)
        except BaseException:
            del _held[folder]
            raise
        try:
            os.chmod(folder, 0o700)  # the umask may have taken some of it
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            lock = os.open(os.path.join(folder, _LOCK), flags, 0o600)
            _held[folder] = (lock, os.getpid())
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink:
                os.write(lock, _machine())
                return folder
        except (FileNotFoundError, BlockingIOError):
            pass  # it is being swept
        except BaseException:
            _release(folder)
            raise
        _release(folder)
    raise OSError("other processes remove what is made there")


def _sweep(place: str) -> None:
    """Remove the folders of dead owners. What cannot be looked at is left alone."""
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if _FOLDER.fullmatch(entry.name) and entry.path not in _held:
                with contextlib.suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                        _remove_if_dead(entry.path)


def _remove_if_dead(folder: str) -> None:
    """OSError when its owner lives."""
    try:
        lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (
        FileNotFoundError
    ):  # it is being made, and its maker takes another; or the maker died then
        os.rmdir(folder)
        return
    try:
        if _is_here(os.read(lock, 1024)):  # else its lock may be one that only its own machine sees
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _delete(folder)
    finally:
        os.close(lock)


def _machine() -> bytes:
    """Name this machine: its name, and a number of this start of it, which containers share that
    have names of their own."""
    boot = text_of("/proc/sys/kernel/random/boot_id").strip() or "unknown"  # with subset=pid
    return os.fsencode(f"{os.uname().nodename}\n{boot}\n")


def _is_here(owner: bytes) -> bool:
    """Tell whether the owner of a folder runs, or ran, on this machine. A folder may be on a file
    system that several machines share without sharing its locks (NFS with local_lock, Lustre with
    localflock)."""
    ours, theirs = _machine().split(b"\n"), owner.split(b"\n")
    if theirs == [b""]:  # its maker died, or was swept, before it could write this
        return True
    return theirs[0] == ours[0] or (theirs[1:2] == ours[1:2] and ours[1] != b"unknown")


def _delete(folder: str) -> None:
    """Delete the sockets first: while the lock file is there, somebody else can finish what was
    begun. Other files, and their folder, stay."""
    with contextlib.suppress(OSError):  # it is gone, or holds something that is not ours
        for name in sorted(os.listdir(folder), key=lambda name: name == _LOCK):
            path = os.path.join(folder, name)
            if name == _LOCK or stat.S_ISSOCK(os.lstat(path).st_mode):
                os.unlink(path)
        os.rmdir(folder)
