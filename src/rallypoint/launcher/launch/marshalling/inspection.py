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
from types import FunctionType
from typing import Any, NamedTuple

from rallypoint.errors import UsageError
from rallypoint.launcher.launch.marshalling import object_path, unpicklable
from rallypoint.launcher.launch.marshalling.global_reads import Read, reads
from rallypoint.launcher.launch.marshalling.importable import is_users
from rallypoint.launcher.launch.marshalling.unpicklable import ObjectRefused
from rallypoint.wire.values import article, shown

SCANNED_MOST = 5000
"""Maximum functions whose code is read for one call (a thousand take 0.1 s)."""

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
    _check_function(fn)
    name = name_of(fn)
    positional, named = _args(args), _kwargs(kwargs)
    try:
        signature = inspect.signature(fn)  # type: ignore[arg-type]  # checked
    except (ValueError, TypeError):  # builtins often have none: the ranks will say
        return Called(positional, named, name)
    with_rank, without = (0, *positional), positional
    given, other = (with_rank, without) if pass_rank else (without, with_rank)
    problem = _unbound(signature, given, named)
    if not problem:
        return Called(positional, named, name)
    line = f"{name}{_shown_signature(signature)}"
    pair = "\n".join(
        f"{way}:  {_call(name, positional, named, pass_rank=pass_rank == (way == 'wrong'))}"
        for way in ("wrong", "right")
    )
    help = [("give what it takes", f"rallypoint.launch({name}, args=(...), kwargs={{...}})")]
    if not _unbound(signature, other, named):
        if pass_rank:
            raise _usage(f"{line} does not want the rank in front", ("write it like this", pair))
        if "rank" in next(iter(signature.parameters), ""):
            raise _usage(
                f"{line} wants the rank in front, which is given only on request",
                ("write it like this", pair),
            )
        help.append(("or, if its first argument is to be the rank, ask for it", pair))
    raise _usage(f"{line} cannot be called with these arguments: {problem}", *help)


def _check_function(fn: Any) -> None:
    """Refuse what is no function, and a function whose result cannot come back from a rank."""
    if not callable(fn):
        given, name = article(type(fn).__name__), "train"
        if fn is None:
            given = "None"
        elif inspect.iscoroutine(fn) or inspect.isgenerator(fn):
            name = fn.__name__
            given = f"the {type(fn).__name__} that {name}() returned"
            fn.close()  # nobody awaits it any more: no warning about that
        raise _usage(
            f"launch takes a function, and was given {given}",
            (
                "give the function itself, without calling it",
                f"wrong:  rallypoint.launch({name}())\nright:  rallypoint.launch({name})",
            ),
        )
    name = name_of(fn)
    for kind, test, makes, how, run in (
        ("an async", inspect.iscoroutinefunction, "only makes a coroutine", "run it in the rank", "asyncio.run"),
        ("a generator", inspect.isgeneratorfunction, "runs nothing, and a generator cannot come back", "return a list", "list"),
    ):  # fmt: skip
        if test(fn):
            raise _usage(
                f"{name} is {kind} function: calling it {makes}",
                (
                    how,
                    f"wrong:  rallypoint.launch({name})\nright:  rallypoint.launch(lambda: {run}({name}()))",
                ),
            )


def name_of(fn: Any) -> str:
    """Return a function's name (`train`, `Trainer.fit`), or the type's name of another callable."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    return str(name).rpartition("<locals>.")[2]


def _args(args: object) -> tuple[Any, ...]:
    if isinstance(args, list | tuple):
        return tuple(args)
    text = repr(args) if _short(args) else "x"
    raise _usage(
        f"args is a tuple, and was given {article(type(args).__name__)}",
        ("put it in a tuple", f"wrong:  args={text}\nright:  args=({text},)"),
    )


def _kwargs(kwargs: object) -> dict[str, Any]:
    if kwargs is None:
        return {}
    wrong = ""
    if not isinstance(kwargs, dict):
        wrong = f"is a dict, and was given {article(type(kwargs).__name__)}"
    elif keys := [key for key in kwargs if not isinstance(key, str)]:
        wrong = f"has a key that is no name: {shown(keys[0])}"
    if wrong:
        raise _usage(f"kwargs {wrong}", ("give names and values", 'kwargs={"lr": 0.1}'))
    assert isinstance(kwargs, dict)
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


def _call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, pass_rank: bool) -> str:
    given = [name]
    if args:
        shown_args = ", ".join(repr(one) if _short(one) else "..." for one in args)
        given.append(f"args=({shown_args}{',' if len(args) == 1 else ''})")
    if kwargs:
        given.append(f"kwargs={{{', '.join(f'{shown(key)}: ...' for key in kwargs)}}}")
    if pass_rank:
        given.append("pass_rank=True")
    return f"rallypoint.launch({', '.join(given)})"


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
        self._seen: dict[int, FunctionType] = {}  # by id, which is used twice for none of them
        self.handed_over: list[tuple[str, str, object]] = []

    def function(self, function: FunctionType, *, by_name: bool) -> None:
        """Inspect a function and those that it calls. Raises ObjectRefused for a lock and its like.

        Globals of its own module matter when the function goes `by_name`, and those of other
        modules in any case.
        """
        waiting = [(function, by_name)]
        while waiting and len(self._seen) < SCANNED_MOST:
            one, named = waiting.pop()
            if id(one) in self._seen or not is_users(one.__module__):
                continue
            self._seen[id(one)] = one
            for read in reads(one):
                own = read.module == one.__globals__.get("__name__")
                if named if own else is_users(read.module):
                    self._look(one, read)
                    waiting += [(code, True) for code in _functions_of(read.value)]

    def kind(self, kind: type, *, by_name: bool) -> None:
        """Inspect the methods of a class."""
        for method in _functions_of(kind) if by_name else ():
            self.function(method, by_name=True)

    def _look(self, function: FunctionType, read: Read) -> None:
        refused = unpicklable.kind_of(type(read.value))
        if refused is not None and refused.code in _WRONG:
            raise ObjectRefused(refused, _read_text(function, read))
        if read.module in sys.modules and self._is_shared(read.value):
            last = read.names[-1]
            if sys.modules[read.module].__dict__.get(last) is read.value:
                self.handed_over.append((read.module, last, read.value))


def _functions_of(value: Any) -> list[FunctionType]:
    """Return the functions that a call of a global may run: itself, its methods, and what a
    decorator has wrapped."""
    if isinstance(value, type) and is_users(value.__module__):
        members = [getattr(one, "__func__", one) for one in value.__dict__.values()]
        return [one for one in members if isinstance(one, FunctionType)]
    value = inspect.getattr_static(value, "__func__", value)
    wrapped = inspect.getattr_static(value, "__wrapped__", None)  # by functools.wraps or cache
    return [one for one in (value, wrapped) if isinstance(one, FunctionType)]


def _read_text(function: FunctionType, read: Read) -> str:
    """Return `global lock in train.py:6, used by increment at train.py:9`, or `state.lock
    (...)`."""
    module = sys.modules.get(read.module)
    made_in = getattr(module, "__file__", None) or function.__code__.co_filename
    text = object_path.global_text(
        read.names[-1], made_in, read.function, function.__code__.co_filename, read.line
    )
    return text if len(read.names) == 1 else f"{'.'.join(read.names)} ({text})"


_DATA = "numbers, text, containers, tensors, arrays"
_RETURN = ("return what can be copied: " + _DATA, "return model.state_dict()")
_RETURN_INSTEAD = {
    "a generator": ("let the rank run through it", "return list(...)"),
    unpicklable.NOT_A_LEAF.name: ("give its numbers", "return loss.detach()   # or loss.item()"),
}
"""Help for a result, by the name of its kind."""


def refusal(
    error: Exception, culprit: object, roots: Sequence[tuple[object, str]], returned_by: str
) -> UsageError:
    """Make the error for an object in the named roots that was refused, or for a library's object
    that it is a part of.

    `returned_by`: name of the function, when the root is its result.
    """
    if isinstance(error, ObjectRefused) and error.place:
        place = object_path.ObjectPlace(error.place)
    else:
        otherwise = "result" if returned_by else f"{roots[0][1]} or its arguments"
        place = object_path.find(culprit, roots, otherwise)
    kind = error.kind if isinstance(error, ObjectRefused) else None
    code: str = "launch-argument"
    why: tuple[str, ...] = ()
    if kind is not None and (place.holder is None or kind.code == "mp-object-in-launch"):
        code, at, reason, help = kind.code, place.text, f"{kind.name} {kind.reason}", kind.help
    else:
        name = type_name(culprit if place.holder is None else place.holder)
        at = place.holder_text or place.text
        reason = f"{article(name)} cannot cross into another process"
        if kind is None:
            reason = f"{reason}: {describe(error)}"
        else:
            why = (f"it holds {kind.name}: {place.text}",)
        help = (
            ("make it in the function, in every rank; or give what it is made of: " + _DATA, ""),
        )
    text = f"{at}: {reason}" if code == "launch-argument" else f"{reason}: {at}"
    if returned_by:
        code = "result-unsupported"
        text = f"what {returned_by} returned cannot be sent back: {at}: {reason}"
        help = (_RETURN_INSTEAD.get(kind.name if kind is not None else "", _RETURN),)
    problem = UsageError(code, text, why=why, help=help)
    problem.__cause__ = error if kind is None else None
    return problem


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
