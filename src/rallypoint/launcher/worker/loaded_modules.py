"""Functions of modules that are loaded already, replaced in every place that has the name."""

from __future__ import annotations

import sys


def replace(package: str, original: object, replacement: object) -> None:
    """Put a function in the place of another in every loaded module of a package: `from x import f`
    makes copies of the name.
    """
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(package + "."):
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, replacement)
