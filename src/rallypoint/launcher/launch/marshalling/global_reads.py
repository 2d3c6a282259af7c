"""Globals that a function reads, each with its line, found in the function's code without running
it."""

from __future__ import annotations

import dis
import linecache
import re
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

_MISSING = object()


class Read(NamedTuple):
    """Reading of a global.

    `names`: as in the source, ("state", "lock") for `state.lock`. `module`: the module of the last.
    """

    names: tuple[str, ...]
    value: object
    module: str
    function: str
    line: int


def closure(function: FunctionType) -> dict[str, object]:
    """Return a function's closure variables that have a value by now."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return found


def reads(function: FunctionType) -> Iterator[Read]:
    """Yield what a function, and those defined inside it, read of globals and closure variables.

    Modules and attributes are followed: `state.lock` is both `state` and `state.lock`. Names that
    have no value yet, and imports inside the function, are left out.
    """
    yield from _of_code(function.__code__, function.__globals__, closure(function))


def _of_code(code: CodeType, namespace: dict[str, Any], cells: dict[str, object]) -> Iterator[Read]:
    here = str(namespace.get("__name__", ""))
    names: tuple[str, ...] = ()
    value: object = _MISSING
    module = here
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = getattr(instruction.positions, "lineno", None) or line
        name = instruction.argval
        match instruction.opname:
            case "LOAD_GLOBAL" | "LOAD_NAME":
                names, value, module = (name,), namespace.get(name, _MISSING), here
            case "LOAD_DEREF":
                names, value, module = (name,), cells.get(name, _MISSING), here
            case "LOAD_ATTR" | "LOAD_METHOD" if value is not _MISSING:
                names = (*names, name)
                if isinstance(value, ModuleType):
                    module = value.__name__
                value = _attribute(value, name)
            case "EXTENDED_ARG":
                continue
            case _:
                value = _MISSING
        if value is not _MISSING:
            yield Read(names, value, module, code.co_qualname, line)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _of_code(constant, namespace, cells)


def _attribute(owner: object, name: str) -> object:
    """Return an attribute of a module or of an instance itself, without running code."""
    own = getattr(owner, "__dict__", None) if not isinstance(owner, type) else None
    return own.get(name, _MISSING) if isinstance(own, dict) else _MISSING


def line_of_definition(filename: str, name: str) -> int:
    """Return the line of a file that first gives a global its value; 0 when none is found.

    Only statements that are not indented are looked at.
    """
    word = re.escape(name)
    makes = re.compile(
        rf"(?:async )?(?:def|class) {word}\b"
        rf"|(?:[\w, (]*[ ,(])?{word}\b(?: *:[^=]+)?[\w, )]*=(?!=)"
        rf"|(?:from .*)?import (?:.*\W)?{word}\b"
        rf"|with .* as {word}\b"
    )
    lines = enumerate(linecache.getlines(filename), 1)
    return next((number for number, line in lines if makes.match(line)), 0)
