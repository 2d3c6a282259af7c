"""Hooks on imports: a module that the program imports is loaded in another way, or something is
done once it is loaded.
"""

from __future__ import annotations

import gc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def untraced(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Hide a function's frames in the traceback of a failed import: Python cuts importlib's frames
    out, and knows them by their file.
    """
    function.__code__ = function.__code__.replace(
        co_filename=importlib.machinery.PathFinder.find_spec.__code__.co_filename
    )
    return function


class ImportHook:
    """Finder in front of the others. It finds a module as they do, and has `load` run it."""

    _finding = False  # by the others; one of the program's may ask all again

    def wants(self, name: str) -> bool:
        """Tell whether a module of this name is to be looked at."""
        raise NotImplementedError

    def takes(self, spec: importlib.machinery.ModuleSpec) -> bool:
        """Tell whether `load` is to run a module that was found so."""
        return True

    def load(self, run: Callable[[ModuleType], None], module: ModuleType) -> None:
        """Load a module, which `run` does as without this hook."""
        raise NotImplementedError

    @untraced
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module as the finders after this one do. Nothing is done by that, and nothing by
        an import that failed: it may be tried again."""
        if self._finding or not self.wants(name):
            return None
        self._finding = True
        spec = None
        try:
            for finder in sys.meta_path:
                if finder is not self and hasattr(finder, "find_spec"):
                    spec = finder.find_spec(name, path, target)
                    if spec is not None:
                        break
        finally:
            self._finding = False
        loader = spec.loader if spec is not None and self.takes(spec) else None
        if loader is not None:
            run = loader.exec_module

            @untraced
            def exec_module(module: ModuleType) -> None:
                # The module sees its loader as it is without us.
                loader.__dict__.pop("exec_module", None)
                self.load(run, module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class AfterImport(ImportHook):
    """Hook that calls `act` with a module once the program has imported it."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._act = act

    def wants(self, name: str) -> bool:
        return name == self._name

    def load(self, run: Callable[[ModuleType], None], module: ModuleType) -> None:
        collects = gc.isenabled()
        gc.disable()  # a sixth of what the import of torch takes: what it makes stays
        try:
            run(module)
        finally:
            if collects:
                gc.enable()
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._act(module)


def now_or_when_imported(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call `act` with the module, as soon as it is imported."""
    module = sys.modules.get(name)
    if module is not None:
        act(module)
    else:
        sys.meta_path.insert(0, AfterImport(name, act))
