"""Lock between processes and threads that the kernel frees when its holder dies, however it dies.

It is a robust, process-shared mutex (pthread_mutexattr_setrobust(3)) in a memfd that every process
maps. The kernel marks it when the thread that holds it ends, SIGKILL included, also while children
that this process forked live on. The next thread that takes it is told.

The holder writes its name and pid into the file, and wipes them out when it releases. A thread that
gets the lock and finds them there knows that this holder died while it held it.

Limits: all processes are in one PID namespace, since the kernel knows the holder by its thread
number.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import math
import mmap
import os
import struct
import threading
import weakref
from typing import Any, NamedTuple

from rallypoint.clock import Clock
from rallypoint.errors import UsageError, WouldDeadlock
from rallypoint.host import fd_passing, memory_files, process_status, system_calls
from rallypoint.host.kernel_files import text_of

# The file begins with a pthread_mutex_t: 40 bytes on x86-64, 48 on AArch64. Its first word is the
# futex, with the number of the holder's thread in these bits.
_THREAD_BITS = (1 << 30) - 1

_TOKEN_AT, _TOKEN_BYTES = 64, 16
"""Random bytes, so that a lock is known again whichever way its descriptor came."""

_NOTE_AT = 80
"""Byte that a holder leaves to the next one."""

_HOLDER_AT = 88
_HOLDER = struct.Struct("=IQd48s16s")
"""Holder: pid (0: nobody), when it started (clock ticks), since when (monotonic seconds), name,
action."""

_DOING_AT = _HOLDER_AT + struct.calcsize("=IQd48s")

_NOBODY = bytes(_HOLDER.size)

_PF_EXITING = 0x4
"""Flag in /proc/PID/stat, as in the kernel's linux/sched.h: the process has begun to end."""

_SLICE = 0.05
"""Seconds of one wait in the kernel, between which signal handlers run. A waiter that is stopped
may swallow the wake-up for the others, which look again after this time."""

# pthread.h, bits/time.h of glibc
_PROCESS_SHARED, _ROBUST, _ERRORCHECK, _CLOCK_MONOTONIC = 1, 1, 2, 1

_libc = ctypes.CDLL(None)
_clocklock = getattr(_libc, "pthread_mutex_clocklock", None)
"""pthread_mutex_clocklock(3), which glibc has since 2.30; None on older ones and on musl."""


class _Timespec(ctypes.Structure):
    """Struct timespec."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _timespec(moment: float) -> _Timespec:
    return _Timespec(int(moment), int(moment % 1 * 1e9))


class LockHolder(NamedTuple):
    """Process that holds the lock, or held it when it died."""

    pid: int
    who: str  # as given to `acquire`; "" when it is not known
    doing: str  # likewise
    since: float  # seconds on the monotonic clock; NaN when it is not known
    started: int  # when the process started, in clock ticks after boot; 0 when it is not known
    holds: bool  # False: it is gone, and nobody has had the lock since

    @property
    def runs(self) -> bool:
        """Tell whether the process lives on. A pid that was given to another process since does not
        count, nor does one that is on its way out: its locks go a moment before it does."""
        found = process_status.status(self.pid)
        return (
            found is not None
            and found.state not in "ZX"
            and found.started == self.started
            and not _is_exiting(self.pid)
        )


class RecordLock:
    """Lock that processes and threads share; not re-entrant.

    Made with `create()`; reaches other processes by fork, or inside a pickle (see `fd_passing`),
    where it is the same object for one process, however often it arrives. A forked child does not
    hold it.
    """

    def __init__(self, fd: int, token: bytes) -> None:
        """Use `create`. Takes the descriptor over."""
        self.token = token
        # while held: the holder that died with it, and is not `settled`
        self.left: LockHolder | None = None
        self.note = 0  # while held: the note
        self._fd = fd
        # Not by `mmap.mmap`: Python would unmap it when it ends, before the kernel looks whether this
        # thread holds the mutex.
        try:
            self._address = system_calls.map_memory(fd, mmap.PAGESIZE)
        except OSError as error:
            os.close(fd)
            raise MemoryError("the memory of a lock cannot be mapped") from error
        weakref.finalize(self, _release_memory, self._address, fd).atexit = False
        self._mutex = ctypes.c_void_p(self._address)
        self._word = ctypes.c_uint32.from_address(self._address)
        page = (ctypes.c_ubyte * mmap.PAGESIZE).from_address(self._address)
        self._bytes = memoryview(page).cast("B")
        self._forget()

    def _forget(self) -> None:
        """Note that no thread of this process holds it or asks for it."""
        self._inside: set[int] = set()  # threads that hold it or are in `acquire`
        self._owner = 0  # the thread that holds it, from a moment after it has it
        self._former: bytes | None = None  # what a release writes where the holder stands
        self._in_parent = False

    @classmethod
    def create(cls) -> RecordLock:
        """Make a new lock, free. Raises OSError when there is no descriptor left."""
        fd = memory_files.create("rallypoint-lock")
        os.ftruncate(fd, mmap.PAGESIZE)
        token = os.urandom(_TOKEN_BYTES)
        lock = cls(fd, token)
        attributes = ctypes.create_string_buffer(64)
        for call in (
            _libc.pthread_mutexattr_init(attributes),
            _libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED),
            _libc.pthread_mutexattr_setrobust(attributes, _ROBUST),
            _libc.pthread_mutexattr_settype(attributes, _ERRORCHECK),
            _libc.pthread_mutex_init(lock._mutex, attributes),
        ):
            if call:
                raise OSError(call, os.strerror(call))
        lock._write(_TOKEN_AT, token)
        _living[token] = lock
        return lock

    def __repr__(self) -> str:
        holder = self.holder()
        if holder is None:
            return "<RecordLock: free>"
        return f"<RecordLock: {'held by' if holder.holds else 'left behind by'} {holder.who or 'somebody'}, pid {holder.pid}>"

    @property
    def mine(self) -> bool:
        """Tell whether the calling thread holds it."""
        return self._owner == threading.get_ident() and self._has_mutex()

    def fileno(self) -> int:
        """Return the descriptor of its memory."""
        return self._fd

    def _has_mutex(self) -> bool:
        return self._word.value & _THREAD_BITS == threading.get_native_id()

    def _read(self, at: int, length: int) -> bytes:
        return bytes(self._bytes[at : at + length])

    def _write(self, at: int, data: bytes) -> None:
        self._bytes[at : at + len(data)] = data

    # -- acquire

    def acquire(self, timeout: float = math.inf, who: str = "", doing: str = "") -> bool:
        """Take the lock; False when it was not free within `timeout` seconds (0: do not wait).

        `who` and `doing` are what others are told. Afterwards `left` is the holder that died with
        it, if so; a caller that does not call `settled()` leaves that to the next holder. Then
        `doing` is not told before `says()` is called: a holder that dies before it has settled the
        loss must not look like one that leaves nothing behind.

        Signal handlers run within 0.05 s; when one raises, the lock is not held. WouldDeadlock when
        this thread has it, or is asking for it (a signal handler in the middle of this call).
        """
        me = threading.get_ident()
        if me in self._inside and (self._owner != me or self._has_mutex()):
            raise WouldDeadlock(
                "lock-twice",
                "this thread asks for a lock that it holds already: it would wait for itself for ever",
            )
        try:
            self._inside.add(me)
            if not self._lock_mutex(_clock.monotonic() + timeout):
                self._inside.discard(me)
                return False
            self._publish(who, doing)
            self._owner = me
            return True
        except BaseException:
            # Not in a method: a second handler may raise at its entry. That error is dropped.
            while True:
                try:
                    self._end()
                    break
                except BaseException:
                    continue
            raise

    def _lock_mutex(self, until: float) -> bool:
        result = _libc.pthread_mutex_trylock(self._mutex)
        while result in (errno.EBUSY, errno.ETIMEDOUT):
            now = _clock.monotonic()
            if now >= until:
                return False
            result = self._wait(min(_SLICE, until - now))
        if result == errno.EOWNERDEAD:
            result = _libc.pthread_mutex_consistent(self._mutex)
        if result:
            raise OSError(result, os.strerror(result))
        return True

    def _wait(self, seconds: float) -> int:
        """Wait in the kernel for the mutex; the error number, 0 when it is locked."""
        if _clocklock is None:
            until = ctypes.byref(_timespec(_clock.wall() + seconds))
            return int(_libc.pthread_mutex_timedlock(self._mutex, until))
        until = ctypes.byref(_timespec(_clock.monotonic() + seconds))
        return int(_clocklock(self._mutex, _CLOCK_MONOTONIC, until))

    def _publish(self, who: str, doing: str) -> None:
        """Read what the last holder left, and write this holder down."""
        self.note = self._read(_NOTE_AT, 1)[0]
        former = self._read(_HOLDER_AT, _HOLDER.size)
        self.left = None if former == _NOBODY else _holder(former, holds=False)
        self._former = former
        told = _cut(doing, 16) if self.left is None else b""
        now = _clock.monotonic()
        entry = _HOLDER.pack(os.getpid(), _started(), now, _cut(who, 48), told)
        self._write(_HOLDER_AT, entry)

    def settled(self) -> None:
        """While held: note that what `left` says is dealt with, and the next holder need not
        know."""
        self._former = _NOBODY
        self.left = None

    def says(self, doing: str) -> None:
        """While held: tell others what it is held for."""
        self._write(_DOING_AT, _cut(doing, 16).ljust(16, b"\0"))

    def leave_note(self, note: int) -> None:
        """While held: write the note, 0 to 255. It stays until a holder writes another one, however
        this process ends."""
        self.note = note
        self._write(_NOTE_AT, bytes((note,)))

    # -- release

    def release(self) -> None:
        """Release it, also if a signal handler raises meanwhile. UsageError when the calling thread
        does not hold it."""
        if not self.mine:
            raise self._not_mine()
        try:
            self._end()
        except BaseException:
            while True:
                try:
                    self._end()
                    break
                except BaseException:
                    continue
            raise

    def _end(self) -> None:
        """Undo what was done of `acquire`, in an order that may be broken off and called again."""
        if self._has_mutex():
            if self._former is not None:
                self._write(_HOLDER_AT, _NOBODY if self.left is None else self._former)
                self._former = None
            self._owner = 0
            _libc.pthread_mutex_unlock(self._mutex)
        self._inside.discard(threading.get_ident())

    def _not_mine(self) -> UsageError:
        if self._in_parent:
            said = f"pid {os.getpid()} gives back a lock that its parent held when it forked: it is the parent's, still"
        elif self._owner:
            said = "this thread gives back a lock that another thread of this process holds"
        else:
            said = "this thread gives back a lock that it does not hold"
        return UsageError("usage", said)

    # -- holder

    def holder(self) -> LockHolder | None:
        """Return the process that holds it now, or has died with it; None when it is free. It may
        be over when this returns."""
        for _ in range(3):  # the entry is written some microseconds after the mutex was locked
            thread = self._word.value & _THREAD_BITS
            entry = self._read(_HOLDER_AT, _HOLDER.size)
            if thread != self._word.value & _THREAD_BITS:
                continue
            written = None if entry == _NOBODY else _holder(entry, holds=thread != 0)
            if not thread or (
                written is not None and os.path.exists(f"/proc/{written.pid}/task/{thread}")
            ):
                return written
        return LockHolder(thread, "", "", math.nan, 0, True) if thread else None

    # -- ways into a process

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.token, fd_passing.sent(self._fd))


_living: weakref.WeakValueDictionary[bytes, RecordLock] = weakref.WeakValueDictionary()
"""Locks of this process by token."""

_registry = threading.RLock()


def _arrived(token: bytes, passed: Any) -> RecordLock:
    """Return the lock that was in a pickle."""
    with _registry:
        here = _living.get(token)
        if here is not None and isinstance(passed, fd_passing.ByAddress):
            return here
        fd = fd_passing.received(passed)
        if here is not None or os.pread(fd, len(token), _TOKEN_AT) != token:
            os.close(fd)
            if here is not None:
                return here
            raise UsageError(
                "usage", "the descriptor that arrived is not that of the lock which was sent"
            )
        here = _living[token] = RecordLock(fd, token)
        return here


def _release_memory(address: int, fd: int) -> None:
    """Unmap a lock, unless a thread here holds it: its robust list would lead nowhere."""
    holder = ctypes.c_uint32.from_address(address).value & _THREAD_BITS
    if not os.path.exists(f"/proc/self/task/{holder}"):
        system_calls.unmap_memory(address, mmap.PAGESIZE)
    try:
        os.close(fd)
    except OSError:
        pass  # this program has closed it already


_clock = Clock()


@functools.cache
def _started() -> int:
    """Return when this process started, in clock ticks after boot."""
    found = process_status.status("self")
    return 0 if found is None else found.started


def _after_fork() -> None:
    global _registry
    _registry = threading.RLock()
    _started.cache_clear()
    for lock in list(_living.values()):
        # the number of a thread is the same in the child
        in_parent = lock._owner == threading.get_ident()
        lock._forget()
        lock._in_parent = in_parent


os.register_at_fork(after_in_child=_after_fork)


def _is_exiting(pid: int) -> bool:
    fields = text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return not fields or bool(int(fields[6]) & _PF_EXITING)


def _holder(entry: bytes, *, holds: bool) -> LockHolder:
    pid, started, since, who, doing = _HOLDER.unpack(entry)
    return LockHolder(
        pid, who.rstrip(b"\0").decode(), doing.rstrip(b"\0").decode(), since, started, holds
    )


def _cut(text: str, length: int) -> bytes:
    """Return as many bytes as there is room for, in whole characters."""
    return text.encode("utf-8", "replace")[:length].decode("utf-8", "ignore").encode()
