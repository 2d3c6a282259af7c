"""The public names, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rallypoint.errors import (
    Compacted,
    EnvironmentProblem,
    FenceStale,
    InternalError,
    LimitExceeded,
    RallypointError,
    SessionLost,
    StoreClosed,
    StorePickled,
    StoreTimeout,
    StoreUnreachable,
    UpdateLost,
    UpdateLostWarning,
    UsageError,
    ValueUnsupported,
    WrongType,
)

if TYPE_CHECKING:
    from rallypoint.host.ports import HeldPort, hold_port
    from rallypoint.store.client import ABSENT, Change, Entry, Store, connect
    from rallypoint.store.retry import retry
    from rallypoint.store.server import Server, serve

__version__ = "0.1.0"

__all__ = [
    "ABSENT",
    "Change",
    "Compacted",
    "Entry",
    "EnvironmentProblem",
    "FenceStale",
    "HeldPort",
    "InternalError",
    "LimitExceeded",
    "RallypointError",
    "Server",
    "SessionLost",
    "Store",
    "StoreClosed",
    "StorePickled",
    "StoreTimeout",
    "StoreUnreachable",
    "UpdateLost",
    "UpdateLostWarning",
    "UsageError",
    "ValueUnsupported",
    "WrongType",
    "__version__",
    "connect",
    "hold_port",
    "retry",
    "serve",
]

_WHERE = {
    "ABSENT": "store.client",
    "Change": "store.client",
    "Entry": "store.client",
    "HeldPort": "host.ports",
    "Server": "store.server",
    "Store": "store.client",
    "connect": "store.client",
    "hold_port": "host.ports",
    "retry": "store.retry",
    "serve": "store.server",
}


def __getattr__(name: str) -> object:
    # Loaded when first used: `rallypoint --help` and a program that only catches our errors need none of it.
    if name not in _WHERE:
        raise AttributeError(f"module 'rallypoint' has no attribute {name!r}")
    import importlib

    found = getattr(importlib.import_module(f"rallypoint.{_WHERE[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
