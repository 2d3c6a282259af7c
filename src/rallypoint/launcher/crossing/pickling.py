"""How objects are taken apart for a parcel: tensors by the memory they share, functions by value where a rank could not import them."""

from __future__ import annotations

import ctypes
import functools
import os
import pickle
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
from cloudpickle import cloudpickle as _by_value

from rallypoint.host import passing
from rallypoint.host.mappings import Mappings
from rallypoint.launcher.crossing import arrival, misfits
from rallypoint.launcher.crossing.misfits import Misfit, Refused
from rallypoint.launcher.crossing.modules import Importable

if TYPE_CHECKING:
    from rallypoint.launcher.crossing import inspection


class Kept(NamedTuple):
    """A storage that goes along: its place in the footer, and what keeps it alive. (It is torch's UntypedStorage.)"""

    number: int
    storage: Any


class _Shared(NamedTuple):
    """A storage that arrives as the same memory: a descriptor's number, bytes to map, and where in them it begins."""

    descriptor: int
    size: int
    start: int
    storage: Any


_Reducer = Callable[[Any], Any]


class Reductions:
    """How each object is taken apart, for whichever pickler does it."""

    scan: inspection.Scan | None
    beside: bool

    def prepare(self, scan: inspection.Scan | None, *, beside: bool = True) -> None:
        """`scan`: of a call; None for a result. `beside=False`: tensors go inside the pickle."""
        self.scan = scan
        self.beside = beside
        self.extents: list[list[int]] = []  # of each storage: first and last byte that its tensors use
        self.storages: dict[int, Kept] = {}
        self._shared: dict[int, _Shared] = {}
        self._importable = Importable()
        self._known: dict[type, _Reducer | None] = {}
        self._mappings = Mappings()

    def forget(self) -> None:
        """Afterwards nothing of what was pickled is kept alive: its own methods, kept by type, would leave it to the collector."""
        self._known.clear()
        self.storages.clear()
        self._shared.clear()

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        try:
            how = self._known[kind]
        except KeyError:
            how = self._known[kind] = self._choose(kind)
        return NotImplemented if how is None else how(obj)

    def _choose(self, kind: type) -> _Reducer | None:
        if issubclass(kind, type):
            return self._class
        if kind is FunctionType:
            return self._function
        if kind is ModuleType:
            return self._module
        misfit = misfits.kind_of(kind)
        if misfit is not None:
            return functools.partial(self._misfit, misfit)
        torch = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "UntypedStorage"):
            if kind is torch.Tensor:
                return self._tensor
            if issubclass(kind, torch.Tensor):
                return self._other_tensor
            if issubclass(kind, torch.UntypedStorage):
                return self._storage
            if issubclass(kind, torch.storage.TypedStorage):
                return arrival.typed
        if issubclass(kind, ctypes._SimpleCData | ctypes.Array) and self.scan is not None:
            return self._ctypes
        return None

    def _misfit(self, misfit: Misfit, obj: object) -> Any:
        for name in ("stdout", "stderr"):
            if obj is getattr(sys, name) or obj is getattr(sys, f"__{name}__"):
                return getattr, (sys, name)
        raise Refused(misfit)

    def _ctypes(self, obj: Any) -> Any:
        if hasattr(obj, "_wrapper"):  # in multiprocessing's shared memory
            raise Refused(misfits.RAW_CTYPES)
        return NotImplemented

    # --- code ---

    def _function(self, obj: FunctionType) -> Any:
        if obj.__module__ is not None and self._importable(obj.__module__):
            reduced = cloudpickle.Pickler._function_reduce(self, obj)
        else:
            reduced = self._dynamic_function_reduce(obj)
        if reduced is not NotImplemented and "_torchdynamo_orig_callable" in obj.__dict__:
            raise Refused(misfits.COMPILED)
        if self.scan is not None:
            self.scan.function(obj, by_name=reduced is NotImplemented)
        return reduced

    def _class(self, obj: type) -> Any:
        reduced = cloudpickle.Pickler.reducer_override(self, obj)
        if reduced is NotImplemented and not self._importable(obj.__module__):
            reduced = _by_value._dynamic_class_reduce(obj)
        if self.scan is not None:
            self.scan.kind(obj, by_name=reduced is NotImplemented)
        return reduced

    def _module(self, obj: ModuleType) -> Any:
        if self._importable(obj.__name__):
            return _by_value.subimport, (obj.__name__,)
        left_out = ("__builtins__", "__loader__", "__spec__", "__cached__")  # they belong to whoever imported it here
        return _by_value.dynamic_subimport, (obj.__name__, {name: one for name, one in vars(obj).items() if name not in left_out})

    # What cloudpickle's reducers call on their pickler.
    _function_reduce = cloudpickle.Pickler._function_reduce
    _dynamic_function_reduce = cloudpickle.Pickler._dynamic_function_reduce
    _function_getnewargs = cloudpickle.Pickler._function_getnewargs

    # --- tensors ---

    def _check_tensor(self, obj: Any) -> None:
        if obj.requires_grad and not obj.is_leaf:
            raise Refused(misfits.NOT_A_LEAF)
        if self.scan is not None and obj.device.type not in ("cpu", "meta"):
            raise Refused(misfits.CUDA)

    def _tensor(self, obj: Any) -> Any:
        """As the bytes of its storage that it uses. What is more than that (sparse, quantized, complex conjugates, names, attributes)
        torch takes apart itself, into plain tensors and whole storages."""
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
            return arrival._shared_tensor, (shared.descriptor, shared.size, shared.start, *shape)
        size = obj.element_size()
        first = obj.storage_offset() * size
        last = first + size * (1 + sum((n - 1) * step for n, step in zip(obj.shape, obj.stride(), strict=True))) if obj.numel() else first
        if not self.beside:
            return arrival._inside_tensor, (bytes(bytes_of(storage, first, last)), shape[0], *shape[2:])
        return arrival._tensor, (self._keep(storage, first, last), *shape)

    def _other_tensor(self, obj: Any) -> Any:
        self._check_tensor(obj)
        return NotImplemented

    def _storage(self, obj: Any) -> Any:
        shared = self._as_shared(obj)
        if shared is not None:
            if shared.start:
                raise Refused(misfits.SHARED_PART)
            return arrival._shared_storage, (shared.descriptor, shared.size, shared.start)
        if obj.device.type == "meta":
            return NotImplemented
        if self.scan is not None and obj.device.type != "cpu":
            raise Refused(misfits.CUDA)
        if not self.beside:
            return arrival._inside_storage, (bytes(bytes_of(obj, 0, obj.nbytes())),)
        return arrival._storage, (self._keep(obj, 0, obj.nbytes()),)

    def _keep(self, storage: Any, first: int, last: int) -> int:
        kept = self.storages.get(storage._cdata)
        if kept is None:
            kept = self.storages[storage._cdata] = Kept(len(self.extents), storage)
            self.extents.append([first, last])
        elif last > first:
            extent = self.extents[kept.number]
            if extent[1] > extent[0]:
                extent[:] = min(extent[0], first), max(extent[1], last)
            else:
                extent[:] = first, last
        return kept.number

    def _as_shared(self, storage: Any) -> _Shared | None:
        """Of a call: the memory of a storage that other processes may have, too."""
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
            raise Refused(misfits.SHARED_NAMELESS)
        try:
            start = storage.data_ptr() - found.first + found.offset
            self._shared[storage._cdata] = known = _Shared(passing.add(fd), start + storage.nbytes(), start, storage)
        finally:
            os.close(fd)
        return known


class Pickler(Reductions, cloudpickle.Pickler):  # type: ignore[misc]
    """Writes a parcel."""


_PythonPickler: Any = pickle._Pickler


class Tracer(Reductions, _PythonPickler):  # type: ignore[misc]
    """Goes the same way in Python, in order to find where it ends: writes nothing, copies nothing, passes over what is plain."""

    dispatch_table = cloudpickle.Pickler.dispatch_table

    def __init__(self) -> None:
        super().__init__(_Nowhere(), 5, buffer_callback=lambda _: None)
        self.globals_ref: dict[int, dict[str, object]] = {}
        self.proto = 5
        self.way: list[object] = []
        self.ended: list[object] | None = None

    def save(self, obj: object, save_persistent_id: bool = True) -> None:
        if type(obj) in _PLAIN or (type(obj) in _CONTAINERS and _all_plain(obj)):
            return
        self.way.append(obj)
        try:
            super().save(obj, save_persistent_id)
        except BaseException:
            if self.ended is None:
                self.ended = list(self.way)
            raise
        finally:
            self.way.pop()

    def memoize(self, obj: object) -> None:
        if id(obj) not in self.memo:  # an empty tuple may come by twice: what stands in it was passed over
            super().memoize(obj)


_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})
_CONTAINERS = frozenset({list, tuple, set, frozenset, dict})


def _all_plain(obj: Any) -> bool:
    if type(obj) is dict:
        return _PLAIN.issuperset(map(type, obj)) and _PLAIN.issuperset(map(type, obj.values()))
    return _PLAIN.issuperset(map(type, obj))


class _Nowhere:
    def write(self, data: object) -> int:
        return 0


_memory_of = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_of.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_of.restype = ctypes.py_object
_PYBUF_READ = 0x100


def bytes_of(storage: Any, first: int, last: int) -> Any:
    """Bytes of a storage, where they are; those of an accelerator's in a copy."""
    if last <= first:
        return b""
    if storage.device.type != "cpu":
        import torch

        part = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, first, (last - first,), (1,))
        copy = part.cpu().untyped_storage()
        block = (ctypes.c_ubyte * (last - first)).from_address(copy.data_ptr())
        block.storage = copy  # type: ignore[attr-defined]  # it is nobody else's
        return memoryview(block).cast("B")
    return _memory_of(storage.data_ptr() + first, last - first, _PYBUF_READ)


def is_shared(value: Any) -> bool:
    """Whether a value is a tensor in memory that processes share, or says itself that it is."""
    kind = type(value)
    if (kind.__module__, kind.__name__) == ("rallypoint.primitives.shared_tensor", "SharedTensor"):
        return True
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is None or not isinstance(value, tensor):
        return False
    try:
        storage: Any = value.untyped_storage()
        address = storage.data_ptr() if storage.device.type == "cpu" else 0
    except (RuntimeError, NotImplementedError):  # a tensor without storage of its own: sparse, functional
        return False
    return Mappings().shared_at(address) is not None
