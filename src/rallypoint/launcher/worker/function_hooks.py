"""Wrappers around functions of loaded modules."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str, call: Callable[..., Any], package: str = "") -> None:
    """Make `owner.name(...)` a call of `call(original, ...)`. Done once; nothing is done for a name
    that the owner does not have.

    `package`: its loaded modules get the wrapper in the place of their copies of the function.
    """
    original = getattr(owner, name, None) if owner is not None else None
    if original is None or hasattr(original, "_rallypoint"):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    wrapper._rallypoint = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)
    # `from x import f` makes copies of the name.
    for other, module in list(sys.modules.items()) if package else ():
        if other == package or other.startswith(package + "."):
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, wrapper)
