"""The lock of a shared tensor: its `with` block, and what is said of its holders."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Literal

from rallypoint.clock import Clock
from rallypoint.errors import LockAbandoned, LockTimeout
from rallypoint.host import process_status
from rallypoint.host.record_lock import LockHolder, RecordLock

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from rallypoint.primitives.shared_tensor import SharedTensor

OnAbandoned = Literal["raise", "continue"]

_clock = Clock()
_we: tuple[int, str] = (0, "")


class Locked:
    """`with shared.locked():`; see there. One `with` at a time. It has no destructor except while
    it holds the lock: what a signal handler raises in one is lost, a Ctrl-C too."""

    __slots__ = ("_doing", "_on_abandoned", "_shared", "_timeout")

    def __init__(
        self, shared: SharedTensor, timeout: float, on_abandoned: OnAbandoned, doing: str
    ) -> None:
        self._doing = doing
        self._shared = shared
        self._timeout = timeout
        self._on_abandoned: OnAbandoned = on_abandoned

    def __enter__(self) -> torch.Tensor:
        self._shared._take(self._timeout, self._on_abandoned, self._doing)
        self.__class__ = _Inside
        return self._shared._tensor

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        lock = self._shared._lock
        try:
            # In a child that was forked in the block the lock is not its own; the program's own
            # error says more.
            if kind is None or lock.mine:
                self._shared._give_back()
        except BaseException:
            if lock.mine:
                lock.release()
            raise
        finally:
            if not lock.mine:
                self.__class__ = Locked


class _Inside(Locked):
    """A `Locked` while it holds the lock."""

    __slots__ = ()

    def __del__(self) -> None:
        # A signal handler can raise at the very entry of __exit__, where nothing catches it. This
        # comes when its traceback goes.
        if self._shared._lock.mine:
            self._shared._give_back()


def timed_out(lock: RecordLock, what: str, timeout: float) -> LockTimeout:
    """Make the error for a lock that was not had; `what`: the tensor."""
    holder = lock.holder()
    headline = f"the lock of SharedTensor {what} was not had within {timeout:g} s: "
    if holder is None:
        why = ("it was free a moment later: whoever held it has just given it back",)
        text = f"{headline}somebody held it"
        return LockTimeout("lock-timeout", text, holder="somebody", held_for=0.0, why=why)
    stopped = f"pid {holder.pid} is stopped (SIGSTOP, Ctrl-Z, a debugger)"
    name = _name(holder)
    return LockTimeout(
        "lock-timeout",
        f"{headline}{name} holds it{_since(holder)}",
        holder=name,
        held_for=0.0 if math.isnan(holder.since) else _seconds(holder),
        why=(stopped,) if process_status.is_stopped(holder.pid) else (),
    )


def abandoned(left: LockHolder, what: str) -> LockAbandoned:
    """Make the error for a lock whose holder went without releasing it."""
    took = f"took the lock {_seconds(left):.1f} s ago"
    if left.runs:
        headline = f"{_name(left)} lost the lock of SharedTensor {what} while it held it"
        why = f"it still runs, and {took}: it has closed a descriptor of the lock's file, with which the lock goes"
    else:
        headline = f"{_name(left)} died while it held the lock of SharedTensor {what}, so it may be half changed"
        why = f"it {took}, and did not give it back"
    return LockAbandoned(
        "lock-abandoned",
        headline,
        why=(why, "this is said once; the lock is free, and the next one who asks gets it"),
        help=(
            (
                "bring the tensor into order under the lock",
                'with shared.locked(on_abandoned="continue"):',
            ),
            (
                "or change it only by calls that are whole or absent",
                "shared.add_(x), shared.copy_(x)",
            ),
        ),
    )


def state_of(lock: RecordLock) -> str:
    """Return which process holds the lock, in words."""
    if lock.mine:
        return "held by this thread"
    holder = lock.holder()
    if holder is None:
        return "free"
    if not holder.holds:
        return f"free: {_name(holder)} died with the lock"
    return f"held by {_name(holder)}{_since(holder)}"


def _name(holder: LockHolder) -> str:
    if holder.holds and holder.pid == os.getpid():
        return "another thread of this process"
    return f"{holder.who} (pid {holder.pid})" if holder.who else f"pid {holder.pid}"


def _seconds(holder: LockHolder) -> float:
    return _clock.monotonic() - holder.since


def _since(holder: LockHolder) -> str:
    seconds = _seconds(holder)
    known = "" if math.isnan(seconds) else f" for {seconds:.1f} s"
    return known + (f", in {holder.doing}" if holder.doing else "")


def who_we_are() -> str:
    """Name this process for others beside its pid: "rank 2", "SpawnProcess-3", or nothing."""
    global _we
    if _we[0] != os.getpid():
        _we = (os.getpid(), _rank_or_name())
    return _we[1]


def _rank_or_name() -> str:
    import multiprocessing.process

    from rallypoint.store import discovery

    here = discovery.current()
    if here is not None and here.rank is not None:
        return f"rank {here.rank}"
    name = multiprocessing.process.current_process().name
    return "" if name == "MainProcess" else name
