"""The file in which a server says at which port it listens."""

from __future__ import annotations

import contextlib
import os
import re
import stat

from rallypoint.errors import UsageError


class PortFile:
    """The file that holds the port while the server lives. Whoever waits for it finds nothing, or
    all of it.

    What is there already is replaced only when it is what a server has left behind: a regular file
    with a port in it.
    """

    def __init__(self, path: str) -> None:
        """`UsageError` for a file that is not ours to replace; nothing is written yet."""
        self._path = path
        self._fd = -1  # kept open, so that no other file gets the number of ours
        self._text = b""
        self._check()

    def write(self, port: str) -> None:
        import secrets

        self._check()  # once more: it may have come since
        self._text = f"{port}\n".encode("ascii")
        beside = f"{self._path}.{secrets.token_hex(4)}"
        made = False
        try:
            self._fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            made = True
            os.write(self._fd, self._text)
            os.replace(beside, self._path)
        except OSError as error:
            if made:
                with contextlib.suppress(OSError):  # the first error is told
                    os.unlink(beside)
            self._close()
            raise self._refused(
                f"the port cannot be written to {self._path}: {os.strerror(error.errno or 0)}"
            ) from error

    def remove(self) -> None:
        """Remove the file if it still is the one that was written: another server may have put its
        own in its place.
        """
        if self._fd < 0:
            return
        try:
            ours, there = os.fstat(self._fd), os.lstat(self._path)
            if (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino) and os.pread(
                self._fd, 64, 0
            ) == self._text:
                os.unlink(self._path)
        except OSError:  # it is not there, or no longer ours to remove
            pass
        self._close()

    def _check(self) -> None:
        try:
            if not stat.S_ISREG(os.lstat(self._path).st_mode):
                raise self._refused(
                    f"{self._path} is no regular file, and is not replaced by one with the port"
                )
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                content = os.read(fd, 64)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._refused(
                f"the port cannot be written to {self._path}: {os.strerror(error.errno or 0)}"
            ) from error
        if not re.fullmatch(rb"[0-9]{1,5}\n?", content):
            raise self._refused(
                f"{self._path} holds something else than a port, and is not replaced"
            )

    def _refused(self, headline: str) -> UsageError:
        return UsageError("usage", headline, help=(("name another file", "--port-file F"),))

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
