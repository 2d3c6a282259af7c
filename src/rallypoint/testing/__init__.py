"""For tests, ours and yours: a clock you move, connections you cut, faults by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rallypoint.testing.clock import ManualClock
    from rallypoint.testing.faults import Fault, Faults
    from rallypoint.testing.network import Network
    from rallypoint.testing.proxied_connection import ProxiedConnection
    from rallypoint.testing.proxy import ChaosProxy, ProxyStatistics, Traffic

__all__ = [
    "ChaosProxy",
    "Fault",
    "Faults",
    "ManualClock",
    "Network",
    "ProxiedConnection",
    "ProxyStatistics",
    "Traffic",
]

_WHERE = {
    "ManualClock": "clock",
    "ProxyStatistics": "proxy",
    "Traffic": "proxy",
    "Fault": "faults",
    "Faults": "faults",
    "Network": "network",
    "ChaosProxy": "proxy",
    "ProxiedConnection": "proxied_connection",
}


def __getattr__(name: str) -> object:
    # Loaded when first used: pytest imports this package at its start, also where nobody tests a
    # store.
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found: object = getattr(import_module(f"rallypoint.testing.{_WHERE[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
