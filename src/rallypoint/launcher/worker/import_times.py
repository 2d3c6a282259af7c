"""Times of imports in a worker: a package that takes long is imported once in every rank, and could
be imported once in the template.

A finder stands first in `sys.meta_path`. While nothing is being imported it finds the next module
as the others would and times how long it takes to run; what that imports in turn is left to the
other finders. So an import is looked at once, from outside, and a program that has imported
everything pays nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import (
    ExtensionFileLoader,
    ModuleSpec,
    SourceFileLoader,
    SourcelessFileLoader,
)
from types import ModuleType
from typing import ParamSpec, TypeVar

from rallypoint.launcher import late_variables, preload_parts
from rallypoint.launcher.protocol import Imported

SLOW = 1.0  # seconds; a package that takes less is not worth an option on the command line

# Loaders that have an instance for each module: what is set on one meets no other import.
_LOADERS = (SourceFileLoader, SourcelessFileLoader, ExtensionFileLoader)

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _untraced(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Python cuts importlib's frames out of the traceback of a failed import, and knows them by
    their file. Ours are to go with them.
    """
    function.__code__ = function.__code__.replace(
        co_filename=importlib.machinery.PathFinder.find_spec.__code__.co_filename
    )
    return function


class ImportTimes(importlib.abc.MetaPathFinder):
    """Finder that adds up the seconds of each package's imports.

    `folder` is the program's own: its modules are looked through, so that what they import is
    named, and not they.
    """

    def __init__(self, folder: str, on_part: Callable[[str], object] = lambda name: None) -> None:
        """`on_part` is called with the name of each part of torch that took long and can be
        imported before the program, at once: a rank that is killed has told by then. Such a part is looked
        at also where it is imported inside another package."""
        self._folder = os.path.join(folder, "")
        self._on_part = on_part
        self._seconds: dict[str, dict[str, float]] = {}  # of each package: by module
        self._busy = False  # an import is being timed, or looked for
        self._finding = False
        self._part = False  # a part of torch is

    def install(self) -> None:
        """Time the imports of this process from now on."""
        sys.meta_path.insert(0, self)

    def slow(self) -> Iterator[Imported]:
        """Yield the packages that took long by now, each named by the module that took longest:
        importing that imports its parents, too."""
        for modules in self._seconds.values():
            seconds = sum(modules.values())
            if seconds >= SLOW:
                yield Imported(max(modules, key=modules.__getitem__), seconds)

    @_untraced
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module as the finders after this one do; its loader also takes the time."""
        if self._part or self._finding or (self._busy and not name.startswith("torch.")):
            return None
        self._finding = True  # which may import something
        try:
            spec = self._found(name, path, target)
        finally:
            self._finding = False
        if (
            spec is not None
            and isinstance(spec.loader, _LOADERS)
            and not self._is_the_programs(spec)
        ):
            spec.loader.__dict__["exec_module"] = self._timed(spec.loader, name)
        return spec

    @_untraced
    def _found(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None

    def _is_the_programs(self, spec: ModuleSpec) -> bool:
        """Tell whether a module is the program's own; an environment in the program's folder is
        not."""
        origin = spec.origin or ""
        return origin.startswith(self._folder) and "-packages" + os.sep not in origin

    def _timed(self, loader: importlib.abc.Loader, name: str) -> Callable[[ModuleType], None]:
        @_untraced
        def exec_module(module: ModuleType) -> None:
            # The module sees its loader as it is without us.
            loader.__dict__.pop("exec_module", None)
            outermost, part = not self._busy, name.startswith("torch.") and not self._part
            # Found while nothing was being imported, and run inside another import.
            if not outermost and not part:
                return loader.exec_module(module)
            former = set(sys.modules) if part else set()
            self._busy, self._part = True, part
            began = time.monotonic()
            try:
                loader.exec_module(module)
            finally:
                seconds = time.monotonic() - began
                self._busy, self._part = not outermost, False
                if outermost:
                    modules = self._seconds.setdefault(_package(name), {})
                    modules[name] = modules.get(name, 0.0) + seconds
            if part and seconds >= preload_parts.LEAST and self._may_be_early(name, former):
                self._on_part(name)

        return exec_module

    def _may_be_early(self, name: str, former: set[str]) -> bool:
        return (
            preload_parts.may_be_early(name, sys.modules.keys() - former)
            and not late_variables.set_for_parts()
        )


def _package(name: str) -> str:
    """Return the top package; of torch, which the template has, the part that is imported late."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == "torch" else 1])
