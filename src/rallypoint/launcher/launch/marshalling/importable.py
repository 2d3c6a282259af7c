"""Modules that a rank can import, so that their functions are sent by name; and modules of the
user's.

A rank has the caller's `sys.path`, working directory and interpreter. A module that was imported in
another way (a test module under pytest's importlib mode, a file loaded by hand, a module made in
memory) is sent by value, as `__main__` is.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_LIBRARY = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
_STDLIB = os.path.dirname(os.path.realpath(os.__file__)) + os.sep
_OURS = __name__.partition(".")[0]
_MAINS = frozenset({"__main__", "__mp_main__"})


def is_users(name: str | None) -> bool:
    """Tell whether a module is of the program: not of Python, of an installed package, or of
    rallypoint."""
    if name is None:
        return False
    if name in _MAINS:
        return True
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top == _OURS:
        return False
    module = sys.modules.get(name)
    if module is None:
        return False
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):  # made in memory, if it is no namespace package
        return not hasattr(module, "__path__") and getattr(module, "__spec__", None) is None
    package = str(getattr(sys.modules.get(top), "__file__", None))
    return not (
        any(part in file or part in package for part in _LIBRARY)
        or os.path.realpath(file).startswith(_STDLIB)
    )


class Importable:
    """Importability of modules for one payload: `sys.path` may have changed at the next."""

    def __init__(self) -> None:
        self._known: dict[str, bool] = dict.fromkeys(_MAINS, False)

    def __call__(self, name: str) -> bool:
        """Tell whether `import name` in a rank gives the same file."""
        if name not in self._known:
            self._known[name] = self._find(name)
        return self._known[name]

    def goes_by_value(self, code: Any) -> bool:
        """Tell whether a function or a class is sent with what is inside it, and not by name."""
        from cloudpickle import cloudpickle

        name = code.__module__
        return not (name and self(name) and cloudpickle._should_pickle_by_reference(code))

    def _find(self, name: str) -> bool:
        module = sys.modules.get(name)
        if not isinstance(module, ModuleType) or not is_users(name):
            return True
        if type(getattr(module, "__loader__", None)).__module__.startswith("_pytest."):
            # its asserts were rewritten, and are to tell what they compared in a rank, too
            return False
        parent = name.rpartition(".")[0]
        if parent and not self(parent):
            return False
        path = list(getattr(sys.modules.get(parent), "__path__", ())) if parent else None
        spec = _spec(name, path)
        file = getattr(module, "__file__", None)
        if spec is None or not isinstance(file, str) or spec.origin is None:
            return spec is not None
        return os.path.realpath(file) == os.path.realpath(spec.origin)


def _spec(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Find a module as a fresh interpreter does, without the finders of a test runner or an import
    hook."""
    for finder in sys.meta_path:
        kind = finder if isinstance(finder, type) else type(finder)
        # The interpreter's own, and those of editable installs, from `.pth` files.
        if kind.__module__.startswith("_") and not kind.__module__.startswith("_pytest"):
            # A finder that looks at a half imported parent may raise.
            with contextlib.suppress(ImportError, AttributeError, ValueError, TypeError):
                spec = finder.find_spec(name, path)
                if spec is not None:
                    return spec
    return None
