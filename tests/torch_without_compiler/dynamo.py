"""What torch asks of torch._dynamo where nothing is compiled; any other name is an error."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def disable(function: Function, recursive: bool = True, **_: object) -> Function:
    """Nothing compiles it anyway."""
    return function


def graph_break() -> None:
    """No graph is made."""


utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization")
trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)
