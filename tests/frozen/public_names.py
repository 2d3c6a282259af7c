"""The public names of the package and their signatures, as text in which no module and no private
class of ours is named.
"""

from __future__ import annotations

import builtins
import collections.abc
import datetime
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import rallypoint
from rallypoint import testing

USED_BY_SYNTAX = frozenset(
    (
        "__bool__", "__call__", "__contains__", "__delitem__", "__enter__", "__exit__", "__getitem__", "__iter__", "__len__", "__next__",
        "__setitem__",
    )
)  # fmt: skip
"""Special methods that the user's own code calls by its syntax; the others are Python's affair."""

BUILT_BY_USERS = frozenset(("ChaosProxy", "ManualClock", "Network", "SharedTensor"))
"""Classes that users construct. All other objects come from calls, and how they are built may
change.
"""

UNDOCUMENTED = {
    "Store": {"ask", "ask_many", "decoded", "encoded", "lease"},
    "Server": {"adopt"},
    "Fault": {
        *("accept", "due", "every", "given", "jitter", "name", "of", "only", "proxy"),
        *("seconds", "size", "ways"),
    },
}
"""Members that serve other parts of the package. No page describes them, and they may change."""

KNOWN = {
    *vars(builtins), *vars(collections.abc), *vars(datetime), *vars(types), *vars(typing),
    *rallypoint.__all__, *testing.__all__, "PathLike", "Size", "T", "Tensor", "dtype", "socket",
}  # fmt: skip
"""Names that a signature shows. A class of ours that users never name is shown as ...: it may be
renamed.
"""

_NAME = re.compile(r"(?<!['\w])(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?!['\w])")
_MODULE = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])")


def describe(module: ModuleType) -> Iterator[str]:
    """Describe each public name of a module: a line, and below a class a line for each of its
    members.
    """
    for name in sorted(module.__all__):
        value = getattr(module, name)
        if inspect.isclass(value):
            yield f"{name}: class{_in_brackets(_bases(value))}"
            yield from (f"    {line}" for line in members(value))
        elif inspect.isfunction(value):
            yield f"{name}{signature(value)}"
        else:
            yield f"{name}: {type(value).__name__ if isinstance(value, str) else 'value'}"


def members(cls: type) -> Iterator[str]:
    """Describe what a user may take from an object of the class."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith("rallypoint")]
    names = {
        name for base in ours for name in (*vars(base), *vars(base).get("__annotations__", ()))
    }
    names -= UNDOCUMENTED.get(cls.__name__, set())
    if cls.__name__ in BUILT_BY_USERS:
        yield f"{cls.__name__}{signature(cls)}"
    if issubclass(cls, BaseException):
        yield from (f".{name}" for name in _attributes(cls))
    for name in sorted(
        name for name in names if not name.startswith("_") or name in USED_BY_SYNTAX
    ):
        value = inspect.getattr_static(cls, name, None)
        if isinstance(value, property):
            yield f".{name}{signature(value.fget, bound=True)[2:] if value.fget else ''}"
        elif isinstance(value, (staticmethod, classmethod)):
            yield f"{cls.__name__}.{name}{signature(value.__func__, bound=isinstance(value, classmethod))}"
        elif inspect.isfunction(value):
            yield f".{name}{signature(value, bound=True)}"
        elif not (issubclass(cls, BaseException) and name in _attributes(cls)):
            yield f".{name}"


def signature(function: Callable[..., object], *, bound: bool = False) -> str:
    """Give the signature of a function, without `self` if it is bound."""
    found = inspect.signature(function)
    parameters = list(found.parameters.values())[bound:]
    parts: list[str] = []
    star = False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
        star = star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = (
            "*"
            if parameter.kind is parameter.VAR_POSITIONAL
            else "**"
            if parameter.kind is parameter.VAR_KEYWORD
            else ""
        )
        default = "" if parameter.default is parameter.empty else f" = {_value(parameter.default)}"
        parts.append(f"{stars}{parameter.name}{_annotated(parameter.annotation)}{default}")
    returned = found.return_annotation
    return f"({', '.join(parts)})" + ("" if returned is found.empty else f" -> {_type(returned)}")


def _annotated(annotation: object) -> str:
    return "" if annotation is inspect.Parameter.empty else f": {_type(annotation)}"


def _type(annotation: object) -> str:
    text = (
        annotation
        if isinstance(annotation, str)
        else getattr(annotation, "__name__", repr(annotation))
    )
    return _NAME.sub(lambda match: match[1] if match[1] in KNOWN else "...", text)


def _value(default: object) -> str:
    if isinstance(default, tuple):
        return f"({', '.join(map(_value, default))})"
    return default.__name__ if inspect.isclass(default) else _MODULE.sub("", repr(default))


def _bases(cls: type) -> list[str]:
    """Name the public classes that an `except` clause or `isinstance` may rely on."""
    public = {
        value for name in rallypoint.__all__ if inspect.isclass(value := getattr(rallypoint, name))
    }
    told = (
        base
        for base in cls.__mro__[1:]
        if base in public or not base.__module__.startswith("rallypoint")
    )
    return sorted(
        base.__name__
        for base in told
        if base not in (object, Exception, BaseException, typing.Generic)
    )


def _attributes(cls: type[BaseException]) -> list[str]:
    """Name the attributes that an exception of the class has."""
    if issubclass(cls, Warning):
        return ["args"]
    required = [
        p
        for p in inspect.signature(cls).parameters.values()
        if p.default is p.empty and p.kind is p.KEYWORD_ONLY
    ]
    examples: tuple[Any, ...] = {
        "WorkerError": ("failed", [ValueError()]),
        "RemoteTraceback": ("text",),
    }.get(cls.__name__, ("code", "headline"))
    error = cls(*examples, **{p.name: {} if p.name == "results" else 0 for p in required})
    return sorted({"args", *(name for name in vars(error) if not name.startswith("_"))})


def _in_brackets(names: list[str]) -> str:
    return f"({', '.join(names)})" if names else ""
