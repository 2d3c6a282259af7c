"""The file in which a server says at which port it listens."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat

from rallypoint.errors import UsageError


class PortFile:
    """File that holds the port while the server lives. A reader finds nothing, or all of it.

    What is there already is replaced only when it is what a server has left behind: a regular file
    with a port in it.
    """

    def __init__(self, path: str) -> None:
        """`UsageError` for a file that is not ours to replace; nothing is written yet."""
        self._path = path
        self._text = b""
        self._check()

    def write(self, port: str) -> None:
        self._check()  # once more: it may have come since
        self._text = f"{port}\n".encode("ascii")
        beside = f"{self._path}.{secrets.token_hex(4)}"
        try:
            with open(beside, "xb") as file:
                file.write(self._text)
            os.replace(beside, self._path)
        except OSError as error:
            with contextlib.suppress(OSError):  # the first error is told
                os.unlink(beside)
            raise self._unwritable(error) from error

    def remove(self) -> None:
        """Remove the file if it still is the one that was written: another server may have put its
        own in its place.
        """
        with contextlib.suppress(OSError, UsageError):  # it is not there, or no longer ours
            if self._text and self._check() == self._text:
                os.unlink(self._path)

    def _check(self) -> bytes:
        """Return what is in the file, b"" when it is not there. `UsageError` for no port."""
        try:
            if not stat.S_ISREG(os.lstat(self._path).st_mode):
                raise self._refused("is no regular file, and is not replaced by one with the port")
            with open(self._path, "rb") as file:
                content = file.read(64)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise self._unwritable(error) from error
        if not re.fullmatch(rb"[0-9]{1,5}\n?", content):
            raise self._refused("holds something else than a port, and is not replaced")
        return content

    def _refused(self, why: str) -> UsageError:
        help = (("name another file", "--port-file F"),)
        return UsageError("usage", f"{self._path} {why}", help=help)

    def _unwritable(self, error: OSError) -> UsageError:
        return self._refused(f"cannot be written: {os.strerror(error.errno or 0)}")
