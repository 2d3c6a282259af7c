"""docs/reference/store.md and primitives.md say what the code says: every public method, every
option with its default, every limit.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import rallypoint
from rallypoint.store import limits
from rallypoint.store.server import admission
from rallypoint.store.state import keys, watches

DOCS = Path(__file__).parents[2] / "docs" / "reference"
PAGE = " ".join((DOCS / "store.md").read_text(encoding="utf-8").split())
PRIMITIVES = " ".join((DOCS / "primitives.md").read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    "name", sorted(name for name in dir(rallypoint.Store) if not name.startswith("_"))
)
def test_every_public_method_is_there(name: str) -> None:
    assert re.search(rf"`store\.{name}\b", PAGE + PRIMITIVES), (
        f"store.{name} is not in the reference"
    )


@pytest.mark.parametrize(
    "name",
    [
        "get",
        "read",
        "wait",
        "set",
        "set_many",
        "get_many",
        "add",
        "compare_and_set",
        "update",
        "delete",
        "watch",
        "c10d",
    ],
)
def test_methods_are_shown_with_their_arguments(name: str) -> None:
    assert f"`store.{name}({_arguments(getattr(rallypoint.Store, name))}" in PAGE


@pytest.mark.parametrize("name", ["lock", "barrier", "queue", "once", "average"])
def test_what_is_built_on_it_is_shown_with_its_arguments(name: str) -> None:
    assert f"`store.{name}({_arguments(getattr(rallypoint.Store, name))}" in PRIMITIVES.replace(
        "### store", "### `store"
    )


@pytest.mark.parametrize("name", ["connect", "serve", "retry"])
def test_functions_are_shown_with_their_arguments(name: str) -> None:
    assert f"`rallypoint.{name}({_arguments(getattr(rallypoint, name))}" in PAGE


def test_the_limits() -> None:
    for number in (
        limits.KEY_BYTES,
        f"{limits.KEYS:,}",
        f"{limits.SESSIONS:,}",
        f"{limits.WAITING:,}",
        f"{admission.STRANGERS} at a time",
    ):
        assert f"| {number}" in PAGE
    assert f"{watches.CHANGES:,} changes, or {watches.CHANGE_BYTES >> 20} MiB" in PAGE
    assert f"| {keys.APPEND_BYTES >> 20} MiB |" in PAGE
    assert limits.SHARE == 4, "a quarter of the memory"
    assert limits.SMALLEST_STORE == 1 << 20, "at least 1 MiB"


def _arguments(function: object) -> str:
    """As one would write a call's signature, without `self` and types."""
    parts: list[str] = []
    keyword_only = False
    for parameter in inspect.signature(function).parameters.values():  # type: ignore[arg-type]
        if parameter.name in (
            "self",
            "store",
        ):  # barrier is a function that stands in the class as it is
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            parts.append("*")
        default = parameter.default
        if default is parameter.empty:
            parts.append(parameter.name)
        elif isinstance(default, str):
            parts.append(f'{parameter.name}="{default}"')
        elif isinstance(default, tuple):
            parts.append(f"{parameter.name}=({', '.join(one.__name__ for one in default)},)")
        else:
            parts.append(f"{parameter.name}={default!r}")
    return ", ".join(parts) + ")"
