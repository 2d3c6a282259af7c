"""Compares what the package shows today with the files in tests/golden, which say what it
promises.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"
ACCEPT = "UPDATE_GOLDEN=1 python -m pytest tests/frozen"


def promised(name: str) -> list[str]:
    """Give the lines of a golden file; none if it is to be written anew."""
    path = GOLDEN / name
    return path.read_text().splitlines() if path.exists() else []


def compare(name: str, lines: Iterable[str]) -> None:
    """Fail with the difference if the lines are not those of the file. With UPDATE_GOLDEN=1 write
    them into it.
    """
    path = GOLDEN / name
    shown = [line.rstrip() for line in lines]
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(shown) + "\n")
        return
    difference = list(
        difflib.unified_diff(promised(name), shown, "promised", "now", lineterm="", n=2)
    )
    if difference:
        raise AssertionError(
            f"the public face differs from tests/golden/{name}:\n\n"
            + "\n".join(difference)
            + f"\n\nUsers rely on this. If the change is meant, accept it and have it reviewed:\n    {ACCEPT}"
        )


def shape(value: object, path: str = "") -> Iterable[str]:
    """Give the keys of a JSON document and the kinds of their values, a line each."""
    match value:
        case dict():
            yield f"{path}: object"
            for key, inner in value.items():
                yield from shape(inner, f"{path}.{key}".lstrip("."))
        case list():
            yield f"{path}: array"
            for inner in value:
                yield from shape(inner, f"{path}[]")
        case bool():
            yield f"{path}: boolean"
        case int() | float():
            yield f"{path}: number"
        case None:
            yield f"{path}: null"
        case _:
            yield f"{path}: text"


def merged_shapes(values: Iterable[object]) -> list[str]:
    """Give the shape that covers all the documents; a key with several kinds of values has them in
    one line.
    """
    kinds: dict[str, set[str]] = {}
    for value in values:
        for line in shape(value):
            path, _, kind = line.rpartition(": ")
            kinds.setdefault(path, set()).add(kind)
    return [
        f"{path or '(document)'}: {' or '.join(sorted(found))}"
        for path, found in sorted(kinds.items())
    ]
