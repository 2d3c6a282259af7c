"""A log's bytes, from wherever it lies: a file, a compressed file, a pipe. The only part of this
folder that touches anything.
"""

from __future__ import annotations

import importlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import IO

from rallypoint.diagnosis.logs.line_filter import is_text
from rallypoint.errors import UsageError

CHUNK = 1 << 20
"""Bytes at a time. Smaller ones cost a call each, larger ones only memory: the search is as fast in
1 MiB as in 16.
"""

MOST_FOLDERS = 1_000
"""Folders in which logs are looked for when a folder was given: half a second's work."""

_LISTED = 4  # logs of a folder that are named when the folder itself was given
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ": "lzma"}
"""Python's modules for compressed files, by their first bytes."""

_FOREIGN = {b"\x28\xb5\x2f\xfd": "zstd -dc", b"PK\x03\x04": "unzip -p"}
"""Commands for files that Python does not unpack."""

# bytes read of the file as it lies there, and its size; 0: unknown
Progress = Callable[[int, int], None]


def chunks(path: str, progress: Progress | None = None) -> Iterator[bytes]:
    """Read the log at `path`, decompressed. Raises `UsageError` for what cannot be read as a log.

    A compressed file that ends too early, as one that is being written does, ends there.
    """
    try:
        info = os.stat(path)
        if stat.S_ISDIR(info.st_mode):
            raise _folder(path)
        raw = open(path, "rb", buffering=0)  # noqa: SIM115 (closed below, after the last chunk)
    except OSError as error:
        raise _unreadable(path, error) from error
    with raw:
        stream = _unpacked(path, raw) if stat.S_ISREG(info.st_mode) else raw
        first = True
        while True:
            try:
                chunk = stream.read(CHUNK)
            except Exception as error:  # each compression has errors of its own
                if first or stream is raw:
                    raise _unreadable(path, error) from error
                return
            if not chunk:
                return
            if first and not is_text(chunk):
                look = ("see what it is", f"file {path}")
                raise UsageError("usage", f"{path} is no text, so it is no log", help=(look,))
            first = False
            yield chunk
            if progress is not None:
                progress(raw.tell() if raw.seekable() else 0, info.st_size)


def of_stream(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """Read a pipe by its `read1`, as bytes come. Raises `UsageError` when it begins like no text."""
    for i, chunk in enumerate(iter(lambda: read(CHUNK), b"")):
        if i == 0 and not is_text(chunk):
            raise UsageError(
                "usage",
                "what came from stdin is no text, so it is no log",
                help=(("if it is compressed", "zcat FILE | rallypoint explain"),),
            )
        yield chunk


def _unpacked(path: str, raw: IO[bytes]) -> IO[bytes]:
    head = raw.read(6)
    raw.seek(0)
    for mark, command in _FOREIGN.items():
        if head.startswith(mark):
            raise UsageError(
                "usage",
                f"{path} is compressed in a way that explain does not read",
                help=(("unpack it on the way", f"{command} {path} | rallypoint explain"),),
            )
    module = next((name for mark, name in _PACKED.items() if head.startswith(mark)), "")
    unpacked: IO[bytes] = importlib.import_module(module).open(raw) if module else raw
    return unpacked


def _unreadable(path: str, error: Exception) -> UsageError:
    if isinstance(error, FileNotFoundError):
        look = ("see what is there", f"ls -l {_parent(path)}")
        return UsageError("usage", f"there is no file {path}", help=(look,))
    why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return UsageError("usage", f"{path} cannot be read: {why}")


def _folder(path: str) -> UsageError:
    """List the newest logs in a folder: its files are not known to somebody who gives it."""
    logs = []
    for folder, _, names in islice(os.walk(path), MOST_FOLDERS):
        for name in names:
            if name.endswith((".log", ".out", ".err", ".txt")):
                with suppress(OSError):  # it was removed meanwhile, or is not to be seen
                    log = os.path.join(folder, name)
                    info = os.lstat(log)
                    logs += [(-info.st_mtime, log)] * (info.st_size > 0)
    helps = tuple(
        ("read one of its logs", f"rallypoint explain {log}") for _, log in sorted(logs)[:_LISTED]
    )
    return UsageError(
        "usage",
        f"{path} is a folder, and explain reads files",
        help=helps or (("see what is in it", f"ls -R {path}"),),
    )


def empty(path: str) -> UsageError:
    """Return the error for logs without a byte, of which this is the first."""
    look = ("see whether the log is another file", f"ls -lt {_parent(path)}")
    return UsageError("usage", f"{path} is empty", help=(look,))


def _parent(path: str) -> str:
    return os.path.dirname(path) or "."
