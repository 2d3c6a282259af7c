"""ObjectPlace of an object that could not be sent, as its author would write it: `args[1].lock`,
`global lock in train.py:6`.

Pickle says which object it would not take. Then what was to be sent is walked once, through the
containers, attributes and functions that a person knows, until that object is found.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import NamedTuple

from rallypoint.launcher import exception_capture
from rallypoint.launcher.launch.marshalling import global_reads
from rallypoint.launcher.launch.marshalling.importable import is_users
from rallypoint.wire.values import shown

PATH_MOST = 160
"""Maximum characters of a path. The middle of a longer one, of a linked list, says nothing."""

WALKED_MOST = 1_000_000
"""Maximum objects that are looked at (a few seconds)."""

_TORCH_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of a torch module: people write model.layer, not model._modules["layer"]."""

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})
_CONTAINERS = frozenset({dict, list, tuple, set, frozenset, deque})
_PROGRAMS = FunctionType, MethodType, type, ModuleType, functools.partial


class ObjectPlace(NamedTuple):
    """Path of an object (`text`), and the library's object that it is a part of, with its own path.

    If there is such a `holder`, that is the matter, and not the object itself.
    """

    text: str
    holder: object = None
    holder_text: str = ""


class _Node:
    """An object that was reached, and how its author would write it.

    `base`: what the first name of the expression is, if that is not plain.
    """

    __slots__ = ("base", "expression", "parent", "thing")

    def __init__(self, parent: _Node | None, thing: object, expression: str, base: str) -> None:
        self.parent = parent
        self.thing = thing
        self.expression = expression
        self.base = base

    def __str__(self) -> str:
        expression = self.expression
        if len(expression) > PATH_MOST:
            expression = f"{expression[: PATH_MOST // 2]} ... {expression[-PATH_MOST // 2 :]}"
        if not self.base:
            return expression
        return self.base if expression.isidentifier() else f"{expression} ({self.base})"


def find(
    culprit: object, roots: Sequence[tuple[object, str]], by_value: Callable[[object], bool]
) -> ObjectPlace | None:
    """Return the place of an object in the named roots; None when the walk does not come to it.

    `by_value`: tells whether what is inside a function or a class is sent.
    """
    waiting = deque(_Node(None, root, name, "") for root, name in roots)
    seen = {id(node.thing) for node in waiting}
    kept: list[object] = []  # so that no id is used twice
    while waiting and len(kept) < WALKED_MOST:
        node = waiting.popleft()
        if node.thing is culprit:
            holder = _holder(node)
            return (
                ObjectPlace(str(node), holder.thing, str(holder))
                if holder
                else ObjectPlace(str(node))
            )
        kept.append(node.thing)
        if isinstance(node.thing, FunctionType | type) and not by_value(node.thing):
            continue
        for segment, base, child in _children(node.thing):
            if id(child) not in seen and not _is_plain(child):
                seen.add(id(child))
                if base or isinstance(node.thing, FunctionType):
                    waiting.append(_Node(node, child, segment, base))
                else:
                    waiting.append(_Node(node, child, node.expression + segment, node.base))
    return None


def _is_plain(thing: object) -> bool:
    """Tell whether an object is plain data, or a container of nothing else."""
    if isinstance(thing, dict) and type(thing) is dict:
        return _PLAIN.issuperset(map(type, thing)) and _PLAIN.issuperset(map(type, thing.values()))
    if isinstance(thing, list | tuple | set | frozenset) and type(thing) in _CONTAINERS:
        return bool(thing) and _PLAIN.issuperset(map(type, thing))
    return type(thing) in _PLAIN


def _holder(node: _Node) -> _Node | None:
    """Return the outermost library's object around a node, up to the first thing of the program."""
    found = None
    at = node.parent
    while at is not None:
        if type(at.thing) in _CONTAINERS:
            if found is not None:
                break
        elif isinstance(at.thing, _PROGRAMS) or is_users(type(at.thing).__module__):
            break
        else:
            found = at
        at = at.parent
    return found


def _children(owner: object) -> Iterator[tuple[str, str, object]]:
    """Yield (expression behind the owner's, base, object) for all that is directly inside it."""
    if isinstance(owner, FunctionType):
        yield from _children_of_function(owner)
        return
    if isinstance(owner, dict):
        for key, value in list(owner.items()):
            yield f"[{shown(key)}]", "", value
            yield f".keys(): {shown(key)}", "", key
    elif isinstance(owner, list | tuple | deque):
        fields = getattr(owner, "_fields", ())
        for index, value in enumerate(owner):
            yield f".{fields[index]}" if index < len(fields) else f"[{index}]", "", value
    elif isinstance(owner, set | frozenset):
        yield from ((" (an element)", "", value) for value in owner)
    elif isinstance(owner, functools.partial):
        yield from ((f".{name}", "", getattr(owner, name)) for name in ("func", "args", "keywords"))
    elif isinstance(owner, MethodType):
        yield ".__self__", "", owner.__self__
        return
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        if name in _TORCH_TABLES and isinstance(value, dict):
            yield from ((f".{key}", "", one) for key, one in value.items())
        elif isinstance(value, staticmethod | classmethod):
            yield f".{name}", "", value.__func__
        else:
            yield f".{name}", "", value
    for kind in type(owner).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            try:
                yield f".{name}", "", object.__getattribute__(owner, name)
            except AttributeError:
                continue


def _children_of_function(function: FunctionType) -> Iterator[tuple[str, str, object]]:
    code, name_of = function.__code__, function.__qualname__
    here = f"{name_of} at {exception_capture.shown_path(code.co_filename)}:{code.co_firstlineno}"
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, f"closure variable {name} in {here}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    positional = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    named = dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=False))
    for name, value in {**named, **(function.__kwdefaults__ or {})}.items():
        yield name, f"default of {name} in {here}", value
    for read in global_reads.reads(function):
        name = read.names[0]
        if len(read.names) == 1 and function.__globals__.get(name) is read.value:
            file = code.co_filename
            yield name, global_text(name, file, name_of, file, read.line), read.value
    for name, value in function.__dict__.items():
        yield f"{function.__name__}.{name}", "", value


def global_text(name: str, made_in: str, function: str, used_in: str, line: int) -> str:
    """Return `global lock in train.py:6, used by increment at train.py:9`, as far as it is
    known."""
    made = global_reads.line_of_definition(made_in, name)
    at = f" in {exception_capture.shown_path(made_in)}:{made}" if made else ""
    used = f"{exception_capture.shown_path(used_in)}:{line}"
    return f"global {name}{at}, used by {function} at {used}"
