"""Unpickling of a payload: large buffers are mapped where they are, and classes of this process
stay the same classes."""

from __future__ import annotations

import functools
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import msgspec
from cloudpickle import cloudpickle as by_value

from rallypoint.host import fd_passing, memory

MAPPED_BYTES = 1024 * 1024
"""Minimum bytes of a buffer that is mapped. Shorter ones are copied (0.1 ms), so that a small
tensor does not keep pages for itself, and many tensors not many mappings (the kernel allows
65530)."""


class Footer(msgspec.Struct):
    """Table of what lies beside the pickle. Offsets and sizes are bytes of the payload."""

    buffers: list[tuple[int, int]]  # offset and size, in the pickle's order
    storages: list[tuple[int, int, int]]  # offset, size, and the first byte's offset in the storage
    pid: int  # of the sender
    kept: list[int]  # shared memory that the receiver opens itself: the sender's descriptors


class ArrivingPayload:
    """Memory of a payload that is being unpickled."""

    def __init__(self, fd: int, footer: Footer) -> None:
        self._fd = fd
        self._buffers = footer.buffers
        self.storages = footer.storages
        self.made: dict[int, Any] = {}
        self.shared: dict[int, Any] = {}

    def buffers(self) -> Iterator[Any]:
        """Yield the buffers beside the pickle, in its order."""
        for offset, size in self._buffers:
            yield self.part(offset, size)

    def part(self, offset: int, size: int) -> Any:
        """Return writable bytes of the payload, which are this process's alone."""
        if size >= MAPPED_BYTES:
            return memory.mapped(self._fd, size, offset, private=True)
        data = bytearray(size)
        if os.preadv(self._fd, [data], offset) != size:
            raise EOFError("the payload is shorter than it says")
        return data


class _UnpicklingThread(threading.local):
    """Payload that a thread unpickles."""

    arrival: ArrivingPayload | None = None


_thread = _UnpicklingThread()


@contextmanager
def arriving(arrival: ArrivingPayload) -> Iterator[None]:
    """Unpickle the tensors of this payload in this thread."""
    before, _thread.arrival = _thread.arrival, arrival
    try:
        yield
    finally:
        _thread.arrival = before


def _current() -> ArrivingPayload:
    if _thread.arrival is None:
        what = "these bytes are one part of a payload of rallypoint.launch"
        raise pickle.UnpicklingError(f"{what}, and mean nothing without the memory beside them")
    return _thread.arrival


# --- functions that stand in a pickle ---


def tensor(
    index: int, dtype: Any, offset: int, shape: Any, stride: Any, requires_grad: bool
) -> Any:
    """Make a tensor in a storage of the payload."""
    begin = _current().storages[index][2] // dtype.itemsize
    return _put(storage(index), dtype, offset - begin, shape, stride, requires_grad)


def storage(index: int) -> Any:
    """Return a storage of the payload."""
    import torch

    arrival = _current()
    if index not in arrival.made:
        offset, size, _ = arrival.storages[index]
        data = arrival.part(offset, size)
        flat = torch.frombuffer(data, dtype=torch.uint8) if size else torch.empty(0, device="cpu")
        arrival.made[index] = flat.untyped_storage()
    return arrival.made[index]


def shared_tensor(
    descriptor: int,
    size: int,
    start: int,
    dtype: Any,
    offset: int,
    shape: Any,
    stride: Any,
    requires_grad: bool,
) -> Any:
    """Make a tensor in memory that processes share."""
    there = shared_storage(descriptor, size, start)
    return _put(there, dtype, offset + start // dtype.itemsize, shape, stride, requires_grad)


def shared_storage(descriptor: int, size: int, start: int) -> Any:
    """Return `size` bytes of shared memory, from its beginning: torch maps nothing else."""
    import torch

    shared = _current().shared
    if descriptor not in shared:
        fd = fd_passing.take(descriptor)
        try:
            shared[descriptor] = torch.UntypedStorage._new_shared_fd_cpu(fd, size)  # type: ignore[attr-defined]
        finally:
            os.close(fd)  # torch has a duplicate
    return shared[descriptor]


def cached(function: Any, maxsize: Any, typed: bool) -> Any:
    """Cache a function's results."""
    return functools.lru_cache(maxsize, typed)(function)


def typed_storage(storage: Any, dtype: Any, legacy: Any) -> Any:
    """Return a typed storage, of torch's class or of a `legacy` one (`torch.FloatStorage`)."""
    import torch

    if legacy is not None:
        return legacy(wrap_storage=storage, _internal=True)
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _put(
    storage: Any, dtype: Any, offset: int, shape: Any, stride: Any, requires_grad: bool
) -> Any:
    import torch

    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, stride)
    return tensor.requires_grad_() if requires_grad else tensor


# --- the pickle ---


_TRACKER = -2  # index of the argument by which cloudpickle's class makers know a class again


class Unpickler(pickle.Unpickler):
    """Unpickler that keeps classes of this process, and gives `__main__` in a rank what is its
    own."""

    def __init__(self, file: Any, buffers: Any, *, in_rank: bool) -> None:
        super().__init__(file, buffers=buffers)
        self._in_rank = in_rank
        self._known: set[int] = set()

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module != by_value.__name__:
            return found
        if name == "_make_skeleton_class":
            return self._class_maker(found, lambda args: args[3].get("__module__"))
        if name == "_make_skeleton_enum":
            return self._class_maker(found, lambda args: args[4])
        if name == "_class_setstate":
            # Of a class of this process, cloudpickle would overwrite methods with copies of them.
            known = self._known
            return lambda kind, state: kind if id(kind) in known else found(kind, state)
        if name == "_make_function" and self._in_rank:
            return _function_of_main
        return found

    def _class_maker(
        self, make: Callable[..., type], module_of: Callable[[Any], Any]
    ) -> Callable[..., type]:
        known, in_rank = self._known, self._in_rank

        def made(*args: Any) -> type:
            is_known = args[_TRACKER] in by_value._DYNAMIC_CLASS_TRACKER_BY_ID
            kind = make(*args)
            if is_known:
                known.add(id(kind))
            elif in_rank and module_of(args) == "__main__":
                # Found there by name, as where it came from: a DataLoader's queue pickles by name.
                sys.modules["__main__"].__dict__.setdefault(kind.__name__, kind)
            return kind

        return made


def _function_of_main(
    code: Any, namespace: dict[str, Any], name: Any, defaults: Any, closure: Any
) -> FunctionType:
    """Make a function of the caller's `__main__`, whose globals are this process's `__main__`."""
    if namespace.get("__name__") == "__main__":
        main = sys.modules["__main__"].__dict__
        for key in namespace:
            if main.get(key) is None:
                main[key] = namespace[key]
        namespace = main
    return by_value._make_function(code, namespace, name, defaults, closure)  # type: ignore[no-any-return]
