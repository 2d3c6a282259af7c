"""The public names, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rallypoint.errors import (
    BarrierBroken,
    BarrierMismatch,
    BarrierTimeout,
    Compacted,
    EnvironmentProblem,
    FenceStale,
    InternalError,
    LaunchTimeout,
    LeaseLost,
    LimitExceeded,
    LockAbandoned,
    LockTimeout,
    OnceFailed,
    RallypointError,
    RankExited,
    RankKilled,
    RemoteError,
    RemoteTraceback,
    SessionLost,
    StoreClosed,
    StorePickled,
    StoreTimeout,
    StoreUnreachable,
    UpdateLost,
    UpdateLostWarning,
    UsageError,
    ValueUnsupported,
    WorkerError,
    WouldDeadlock,
    WrongType,
)

if TYPE_CHECKING:
    from rallypoint.host.ports import HeldPort, hold_port
    from rallypoint.launcher.launch.launch import launch
    from rallypoint.launcher.worker.torch_hooks import preempted
    from rallypoint.primitives.average.average import Averaged
    from rallypoint.primitives.lock import Grant, Lock
    from rallypoint.primitives.queue import Queue
    from rallypoint.primitives.shared_tensor import SharedTensor
    from rallypoint.primitives.store import Store, connect
    from rallypoint.store.client.client import ABSENT, Change, Entry
    from rallypoint.store.client.retry import retry
    from rallypoint.store.server.server import Server, serve

__version__ = "0.1.0"

__all__ = [
    "ABSENT",
    "Averaged",
    "BarrierBroken",
    "BarrierMismatch",
    "BarrierTimeout",
    "Change",
    "Compacted",
    "Entry",
    "EnvironmentProblem",
    "FenceStale",
    "Grant",
    "HeldPort",
    "InternalError",
    "LaunchTimeout",
    "LeaseLost",
    "LimitExceeded",
    "Lock",
    "LockAbandoned",
    "LockTimeout",
    "OnceFailed",
    "Queue",
    "RallypointError",
    "RankExited",
    "RankKilled",
    "RemoteError",
    "RemoteTraceback",
    "Server",
    "SessionLost",
    "SharedTensor",
    "Store",
    "StoreClosed",
    "StorePickled",
    "StoreTimeout",
    "StoreUnreachable",
    "UpdateLost",
    "UpdateLostWarning",
    "UsageError",
    "ValueUnsupported",
    "WorkerError",
    "WouldDeadlock",
    "WrongType",
    "__version__",
    "connect",
    "hold_port",
    "launch",
    "preempted",
    "retry",
    "serve",
]

_WHERE = {
    "launch": "launcher.launch.launch",
    "preempted": "launcher.worker.torch_hooks",
    "Averaged": "primitives.average.average",
    "Grant": "primitives.lock",
    "Lock": "primitives.lock",
    "Queue": "primitives.queue",
    "SharedTensor": "primitives.shared_tensor",
    "ABSENT": "store.client.client",
    "Change": "store.client.client",
    "Entry": "store.client.client",
    "HeldPort": "host.ports",
    "Server": "store.server.server",
    "Store": "primitives.store",
    "connect": "primitives.store",
    "hold_port": "host.ports",
    "retry": "store.client.retry",
    "serve": "store.server.server",
}


def __getattr__(name: str) -> object:
    # Loaded when first used: `rallypoint --help` and a program that only catches our errors need
    # none of it.
    if name not in _WHERE:
        raise AttributeError(f"module 'rallypoint' has no attribute {name!r}")
    import importlib

    found = getattr(importlib.import_module(f"rallypoint.{_WHERE[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
