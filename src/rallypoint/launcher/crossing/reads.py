"""Which globals a function reads, and where: from its code, without running it."""

from __future__ import annotations

import ast
import dis
import linecache
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

SOURCE_BYTES_MOST = 2 * 1024 * 1024  # a larger source file is not searched for the line that makes a global

_MISSING = object()


class Read(NamedTuple):
    """`names`: as in the source, ("state", "lock") for `state.lock`. `module`: the name of the module that has the last of them."""

    names: tuple[str, ...]
    value: object
    module: str
    function: str
    line: int


def reads(function: FunctionType) -> Iterator[Read]:
    """What a function, with those defined inside it, reads of its globals and of what it closes over, each as far as modules and
    attributes lead: for `state.lock` both `state` and `state.lock`. What is not there yet is left out."""
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
        line = _line(instruction) or line
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
                names, value, module = (str(name),), imported if imported is not None else _MISSING, str(name)
                continue  # nothing of it is read yet
            case "IMPORT_FROM" if value is not _MISSING or isinstance(sys.modules.get(names[0] if names else ""), ModuleType):
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
    """Without running anything: what stands in a module or in an instance itself."""
    if isinstance(owner, ModuleType):
        return owner.__dict__.get(name, _MISSING), owner.__name__
    own = getattr(owner, "__dict__", None) if not isinstance(owner, type) else None
    return (own.get(name, _MISSING) if isinstance(own, dict) else _MISSING), module


def _line(instruction: dis.Instruction) -> int | None:
    return instruction.positions.lineno if instruction.positions is not None else None


def globals_of(code: CodeType) -> set[str]:
    """The names of globals that a code object and those inside it use."""
    found = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= globals_of(constant)
    return found


def line_of_use(function: FunctionType, name: str) -> int:
    """The first line on which a function uses a global; 0 when it does not."""
    return next((read.line for read in reads(function) if read.names[0] == name), 0)


def line_of_definition(filename: str, name: str) -> int:
    """The line of a file that first gives a global its value: an assignment, a definition, an import; 0 when there is none to be found."""
    source = "".join(linecache.getlines(filename))
    if name not in source or len(source) > SOURCE_BYTES_MOST:
        return 0
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # not the text that runs: a notebook's cell with magic lines, or not Python
        return 0
    return min((node.lineno for node in _top_level(tree) if name in _names(node)), default=0)


def _top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements outside of functions and classes, inside `if`, `try` and `with` as well."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            waiting += [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]


def _names(node: ast.stmt) -> set[str]:
    match node:
        case ast.Assign(targets=targets):
            return {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {alias.asname or alias.name for alias in names}
        case ast.With(items=items):
            return {item.optional_vars.id for item in items if isinstance(item.optional_vars, ast.Name)}
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
    return set()
