"""A tensor in shared memory of one host, with a lock that survives the death of its holder.

The memory is a memfd: it has no name, takes nothing from /dev/shm, and goes with its last user. The
lock is a `RecordLock`, which the kernel frees when its holder is killed; the next holder is told
so.

`add_` and `copy_` are whole or absent, at any size, whenever their process is killed. They write
the result beside the tensor first (a redo record), then leave a note in the lock, then copy it
over, then remove the note. The next holder that finds the note copies again, which does no harm,
before anything else. The other way, two halves that take turns, would give `tensor` a changing
address.
"""

from __future__ import annotations

import math
import mmap
import operator
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from rallypoint.errors import UsageError, WouldDeadlock
from rallypoint.host import fd_passing, memory, process_status
from rallypoint.host.record_lock import RecordLock
from rallypoint.primitives.shared_tensor_lock import (
    Locked,
    OnAbandoned,
    abandoned,
    state_of,
    timed_out,
    who_we_are,
)
from rallypoint.store.client.arguments import described, seconds_of

if TYPE_CHECKING:
    import torch

_REDO = 1
"""The lock's note: what stands beside the tensor is complete, and has to be copied over it."""

_WHOLE = ("add_", "copy_")
"""Calls in which a holder may die without leaving anything half changed."""

_SMALLEST = 16
"""Bytes of the largest element: an empty tensor has memory, too, since no empty file is mapped."""


class SharedTensor:
    """A tensor that the processes of one host share, zeros at first, with a lock.

    `shape`: an int or a sequence of ints. `dtype`: a torch.dtype of whole bytes per element;
    torch's default without one.

    `tensor` is the memory itself: an ordinary CPU tensor, always the same object and address, which
    lives for as long as anybody uses it, also when the SharedTensor is gone. Reading and writing it
    is not guarded: do that inside `with shared.locked()`. `add_` and `copy_` take the lock
    themselves, unless the calling thread has it.

    It goes to other processes by fork, as an argument of `multiprocessing.Process` or a pool's
    initializer (fork, spawn, forkserver), and through queues, pipes and cloudpickle, where the
    sender must keep it until it has arrived. In a process it is one object, however often it
    arrives. After a fork parent and child share it; a lock that was held stays the parent's.

    Threads exclude each other as processes do. Signal handlers run at once in a waiting call of the
    main thread; if one raises, the lock is not held, and `add_` or `copy_` is whole or absent.
    """

    __slots__ = ("__weakref__", "_address", "_beside", "_lock", "_main", "_tensor")

    def __init__(self, shape: int | Sequence[int], dtype: torch.dtype | None = None) -> None:
        import torch

        size = _checked_shape(shape)
        dtype = torch.get_default_dtype() if dtype is None else _checked_dtype(dtype)
        length = max(_SMALLEST, math.prod(size) * dtype.itemsize)
        # The memory beside the tensor costs nothing before it is written.
        fd = memory.create(_beside_at(length) + length)
        try:
            self._open(RecordLock.create(), fd, size, dtype)
        finally:
            os.close(fd)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> Self:
        """Make a new one with the shape, dtype and values of a tensor, which may be on any device.
        It is a copy."""
        shared = cls(tuple(tensor.shape), tensor.dtype)
        shared._main.copy_(tensor.detach())
        return shared

    def _open(self, lock: RecordLock, fd: int, size: tuple[int, ...], dtype: torch.dtype) -> None:
        """Map the memory. `fd` stays the caller's."""
        import torch

        length = max(_SMALLEST, math.prod(size) * dtype.itemsize)
        # As torch itself opens shared memory that arrives: `tensor` may go through
        # torch.multiprocessing, and stays this memory. A tensor over a mapping of our own would be
        # moved to a copy in /dev/shm when it is sent.
        with torch.inference_mode(False):
            storage = torch.UntypedStorage._new_shared_fd_cpu(fd, length)  # type: ignore[attr-defined]
            self._tensor: torch.Tensor = torch.empty(0, dtype=dtype, device="cpu")
            self._tensor.set_(storage, 0, size)  # type: ignore[call-overload]
            # A program may do things to its object (requires_grad_, resize_), and not to this one.
            self._main: torch.Tensor = self._tensor.detach()
        self._address = self._main.data_ptr()
        self._beside: torch.Tensor | None = None
        self._lock = lock
        _living[lock.token] = self

    @property
    def tensor(self) -> torch.Tensor:
        """The memory as a tensor. Unguarded; while an `add_` or `copy_` is under way elsewhere it
        may be half changed, which no holder of the lock ever sees."""
        self._check_place()
        return self._tensor

    @property
    def shape(self) -> torch.Size:
        return self._main.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._main.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its elements. As many again are used from the first `add_` or `copy_` on."""
        return self._main.numel() * self._main.element_size()

    def __repr__(self) -> str:
        return f"<SharedTensor {self._what()}, {state_of(self._lock)}>"

    def _what(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {tuple(self.shape)}, {self.nbytes} bytes"

    # -- the lock

    def locked(
        self, timeout: float | timedelta | None = None, on_abandoned: OnAbandoned = "raise"
    ) -> Locked:
        """Hold the lock for a `with` block; `as` gives the tensor.

        `timeout`: seconds to wait for it, 0 for not at all; None waits without an end. LockTimeout,
        which names the holder, afterwards. When the last holder died in its block, what it was
        changing may be half changed: LockAbandoned names it, once, to the next one that asks; the
        lock is free then. `on_abandoned="continue"` has the lock instead, for a caller that can
        tell, or need not know. WouldDeadlock (`lock-twice`) when the calling thread has it already.
        A waiting thread stands in the kernel's queue; fairness is not promised."""
        if on_abandoned not in ("raise", "continue"):
            text = f'on_abandoned={on_abandoned!r} is neither "raise" nor "continue"'
            raise UsageError("usage", text)
        return Locked(self, seconds_of(timeout), on_abandoned, "")

    def _take(self, timeout: float, on_abandoned: OnAbandoned, doing: str) -> None:
        lock = self._lock
        if lock.mine:
            text = f"this thread asks for the lock of {self!r}, which it holds already: it would wait for itself for ever"
            inside = (
                "inside the block use what is there",
                "shared.tensor, shared.add_(x), shared.copy_(x)",
            )
            raise WouldDeadlock("lock-twice", text, help=(inside,))
        try:
            if not lock.acquire(timeout, who_we_are(), doing):
                raise timed_out(lock, self._what(), timeout)
            self._check_place()
            self._redo()
            left = lock.left
            if left is not None:
                error = abandoned(left, self._what())
                lock.settled()
                if on_abandoned == "raise" and left.doing not in _WHOLE:
                    raise error
                lock.says(doing)
        except BaseException:
            if lock.mine:
                lock.release()
            raise

    def _give_back(self) -> None:
        """Release the lock. Memory that is complete beside the tensor is copied first, also when a
        signal handler has raised in the middle of `add_` or `copy_`. If that is broken off, too,
        the next holder does it."""
        try:
            if self._lock.mine:
                self._redo()
        finally:
            self._lock.release()

    # -- whole or absent

    def add_(
        self,
        x: Any,
        alpha: float = 1,
        *,
        timeout: float | timedelta | None = None,
        on_abandoned: OnAbandoned = "raise",
    ) -> Self:
        """Do `tensor += alpha * x` under the lock, whole or absent when this process is killed.

        `x`: a tensor on any device or a number, which broadcasts and is converted as for
        `torch.Tensor.add_`, and fails with torch's error when it cannot; nothing is changed then.
        `timeout`, `on_abandoned`: see `locked`; they do not matter when the calling thread has the
        lock. A holder that died inside an `add_` or `copy_` of its own leaves nothing half changed,
        and is not told of.
        """
        import torch

        value = _here(x)

        def add(out: torch.Tensor) -> None:
            if isinstance(value, torch.Tensor) and value.shape != out.shape:
                out.copy_(self._main).add_(value, alpha=alpha)  # never broadcasts beyond `out`
            else:
                torch.add(self._main, value, alpha=alpha, out=out)

        return self._change("add_", add, seconds_of(timeout), on_abandoned)

    def copy_(
        self,
        x: Any,
        *,
        timeout: float | timedelta | None = None,
        on_abandoned: OnAbandoned = "raise",
    ) -> Self:
        """Do `tensor[...] = x` under the lock, whole or absent when this process is killed. See
        `add_`."""
        import torch

        value = torch.as_tensor(_here(x), device="cpu")
        return self._change(
            "copy_", lambda out: out.copy_(value), seconds_of(timeout), on_abandoned
        )

    def _change(
        self,
        doing: str,
        write: Callable[[torch.Tensor], object],
        timeout: float,
        on_abandoned: OnAbandoned,
    ) -> Self:
        if self._lock.mine:
            self._write(write)
        else:
            with Locked(self, timeout, on_abandoned, doing):
                self._write(write)
        return self

    def _write(self, write: Callable[[torch.Tensor], object]) -> None:
        beside = self._beside_it()
        _compute(lambda: write(beside))
        try:
            self._lock.leave_note(_REDO)
            self._redo()
        except BaseException:
            # Who has the lock for a block may catch this there, and go on writing to the tensor: it
            # must not be copied over that later.
            self._redo()
            self._lock.leave_note(0)  # the file's may stand though ours does not
            raise

    def _redo(self) -> None:
        """Finish, while the lock is held, what is complete beside the tensor."""
        if self._lock.note == _REDO:
            beside = self._beside_it()
            _compute(lambda: self._main.copy_(beside))
            self._lock.leave_note(0)

    def _beside_it(self) -> torch.Tensor:
        """Map the memory beside the tensor, of the same form."""
        if self._beside is None:
            import torch

            storage = self._main.untyped_storage()
            fd, length = storage._share_fd_cpu_()  # torch's own descriptor, which stays its
            mapped = mmap.mmap(fd, length, offset=_beside_at(length))
            with torch.inference_mode(False):
                flat = torch.frombuffer(mapped, dtype=torch.uint8)
                self._beside = flat[: self.nbytes].view(self.dtype).view(self.shape)
        return self._beside

    def _check_place(self) -> None:
        if self._main.data_ptr() != self._address:
            raise UsageError(
                "usage",
                f"the tensor of SharedTensor {self._what()} is no longer the shared memory: torch.multiprocessing has moved it",
                why=(
                    'with the sharing strategy "file_system" torch copies a tensor that it sends, and puts the copy in its place',
                ),
                help=(("send the SharedTensor, not its tensor", "queue.put(shared)"),),
            )

    # -- ways into a process, and out of it

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_place()
        fd, _ = self._main.untyped_storage()._share_fd_cpu_()
        passed = fd_passing.sent(fd)
        return _arrived, (type(self), self._lock, passed, tuple(self.shape), self.dtype)


_living: weakref.WeakValueDictionary[bytes, SharedTensor] = weakref.WeakValueDictionary()


def _compute(step: Callable[[], object]) -> None:
    """Run a step, with one thread where torch's others did not come along, see `_forked`. What it
    works on has no gradient, so nothing is recorded; a `no_grad` around it would take longer than
    the step itself on a small tensor."""
    if not _bereft:
        step()
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        step()
    finally:
        torch.set_num_threads(threads)


_threads_at_fork = 1
_bereft = False


def _forking() -> None:
    global _threads_at_fork
    _threads_at_fork = process_status.threads()


def _forked() -> None:
    """Note that a child has none of its parent's other threads. If OpenMP's were among them, its
    next computation with several waits for them for ever (GCC's libgomp), holding the lock."""
    global _bereft
    _bereft = _bereft or _threads_at_fork > 1


os.register_at_fork(before=_forking, after_in_child=_forked)


def _arrived(
    kind: type[SharedTensor],
    lock: RecordLock,
    passed: Any,
    size: tuple[int, ...],
    dtype: torch.dtype,
) -> SharedTensor:
    """Return the tensor that was in a pickle: the one that this process has already, if so."""
    here = _living.get(lock.token)
    if here is not None and isinstance(passed, fd_passing.ByAddress):
        return here
    fd = fd_passing.received(passed)
    try:
        if here is None:
            here = kind.__new__(kind)
            here._open(lock, fd, size, dtype)
        return here
    finally:
        os.close(fd)


def _checked_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        lengths = shape if isinstance(shape, Sequence) else (shape,)
        size = tuple(map(operator.index, lengths))
    except TypeError:
        text = f"a shape is an int or a sequence of ints, not {described(shape)}"
        raise TypeError(text) from None
    if any(length < 0 for length in size):
        raise UsageError("usage", f"the shape {size} has a negative length")
    return size


def _checked_dtype(dtype: object) -> torch.dtype:
    import torch

    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype={dtype!r}: a torch.dtype, not {described(dtype)}")
    if str(dtype).startswith("torch.q"):  # their scale is no part of the memory
        text = f"a SharedTensor cannot be quantized ({dtype})"
        raise UsageError("usage", text, help=(("share its int_repr()", ""),))
    return dtype


def _beside_at(length: int) -> int:
    """Return where in the file the memory beside the tensor begins: with a page, to be mapped."""
    return -(-length // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _here(x: Any) -> Any:
    """Bring a tensor to the CPU, before the lock is taken, and without gradient."""
    import torch

    if not isinstance(x, torch.Tensor):
        return x
    return x.detach() if x.is_cpu else x.detach().to("cpu")
