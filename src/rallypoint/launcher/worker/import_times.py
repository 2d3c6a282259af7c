"""Times of imports in a worker: a package that takes long is imported once in every rank, and could
be imported once in the template.

A finder stands first in `sys.meta_path`. While nothing is being imported it finds the next module
as the others would and times how long it takes to run; what that imports in turn is left to the
other finders. So an import is looked at once, from outside, and a program that has imported
everything pays nothing.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.machinery import (
    ExtensionFileLoader,
    ModuleSpec,
    SourceFileLoader,
    SourcelessFileLoader,
)
from types import ModuleType

from rallypoint.launcher import late_variables, preload_parts
from rallypoint.launcher.protocol import Imported
from rallypoint.launcher.worker.after_import import ImportHook, untraced

SLOW = 1.0  # seconds; a package that takes less is not worth an option on the command line

# Loaders that have an instance for each module: what is set on one meets no other import.
_LOADERS = (SourceFileLoader, SourcelessFileLoader, ExtensionFileLoader)


class ImportTimes(ImportHook):
    """Hook that adds up the seconds of each package's imports.

    `folder` is the program's own. Its modules are not timed, so that the packages that they import
    are named.
    """

    def __init__(self, folder: str, on_part: Callable[[str], object] = lambda name: None) -> None:
        """`on_part` is called with the name of each part of torch that took long and can be
        imported before the program, at once: a rank that is killed has told by then. Such a part is looked
        at also where it is imported inside another package."""
        self._folder = os.path.join(folder, "")
        self._on_part = on_part
        self._seconds: dict[str, dict[str, float]] = {}  # of each package: by module
        self._busy = False  # an import is being timed
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

    def wants(self, name: str) -> bool:
        return not self._part and (not self._busy or name.startswith("torch."))

    def takes(self, spec: ModuleSpec) -> bool:
        """Tell whether a module's import is timed: the program's own are not; an environment in the
        program's folder is not its own."""
        origin = spec.origin or ""
        own = origin.startswith(self._folder) and "-packages" + os.sep not in origin
        return isinstance(spec.loader, _LOADERS) and not own

    @untraced
    def load(self, run: Callable[[ModuleType], None], module: ModuleType) -> None:
        name = module.__name__
        outermost, part = not self._busy, name.startswith("torch.") and not self._part
        # Found while nothing was being imported, and run inside another import.
        if not outermost and not part:
            return run(module)
        former = set(sys.modules) if part else set()
        self._busy, self._part = True, part
        began = time.monotonic()
        try:
            run(module)
        finally:
            seconds = time.monotonic() - began
            self._busy, self._part = not outermost, False
            if outermost:
                modules = self._seconds.setdefault(_package(name), {})
                modules[name] = modules.get(name, 0.0) + seconds
        if part and seconds >= preload_parts.LEAST and self._may_be_early(name, former):
            self._on_part(name)

    def _may_be_early(self, name: str, former: set[str]) -> bool:
        return (
            preload_parts.may_be_early(name, sys.modules.keys() - former)
            and not late_variables.set_for_parts()
        )


def _package(name: str) -> str:
    """Return the top package; of torch, which the template has, the part that is imported late."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == "torch" else 1])
