"""Where something stands in what was to be sent, in the words of whoever wrote it: `args[1].lock`, `global lock in train.py:6`.

Given is the way that the pickler took: the objects it was inside of, from the outermost on. Between two that a person knows there are
often some that only the pickler has (a tuple of constructor arguments, a function's state): they are passed over.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import NamedTuple

from rallypoint.launcher import words
from rallypoint.launcher.crossing import reads
from rallypoint.launcher.crossing.modules import is_users
from rallypoint.wire.values import shown

PATH_MOST = 160
"""Characters of a path. A linked list of a thousand nodes has a long one, and its middle says nothing."""

_TORCH_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
"""Of a torch module: people write model.layer, not model._modules["layer"]."""

_PLAIN = frozenset({dict, list, tuple, set, frozenset, deque})  # nobody's
_PROGRAMS = FunctionType, MethodType, type, ModuleType, functools.partial


class Place(NamedTuple):
    """`text`: where it is. `holder`: the library's object that it is a part of, with its own place, when there is one: not the thing
    itself is then the matter, but that."""

    text: str
    holder: object = None
    holder_text: str = ""


class _At:
    """An object that a person knows, and how he would write it."""

    __slots__ = ("base", "expression", "thing")

    def __init__(self, thing: object, expression: str, base: str = "") -> None:
        self.thing = thing
        self.expression = expression
        self.base = base  # what the first name of the expression is, if that is not plain

    def __str__(self) -> str:
        expression = self.expression
        if len(expression) > PATH_MOST:
            expression = f"{expression[: PATH_MOST // 2]} ... {expression[-PATH_MOST // 2 :]}"
        if not self.base:
            return expression
        plain = expression.isidentifier()
        return self.base if plain else f"{expression} ({self.base})"


def place(trail: Sequence[object], roots: Sequence[tuple[object, str]]) -> Place:
    """`trail`: from the outermost object to the one that is the matter. `roots`: objects on it that have names of their own."""
    at = _At(None, "")
    way: list[_At] = []
    for thing in trail:
        step = _root(thing, roots) if at.thing is None else _step(at, thing)
        if step is None and isinstance(thing, FunctionType) and thing is not at.thing:
            step = _At(thing, thing.__name__, f"function {thing.__qualname__}")
        if step is not None:
            at = step
            way.append(at)
    holder = _holder(way, trail[-1] if trail else None)
    return Place(str(at), holder.thing, str(holder)) if holder is not None else Place(str(at))


def _root(thing: object, roots: Sequence[tuple[object, str]]) -> _At | None:
    return next((_At(thing, name) for root, name in roots if root is thing), None)


def _holder(way: list[_At], culprit: object) -> _At | None:
    """The outermost of the libraries' objects that the culprit is inside of, up to the first thing of the program's own."""
    found = None
    for at in reversed(way):
        if at.thing is culprit:
            continue
        if type(at.thing) in _PLAIN:
            if found is not None:
                break
        elif isinstance(at.thing, _PROGRAMS) or is_users(type(at.thing).__module__):
            break
        else:
            found = at
    return found


def _step(at: _At, thing: object) -> _At | None:
    """From an object to something directly inside it; None when it is not."""
    owner = at.thing
    if thing is owner:
        return None
    if isinstance(owner, FunctionType):
        return _into_function(owner, thing)
    segment = _segment(owner, thing)
    if segment is None:
        return None
    return _At(thing, at.expression + segment, at.base)


def _segment(owner: object, thing: object) -> str | None:
    if isinstance(owner, dict):
        for key, value in owner.items():
            if value is thing:
                return f"[{shown(key)}]"
            if key is thing:
                return f".keys(): {shown(key)}"
    elif isinstance(owner, list | tuple | deque):
        fields = getattr(owner, "_fields", ())
        for index, value in enumerate(owner):
            if value is thing:
                return f".{fields[index]}" if index < len(fields) else f"[{index}]"
    elif isinstance(owner, set | frozenset) and any(one is thing for one in owner):
        return " (an element)"
    elif isinstance(owner, functools.partial):
        for name in ("func", "args", "keywords"):
            if getattr(owner, name) is thing:
                return f".{name}"
    elif isinstance(owner, MethodType):
        return ".__self__" if owner.__self__ is thing else None
    return next((f".{name}" for name, value in _attributes(owner) if value is thing), None)


def _attributes(owner: object) -> Iterable[tuple[str, object]]:
    own = getattr(owner, "__dict__", None)
    if own is not None:
        for name, value in list(own.items()):
            if name in _TORCH_TABLES and isinstance(value, dict):
                yield from value.items()
            else:
                yield name, value
    for kind in type(owner).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            try:
                yield name, object.__getattribute__(owner, name)
            except AttributeError:
                continue


def _into_function(function: FunctionType, thing: object) -> _At | None:
    code = function.__code__
    where = f"{words.shown_path(code.co_filename)}:{code.co_firstlineno}"
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            if cell.cell_contents is thing:
                return _At(thing, name, f"closure variable {name} in {function.__qualname__} at {where}")
        except ValueError:  # not assigned yet
            continue
    positional = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    named = dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=False))
    for name, value in {**named, **(function.__kwdefaults__ or {})}.items():
        if value is thing:
            return _At(thing, name, f"default of {name} in {function.__qualname__} at {where}")
    for name in sorted(reads.globals_of(code)):
        if function.__globals__.get(name) is thing:
            line = reads.line_of_use(function, name)
            return _At(thing, name, global_text(name, code.co_filename, function.__qualname__, code.co_filename, line))
    for name, value in function.__dict__.items():
        if value is thing:
            return _At(thing, f"{function.__name__}.{name}")
    return None


def global_text(name: str, made_in: str, function: str, used_in: str, line: int) -> str:
    """`global lock in train.py:6, used by increment at train.py:9`, as much of it as can be found out."""
    made = reads.line_of_definition(made_in, name)
    at = f" in {words.shown_path(made_in)}:{made}" if made else ""
    return f"global {name}{at}, used by {function} at {words.shown_path(used_in)}:{line}"
