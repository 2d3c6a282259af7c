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

import array
import errno
import fcntl
import functools
import io
import mmap
import os
import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

from rallypoint.errors import UsageError
from rallypoint.host import fd_passing, memory, system_calls
from rallypoint.host.fd_passing import OwnedFds
from rallypoint.launcher.launch.marshalling import unpicklable, unpickling
from rallypoint.launcher.launch.marshalling.importable import Importable
from rallypoint.launcher.launch.marshalling.pickling import Pickler, bytes_of, is_shared
from rallypoint.launcher.launch.marshalling.unpicklable import ObjectRefused
from rallypoint.launcher.launch.marshalling.unpickling import (
    MAPPED_BYTES,
    ArrivingPayload,
    DescriptorReader,
    Unpickler,
)

if TYPE_CHECKING:
    from rallypoint.launcher.launch.marshalling import inspection
    from rallypoint.launcher.launch.marshalling.object_path import ObjectPlace

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

_HEAD = struct.Struct("<QQQ")  # length of the pickle; offset of the footer; how many numbers it has
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


class Unsendable(Exception):
    """Result that cannot be sent. `path`: "result[0].model"; `reason`: a clause. The text is one
    sentence."""

    def __init__(self, path: str, type_name: str, reason: str) -> None:
        super().__init__(path, type_name, reason)
        self.path = path
        self.type_name = type_name
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Packed:
    """Pack a function and its arguments, for any number of ranks.

    Raises UsageError (`launch-argument`, `lock-in-wrong-scope`, `mp-object-in-launch`), which names
    by path what cannot be sent; OSError when there is no memory.
    """
    # Not at the top: ranks, which import this module, need it only when something fails.
    from rallypoint.launcher.launch.marshalling import inspection, object_path

    recent: list[object] = []
    try:
        return _pack((fn, args, kwargs), inspection.Scan(is_shared), recent)
    except Exception as problem:
        if _of_memory(problem):
            raise
        error = problem
    if isinstance(error, ObjectRefused) and error.place:
        raise inspection.refusal(error.kind, object_path.ObjectPlace(error.place))
    name = fn.__name__ if isinstance(fn, FunctionType) else "fn"
    culprit, place = _find(((fn, name), (args, "args"), (kwargs, "kwargs")), recent, in_call=True)
    if isinstance(error, ObjectRefused):
        raise inspection.refusal(error.kind, place)
    raise inspection.not_pickled(culprit, error, place) from error


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


def pack_result(value: object) -> Packed:
    """Pack what a function returned.

    Raises Unsendable, which names by path what cannot be sent; OSError when there is no memory.
    """
    from rallypoint.launcher.launch.marshalling import inspection

    recent: list[object] = []
    try:
        return _pack(value, None, recent)
    except Exception as problem:
        if _of_memory(problem) or isinstance(problem, Unsendable):
            raise
        error = problem
    culprit, place = _find(((value, "result"),), recent, in_call=False)
    kind = error.kind if isinstance(error, ObjectRefused) else None
    why = f" (it holds {kind.name})" if kind is not None else f": {inspection.describe(error)}"
    name = inspection.type_name(culprit)
    if kind is None or place.holder is not None:
        reason = f"a {name} cannot be sent to another process{why}"
    elif kind is unpicklable.NOT_A_LEAF:
        reason = f"{kind.name} cannot be sent back: give loss.detach() or loss.item()"
    else:
        reason = f"{kind.name} {kind.reason}"
    raise Unsendable(place.holder_text or place.text, name, reason) from (
        error if kind is None else None
    )


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

    for records_of in (exception_payload.records_of, exception_payload.text_of):
        try:
            return _pack(records_of(error, _small_bytes), None)
        except Exception:
            continue
    return _pack(exception_payload.name_of(error), None)


def unpack_error(fds: Sequence[int]) -> BaseException:
    """Unpack an exception in the caller. Takes the descriptors over. Never raises.

    RemoteTraceback is its `__cause__`; its own cause, or else its context, is its `__context__`. An
    exception whose class cannot be had here becomes a RemoteError.
    """
    from rallypoint.launcher.launch.marshalling import exception_payload

    try:
        records, _ = _unpack(fds, in_rank=False)
        return exception_payload.rebuilt(records, _from_small_bytes)
    except Exception as problem:
        return exception_payload.unreadable(problem)


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


def _pack(
    value: object, scan: inspection.Scan | None, recent: list[object] | None = None
) -> Packed:
    """Pack a value. After an exception `recent` has the last objects that pickle came to."""
    flags = system_calls.MFD_CLOEXEC | system_calls.MFD_ALLOW_SEALING
    fd = system_calls.memfd_create("rallypoint-payload", flags)
    buffers: list[memoryview] = []
    writer = _PayloadWriter(fd)
    pickler = Pickler(writer, scan, functools.partial(_aside, buffers))
    try:
        with fd_passing.collecting() as passed:
            pickler.dump(value)
            pickler.dump(scan.handed_over if scan is not None else None)
            length = writer.at - _HEAD_BYTES
            footer = array.array("q", [len(buffers), len(pickler.extents)])
            for buffer in buffers:
                footer.extend((_place(writer, len(buffer)), len(buffer)))
                writer.write(buffer)
            for (first, last), sent in zip(pickler.extents, pickler.storages.values(), strict=True):
                begin = first - first % ALIGNMENT  # the offsets of all dtypes stay whole numbers
                footer.extend((_place(writer, last - begin), last - begin, begin))
                writer.write(bytes_of(sent.storage, begin, last))
            kept_open = passed[DESCRIPTORS_MOST:]
            if kept_open and scan is None:
                from rallypoint.launcher.launch.marshalling import inspection

                many = f"{len(passed)} objects in it have shared memory to pass on"
                reason = f"{many}, and {DESCRIPTORS_MOST} can be"
                raise Unsendable("result", inspection.type_name(value), reason)
            footer.extend((os.getpid(), len(kept_open), *kept_open))
            where = writer.at
            writer.write(footer.tobytes())
            os.pwrite(fd, _HEAD.pack(length, where, len(footer)), 0)
            fcntl.fcntl(fd, system_calls.F_ADD_SEALS, _SEALS)
            return Packed([fd, *passed[:DESCRIPTORS_MOST]], writer.at, kept_open)
    except BaseException:
        os.close(fd)
        if recent is not None:
            recent += pickler.recent
        raise
    finally:
        pickler.forget()


def _aside(buffers: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
    """Tell pickle whether a buffer stays inside; keep it if not."""
    raw = buffer.raw()
    if raw.nbytes < BESIDE_BYTES:
        return True
    buffers.append(raw)
    return False


def _place(writer: _PayloadWriter, size: int) -> int:
    """Move to an offset for this many bytes, at which they can be mapped if they are large."""
    unit = mmap.PAGESIZE if size >= MAPPED_BYTES else ALIGNMENT
    writer.at = -(-writer.at // unit) * unit
    return writer.at


def _small_bytes(value: object) -> bytes:
    """Pickle a part of an exception, with everything inside. Raises what pickling raises."""
    from rallypoint.launcher.launch.marshalling import exception_payload

    file = io.BytesIO()
    pickler = Pickler(file, None, beside=False)
    try:
        pickler.dump(value)
    finally:
        pickler.forget()
    data = file.getvalue()
    if len(data) > exception_payload.BYTES_MOST:
        raise ValueError(f"{len(data)} bytes are more than {exception_payload.BYTES_MOST}")
    return data


def _from_small_bytes(data: bytes) -> Any:
    return Unpickler(io.BytesIO(data), (), in_rank=False).load()


def _unpack(fds: Sequence[int], *, in_rank: bool) -> Any:
    """Unpickle the value and what was sent behind it."""
    fd, *passed = fds
    try:
        length, where, count = _HEAD.unpack(os.pread(fd, _HEAD.size, 0))
        footer = array.array("q", os.pread(fd, 8 * count, where))
        arrival = ArrivingPayload(fd, footer)
        others = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in arrival.others]
    except BaseException:
        for one in passed:
            os.close(one)
        os.close(fd)
        raise
    try:
        with fd_passing.arriving([*passed, *others]), unpickling.arriving(arrival):
            file = io.BufferedReader(DescriptorReader(fd, _HEAD_BYTES, length), BESIDE_BYTES)
            unpickler = Unpickler(file, arrival.buffers(), in_rank=in_rank)
            return unpickler.load(), unpickler.load()
    finally:
        os.close(fd)


# --- what cannot be sent ---


def _find(
    roots: Sequence[tuple[object, str]], recent: list[object], *, in_call: bool
) -> tuple[object, ObjectPlace]:
    """Return the object that could not be sent, and its place.

    That is the last object that pickle came to. If it was made by pickling another, it is in
    nothing that a person knows: then that other is named, if it cannot be sent by itself either.
    """
    from rallypoint.launcher.launch.marshalling import object_path

    importable = Importable()
    for number, culprit in enumerate(reversed(recent)):
        place = object_path.find(culprit, roots, importable.goes_by_value)
        if place is not None and (number == 0 or _fails(culprit, in_call=in_call)):
            return culprit if place.holder is None else place.holder, place
    root, name = roots[-1 if len(roots) == 1 else 1]
    return root, object_path.ObjectPlace(name)


def _fails(value: object, *, in_call: bool) -> bool:
    from rallypoint.launcher.launch.marshalling import inspection

    try:
        _pack(value, inspection.Scan(is_shared) if in_call else None).close()
    except Exception:
        return True
    return False


def _of_memory(error: BaseException) -> bool:
    """Tell whether an error is about memory, and not about the objects that were packed."""
    return isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno in _NO_ROOM
    )
