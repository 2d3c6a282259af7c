"""In each Python that finds this module on its path, the least used parts of torch are loaded when
one is used.

They serve compilers, quantization and tensors without data, and are two fifths of what the import of
torch takes. Nothing is left out: the first look at a name of one of them loads them all, in the order
in which torch does, as many import each other.
"""

from __future__ import annotations

import gc
import sys
import types
from _thread import RLock
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder

# Modules, with the names that torch's own import takes from them.
PARTS: dict[str, Sequence[str]] = {
    "pynvml": (),
    "torch._higher_order_ops": ("cond", "while_loop"),
    "torch._higher_order_ops.invoke_subgraph": ("NestedCompileRegionOptions",),
    "torch._meta_registrations": (),
    "torch._native": (),
    "torch.distributions": (),
    "torch.export": (),
    "torch.func": ("vmap",),
    "torch.masked": (),
    "torch.nn.intrinsic": (),
    "torch.nn.qat": (),
    "torch.nn.quantizable": (),
    "torch.nn.quantized": (),
    "torch.quantization": (),
    "torch.quasirandom": (),
    "torchgen.model": (),
}
WHOLE = {"torch", "torch._dynamo", "torch._inductor.async_compile", "torch._inductor.compile_fx"}
"""Modules that make so much as they are imported that the collector is kept from it."""
_loading = RLock()
_unloaded: list[Unloaded] = []  # in torch's own order


class Unloaded(types.ModuleType):
    """A module that becomes itself when a name of it is looked up."""

    def __getattr__(self, name: str) -> object:
        assert self.__spec__ is not None
        if name != "__path__" or self.__spec__.submodule_search_locations is not None:
            load_the_rest([self])
        return types.ModuleType.__getattribute__(self, name)


def load_the_rest(asked: Sequence[Unloaded] = ()) -> None:
    """Load all in torch's own order, but the one first that another needs while it is loaded."""
    with _loading:
        modules = _unloaded[:] or asked
        _unloaded.clear()
        for module in modules:
            spec = module.__spec__
            if spec is None or not isinstance(spec.loader, _LaterLoader):
                continue  # it is loaded, or about to be
            spec.loader = module.__loader__ = spec.loader.usual
            if spec.submodule_search_locations is not None:
                vars(module)["__path__"] = spec.submodule_search_locations
            spec.loader.exec_module(module)
            module.__class__ = types.ModuleType


def _stand_in(module: str, name: str) -> type:
    """Return what is called, or named as a type, in place of a name of an unloaded module."""

    def call(_: type, *args: object, **kwargs: object) -> object:
        load_the_rest()
        return getattr(sys.modules[module], name)(*args, **kwargs)

    return type(name, (), {"__new__": call})


class _LaterLoader:
    def __init__(self, usual: object) -> None:
        self.usual = usual

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        name = module.__name__
        vars(module).update({one: _stand_in(name, one) for one in PARTS[name]})
        if not PARTS[name]:  # else torch imports modules below this one, and they need little of it
            vars(module).pop("__path__", None)
        module.__class__ = Unloaded
        assert isinstance(module, Unloaded)
        _unloaded.append(module)
        if name == "torch._meta_registrations":
            _let_generators_be_made()


def _let_generators_be_made() -> None:
    """Do what torch.Generator needs of a module that torch._meta_registrations imports."""
    import torch

    if hasattr(torch._C, "_set_generator_metaclass"):
        from torch._opaque_base import OpaqueBaseMeta

        torch._C._set_generator_metaclass(OpaqueBaseMeta)


def _without_collecting(spec: ModuleSpec) -> None:
    """Keep the collector from what `spec` imports: it took a seventh of the time, and all stays.
    The interpreter's end would look at all of it once more, for a quarter of the time.
    """
    loader = spec.loader
    assert loader is not None
    run = loader.exec_module

    def exec_module(module: types.ModuleType) -> None:
        vars(loader).pop("exec_module", None)  # the module sees its loader as it is
        collects = gc.isenabled()
        gc.disable()
        try:
            run(module)
        finally:
            gc.freeze()
            if collects:
                gc.enable()

    loader.exec_module = exec_module  # type: ignore[method-assign]


class _PartFinder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torch._dynamo":
            load_the_rest()
        if name not in WHOLE and name not in PARTS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None:
            return None
        if name in WHOLE:
            _without_collecting(spec)
        else:
            spec.loader = _LaterLoader(spec.loader)  # type: ignore[assignment]
        return spec


sys.meta_path.insert(0, _PartFinder)
