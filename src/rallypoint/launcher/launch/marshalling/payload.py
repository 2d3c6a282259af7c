"""Payloads between the caller and its ranks: a pickle in shared memory, large buffers beside it,
and descriptors.

A payload is a memfd: a head, the pickle, and behind it, each at an offset that can be mapped, the
memory of arrays and tensors. They are written once, from where they are, and never copied again:
the receiver maps large ones, privately. So a result of a gigabyte costs one copy, eight ranks read
the same pages of one packed call, and none sees what another writes.

Tensors that share memory (tied weights, views) share it where they arrive, and of a large storage
only the part that its tensors cover is sent. In a call, a tensor whose memory is shared with other
processes arrives as that same memory; a result is always a copy, on the CPU.
"""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import msgspec

from rallypoint.errors import RemoteError, RemoteTraceback, UsageError
from rallypoint.host import fd_passing, memory, system_calls
from rallypoint.host.fd_passing import OwnedFds
from rallypoint.launcher.launch.marshalling import unpickling
from rallypoint.launcher.launch.marshalling.pickling import Pickler, is_shared, write_storage
from rallypoint.launcher.launch.marshalling.unpickling import (
    MAPPED_BYTES,
    ArrivingPayload,
    Footer,
    Unpickler,
)

if TYPE_CHECKING:
    from rallypoint.launcher.launch.marshalling import inspection

BESIDE_BYTES = 64 * 1024
"""Minimum bytes of a buffer beside the pickle: to copy a shorter one costs less than its own
place."""

ALIGNMENT = 64
"""Bytes of a cache line, as in torch's own allocator."""

DESCRIPTORS_MOST = 200
"""Maximum descriptors that are sent: with streams and the like they fit one packet (SCM_MAX_FD is
253).

A model of 300 shared parameters has more: the receiver opens the others, while the caller has them
open and waits.
"""

_HEAD = struct.Struct("<QQQ")  # length of the pickle; offset and length of the footer
_HEAD_BYTES = 64
_NO_ROOM = frozenset({errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.ENFILE})
_SEALS = memory.SEALS | system_calls.F_SEAL_WRITE


class Packed(OwnedFds):
    """Packed payload: `fds[0]` is its memory, the others are shared memory that arrives as the
    same.

    `kept`: descriptors that the receiver opens itself. `close()`, or the end of a `with`, closes
    all; the receiver must have unpacked before.
    """

    def __init__(self, fds: list[int], size: int, kept: Sequence[int] = ()) -> None:
        self._kept = OwnedFds(kept)
        self.size = size  # bytes
        super().__init__(fds)

    def __repr__(self) -> str:
        return f"<Packed {self.size} bytes, {len(self.fds)} descriptors>"

    def close(self) -> None:
        """Close the descriptors. May be called twice."""
        super().close()
        self._kept.close()


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Packed:
    """Pack a function and its arguments, for any number of ranks.

    Raises UsageError (`launch-argument`, `lock-in-wrong-scope`, `mp-object-in-launch`), which names
    by path what cannot be sent; OSError when there is no memory.
    """
    # Not at the top: ranks, which import this module, need it only when something fails.
    from rallypoint.launcher.launch.marshalling import inspection

    name = fn.__name__ if isinstance(fn, FunctionType) else "fn"
    roots = (fn, name), (args, "args"), (kwargs, "kwargs")
    return _pack((fn, args, kwargs), inspection.Scan(is_shared), roots)


def unpack_call(fds: Sequence[int]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Unpack a function and its arguments in a rank. Takes the descriptors over.

    Definitions of the caller's `__main__` are put into this process's `__main__`, where pickle
    finds them by name. Raises what the import of the program's modules raises.
    """
    try:
        (fn, args, kwargs), handed_over = _unpack(fds, in_rank=True)
        for module, name, value in handed_over:
            __import__(module)
            setattr(sys.modules[module], name, value)
    except Exception as error:
        error.add_note(
            "rallypoint: this was raised while the function and its arguments were unpacked in the rank"
        )
        raise
    return fn, args, kwargs


def pack_result(value: object, name: str) -> Packed:
    """Pack what the function of this name returned.

    Raises UsageError (`result-unsupported`), which names by path what cannot be sent; OSError when
    there is no memory.
    """
    return _pack(value, None, ((value, "result"),), returned_by=name)


def unpack_result(fds: Sequence[int]) -> Any:
    """Unpack a rank's result in the caller. Takes the descriptors over.

    Large tensors and arrays stay where they are, and each lives as long as it is referenced. Raises
    UsageError (`result-unsupported`) when this process cannot read the result.
    """
    try:
        value, _ = _unpack(fds, in_rank=False)
    except Exception as error:
        from rallypoint.launcher.launch.marshalling import inspection

        raise UsageError(
            "result-unsupported",
            f"what the rank returned cannot be read here: {inspection.describe(error)}",
            why=("its class is to be found in the caller as well as in the ranks",),
        ) from error
    return value


def pack_error(error: BaseException) -> Packed:
    """Pack an exception with its chain, its notes and its traceback as text. Never raises.

    What cannot be sent of it is left out, and a note says so.
    """
    from rallypoint.launcher.launch.marshalling import exception_payload

    try:
        return _pack(exception_payload.records_of(error, _small_bytes), None)
    except Exception:  # of a signal's handler, or of a class that raises wherever it is looked at
        return _pack(exception_payload.records_of_type(error), None)


def unpack_error(fds: Sequence[int]) -> BaseException:
    """Unpack an exception in the caller. Takes the descriptors over. Never raises.

    RemoteTraceback is its `__cause__`; its own cause, or else its context, is its `__context__`. An
    exception whose class cannot be had here becomes a RemoteError.
    """
    from rallypoint.launcher.launch.marshalling import exception_payload

    try:
        (text, records), _ = _unpack(fds, in_rank=False)
        return exception_payload.rebuilt(text, records, _from_small_bytes)
    except Exception as problem:
        text = f"{type(problem).__name__}: {problem}"
        error = RemoteError("an exception that cannot be read here", text)
        error.__cause__ = RemoteTraceback(text)
        return error


# --- packing ---


class _PayloadWriter:
    """File of a pickler: large bytes come in one piece, and go straight to the memory."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.at = _HEAD_BYTES

    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B")
        size = len(view)
        while view:
            done = os.pwrite(self._fd, view, self.at)
            view, self.at = view[done:], self.at + done
        return size

    def move_to_place(self, size: int) -> int:
        """Move to an offset for this many bytes, at which they can be mapped if they are large."""
        unit = mmap.PAGESIZE if size >= MAPPED_BYTES else ALIGNMENT
        self.at = -(-self.at // unit) * unit
        return self.at


def _pack(
    value: object,
    scan: inspection.Scan | None,
    roots: Sequence[tuple[object, str]] = (),
    returned_by: str = "",
) -> Packed:
    """Pack a value; `scan`: of a call. Raises OSError when there is no memory, and for what cannot
    be sent the UsageError of `inspection.refusal`."""
    flags = system_calls.MFD_CLOEXEC | system_calls.MFD_ALLOW_SEALING
    buffers: list[memoryview] = []

    def stays_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= BESIDE_BYTES:
            buffers.append(raw)
        return raw.nbytes < BESIDE_BYTES

    # Closed also after an error, whose traceback would keep them open.
    with OwnedFds() as memfd, fd_passing.collecting() as passed:
        fd = memfd.add(system_calls.memfd_create("rallypoint-payload", flags))
        writer = _PayloadWriter(fd)
        pickler = Pickler(writer, scan, stays_inside)
        try:
            pickler.dump(value)
            pickler.dump(scan.handed_over if scan is not None else None)
        except Exception as error:
            if isinstance(error, MemoryError) or getattr(error, "errno", 0) in _NO_ROOM:
                raise
            from rallypoint.launcher.launch.marshalling import inspection

            problem = inspection.refusal(error, pickler.last, roots, returned_by)
            raise problem from problem.__cause__
        length = writer.at - _HEAD_BYTES
        kept = passed[DESCRIPTORS_MOST:]
        footer = Footer([], [], os.getpid(), kept)
        for buffer in buffers:
            footer.buffers.append((writer.move_to_place(len(buffer)), len(buffer)))
            writer.write(buffer)
        for sent in pickler.storages.values():
            begin = sent.first - sent.first % ALIGNMENT  # offsets of all dtypes stay whole numbers
            size = sent.last - begin
            footer.storages.append((writer.move_to_place(size), size, begin))
            write_storage(writer.write, sent.storage, begin, sent.last)
        where = writer.at
        writer.write(msgspec.msgpack.encode(footer))
        os.pwrite(fd, _HEAD.pack(length, where, writer.at - where), 0)
        fcntl.fcntl(fd, system_calls.F_ADD_SEALS, _SEALS)
        return Packed([*memfd.give(), *passed[:DESCRIPTORS_MOST]], writer.at, kept)


def _small_bytes(value: object) -> bytes:
    """Pickle a part of an exception, with everything inside. Raises what pickling raises."""
    from rallypoint.launcher.launch.marshalling import exception_payload

    file = io.BytesIO()
    Pickler(file, None, beside=False).dump(value)
    data = file.getvalue()
    if len(data) > exception_payload.BYTES_MOST:
        raise ValueError(f"{len(data)} bytes are more than {exception_payload.BYTES_MOST}")
    return data


def _from_small_bytes(data: bytes) -> Any:
    return Unpickler(io.BytesIO(data), (), in_rank=False).load()


def _unpack(fds: Sequence[int], *, in_rank: bool) -> Any:
    """Unpickle the value and what was sent behind it."""
    with OwnedFds(fds[:1]), OwnedFds(fds[1:]) as passed:
        length, where, size = _HEAD.unpack(os.pread(fds[0], _HEAD.size, 0))
        footer = msgspec.msgpack.decode(os.pread(fds[0], size, where), type=Footer)
        for number in footer.kept:
            path = f"/proc/{footer.pid}/fd/{number}"
            passed.add(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        arrival = ArrivingPayload(fds[0], footer)
        with (
            mmap.mmap(fds[0], _HEAD_BYTES + length, mmap.MAP_PRIVATE, mmap.PROT_READ) as file,
            fd_passing.arriving(passed.give()),
            unpickling.arriving(arrival),
        ):
            file.seek(_HEAD_BYTES)
            unpickler = Unpickler(file, arrival.buffers(), in_rank=in_rank)
            return unpickler.load(), unpickler.load()
