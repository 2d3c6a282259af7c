"""Checks of a call of `launch`, before anything starts, and the errors that name what cannot be
sent.

Objects that are pickled are checked on the way (`unpicklable`), so an object that leaves its lock
out (`__getstate__`) is not blamed for it. `Scan` looks at what is *not* pickled: a function of an
imported module goes by name, and the globals that it reads are made anew in every rank. A lock
among them would guard nothing, in silence; a shared tensor would be another one in every rank, and
is handed over (`Scan.handed_over`).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from rallypoint.errors import UsageError
from rallypoint.launcher.launch.marshalling import object_path, unpicklable
from rallypoint.launcher.launch.marshalling.global_reads import Read, reads
from rallypoint.launcher.launch.marshalling.importable import is_users
from rallypoint.launcher.launch.marshalling.unpicklable import ObjectRefused, UnpicklableKind
from rallypoint.wire.values import shown

SCANNED_MOST = 5000
"""Maximum functions whose code is read for one call (a thousand take 0.1 s)."""

ELEMENTS_MOST = 100
"""Maximum elements of a global container that is searched: a lock per device or file, no data
set."""

_WRONG = frozenset({"lock-in-wrong-scope", "mp-object-in-launch"})
"""Codes of objects that are wrong as globals of an imported module, too.

A file, a socket or a thread there is each rank's own, and may be meant so.
"""


# --- the function and its arguments ---


class Called(NamedTuple):
    """Arguments of a checked call; `name`: what a person calls the function."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str


def bind(fn: object, args: object, kwargs: object, *, pass_rank: bool = False) -> Called:
    """Check that a function takes these arguments, which are as the user gave them.

    Raises UsageError, with the line to type.
    """
    function = _function(fn)
    name = name_of(function)
    positional, named = _args(args), _kwargs(kwargs)
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # builtins often have none: the ranks will say
        return Called(positional, named, name)
    rank = (0,) if pass_rank else ()
    problem = _unbound(signature, (*rank, *positional), named)
    if not problem:
        return Called(positional, named, name)
    line = f"{name}{_shown_signature(signature)}"
    other = () if pass_rank else (0,)
    if not _unbound(signature, (*other, *positional), named):
        right = _call(name, args=positional, kwargs=named, pass_rank=not pass_rank)
        wrong = _call(name, args=positional, kwargs=named, pass_rank=pass_rank)
        pair = f"wrong:  {wrong}\nright:  {right}"
        if pass_rank:
            raise _usage(f"{line} does not want the rank in front", ("write it like this", pair))
        if "rank" in next(iter(signature.parameters), ""):
            raise _usage(
                f"{line} wants the rank in front, which is given only on request",
                ("write it like this", pair),
            )
        raise _usage(
            f"{line} cannot be called with these arguments: {problem}",
            ("give what it takes", _call(name, args=None, kwargs={}, pass_rank=False)),
            ("or, if its first argument is to be the rank, ask for it", pair),
        )
    raise _usage(
        f"{line} cannot be called with these arguments: {problem}",
        ("give what it takes", _call(name, args=None, kwargs={}, pass_rank=pass_rank)),
    )


def _function(fn: object) -> Callable[..., Any]:
    """Return `fn` if it is a function whose result can come back from a rank. Raises UsageError."""
    if inspect.iscoroutine(fn) or inspect.isgenerator(fn) or inspect.isasyncgen(fn):
        name = fn.__name__
        if inspect.iscoroutine(fn):
            fn.close()  # nobody awaits it any more: no warning about that
        raise _called_already(
            f"the {'coroutine' if inspect.iscoroutine(fn) else 'generator'} that {name}() returned",
            name,
        )
    if fn is None:
        raise _called_already("None", "train")
    if not callable(fn):
        raise _called_already(f"{_article(type(fn).__name__)} {type(fn).__name__}", "train")
    inner = _innermost(fn)
    name = name_of(fn)
    if inspect.iscoroutinefunction(inner):
        raise _usage(
            f"{name} is an async function: calling it only makes a coroutine",
            (
                "run it in the rank",
                f"wrong:  rallypoint.launch({name})\nright:  rallypoint.launch(lambda: asyncio.run({name}()))",
            ),
        )
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise _usage(
            f"{name} is a generator function: calling it runs nothing, and a generator cannot come back",
            (
                "return a list",
                f"wrong:  rallypoint.launch({name})\nright:  rallypoint.launch(lambda: list({name}()))",
            ),
        )
    return fn


def _innermost(fn: Any) -> Any:
    """Return the function that a call runs in the end."""
    while True:
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif isinstance(fn, MethodType):
            fn = fn.__func__
        elif not isinstance(fn, FunctionType | type) and isinstance(_own_call(fn), FunctionType):
            fn = _own_call(fn)
        else:
            return fn


def _own_call(fn: object) -> object:
    """Return `__call__` of an object's class."""
    return next(
        (kind.__dict__["__call__"] for kind in type(fn).__mro__ if "__call__" in kind.__dict__),
        None,
    )


def name_of(fn: Any) -> str:
    """Return a function's name (`train`, `Trainer.fit`), or the type's name of another callable."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    return str(name).rpartition("<locals>.")[2]


def _called_already(what: str, name: str) -> UsageError:
    return _usage(
        f"launch takes a function, and was given {what}",
        (
            "give the function itself, without calling it",
            f"wrong:  rallypoint.launch({name}())\nright:  rallypoint.launch({name})",
        ),
    )


def _args(args: object) -> tuple[Any, ...]:
    if isinstance(args, list | tuple):
        return tuple(args)
    one = args if isinstance(args, int | float | str | bool | None) else "x"
    text = one if one == "x" and not isinstance(args, str) else repr(one)
    if len(text) > 40:
        text = "x"
    raise _usage(
        f"args is a tuple, and was given {_article(type(args).__name__)} {type(args).__name__}",
        ("put it in a tuple", f"wrong:  args={text}\nright:  args=({text},)"),
    )


def _kwargs(kwargs: object) -> dict[str, Any]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict):
        raise _usage(
            f"kwargs is a dict, and was given {_article(type(kwargs).__name__)} {type(kwargs).__name__}",
            ("give names and values", 'kwargs={"lr": 0.1}'),
        )
    for key in kwargs:
        if not isinstance(key, str):
            raise _usage(
                f"kwargs has a key that is no name: {shown(key)}",
                ("names are text", 'kwargs={"lr": 0.1}'),
            )
    return dict(kwargs)


def _unbound(signature: inspect.Signature, args: Sequence[object], kwargs: dict[str, Any]) -> str:
    """Return why these arguments do not fit; "" when they do."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""


def _shown_signature(signature: inspect.Signature) -> str:
    bare = [
        one.replace(
            annotation=inspect.Parameter.empty, default=one.default if _short(one.default) else ...
        )
        for one in signature.parameters.values()
    ]
    text = str(inspect.Signature(bare))
    return text if len(text) <= 100 else "(...)"


def _short(value: object) -> bool:
    return value is inspect.Parameter.empty or (
        isinstance(value, int | float | str | bool | None) and len(repr(value)) <= 20
    )


def _call(
    name: str, args: tuple[Any, ...] | None, kwargs: dict[str, Any], *, pass_rank: bool
) -> str:
    given = [name]
    if args is None:
        given.append("args=(...), kwargs={...}")
    elif args:
        given.append(
            f"args=({', '.join(repr(one) if _short(one) else '...' for one in args)}{',' if len(args) == 1 else ''})"
        )
    if kwargs:
        given.append(f"kwargs={{{', '.join(f'{shown(key)}: ...' for key in kwargs)}}}")
    if pass_rank:
        given.append("pass_rank=True")
    return f"rallypoint.launch({', '.join(given)})"


def _article(word: str) -> str:
    return "an" if word[:1].lower() in "aeiou" else "a"


def _usage(headline: str, *help: tuple[str, str]) -> UsageError:
    return UsageError("usage", headline, help=help)


# --- what is not pickled, and what is ---


class Scan:
    """Inspector of the functions that one call needs, each once.

    `handed_over`: globals of imported modules that are to be the same memory in every rank, as
    (module, name, value).
    """

    def __init__(self, is_shared: Callable[[object], bool]) -> None:
        """`is_shared`: tells whether a value is memory that processes share."""
        self._is_shared = is_shared
        self._seen: set[int] = set()
        self._keep: list[object] = []  # so that no id is used twice
        self.handed_over: list[tuple[str, str, object]] = []

    def function(self, function: FunctionType, *, by_name: bool) -> None:
        """Inspect a function and those that it calls. Raises ObjectRefused for a lock and its like.

        Globals of its own module matter when the function goes `by_name`, and those of other
        modules in any case.
        """
        waiting: list[tuple[object, bool]] = [(function, by_name)]
        while waiting and len(self._seen) < SCANNED_MOST:
            one, named = waiting.pop()
            if id(one) in self._seen:
                continue
            self._seen.add(id(one))
            self._keep.append(one)
            if isinstance(one, type):
                waiting += [(member, named) for member in self._members(one)]
                continue
            assert isinstance(one, FunctionType)
            if not is_users(one.__module__):
                continue
            for read in reads(one):
                own = read.module == one.__globals__.get("__name__")
                if named if own else is_users(read.module):
                    self._read(one, read)
                    waiting += [(code, True) for code in _code_of(read.value)]

    def kind(self, kind: type, *, by_name: bool) -> None:
        """Inspect the methods of a class."""
        if by_name and is_users(kind.__module__):
            for member in self._members(kind):
                self.function(member, by_name=True)

    def _members(self, kind: type) -> list[FunctionType]:
        found: list[FunctionType] = []
        for name, member in list(kind.__dict__.items()):
            refused = unpicklable.kind_of(type(member))
            if refused is not None and refused.code in _WRONG:
                raise ObjectRefused(refused, f"class attribute {kind.__qualname__}.{name}")
            found += _code_of(member)
        return found

    def _read(self, function: FunctionType, read: Read) -> None:
        if isinstance(read.value, ModuleType | FunctionType | type | CodeType):
            return
        for path, value in _looked_into(read.value):
            refused = unpicklable.kind_of(type(value))
            if refused is not None and refused.code in _WRONG:
                raise ObjectRefused(refused, _read_text(function, read, path))
        if read.module in sys.modules and self._is_shared(read.value):
            last = read.names[-1]
            if sys.modules[read.module].__dict__.get(last) is read.value:
                self.handed_over.append((read.module, last, read.value))


def _code_of(value: object) -> list[Any]:
    """Return the functions that a call of a global or a member may run."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        return [
            one for one in (value.fget, value.fset, value.fdel) if isinstance(one, FunctionType)
        ]
    if isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, MethodType):
        value = value.__func__
    if not isinstance(value, FunctionType | type):
        value = inspect.getattr_static(value, "__wrapped__", None)  # functools.cache and its like
    if isinstance(value, FunctionType):
        inner = value.__dict__.get("__wrapped__")
        return [value, inner] if isinstance(inner, FunctionType) else [value]
    return [value] if isinstance(value, type) and is_users(value.__module__) else []


def _looked_into(value: Any) -> list[tuple[str, object]]:
    """Return (path, object) for a value and the elements of a small container."""
    found: list[tuple[str, object]] = [("", value)]
    if type(value) is dict and len(value) <= ELEMENTS_MOST:
        found += [(f"[{shown(key)}]", one) for key, one in value.items()]
    elif type(value) in (list, tuple) and len(value) <= ELEMENTS_MOST:
        found += [(f"[{index}]", one) for index, one in enumerate(value)]
    return found


def _read_text(function: FunctionType, read: Read, path: str) -> str:
    """Return `global lock in train.py:6, used by increment at train.py:9`, or `state.lock
    (...)`."""
    module = sys.modules.get(read.module)
    made_in = getattr(module, "__file__", None) or function.__code__.co_filename
    text = object_path.global_text(
        read.names[-1], made_in, read.function, function.__code__.co_filename, read.line
    )
    expression = ".".join(read.names) + path
    return text if expression == read.names[-1] else f"{expression} ({text})"


def refusal(kind: UnpicklableKind, place: object_path.ObjectPlace) -> UsageError:
    """Make the error for an object of this kind, or for a library's object that it is a part of."""
    holder = place.holder
    if holder is not None and kind.code != "mp-object-in-launch":
        name = type(holder).__qualname__
        what = (
            f"{_article(name)} {type(holder).__module__}.{name} cannot cross into another process"
        )
        return UsageError(
            "launch-argument",
            f"{place.holder_text}: {what}",
            why=(f"it holds {kind.name}: {place.text}",),
            help=(("make it in the function, in every rank", ""),),
        )
    said = f"{kind.name} {kind.reason}"
    argument = kind.code == "launch-argument"
    text = f"{place.text}: {said}" if argument else f"{said}: {place.text}"
    return UsageError(kind.code, text, help=kind.help)


def not_pickled(
    culprit: object, error: BaseException, place: object_path.ObjectPlace
) -> UsageError:
    """Make the error for an object that pickle itself refuses."""
    made_of = "numbers, text, containers, tensors, arrays"
    name = type_name(culprit)
    return UsageError(
        "launch-argument",
        f"{place.holder_text or place.text}: {_article(name)} {name} cannot cross into another process: {describe(error)}",
        help=(
            (f"make it in the function, in every rank; or give what it is made of: {made_of}", ""),
        ),
    )


def type_name(value: object) -> str:
    """Return the full name of a value's type, without the module of builtins and `__main__`."""
    kind = type(value)
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def describe(error: BaseException) -> str:
    """Return an exception in one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
