"""A parcel that is being unpacked: large buffers are mapped where they are, classes that came from here are the same again."""

from __future__ import annotations

import array
import ctypes
import io
import mmap
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from cloudpickle import cloudpickle as _by_value

from rallypoint.host import passing

MAPPED_BYTES = 1024 * 1024
"""Buffers from this size on are mapped where they arrive. Shorter ones are copied then (0.1 ms), so that a small tensor does not
keep pages for itself, and a process of many tensors not many mappings (the kernel allows 65530)."""


# --- names that stand in a pickle; who unpacks puts the arrival's own methods in their place ---


_OUTSIDE = pickle.UnpicklingError(
    "these bytes are one part of a parcel of rallypoint.launch, and mean nothing without the memory beside them"
)


def _tensor(*_: Any) -> Any:
    """See `Arrival.tensor`."""
    raise _OUTSIDE


def _storage(*_: Any) -> Any:
    """See `Arrival.storage`."""
    raise _OUTSIDE


def _shared_tensor(*_: Any) -> Any:
    """See `Arrival.shared_tensor`."""
    raise _OUTSIDE


def _shared_storage(*_: Any) -> Any:
    """See `Arrival.shared_storage`."""
    raise _OUTSIDE


def _inside_tensor(data: bytes, dtype: Any, shape: Any, stride: Any, requires_grad: bool) -> Any:
    return _put(_inside_storage(data), dtype, 0, shape, stride, requires_grad)


def _inside_storage(data: bytes) -> Any:
    return _over(bytearray(data))


def typed(storage: Any) -> Any:
    if type(storage).__name__ == "TypedStorage":
        return _typed_again, (storage._untyped_storage, storage.dtype)
    return _typed_again, (storage._untyped_storage, storage.dtype, type(storage))


def _typed_again(storage: Any, dtype: Any, kind: Any = None) -> Any:
    import torch

    if kind is not None:
        return kind(wrap_storage=storage, _internal=True)
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _over(memory: Any) -> Any:
    """A storage over writable memory, which it keeps."""
    import torch

    if not len(memory):
        return torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _put(storage: Any, dtype: Any, offset: int, shape: Any, stride: Any, requires_grad: bool) -> Any:
    import torch

    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, stride)
    return tensor.requires_grad_() if requires_grad else tensor


# --- the arrival ---


class Arrival:
    """A parcel that is being unpacked."""

    def __init__(self, fd: int, footer: array.array[int]) -> None:
        self._fd = fd
        count, storages = footer[0], footer[1]
        self._buffers = [tuple(footer[at : at + 2]) for at in range(2, 2 + 2 * count, 2)]
        begin = 2 + 2 * count
        self._storages = [tuple(footer[at : at + 3]) for at in range(begin, begin + 3 * storages, 3)]
        self._made: dict[int, Any] = {}
        self._shared: dict[int, Any] = {}
        pid, _, *numbers = footer[begin + 3 * storages :]
        self.others = [f"/proc/{pid}/fd/{number}" for number in numbers]

    def buffers(self) -> Iterator[Any]:
        for offset, size in self._buffers:
            yield self._memory(offset, size)

    def _memory(self, offset: int, size: int) -> Any:
        if size >= MAPPED_BYTES:
            return _map(self._fd, offset, size)
        data = bytearray(size)
        if os.preadv(self._fd, [data], offset) != size:
            raise EOFError("the parcel is shorter than it says")
        return data

    def _stored(self, index: int) -> Any:
        if index not in self._made:
            offset, size, _ = self._storages[index]
            self._made[index] = _over(self._memory(offset, size))
        return self._made[index]

    def tensor(self, index: int, dtype: Any, offset: int, shape: Any, stride: Any, requires_grad: bool) -> Any:
        begin = self._storages[index][2]
        return _put(self._stored(index), dtype, offset - begin // dtype.itemsize, shape, stride, requires_grad)

    def storage(self, index: int) -> Any:
        return self._stored(index)

    def shared_tensor(self, descriptor: int, size: int, start: int, dtype: Any, offset: int, shape: Any, stride: Any, grad: bool) -> Any:
        return _put(self.shared_storage(descriptor, size, start), dtype, offset + start // dtype.itemsize, shape, stride, grad)

    def shared_storage(self, descriptor: int, size: int, start: int) -> Any:
        """`size` bytes from the file's beginning: torch maps nothing else; the tensors' offsets make up for it."""
        import torch

        if descriptor not in self._shared:
            fd = passing.take(descriptor)
            try:
                self._shared[descriptor] = torch.UntypedStorage._new_shared_fd_cpu(fd, size)  # type: ignore[attr-defined]
            finally:
                os.close(fd)  # torch has a duplicate
        return self._shared[descriptor]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


def _map(fd: int, offset: int, size: int) -> memoryview:
    """A private, writable mapping, which ends with the last view of it. Not Python's own: that keeps a descriptor for each."""
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, offset)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    block = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(block, _libc.munmap, address, size).atexit = False
    return memoryview(block).cast("B")


class Reader(io.RawIOBase):
    """Reads a descriptor from a place of its own: several processes have the same one, and one position."""

    def __init__(self, fd: int, at: int, size: int) -> None:
        self._fd = fd
        self._at = at
        self._end = at + size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: self._end - self._at]
        done = os.preadv(self._fd, [view], self._at) if view else 0
        self._at += done
        return done


_TRACKER = -2  # which argument of cloudpickle's class makers is the number by which it knows the class again


class Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, arrival: Arrival, buffers: Any, *, in_rank: bool) -> None:
        super().__init__(file, buffers=buffers)
        self._known: set[int] = set()
        here = __name__
        there = _by_value.__name__
        self._instead: dict[tuple[str, str], Any] = {
            (here, "_tensor"): arrival.tensor,
            (here, "_storage"): arrival.storage,
            (here, "_shared_tensor"): arrival.shared_tensor,
            (here, "_shared_storage"): arrival.shared_storage,
            (there, "_make_skeleton_class"): self._class_with(_by_value._make_skeleton_class, _module_of_class, in_rank),
            (there, "_make_skeleton_enum"): self._class_with(_by_value._make_skeleton_enum, _module_of_enum, in_rank),
            (there, "_class_setstate"): self._class_state,
        }
        if in_rank:
            self._instead[there, "_make_function"] = _function_of_main

    def forget(self) -> None:
        """Afterwards nothing that arrived is kept alive by it, without the collector."""
        self._instead.clear()

    def find_class(self, module: str, name: str) -> Any:
        return self._instead.get((module, name)) or super().find_class(module, name)

    def _class_with(self, make: Callable[..., type], module_of: Callable[[Any], Any], in_rank: bool) -> Callable[..., type]:
        def made(*args: Any) -> type:
            known = args[_TRACKER] in _by_value._DYNAMIC_CLASS_TRACKER_BY_ID
            kind = make(*args)
            if known:
                self._known.add(id(kind))
            elif in_rank and module_of(args) == "__main__":
                # Found there by name, as where it came from: a DataLoader's queue pickles by name.
                sys.modules["__main__"].__dict__.setdefault(kind.__name__, kind)
            return kind

        return made

    def _class_state(self, kind: type, state: Any) -> type:
        """A class that came from here and returns is the same class, and is left alone: cloudpickle would overwrite its methods with copies
        that have other globals."""
        if id(kind) in self._known:
            return kind
        return _by_value._class_setstate(kind, state)  # type: ignore[no-any-return]


def _module_of_class(args: Any) -> Any:
    return args[3].get("__module__")


def _module_of_enum(args: Any) -> Any:
    return args[4]


def _function_of_main(code: Any, namespace: dict[str, Any], name: Any, defaults: Any, closure: Any) -> FunctionType:
    """A function of the caller's `__main__` has this process's `__main__` for its globals: all of them the same one, found by name."""
    if namespace.get("__name__") == "__main__":
        main = sys.modules["__main__"].__dict__
        for key in namespace:
            if main.get(key) is None:
                main[key] = namespace[key]
        namespace = main
    return _by_value._make_function(code, namespace, name, defaults, closure)  # type: ignore[no-any-return]
