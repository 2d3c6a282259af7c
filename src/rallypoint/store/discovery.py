"""The store of the job that this process belongs to: its address, and the secret without which
nobody gets in.

A rank is told by the launcher (`enter`), with the secret as a descriptor that its forks inherit and
that no other program gets. Elsewhere RALLYPOINT_STORE and RALLYPOINT_SECRET_FILE say it. The secret
itself is kept nowhere: it is read when it is needed.
"""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING

from rallypoint.errors import Advice, EnvironmentProblem, UsageError
from rallypoint.host.fd_passing import file_behind

if TYPE_CHECKING:
    from rallypoint.wire.messages import Identity

SHORTEST_SECRET = 16
"""Bytes: 128 bits, when they are random, are beyond guessing; whatever is shorter was made up by a
person.
"""

SECRET_BYTES = 32
"""Bytes of a secret that is made here: as long as the SHA-256 that is keyed with it. More adds
nothing."""

SECRET_FILE_BYTES = 4096
"""The largest file that is taken for a secret: many times any key, and no data set that was named
by mistake.
"""


class Place:
    """A store's address, the job it belongs to ("" when that is not known), and the rank of this
    process there."""

    def __init__(self, address: str, job: str, rank: int | None, read: Callable[[], bytes]) -> None:
        self.address = address
        self.job = job
        self.rank = rank
        self._read = read

    def __repr__(self) -> str:
        return f"<Place {self.address}{f' of job {self.job}' if self.job else ''}{f': rank {self.rank}' if self.rank is not None else ''}>"

    @property
    def identity(self) -> Identity:
        """Identity of this process: a fork of a rank has the rank's number and its own pid."""
        from rallypoint.wire.messages import Identity

        return Identity(os.uname().nodename, os.getpid(), self.rank)

    def secret(self) -> bytes:
        """Read the secret anew. `EnvironmentProblem` ("secret-unreadable"), `UsageError`
        ("secret-too-short")."""
        return self._read()


_place: Place | None = None
_without = ""  # why the job of this process has no store


def enter(address: str, secret_fd: int, job: str, rank: int) -> None:
    """Note that this process is a rank of a job with this store. The descriptor stays open for as
    long as the process lives."""
    global _place, _without
    _place, _without = Place(address, job, rank, _Descriptor(secret_fd).read), ""


def enter_without(why: str) -> None:
    """Note that this process is a rank of a job that has no store. The next `no_store` says why."""
    global _place, _without
    _place, _without = None, why


def current() -> Place | None:
    """Return the store of this process's job, else the one that RALLYPOINT_STORE and
    RALLYPOINT_SECRET_FILE name, else None (see `no_store`).

    The secret is not looked at before `Place.secret()`.
    """
    if _place is not None:
        return _place
    address, path = os.environ.get("RALLYPOINT_STORE"), os.environ.get("RALLYPOINT_SECRET_FILE")
    if not address or not path:
        return None
    return Place(
        address, os.environ.get("RALLYPOINT_JOB", ""), None, lambda: _from_environment(path)
    )


def exported_address() -> str:
    """Return the address in RALLYPOINT_STORE, "" without one. `UsageError` ("address-malformed"),
    which names the variable, when it is none."""
    import shlex

    from rallypoint.store.address import parse

    address = os.environ.get("RALLYPOINT_STORE", "")
    try:
        if address:
            parse(address)
    except UsageError as error:
        help = tuple(
            (sentence, f"export RALLYPOINT_STORE={shlex.quote(right)}")
            for sentence, right in error.help
        )
        raise UsageError(error.code, f"RALLYPOINT_STORE={error.headline}", help=help) from None
    return address


def _from_environment(path: str) -> bytes:
    """Read the secret for a store that the environment names; an error about either variable names
    it."""
    exported_address()
    return secret_from_file(path, f"RALLYPOINT_SECRET_FILE={path}")


def no_store() -> UsageError:
    """Make the error for a process in which `current()` is None: what is missing here, and what to
    do about it."""
    if _without:
        return UsageError("no-store", "this job has no store", why=(_without,), help=(_OWN_STORE,))
    if address := os.environ.get("RALLYPOINT_STORE"):
        if not os.environ.get("RALLYPOINT_JOB"):
            return UsageError(
                "secret-missing",
                f"the store that RALLYPOINT_STORE names, {address}, cannot be joined without its secret",
                help=(
                    (
                        "name the file with its secret, as `rallypoint serve` prints it",
                        "export RALLYPOINT_SECRET_FILE=...",
                    ),
                    ("or give both", "rallypoint.connect(address, secret_file=...)"),
                ),
            )
        return UsageError(
            "no-store",
            "this process has no secret for the store that RALLYPOINT_STORE names",
            why=(
                "a job's secret is handed to its ranks, and what they fork has it; a new program (spawn, subprocess) has not",
            ),
            help=(
                (
                    "pass the store object itself: it connects where it arrives",
                    "multiprocessing.Process(target=work, args=(store,))",
                ),
                (
                    "for a store that you have started yourself, name the file with its secret",
                    "export RALLYPOINT_SECRET_FILE=...",
                ),
            ),
        )
    if os.environ.get("RALLYPOINT_JOB"):
        return UsageError(
            "no-store",
            "this process of a job has no store",
            why=(
                "a job's store is for the ranks that are Python programs, and for what they fork: not for a program of --no-python",
            ),
            help=(("start a Python program as one", "rallypoint run script.py"), _OWN_STORE),
        )
    if os.environ.get("RALLYPOINT_SECRET_FILE"):
        return UsageError(
            "no-store",
            "there is no store to connect to: RALLYPOINT_SECRET_FILE is set, and RALLYPOINT_STORE is not",
            help=(
                (
                    "name its address as well, as `rallypoint serve` prints it",
                    "export RALLYPOINT_STORE=tcp://HOST:PORT",
                ),
            ),
        )
    return UsageError(
        "no-store",
        "there is no store to connect to: this process belongs to no job, and RALLYPOINT_STORE is not set",
        help=(("run the program as a job", "rallypoint run script.py"), _OWN_STORE),
    )


_OWN_STORE = (
    "start a store, and give its address and secret",
    "with rallypoint.serve() as server:\n    store = rallypoint.connect(server.address, secret=server.secret)",
)


class _Descriptor:
    """A secret in an open file; knows it again, since a program that closes every descriptor may
    have given the number away.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._file = fd, file_behind(fd)

    def read(self) -> bytes:
        if file_behind(self._fd) == self._file:
            return checked_secret(os.pread(self._fd, SECRET_FILE_BYTES, 0))
        raise EnvironmentProblem(
            "secret-unreadable",
            "the job's secret cannot be read any more: this program has closed the descriptor that rallypoint gave it",
            why=(
                f"descriptor {self._fd}, close-on-exec, is not the file that it was at the start",
            ),
            help=(
                (
                    "connect before all descriptors are closed, and use that store",
                    "store = rallypoint.connect()",
                ),
            ),
        )


def secret_from_file(path: str, shown: str = "") -> bytes:
    """Read the secret in a file. `shown`: how errors name the file, if not by its path.

    `EnvironmentProblem` ("secret-unreadable") when it cannot be read, when it is another user's
    than ours or root's, or when others than its owner may read or change it (the group may read a
    file of root's on a disk that is mounted read-only: a container's secret); `UsageError`
    ("secret-too-short").
    """
    shown = shown or path
    try:
        fd = os.open(
            path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        )  # a pipe without a writer must not hold us up
    except OSError as error:
        import shlex

        missing = isinstance(error, FileNotFoundError)
        make, folder = _MAKE.format(shlex.quote(path)), os.path.dirname(path)
        help = (("copy it from the machine that has it; if none has, make it", make),)
        why = os.strerror(error.errno or 0)
        if missing and os.path.basename(folder).startswith(SERVE_FOLDER_PREFIX):
            why = "no such file on this machine: the `rallypoint serve` that wrote it has ended, or runs elsewhere"
            help = (
                (
                    "start it again, and export what it prints; or copy the file from its machine",
                    "rallypoint serve",
                ),
            )
        elif missing and folder and not os.path.isdir(folder):
            help = ((help[0][0], f"mkdir -p {shlex.quote(folder)} && {make}"),)
        raise _unreadable(shown, why, help if missing else ()) from error
    try:
        found = os.fstat(fd)
        content = os.read(fd, SECRET_FILE_BYTES) if stat.S_ISREG(found.st_mode) else b""
        # root's, and nobody can change it here: the mounted secret of a container, which a process
        # that is not root reads as one of the file's group
        mounted = found.st_uid == 0 and bool(os.fstatvfs(fd).f_flag & os.ST_RDONLY)
        _check_file(path, shown, found, content, mounted=mounted)
    except OSError as error:
        raise _unreadable(shown, os.strerror(error.errno or 0)) from error
    finally:
        os.close(fd)
    return checked_secret(content, f"the secret in {shown}")


SERVE_FOLDER_PREFIX = "rallypoint-serve-"
"""First part of the name of the folder in which `rallypoint serve` keeps a secret of its own, for as
long as it runs."""

_MAKE = "(umask 077 && head -c 32 /dev/urandom | base64 > {})"
"""Command that makes a file with a secret."""

_MAKE_ONE = ("make one of your own, and name that", _MAKE.format("my-secret"))


_MOUNTED = (
    (
        "it is mounted, and read-only: in the manifest of a pod, give its volume another mode",
        "defaultMode: 0400",
    ),
)


def _private(path: str, content: bytes) -> Advice:
    """Make the help for a file that others may use. One that does not look like a secret may be one
    that others need: nobody may be led to type `chmod 600 /etc/passwd`."""
    if len(content.splitlines()) <= 1:
        return ("keep it to yourself", f"chmod 600 {path}"), (
            "and make a new secret, if somebody may have read this one",
            "",
        )
    return (
        (
            "it has several lines, as no secret has: make one of your own, and name that",
            _MAKE_ONE[1],
        ),
    )


def _check_file(
    path: str, shown: str, found: os.stat_result, content: bytes, *, mounted: bool
) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise _unreadable(shown, "it is not a regular file")
    if found.st_uid not in (0, os.geteuid()):  # its owner can read it, and change it at any time
        raise _unreadable(
            shown, f"it belongs to another user (uid {found.st_uid})", help=(_MAKE_ONE,)
        )
    if found.st_mode & (0o037 if mounted else 0o077):
        raise _unreadable(
            shown,
            f"its mode is {stat.S_IMODE(found.st_mode):04o}: others than its owner may use it",
            help=_MOUNTED if mounted else _private(path, content),
        )
    if found.st_size > SECRET_FILE_BYTES:
        raise _unreadable(
            shown, f"{found.st_size} bytes are no secret; at most {SECRET_FILE_BYTES} are read"
        )


def _unreadable(shown: str, why: str, help: Advice = ()) -> EnvironmentProblem:
    return EnvironmentProblem(
        "secret-unreadable", f"the secret in {shown} cannot be used: {why}", help=help
    )


def needed_secret(path: str, missing: str, why: str, command: str, help: Advice = ()) -> bytes:
    """Read the secret that several machines share. `path` is "" when none was named: raises
    UsageError `secret-missing` with this headline and reason, and `help`, or else `command` to name
    one with."""
    if path:
        return secret_from_file(path)
    make = _MAKE.format("~/rallypoint-secret")
    raise UsageError(
        "secret-missing",
        missing,
        why=(why,),
        help=help
        or (
            ("make one, once, where all nodes can read it", make),
            ("and name it on every node", f"{command} --secret-file ~/rallypoint-secret"),
        ),
    )


def derived(secret: bytes, purpose: str) -> bytes:
    """Return the secret of one purpose: HMAC-SHA256 under the one that a file has. In digits, which
    `checked_secret` leaves as they are: of random bytes one in 128 has a line break at its end.
    """
    return hmac.digest(secret, purpose.encode(), "sha256").hex().encode()


def new_secret() -> bytes:
    """Return random bytes that `checked_secret` leaves as they are: a client may get them by a
    file."""
    while True:
        made = os.urandom(SECRET_BYTES)
        if checked_secret(made) == made:
            return made


def checked_secret(secret: bytes | str, name: str = "the secret") -> bytes:
    """Return a secret as bytes (text as UTF-8), without line breaks at its end: it may have come
    from a file that an editor wrote. All of them go, not one, so that a secret which has been here
    once stays what it is.

    TypeError for anything but bytes and text, `UsageError` ("secret-too-short") below 16 bytes; the
    secret itself is never shown.
    """
    if not isinstance(
        secret, (bytes, bytearray, memoryview, str)
    ):  # bytes(n) would be n zeros, which anybody can guess
        raise TypeError(f"a secret is bytes or str, not {type(secret).__name__}")
    data = (secret.encode() if isinstance(secret, str) else bytes(secret)).rstrip(b"\r\n")
    if len(data) < SHORTEST_SECRET:
        raise UsageError(
            "secret-too-short",
            f"{name} has {len(data)} bytes, and at least {SHORTEST_SECRET} are needed",
            help=(("make one that cannot be guessed", _MAKE.format("secret")),),
        )
    return data
