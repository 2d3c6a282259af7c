"""Acts that wait until the program has imported a module (fresh interpreters)."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


class AfterImport(importlib.abc.MetaPathFinder):
    """Finder that calls `act` once the program has imported a module. A mere look where the module
    is does not count, and an import that failed may be tried again."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._act = act
        self._asking = False  # the other finders; one of the program's may ask all again

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name or self._asking:
            return None
        self._asking = True
        try:
            # Not by importlib.util: it is not there yet.
            others = [
                one.find_spec
                for one in sys.meta_path
                if one is not self and hasattr(one, "find_spec")
            ]
            spec = next(
                (found for find in others if (found := find(name, path, target)) is not None), None
            )
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._act(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def now_or_when_imported(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call `act` with the module, as soon as it is imported."""
    module = sys.modules.get(name)
    if module is not None:
        act(module)
    else:
        sys.meta_path.insert(0, AfterImport(name, act))
