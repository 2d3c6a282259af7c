"""What travels between the caller and its ranks: a pickle in shared memory, its large buffers beside it, and descriptors.

A parcel is a memfd: a head, the pickle, and behind it, each at an offset that can be mapped, the memory of arrays and tensors. They are
written once, straight from where they are, and never copied again: who unpacks maps what is large, privately. So a result of a
gigabyte costs one copy, eight ranks read the same pages of one packed call, and none sees what another writes.

Tensors share memory after they arrived if they did before (tied weights, views), and of a large storage only the part that its tensors
cover is sent. In a call, a tensor whose memory is shared with other processes arrives as that same memory; a result is a copy always,
as it was when it was returned, and lies on the CPU.
"""

from __future__ import annotations

import array
import contextlib
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
from types import FunctionType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from rallypoint.errors import UsageError
from rallypoint.host import memory, passing, system_calls
from rallypoint.launcher.crossing import misfits
from rallypoint.launcher.crossing.arrival import MAPPED_BYTES, Arrival, Reader, Unpickler
from rallypoint.launcher.crossing.misfits import Misfit, Refused
from rallypoint.launcher.crossing.pickling import Pickler, Tracer, bytes_of, is_shared

if TYPE_CHECKING:
    from rallypoint.launcher.crossing import inspection, trail

BESIDE_BYTES = 64 * 1024
"""Buffers from this size on stand beside the pickle: shorter ones are copied with it, for less than a place of their own costs."""

ALIGNMENT = 64
"""Bytes: a cache line, and what torch's own allocator gives."""

DESCRIPTORS_MOST = 200
"""Descriptors of a parcel: with streams and the like they fit one packet (SCM_MAX_FD is 253). A model of 300 shared parameters has more:
those are opened by the receiver, while the caller waits for it and has them open."""

_HEAD = struct.Struct("<QQQ")  # length of the pickle; offset of the footer; how many numbers it has
_HEAD_BYTES = 64
_NO_ROOM = frozenset({errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.ENFILE})
_SEALS = memory.SEALS | system_calls.F_SEAL_WRITE


class Packed:
    """A parcel. `fds[0]` is its memory; the others are shared memory that is to arrive as the same. They are closed by `close()`, or at
    the end of a `with`: not before the receiver has unpacked."""

    __slots__ = ("_kept", "fds", "size")

    def __init__(self, fds: list[int], size: int, kept: Sequence[int] = ()) -> None:
        self.fds = fds
        self.size = size  # bytes
        self._kept = list(kept)

    def __repr__(self) -> str:
        return f"<Packed {self.size} bytes, {len(self.fds)} descriptors>"

    def close(self) -> None:
        """Close the descriptors. May be called twice."""
        while self.fds:
            os.close(self.fds.pop())
        while self._kept:
            os.close(self._kept.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Unsendable(Exception):
    """A result cannot be sent. `path`: "result[0].model"; `type_name`; `reason`: a clause. Its text is one sentence."""

    def __init__(self, path: str, type_name: str, reason: str) -> None:
        super().__init__(path, type_name, reason)
        self.path = path
        self.type_name = type_name
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Packed:
    """A function and its arguments, for any number of ranks. UsageError (`launch-argument`, `lock-in-wrong-scope`,
    `mp-object-in-launch`) names by path what cannot cross; OSError when there is no memory."""
    from rallypoint.launcher.crossing import inspection  # not at the top: ranks, which import this module, need it when something fails

    try:
        return _pack((fn, args, kwargs), inspection.Scan(is_shared))
    except Exception as error:
        if _of_memory(error):
            raise
        refusal, cause = _refusal(fn, args, kwargs, error)
    raise refusal from cause


def unpack_call(fds: Sequence[int]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function and its arguments, in a rank. Takes the descriptors over. What was defined in the caller's `__main__` is put into this
    process's `__main__`, where pickle finds it by name. Raises what the import of the program's modules raises."""
    try:
        (fn, args, kwargs), handed_over = _unpack(fds, in_rank=True)
        for module, name, value in handed_over:
            __import__(module)
            setattr(sys.modules[module], name, value)
    except Exception as error:
        error.add_note("rallypoint: this was raised while the function and its arguments were unpacked in the rank")
        raise
    return fn, args, kwargs


def pack_result(value: object) -> Packed:
    """What a function returned. Unsendable names by path what cannot be sent; OSError when there is no memory."""
    try:
        return _pack(value, None)
    except Exception as error:
        if _of_memory(error):
            raise
        from rallypoint.launcher.crossing import inspection

        at, culprit, problem = _trace(value, ((value, "result"),), None, error)
        name = _name_of_type(culprit)
        if isinstance(problem, Refused):
            misfit = problem.misfit
            if at.holder is not None:
                name = _name_of_type(at.holder)
                raise Unsendable(at.holder_text, name, f"a {name} cannot be sent to another process (it holds {misfit.name})") from None
            raise Unsendable(at.text, name, _of_result(misfit)) from None
        where = at.text or "result"
        if at.holder is not None:
            where, name = at.holder_text, _name_of_type(at.holder)
        raise Unsendable(where, name, f"a {name} cannot be sent to another process: {inspection.describe(problem)}") from error


def unpack_result(fds: Sequence[int]) -> Any:
    """What a rank returned, in the caller. Takes the descriptors over. Large tensors and arrays stay where they are, and each lives
    as long as somebody has it. UsageError (`result-unsupported`) when this process cannot read it."""
    try:
        value, _ = _unpack(fds, in_rank=False)
    except Exception as error:
        from rallypoint.launcher.crossing import inspection

        raise UsageError(
            "result-unsupported",
            f"what the rank returned cannot be read here: {inspection.describe(error)}",
            why=("its class is to be found in the caller as well as in the ranks",),
        ) from error
    return value


def pack_error(error: BaseException) -> Packed:
    """An exception that left the function, with its chain, its notes and its traceback as text. Never raises: what of it cannot be sent
    is left out, and a note says so."""
    from rallypoint.launcher.crossing import keepsake

    for attempt in (keepsake.of, keepsake.bare):
        try:
            return _pack(attempt(error, small_bytes), None)
        except Exception:
            continue
    return _pack(keepsake.nothing(error), None)


def unpack_error(fds: Sequence[int]) -> BaseException:
    """The exception, in the caller, with RemoteTraceback as its `__cause__`; its own cause, or else its context, is its `__context__`.
    RemoteError instead of one whose class cannot be had here. Takes the descriptors over. Never raises."""
    from rallypoint.launcher.crossing import keepsake

    try:
        records, _ = _unpack(fds, in_rank=False)
        return keepsake.rebuilt(records, from_small_bytes)
    except Exception as problem:
        return keepsake.unreadable(problem)


# --- packing ---


class _Writer:
    """The file that a pickler writes to: large bytes come in one piece, and go straight to the memory."""

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


def _pack(value: object, scan: inspection.Scan | None) -> Packed:
    fd = system_calls.memfd_create("rallypoint-parcel", system_calls.MFD_CLOEXEC | system_calls.MFD_ALLOW_SEALING)
    try:
        with passing.collecting() as passed, contextlib.ExitStack() as stack:
            buffers: list[memoryview] = []
            writer = _Writer(fd)
            pickler = Pickler(writer, protocol=5, buffer_callback=functools.partial(_aside, buffers))
            pickler.prepare(scan)
            stack.callback(pickler.forget)
            pickler.dump(value)
            pickler.dump(scan.handed_over if scan is not None else None)
            length = writer.at - _HEAD_BYTES
            footer = array.array("q", [len(buffers), len(pickler.extents)])
            for buffer in buffers:
                footer.extend((_place(writer, len(buffer)), len(buffer)))
                writer.write(buffer)
            for (first, last), kept in zip(pickler.extents, pickler.storages.values(), strict=True):
                begin = first - first % ALIGNMENT  # of whatever dtype the next tensor is: its offset stays a whole number
                footer.extend((_place(writer, last - begin), last - begin, begin))
                writer.write(bytes_of(kept.storage, begin, last))
            kept_open = passed[DESCRIPTORS_MOST:]
            if kept_open and scan is None:
                many = f"{len(passed)} objects in it have shared memory to pass on, and {DESCRIPTORS_MOST} can be"
                raise Unsendable("result", _name_of_type(value), many)
            footer.extend((os.getpid(), len(kept_open), *kept_open))
            where = writer.at
            writer.write(footer.tobytes())
            os.pwrite(fd, _HEAD.pack(length, where, len(footer)), 0)
            fcntl.fcntl(fd, system_calls.F_ADD_SEALS, _SEALS)
            return Packed([fd, *passed[:DESCRIPTORS_MOST]], writer.at, kept_open)
    except BaseException:
        os.close(fd)
        raise


def _aside(buffers: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
    """pickle's question whether a buffer stays inside."""
    raw = buffer.raw()
    if raw.nbytes < BESIDE_BYTES:
        return True
    buffers.append(raw)
    return False


def _place(writer: _Writer, size: int) -> int:
    """Go on at an offset for this many bytes: one that can be mapped, if it is to be."""
    unit = mmap.PAGESIZE if size >= MAPPED_BYTES else ALIGNMENT
    writer.at = -(-writer.at // unit) * unit
    return writer.at


def small_bytes(value: object) -> bytes:
    """A pickle with everything inside, for an exception's parts. Raises what pickling raises."""
    file = io.BytesIO()
    pickler = Pickler(file, protocol=5)
    pickler.prepare(None, beside=False)
    try:
        pickler.dump(value)
    finally:
        pickler.forget()
    return file.getvalue()


def from_small_bytes(data: bytes) -> Any:
    """The value again. Raises what unpickling raises."""
    unpickler = Unpickler(io.BytesIO(data), Arrival(-1, array.array("q", [0, 0, 0, 0])), (), in_rank=False)
    try:
        return unpickler.load()
    finally:
        unpickler.forget()


def _unpack(fds: Sequence[int], *, in_rank: bool) -> Any:
    """The value, and what was sent behind it."""
    fd, *passed = fds
    try:
        length, where, count = _HEAD.unpack(os.pread(fd, _HEAD.size, 0))
        footer = array.array("q", os.pread(fd, 8 * count, where))
        arrival = Arrival(fd, footer)
        others = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in arrival.others]
    except BaseException:
        for one in passed:
            os.close(one)
        os.close(fd)
        raise
    try:
        with passing.arriving([*passed, *others]):
            file = io.BufferedReader(Reader(fd, _HEAD_BYTES, length), BESIDE_BYTES)
            unpickler = Unpickler(file, arrival, arrival.buffers(), in_rank=in_rank)
            try:
                return unpickler.load(), unpickler.load()
            finally:
                unpickler.forget()
    finally:
        os.close(fd)


# --- what was the matter ---


def _refusal(fn: object, args: object, kwargs: object, error: Exception) -> tuple[UsageError, Exception | None]:
    """The error for a call that could not be packed, and what it came from, when that says more."""
    from rallypoint.launcher.crossing import inspection

    if isinstance(error, Refused) and error.place:
        return inspection.refusal(error.misfit, error.place), None
    names = ((fn, fn.__name__ if isinstance(fn, FunctionType) else "fn"), (args, "args"), (kwargs, "kwargs"))
    at, culprit, problem = _trace((fn, args, kwargs), names, inspection.Scan(is_shared), error)
    if not isinstance(problem, Refused):
        return inspection.unpicklable(culprit, problem, at.text or "args", at.holder, at.holder_text), problem
    if problem.place:
        return inspection.refusal(problem.misfit, problem.place), None
    return inspection.refusal(problem.misfit, at.text, at.holder, at.holder_text), None


def _trace(
    root: object, names: Sequence[tuple[object, str]], scan: inspection.Scan | None, error: Exception
) -> tuple[trail.Place, object, Exception]:
    """Where packing fails, on what, and with what."""
    from rallypoint.launcher.crossing import trail

    tracer = Tracer()
    tracer.prepare(scan)
    with passing.collecting() as passed:
        try:
            tracer.dump(root)
        except Exception as again:
            error = again
        finally:
            tracer.forget()
            while passed:
                os.close(passed.pop())
    way = tracer.ended or [root]
    return trail.place(way, names), way[-1], error


def _of_result(misfit: Misfit) -> str:
    """A misfit's sentence for what comes back instead of going."""
    if misfit is misfits.NOT_A_LEAF:
        return f"{misfit.name} cannot be sent back: give loss.detach() or loss.item()"
    return f"{misfit.name} {misfit.reason}"


def _name_of_type(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"


def _of_memory(error: BaseException) -> bool:
    """Whether it says that there is no memory, and nothing about what was packed."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _NO_ROOM)
