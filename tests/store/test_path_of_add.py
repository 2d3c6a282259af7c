"""The way of one `store.add` from its call to the state and back: short enough to be read."""

from __future__ import annotations

import ast
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import rallypoint

SOURCE = Path(rallypoint.__file__).parent

MOST_FUNCTIONS = 27
"""Functions of rallypoint that run for one `add` on a connection that is in use, in the client and
in the server together, helpers of three lines included. It may only become smaller."""

MOST_LINES = 40


def _lines_of(code: CodeType) -> int:
    """Return the length of a function, with its docstring."""
    tree = ast.parse(Path(code.co_filename).read_text())
    return max(
        (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name
        if min([node.lineno, *(one.lineno for one in node.decorator_list)]) == code.co_firstlineno
    )


def test_an_add_runs_few_functions_and_none_is_long() -> None:
    seen: dict[str, CodeType] = {}
    counting = False

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not counting or event != "call" or "keep-alive" in threading.current_thread().name:
            return
        if Path(code.co_filename).is_relative_to(SOURCE):
            seen[f"{Path(code.co_filename).relative_to(SOURCE)}: {code.co_qualname}"] = code

    threading.setprofile(note)  # for the server's thread
    try:
        with (
            rallypoint.serve() as server,
            rallypoint.connect(server.address, secret=server.secret, ttl=60.0) as store,
        ):
            before = store.status()["revision"]
            for _ in range(3):
                store.add("x", 1)
            sys.setprofile(note)
            counting = True
            total = store.add("x", 1)
            counting = False
            sys.setprofile(None)
            assert (total, store.status()["revision"]) == (4, before + 4)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert any("state/keys.py" in name for name in seen), "the server's side is seen too"
    assert len(seen) <= MOST_FUNCTIONS, "\n".join(seen)
    assert {
        name: size for name, code in seen.items() if (size := _lines_of(code)) > MOST_LINES
    } == {}
