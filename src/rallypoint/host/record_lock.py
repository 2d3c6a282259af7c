"""A lock between processes that the kernel frees when its holder dies, however it dies; threads respect it, too.

It is a POSIX record lock (fcntl(2)) on a memfd that nobody else opens. Such a lock belongs to a process: the kernel drops it when that
process ends, SIGKILL included, also while children that it forked live on, since they do not inherit it. The other two kinds, flock(2)
and open file description locks, belong to the open file, which a fork shares: the children of a dead holder would keep them.

What record locks do not do by themselves, and is done here:

- They do not exclude threads of one process: a thread lock stands in front.
- Closing *any* descriptor of the file drops every lock that the process has on it. So there is one `RecordLock` per file and process,
  whatever way it came; a second descriptor that arrives is kept until nobody here holds the lock, and closed then.
- F_SETLKW has no timeout. A wait without an end calls it; a wait with one has it called in a thread, see `_Errand`. Nothing spins.
- The kernel says EDEADLK when processes wait for each other in a circle. That is no deadlock if they have several threads, and no
  error here: such a wait is tried again at intervals.

The holder writes who it is into the file, and wipes it out when it releases. Who gets the lock and finds somebody written there knows
that this one died while it held it.
"""

from __future__ import annotations

import _thread
import errno
import fcntl
import math
import os
import select
import struct
import threading
import weakref
from typing import Any, NamedTuple

from rallypoint.clock import Clock
from rallypoint.errors import UsageError, WouldDeadlock
from rallypoint.host import handover, processes

_TOKEN = struct.Struct("=16s")
"""At the file's beginning: random, so that a lock is known again whichever way its descriptor came."""

_NOTE = _TOKEN.size
"""Where the note stands: one byte that a holder leaves to the next one."""

_HOLDER_AT = 24
_HOLDER = struct.Struct("=IQd48s16s")
"""Who holds it: pid (0: nobody), when it started (clock ticks), when it got the lock (monotonic seconds), who, doing what."""

_DOING_AT = _HOLDER_AT + struct.calcsize("=IQd48s")

_NOBODY = bytes(_HOLDER.size)
_BYTES = _HOLDER_AT + _HOLDER.size

_FLOCK = struct.Struct("@hhqqi")
"""struct flock: type, whence, start, length, pid."""

_PF_EXITING = 0x4
"""In the flags of /proc/PID/stat, as in the kernel's linux/sched.h: it has begun to end."""

_CIRCLE_SECONDS = 0.01
"""Between two tries while the kernel sees a circle: long beside the 5 us that a try takes, short beside what a person notices."""


class Holder(NamedTuple):
    """Who holds the lock, or held it when it died."""

    pid: int
    who: str  # as given to `acquire`; "" when it is not known
    doing: str  # likewise
    since: float  # seconds on the monotonic clock; NaN when it is not known
    started: int  # when the process started, in clock ticks after boot; 0 when it is not known
    holds: bool  # False: it is gone, and nobody has had the lock since

    @property
    def runs(self) -> bool:
        """Whether the process lives on. A pid that was given to another process since does not count, nor does one that is on its way
        out: its locks go a moment before it does."""
        found = processes.status(self.pid)
        return found is not None and found.state not in "ZX" and found.started == self.started and not _is_exiting(self.pid)


class RecordLock:
    """One lock. Processes and threads exclude each other; not re-entrant.

    Made with `create()`; reaches other processes by fork, or inside a pickle (see `handover`), where it is the same object for one
    process, however often it arrives. After a fork the child has it free to ask for, whatever the parent's threads did with it.
    """

    def __init__(self, fd: int, token: bytes) -> None:
        """Use `create`. Takes the descriptor over."""
        self.token = token
        self.left: Holder | None = None  # while held: who died with it, and is not `settled`
        self.note = 0  # while held: the note
        self._fd = fd
        self._spares: list[int] = []  # descriptors of the same file, to be closed while nobody here holds the lock
        # Not __del__, which runs while a weak reference can still bring the object back.
        weakref.finalize(self, _forsaken, token, fd, self._spares).atexit = False
        self._errand: _Errand | None = None
        self._begin()

    def _begin(self) -> None:
        """Nobody in this process holds it or asks for it."""
        self._threads = threading.RLock()  # an RLock knows its owner, which matters when a signal handler raises; never taken twice
        self._inside = 0  # the thread that holds the thread lock, from a moment after it has it
        self._held = False
        self._former: bytes | None = None  # what a release writes where the holder stands; None: nothing to be written
        self._errand = None
        self._in_parent = False

    @classmethod
    def create(cls) -> RecordLock:
        """A new lock, free. Raises OSError when there is no descriptor left."""
        fd = processes.memory_file("rallypoint-lock")
        token = os.urandom(_TOKEN.size)
        os.pwrite(fd, token.ljust(_BYTES, b"\0"), 0)
        with _registry:
            return _entered(cls(fd, token))

    def __repr__(self) -> str:
        holder = self.holder()
        if holder is None:
            return "<RecordLock: free>"
        return f"<RecordLock: {'held by' if holder.holds else 'left behind by'} {holder.who or 'somebody'}, pid {holder.pid}>"

    @property
    def mine(self) -> bool:
        """Whether the calling thread holds it."""
        return self._held and self._inside == threading.get_ident()

    def fileno(self) -> int:
        """The descriptor. Never duplicate and close it in this process: that would drop the lock."""
        return self._fd

    # -- taking it ----------------------------------------------------------------------------------------------------------------

    def acquire(self, timeout: float = math.inf, who: str = "", doing: str = "") -> bool:
        """Take the lock; False when it was not to be had within `timeout` seconds (0: do not wait).

        `who` and `doing` are what others are told. Afterwards `left` is the one who died with it, if so; who does not call `settled()`
        leaves that to the next holder. Then `doing` is not told before `says()` is called: a holder who dies before he has settled it must
        not look like one of whom it is known that he leaves nothing behind.

        Signal handlers run at once, in the main thread, as in every Python call; when one raises, the lock is not held. WouldDeadlock when
        this thread has it, or is asking for it (a signal handler in the middle of this call). UsageError when the program has closed the
        descriptor.
        """
        me = threading.get_ident()
        if self._inside == me:
            raise WouldDeadlock("lock-twice", "this thread asks for a lock that it holds already: it would wait for itself for ever")
        until = _clock.monotonic() + timeout
        try:
            if not self._threads.acquire(timeout=-1 if timeout == math.inf else min(timeout, threading.TIMEOUT_MAX)):
                return False
            self._inside = me
            if self._ask(until):
                self._publish(who, doing)
                self._held = True
                return True
            self._end()
            return False
        except BaseException:
            self._end_after_all()
            raise

    def _ask(self, until: float) -> bool:
        """Get the record lock for this process."""
        while True:
            if self._errand is None:
                if self._try():
                    return True
                if until == math.inf:
                    self.wait()
                    return True
                if _clock.monotonic() >= until:
                    return False
                self._errand = _Errand()
                self._errand.start(self)
            if self._errand.wait(until):
                self._errand = None
                return True
            if not self._errand.give_up():
                return False
            self._errand = None  # it was over, for somebody who did not want it any more, before this one could take it up

    def _try(self) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise self._translated(error) from None

    def wait(self) -> None:
        """Wait in the kernel until this process has the record lock. For `_ask` and its errand alone."""
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX)
                return
            except OSError as error:
                if error.errno != errno.EDEADLK:
                    raise self._translated(error) from None
            select.select((), (), (), _CIRCLE_SECONDS)

    def pass_on(self) -> None:
        """Let the next process have the record lock. For `_end` and an errand alone."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            # This program has closed our descriptor, and with it the lock: the next `acquire` says so.

    def _publish(self, who: str, doing: str) -> None:
        """Take in what the last holder left, and write down who has it now."""
        found = os.pread(self._fd, _BYTES, 0)
        if found[: _TOKEN.size] != self.token:
            raise self._closed()
        self.note = found[_NOTE]
        former = found[_HOLDER_AT:]
        self.left = None if former == _NOBODY else _holder(former, holds=False)
        self._former = former
        own = _this_process()
        told = _cut(doing, 16) if self.left is None else b""
        entry = _HOLDER.pack(own.pid, own.started, _clock.monotonic(), _cut(who, 48), told)
        os.pwrite(self._fd, entry, _HOLDER_AT)

    def settled(self) -> None:
        """While held: what `left` says is dealt with, and the next holder need not know."""
        self._former = _NOBODY
        self.left = None

    def says(self, doing: str) -> None:
        """While held: tell others what it is held for."""
        os.pwrite(self._fd, _cut(doing, 16).ljust(16, b"\0"), _DOING_AT)

    def leave_note(self, note: int) -> None:
        """While held: write the note, 0 to 255. It stands until a holder writes another one, however this process ends."""
        self.note = note
        os.pwrite(self._fd, bytes((note,)), _NOTE)

    # -- giving it back -----------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Give it back. UsageError when the calling thread does not hold it. If a signal handler raises meanwhile, it is given back all
        the same."""
        if not self.mine:
            raise self._not_mine()
        try:
            self._end()
        except BaseException:
            self._end_after_all()
            raise

    def _end_after_all(self) -> None:
        """While an exception, of a signal handler perhaps, is on its way out. Another one at the same moment is one too many."""
        while True:
            try:
                return self._end()
            except OSError:
                raise
            except BaseException:
                continue

    def _end(self) -> None:
        """Undo whatever of `acquire` was done, in an order in which it may be broken off anywhere and called again."""
        if self._inside == threading.get_ident():
            self._held = False
            if self._errand is None or self._errand.give_up():
                self._errand = None
                self._unlock()
            self._inside = 0
        try:
            self._threads.release()
        except RuntimeError:
            pass  # not ours: it was never had, or was released before this was broken off

    def _unlock(self) -> None:
        if self._former is not None:
            try:
                os.pwrite(self._fd, _NOBODY if self.left is None else self._former, _HOLDER_AT)
            except OSError as error:
                if error.errno != errno.EBADF:  # as in `pass_on`
                    raise
            self._former = None  # before it is unlocked: afterwards the next holder stands there
        self.pass_on()
        if self._spares:
            _close(self._spares)

    # -- who has it ---------------------------------------------------------------------------------------------------------------

    def holder(self) -> Holder | None:
        """Who holds it now, or has died with it; None when it is free. Without waiting: it may be over when this returns."""
        for _ in range(3):  # what is written and what the kernel knows are some microseconds apart while it changes hands
            pid = self._locked_by()
            entry = os.pread(self._fd, _HOLDER.size, _HOLDER_AT)
            if self._locked_by() != pid:
                continue
            written = None if entry == _NOBODY else _holder(entry, holds=pid is not None)
            if pid is None or (written is not None and written.pid == pid):
                return written
        return None if pid is None else Holder(pid, "", "", math.nan, 0, True)

    def _locked_by(self) -> int | None:
        """The pid of the process that has the record lock."""
        if self._former is not None:  # the kernel tells of other processes alone
            return _this_process().pid
        reply = fcntl.fcntl(self._fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        kind, _, _, _, pid = _FLOCK.unpack(reply)
        return None if kind == fcntl.F_UNLCK else int(pid)

    def _translated(self, error: OSError) -> Exception:
        return self._closed() if error.errno == errno.EBADF else error

    def _closed(self) -> UsageError:
        return UsageError(
            "usage",
            f"this lock cannot be used any more in pid {os.getpid()}: the program has closed its descriptor, {self._fd}",
            help=(("leave descriptors alone that you have not opened, when you close many", ""),),
        )

    def _not_mine(self) -> UsageError:
        if self._in_parent:
            return UsageError(
                "usage", f"pid {os.getpid()} gives back a lock that its parent held when it forked: it is the parent's, still"
            )
        if self._held:
            return UsageError("usage", "this thread gives back a lock that another thread of this process holds")
        return UsageError("usage", "this thread gives back a lock that it does not hold")

    # -- ways into a process, and out of it ---------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.token, handover.sent(self._fd))

    def _keep(self, fd: int) -> None:
        """Another descriptor of this lock's file has arrived. It must not be closed while this process holds the lock."""
        if fd == self._fd:
            return
        self._spares.append(fd)
        if self._threads.acquire(blocking=False):
            try:
                if self._inside == 0 and self._errand is None:
                    _close(self._spares)
            finally:
                self._threads.release()

    def _forked(self) -> None:
        """In a child: the record lock stayed with the parent, and other threads did not come along."""
        in_parent = self.mine
        self._begin()
        self._in_parent = in_parent


class _Errand:
    """F_SETLKW in a thread, for a wait that has an end, which that call has not.

    A record lock is the process's, so any thread can get it for another. Who does not want to wait any longer leaves the errand alone:
    it goes on standing in the kernel's queue, where the next one of this process who asks finds it. When it gets the lock and nobody
    waits, it gives it back. While there is an errand nobody else of the process locks or unlocks.
    """

    def __init__(self) -> None:
        self._started: list[int] = []
        self._guard = threading.Lock()
        self._answer = threading.Lock()
        self._answer.acquire()
        self._wanted = True
        self._finished = False
        self._has_it = False
        self._failure: Exception | None = None

    def start(self, lock: RecordLock) -> None:
        # One step for the interpreter: no signal handler can raise between the thread's start and the note that it has started. With
        # `threading.Thread` it could, in start(), which waits for the thread.
        self._started.extend(map(_thread.start_new_thread, (self._run,), ((lock,),)))

    def _run(self, lock: RecordLock) -> None:
        failure: Exception | None = None
        try:
            lock.wait()
        except Exception as error:
            failure = error
        with self._guard:
            self._failure = failure
            self._has_it = failure is None and self._wanted
            if failure is None and not self._wanted:
                lock.pass_on()
            self._finished = True
            self._answer.release()

    def wait(self, until: float) -> bool:
        """Whether this process has the lock, at the latest at `until`."""
        with self._guard:
            self._wanted = True
        timeout = until - _clock.monotonic()
        self._answer.acquire(timeout=-1 if timeout == math.inf else max(0.0, min(timeout, threading.TIMEOUT_MAX)))
        over = self.give_up()
        if self._failure is not None:
            raise self._failure
        return over and self._has_it

    def give_up(self) -> bool:
        """Nobody waits. Whether the errand is over: then the process has the lock, or has not, and will not get it from here."""
        with self._guard:
            self._wanted = False
            return self._finished or not self._started


# -- one lock per file and process ----------------------------------------------------------------------------------------------------

_registry = threading.RLock()  # an RLock: the collector may run `_forsaken` in a thread that has it
_living: dict[bytes, weakref.ref[RecordLock]] = {}


def known(token: bytes) -> RecordLock | None:
    """The lock with this token, if this process has it."""
    reference = _living.get(token)
    return None if reference is None else reference()


def _arrived(token: bytes, passed: Any) -> RecordLock:
    """The lock that was in a pickle."""
    with _registry:
        here = known(token)
        if here is not None and isinstance(passed, handover.ByAddress):
            return here
        fd = handover.received(passed)
        if here is not None:
            here._keep(fd)
            return here
        if os.pread(fd, len(token), 0) != token:
            os.close(fd)
            raise UsageError("usage", "the descriptor that arrived is not that of the lock which was sent")
        return _entered(RecordLock(fd, token))


def _entered(lock: RecordLock) -> RecordLock:
    _living[lock.token] = weakref.ref(lock)
    return lock


def _forsaken(token: bytes, fd: int, spares: list[int]) -> None:
    """Nobody here has the lock any more: its descriptors go, but not if it has come anew, and may be held, while it went."""
    with _registry:
        heir = known(token)
        if heir is not None:
            heir._spares.extend((fd, *spares))
            return
        _close([fd, *spares])
        _living.pop(token, None)


def _close(fds: list[int]) -> None:
    while fds:
        try:
            os.close(fds.pop())
        except OSError:
            pass  # this program has closed it already


class _Process(NamedTuple):
    pid: int
    started: int


_clock = Clock()
_own: _Process | None = None


def _this_process() -> _Process:
    global _own
    if _own is None:
        found = processes.status("self")
        _own = _Process(os.getpid(), 0 if found is None else found.started)
    return _own


def _after_fork() -> None:
    global _own, _registry
    _own, _registry = None, threading.RLock()
    for reference in list(_living.values()):
        lock = reference()
        if lock is not None:
            lock._forked()


os.register_at_fork(after_in_child=_after_fork)


def _is_exiting(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return bool(int(file.read().rpartition(b")")[2].split()[6]) & _PF_EXITING)
    except (FileNotFoundError, ProcessLookupError):
        return True


def _holder(entry: bytes, *, holds: bool) -> Holder:
    pid, started, since, who, doing = _HOLDER.unpack(entry)
    return Holder(pid, who.rstrip(b"\0").decode(), doing.rstrip(b"\0").decode(), since, started, holds)


def _cut(text: str, length: int) -> bytes:
    """As many bytes as there is room for, in whole characters."""
    return text.encode("utf-8", "replace")[:length].decode("utf-8", "ignore").encode()
