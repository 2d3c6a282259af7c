"""Pickling for a payload: tensors by the memory that they share, functions by value where a rank
could not import them."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from abc import ABCMeta
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import msgspec
from cloudpickle import cloudpickle as _by_value

from rallypoint.host import fd_passing
from rallypoint.host.shared_mappings import Mappings
from rallypoint.launcher.launch.marshalling import unpicklable, unpickling
from rallypoint.launcher.launch.marshalling.importable import Importable
from rallypoint.launcher.launch.marshalling.unpicklable import ObjectRefused, UnpicklableKind

if TYPE_CHECKING:
    from rallypoint.launcher.launch.marshalling import inspection


class SentStorage(msgspec.Struct):
    """Storage that is sent (torch's UntypedStorage): its number in the footer, and the first and
    last byte that its tensors use."""

    number: int
    storage: Any
    first: int
    last: int


class _SharedStorage(NamedTuple):
    """Storage that arrives as the same memory.

    `descriptor`: its number among those sent; `size`: bytes to map; `start`: where in them it
    begins.
    """

    descriptor: int
    size: int
    start: int
    storage: Any


_Reducer = Callable[["Pickler", Any], Any]


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler of one payload.

    `scan`: of a call; None for a result. `beside`: tensors are sent beside the pickle, not inside.
    """

    def __init__(
        self,
        file: Any,
        scan: inspection.Scan | None,
        buffer_callback: Callable[[Any], bool] | None = None,
        *,
        beside: bool = True,
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.scan = scan
        self.beside = beside
        self.last: object = None  # object that pickle came to last: the one that it refused
        self.storages: dict[int, SentStorage] = {}
        self._shared: dict[int, _SharedStorage] = {}
        self._importable = Importable()
        self._known: dict[type, _Reducer | None] = {}
        self._mappings = Mappings()

    def reducer_override(self, obj: Any) -> Any:
        self.last = obj
        kind = type(obj)
        try:
            how = self._known[kind]
        except KeyError:
            how = self._known[kind] = self._choose(kind)
        return NotImplemented if how is None else how(self, obj)

    def _choose(self, kind: type) -> _Reducer | None:
        if issubclass(kind, type):
            return Pickler._class
        if kind is FunctionType:
            return Pickler._function
        if kind is ModuleType:
            return Pickler._module
        if kind is functools._lru_cache_wrapper:
            return Pickler._cached
        if kind is functools.cached_property:
            return Pickler._cached_property
        refused = unpicklable.kind_of(kind)
        if refused is not None:
            return lambda self, obj: self._refuse(refused, obj)
        torch = sys.modules.get("torch")
        if self.beside and torch is not None and hasattr(torch, "UntypedStorage"):
            if kind is torch.Tensor:
                return Pickler._tensor
            if issubclass(kind, torch.Tensor):
                return Pickler._other_tensor
            if issubclass(kind, torch.UntypedStorage):
                return Pickler._storage
            if issubclass(kind, torch.storage.TypedStorage):
                return Pickler._typed_storage
        if issubclass(kind, ctypes._SimpleCData | ctypes.Array) and self.scan is not None:
            return Pickler._ctypes
        return None

    def _refuse(self, kind: UnpicklableKind, obj: object) -> Any:
        for name in ("stdout", "stderr"):
            if obj is getattr(sys, name) or obj is getattr(sys, f"__{name}__"):
                return getattr, (sys, name)
        raise ObjectRefused(kind)

    def _ctypes(self, obj: Any) -> Any:
        if hasattr(obj, "_wrapper"):  # in multiprocessing's shared memory
            raise ObjectRefused(unpicklable.RAW_CTYPES)
        return NotImplemented

    # --- code ---

    def _function(self, obj: FunctionType) -> Any:
        if obj.__module__ is not None and self._importable(obj.__module__):
            reduced = self._function_reduce(obj)
        else:
            reduced = self._dynamic_function_reduce(obj)
        if reduced is not NotImplemented and "_torchdynamo_orig_callable" in obj.__dict__:
            raise ObjectRefused(unpicklable.COMPILED)
        if self.scan is not None:
            self.scan.function(obj, by_name=reduced is NotImplemented)
        return reduced

    def _cached(self, obj: Any) -> Any:
        """Reduce a function of `functools.cache`, with no results, unless a rank finds it by name."""
        if self._importable(obj.__module__) and _by_value._lookup_module_and_qualname(obj):
            return NotImplemented
        given = obj.cache_parameters()
        return unpickling.cached, (obj.__wrapped__, given["maxsize"], given["typed"])

    def _cached_property(self, obj: Any) -> Any:
        """Leave out its lock, which Python before 3.12 has."""
        return type(obj), (obj.func,), {"attrname": obj.attrname}

    def _class(self, obj: type) -> Any:
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented and not self._importable(obj.__module__):
            reduced = _by_value._dynamic_class_reduce(obj)
        by_value = reduced is not NotImplemented and reduced[0] is _by_value._make_skeleton_class
        slots = vars(obj).get("__slots__") if by_value and type(obj) in (type, ABCMeta) else None
        if slots and isinstance(slots, str | tuple | list | dict):
            # cloudpickle sets them when the class is made, too late: its objects have a dict.
            reduced[1][3]["__slots__"] = slots
        if self.scan is not None:
            self.scan.kind(obj, by_name=reduced is NotImplemented)
        return reduced

    def _module(self, obj: ModuleType) -> Any:
        if self._importable(obj.__name__):
            return _by_value.subimport, (obj.__name__,)
        # They belong to the import of the module in this process.
        left_out = ("__builtins__", "__loader__", "__spec__", "__cached__")
        return _by_value.dynamic_subimport, (
            obj.__name__,
            {name: one for name, one in vars(obj).items() if name not in left_out},
        )

    # --- tensors ---

    def _check_tensor(self, obj: Any) -> None:
        if obj.requires_grad and not obj.is_leaf:
            raise ObjectRefused(unpicklable.NOT_A_LEAF)
        if self.scan is not None and obj.device.type not in ("cpu", "meta"):
            raise ObjectRefused(unpicklable.CUDA)

    def _tensor(self, obj: Any) -> Any:
        """Reduce a plain tensor to the bytes of its storage that it uses.

        All others (sparse, quantized, complex conjugates, with names or attributes) are taken apart
        by torch, into plain tensors and whole storages.
        """
        import torch

        self._check_tensor(obj)
        if (
            obj.layout is not torch.strided
            or obj.device.type in ("meta", "xla", "mtia", "maia")
            or obj.is_quantized
            or obj.is_nested
            or obj.is_conj()
            or obj.is_neg()
            or (hasattr(obj, "has_names") and obj.has_names())  # not since torch 2.13
            or obj.__dict__
            or obj._backward_hooks
        ):
            return NotImplemented
        storage = obj.untyped_storage()
        shape = (obj.dtype, obj.storage_offset(), tuple(obj.shape), obj.stride(), obj.requires_grad)
        shared = self._as_shared(storage)
        if shared is not None:
            return unpickling.shared_tensor, (shared.descriptor, shared.size, shared.start, *shape)
        size = obj.element_size()
        first = last = obj.storage_offset() * size
        if obj.numel():
            steps = zip(obj.shape, obj.stride(), strict=True)
            last += size * (1 + sum((length - 1) * step for length, step in steps))
        return unpickling.tensor, (self._keep(storage, first, last), *shape)

    def _other_tensor(self, obj: Any) -> Any:
        self._check_tensor(obj)
        return NotImplemented

    def _typed_storage(self, obj: Any) -> Any:
        legacy = type(obj) if type(obj).__name__ != "TypedStorage" else None
        return unpickling.typed_storage, (obj._untyped_storage, obj.dtype, legacy)

    def _storage(self, obj: Any) -> Any:
        shared = self._as_shared(obj)
        if shared is not None:
            if shared.start:
                raise ObjectRefused(unpicklable.SHARED_PART)
            return unpickling.shared_storage, (shared.descriptor, shared.size, shared.start)
        if obj.device.type == "meta":
            return NotImplemented
        if self.scan is not None and obj.device.type != "cpu":
            raise ObjectRefused(unpicklable.CUDA)
        return unpickling.storage, (self._keep(obj, 0, obj.nbytes()),)

    def _keep(self, storage: Any, first: int, last: int) -> int:
        sent = self.storages.get(storage._cdata)
        if sent is None or sent.first == sent.last:
            number = len(self.storages) if sent is None else sent.number
            sent = self.storages[storage._cdata] = SentStorage(number, storage, first, last)
        elif first < last:
            sent.first, sent.last = min(sent.first, first), max(sent.last, last)
        return sent.number

    def _as_shared(self, storage: Any) -> _SharedStorage | None:
        """Return the memory of a storage in a call, if other processes may have it too."""
        if self.scan is None or storage.device.type != "cpu" or not storage.nbytes():
            return None
        known = self._shared.get(storage._cdata)
        if known is not None:
            return known
        found = self._mappings.shared_at(storage.data_ptr())
        if found is None:
            return None
        fd = found.open()
        if fd is None:
            raise ObjectRefused(unpicklable.SHARED_NAMELESS)
        try:
            start = storage.data_ptr() - found.first + found.offset
            number, size = fd_passing.add(fd), start + storage.nbytes()
            self._shared[storage._cdata] = known = _SharedStorage(number, size, start, storage)
        finally:
            os.close(fd)
        return known


_memory_of = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_of.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_of.restype = ctypes.py_object
_PYBUF_READ = 0x100


def write_storage(write: Callable[[Any], object], storage: Any, first: int, last: int) -> None:
    """Write bytes of a storage from where they are; of an accelerator's storage from a copy."""
    if first == last:
        return
    if storage.device.type != "cpu":
        import torch

        part = torch.empty(0, dtype=torch.uint8, device=storage.device)
        storage = part.set_(storage, first, (last - first,), (1,)).cpu().untyped_storage()
        first, last = 0, last - first
    write(_memory_of(storage.data_ptr() + first, last - first, _PYBUF_READ))


def is_shared(value: Any) -> bool:
    """Tell whether a value is a tensor in memory that processes share, or a SharedTensor."""
    kind = type(value)
    if (kind.__module__, kind.__name__) == ("rallypoint.primitives.shared_tensor", "SharedTensor"):
        return True
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is None or not isinstance(value, tensor):
        return False
    try:
        storage: Any = value.untyped_storage()
        address = storage.data_ptr() if storage.device.type == "cpu" else 0
    except (RuntimeError, NotImplementedError):
        # A tensor without storage of its own: sparse, functional.
        return False
    return Mappings().shared_at(address) is not None
