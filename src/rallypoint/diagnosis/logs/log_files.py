"""A log's bytes, from wherever it lies: a file, a compressed file, a pipe. The only part of this
folder that touches anything.
"""

from __future__ import annotations

import io
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from typing import IO

from rallypoint.diagnosis.logs.line_filter import is_text
from rallypoint.errors import UsageError

CHUNK = 1 << 20
"""Bytes at a time. Smaller ones cost a call each, larger ones only memory: the search is as fast in
1 MiB as in 16.
"""

_LISTED = 4  # logs of a folder that are named when the folder itself was given

Progress = Callable[
    [int, int], None
]  # bytes read of the file as it lies there, and its size; 0: unknown


def chunks(path: str, progress: Progress | None = None) -> Iterator[bytes]:
    """The bytes of the log at `path`, decompressed. Raises `UsageError` for what cannot be read as
    a log.

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
        stream, packed = _unpacked(path, raw, info)
        first = True
        while True:
            try:
                chunk = stream.read(CHUNK)
            except EOFError:
                return
            except (zlib.error, OSError, ValueError) as error:
                if first or not packed:
                    raise _unreadable(path, error) from error
                return
            if first and not chunk:
                raise UsageError(
                    "usage",
                    f"{path} is empty",
                    help=(("see whether the log is another file", f"ls -lt {_parent(path)}"),),
                )
            if first and not is_text(chunk[:4096]):
                raise UsageError(
                    "usage",
                    f"{path} is no text, so it is no log",
                    help=(("see what it is", f"file {path}"),),
                )
            if not chunk:
                return
            first = False
            yield chunk
            if progress is not None:
                progress(raw.tell() if raw.seekable() else 0, info.st_size)


def of_stream(stream: IO[bytes]) -> Iterator[bytes]:
    """The bytes of a pipe, as they come. Raises `UsageError` when it begins like no text."""
    read = getattr(stream, "read1", stream.read)
    first = True
    while chunk := read(CHUNK):
        if first and not is_text(chunk[:4096]):
            raise UsageError(
                "usage",
                "what came from stdin is no text, so it is no log",
                help=(("if it is compressed", "zcat FILE | rallypoint explain"),),
            )
        first = False
        yield chunk


def _unpacked(
    path: str, raw: IO[bytes], info: os.stat_result
) -> tuple[IO[bytes] | io.BufferedIOBase, bool]:
    if not stat.S_ISREG(info.st_mode):
        return raw, False
    head = raw.read(6)
    raw.seek(0)
    if head.startswith(b"\x1f\x8b"):
        import gzip

        return gzip.GzipFile(fileobj=raw), True
    if head.startswith(b"BZh"):
        import bz2

        return bz2.BZ2File(raw), True
    if head.startswith(b"\xfd7zXZ"):
        import lzma

        return lzma.LZMAFile(raw), True
    for mark, program in ((b"\x28\xb5\x2f\xfd", "zstd"), (b"PK\x03\x04", "unzip -p")):
        if head.startswith(mark):
            command = (
                f"zstd -dc {path} | rallypoint explain"
                if program == "zstd"
                else f"unzip -p {path} | rallypoint explain"
            )
            raise UsageError(
                "usage",
                f"{path} is compressed in a way that explain does not read",
                help=(("unpack it on the way", command),),
            )
    return raw, False


def _unreadable(path: str, error: Exception) -> UsageError:
    if isinstance(error, FileNotFoundError):
        return UsageError(
            "usage",
            f"there is no file {path}",
            help=(("see what is there", f"ls -l {_parent(path)}"),),
        )
    why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return UsageError("usage", f"{path} cannot be read: {why}")


def _folder(path: str) -> UsageError:
    """The logs in a folder, the newest first: somebody gave the folder because they do not know its
    files.
    """
    found: list[tuple[float, str]] = []
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            if name.endswith((".log", ".out", ".err", ".txt")) and len(found) < 1000:
                full = os.path.join(folder, name)
                try:
                    found.append((os.stat(full).st_mtime, full))
                except OSError:
                    continue  # gone since it was listed
    found.sort(key=lambda one: -one[0])
    helps = tuple(
        ("read its newest log" if i == 0 else "or", f"rallypoint explain {name}")
        for i, (_, name) in enumerate(found[:_LISTED])
    )
    return UsageError(
        "usage",
        f"{path} is a folder, and explain reads files",
        help=helps or (("see what is in it", f"ls -R {path}"),),
    )


def _parent(path: str) -> str:
    return os.path.dirname(path) or "."
