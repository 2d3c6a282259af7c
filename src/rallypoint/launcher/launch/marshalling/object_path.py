"""Place of an object that could not be sent, as its author would write it: `args[1].lock`,
`global lock in train.py:6`.

Pickle says which object it would not take. Then what was to be sent is walked once, through the
containers, attributes and functions that a person knows, until that object is found.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import NamedTuple

from rallypoint.launcher import exception_capture
from rallypoint.launcher.launch import notebook_cells
from rallypoint.launcher.launch.marshalling import global_reads
from rallypoint.launcher.launch.marshalling.importable import Importable, is_users
from rallypoint.wire.values import shown

PATH_MOST = 160
"""Maximum characters of a path. The middle of a longer one, of a linked list, says nothing."""

WALKED_MOST = 1_000_000
"""Maximum objects that are looked at (a few seconds)."""

_TORCH_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of a torch module: people write model.layer, not model._modules["layer"]."""

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})
_CONTAINERS = frozenset({dict, list, tuple, set, frozenset})
_PROGRAMS = FunctionType, MethodType, type, ModuleType, functools.partial


class ObjectPlace(NamedTuple):
    """Path of an object (`text`), and the library's object that it is a part of, with its own path.

    If there is such a `holder`, that is the matter, and not the object itself.
    """

    text: str
    holder: object = None
    holder_text: str = ""


class _Node(NamedTuple):
    """An object that was reached, and how its author would write it.

    `segment`: its part of the expression, behind the parent's. `base`: description of a name with
    which an expression begins; "" when there is none.
    """

    parent: _Node | None
    thing: object
    segment: str
    base: str

    def text(self) -> str:
        """Return the expression, with what its first name is."""
        node, expression = self, self.segment
        while not node.base and node.parent is not None and len(expression) < 10 * PATH_MOST:
            node = node.parent
            expression = node.segment + expression
        if len(expression) > PATH_MOST:
            expression = f"{expression[: PATH_MOST // 2]} ... {expression[-PATH_MOST // 2 :]}"
        if not node.base:
            return expression
        return node.base if expression.isidentifier() else f"{expression} ({node.base})"


def find(culprit: object, roots: Sequence[tuple[object, str]], otherwise: str) -> ObjectPlace:
    """Return the place of an object in the named roots; `otherwise` when the walk does not come to
    it: it was made by pickling another object, or is in a container that is not walked."""
    goes_by_value = Importable().goes_by_value
    waiting = deque(_Node(None, root, name, "") for root, name in roots)
    seen = {id(node.thing) for node in waiting}
    kept: list[object] = []  # so that no id is used twice
    while waiting and len(kept) < WALKED_MOST:
        node = waiting.popleft()
        thing = node.thing
        if thing is culprit:
            holder = _holder(node)
            return ObjectPlace(node.text(), *((holder.thing, holder.text()) if holder else ()))
        kept.append(thing)
        if isinstance(thing, FunctionType | type) and not goes_by_value(thing):
            continue
        for segment, base, child in _children(thing):
            if id(child) not in seen and not _is_plain(child):
                seen.add(id(child))
                waiting.append(_Node(node, child, segment, base))
    return ObjectPlace(otherwise)


def _is_plain(thing: object) -> bool:
    """Tell whether an object is plain data, or a container of nothing else."""
    kinds = {type(thing)}
    if kinds < _CONTAINERS:
        assert isinstance(thing, dict | list | tuple | set | frozenset)
        values = thing.values() if isinstance(thing, dict) else ()
        kinds = {*map(type, thing), *map(type, values)}
    return _PLAIN.issuperset(kinds)


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
        yield from ((f"[{shown(key)}]", "", value) for key, value in list(owner.items()))
    elif isinstance(owner, list | tuple):
        yield from ((f"[{index}]", "", value) for index, value in enumerate(owner))
    elif isinstance(owner, set | frozenset):
        yield from ((" (an element)", "", value) for value in owner)
    elif isinstance(owner, functools.partial):
        yield from ((f".{name}", "", getattr(owner, name)) for name in ("func", "args", "keywords"))
    elif isinstance(owner, MethodType | BuiltinMethodType):
        yield ".__self__", "", owner.__self__
        return
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        if name in _TORCH_TABLES and isinstance(value, dict):
            yield from ((f".{key}", "", one) for key, one in value.items())
        else:
            yield f".{name}", "", getattr(value, "__func__", value)


def _children_of_function(function: FunctionType) -> Iterator[tuple[str, str, object]]:
    code, name_of = function.__code__, function.__qualname__
    file = code.co_filename
    here = f"{name_of} at {_shown(file)}:{code.co_firstlineno}"
    for name, value in global_reads.closure(function).items():
        yield name, f"closure variable {name} in {here}", value
    positional = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    named = dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=False))
    for name, value in {**named, **(function.__kwdefaults__ or {})}.items():
        yield name, f"default of {name} in {here}", value
    for read in global_reads.reads(function):
        name = read.names[0]
        if len(read.names) == 1 and function.__globals__.get(name) is read.value:
            yield name, global_text(name, file, name_of, file, read.line), read.value


def global_text(name: str, made_in: str, function: str, used_in: str, line: int) -> str:
    """Return `global lock in train.py:6, used by increment at train.py:9`, as far as it is
    known."""
    made = global_reads.line_of_definition(made_in, name)
    at = f" in {_shown(made_in)}:{made}" if made else ""
    return f"global {name}{at}, used by {function} at {_shown(used_in)}:{line}"


def _shown(file: str) -> str:
    return notebook_cells.named(exception_capture.shown_path(file))
