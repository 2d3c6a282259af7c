"""Globals that a function reads, and the lines of that, from its code, without running it."""

from __future__ import annotations

import dis
import linecache
import re
import sys
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


def reads(function: FunctionType) -> Iterator[Read]:
    """Yield what a function, and those defined inside it, read of globals and closure variables.

    Modules and attributes are followed: `state.lock` is both `state` and `state.lock`. Names that
    have no value yet are left out.
    """
    cells = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            cells[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from _of_code(function.__code__, function.__globals__, cells)


def _of_code(code: CodeType, namespace: dict[str, Any], cells: dict[str, Any]) -> Iterator[Read]:
    here = str(namespace.get("__name__", ""))
    names: tuple[str, ...] = ()
    value: object = _MISSING
    module = here
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        positions = instruction.positions
        line = (positions.lineno if positions is not None else None) or line
        name = instruction.argval
        match instruction.opname:
            case "LOAD_GLOBAL" | "LOAD_NAME":
                names, value, module = (name,), namespace.get(name, _MISSING), here
            case "LOAD_DEREF":
                names, value, module = (name,), cells.get(name, _MISSING), here
            case "LOAD_ATTR" | "LOAD_METHOD" if value is not _MISSING:
                names, (value, module) = (*names, name), _attribute(value, name, module)
            case "IMPORT_NAME":
                imported = sys.modules.get(name) if isinstance(name, str) else None
                names, value, module = (
                    (str(name),),
                    imported if imported is not None else _MISSING,
                    str(name),
                )
                continue  # nothing of it is read yet
            case "IMPORT_FROM" if value is not _MISSING or isinstance(
                sys.modules.get(names[0] if names else ""), ModuleType
            ):
                source = sys.modules.get(names[0])
                found, owner = _attribute(source, name, module)
                if found is not _MISSING:
                    yield Read((name,), found, owner, code.co_qualname, line)
                continue
            case "CACHE" | "PUSH_NULL" | "EXTENDED_ARG" | "PRECALL" | "RESUME" | "NOP":
                continue
            case _:
                value = _MISSING
                continue
        if value is not _MISSING:
            yield Read(names, value, module, code.co_qualname, line)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _of_code(constant, namespace, cells)


def _attribute(owner: object, name: str, module: str) -> tuple[object, str]:
    """Return an attribute of a module or of an instance itself, and its module, without running
    code."""
    if isinstance(owner, ModuleType):
        return owner.__dict__.get(name, _MISSING), owner.__name__
    own = getattr(owner, "__dict__", None) if not isinstance(owner, type) else None
    return (own.get(name, _MISSING) if isinstance(own, dict) else _MISSING), module


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
