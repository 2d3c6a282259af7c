"""Files that are written for as long as that works, and written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shlex
import stat
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from rallypoint.errors import Advice

WHOLE, CUT = 0o600, 0o400
"""Modes of a kept file. One that was given up is made read-only: the only mark that a full disk has
room for."""


def reason_of(error: OSError) -> str:
    """Return the system's words. A file where a folder should be is "File exists" to mkdir; it is
    said as what it is."""
    number = errno.ENOTDIR if error.errno == errno.EEXIST else error.errno
    return os.strerror(number) if number else str(error)


def at_once(path: str, flags: int) -> int:
    """Open a kept file, for `open`. A pipe with its name is empty, and keeps no reader waiting."""
    return os.open(path, flags | os.O_NONBLOCK)


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
