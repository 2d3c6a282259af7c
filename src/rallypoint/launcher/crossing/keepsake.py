"""An exception on its way to another process: what of it can be sent, as records; and the exception again.

Each exception of the chain is a record of its own, so that one that cannot be sent does not take the others with it, and each attribute
is tried by itself. It is built again without its own `__init__`: that takes, in many a class, other arguments than `args` has, and
plain pickle fails on those where they arrive.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from rallypoint.errors import RemoteError, RemoteTraceback
from rallypoint.launcher import cells, words
from rallypoint.launcher.channel import cut

CHAIN_MOST = 50
"""Exceptions of one chain or group: beyond that they are left out, and the traceback's text has what there is."""

PART_BYTES_MOST = 16 * 1024 * 1024
"""Of one exception's arguments, or of one attribute: a batch that was kept for inspection, not a whole model."""

TEXT_BYTES_MOST = 256 * 1024
"""Of a message, a note, a traceback: as much as a person can scroll through."""

Record = dict[str, Any]
Dumps = Callable[[object], bytes]
Loads = Callable[[bytes], Any]


def of(error: BaseException, dumps: Dumps) -> list[Record]:
    """The records of an exception and of all that hang from it, itself first. `dumps` may raise anything."""
    found = _all(error)
    numbers = {id(one): number for number, one in enumerate(found)}
    records = [_record(one, dumps, numbers) for one in found]
    records[0]["traceback"] = _text(words.traceback_text(error))
    return records


def bare(error: BaseException, dumps: Dumps) -> list[Record]:
    """Only what is text."""
    return [{**_texts(error), "traceback": _text(words.traceback_text(error))}]


def nothing(error: BaseException) -> list[Record]:
    """When not even its text can be had."""
    return [{"type": type(error).__name__, "message": "<message cannot be shown>", "notes": [], "traceback": ""}]


def _all(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting and len(found) < CHAIN_MOST:
        one = waiting.pop(0)
        if one is None or any(one is other for other in found):
            continue
        found.append(one)
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
    return found


def _texts(error: BaseException) -> Record:
    notes = getattr(error, "__notes__", None)
    return {
        "type": words.type_name(type(error)),
        "message": _text(words.message_of(error)),
        "notes": [_text(note) for note in notes if isinstance(note, str)] if isinstance(notes, list) else [],
    }


def _text(text: str) -> str:
    return cut(words.sayable(text), TEXT_BYTES_MOST)


def _record(error: BaseException, dumps: Dumps, numbers: dict[int, int]) -> Record:
    record = _texts(error)
    record["cause"] = numbers.get(id(error.__cause__))
    record["context"] = numbers.get(id(error.__context__))
    record["suppress"] = error.__suppress_context__
    if isinstance(error, BaseExceptionGroup):
        members = [numbers[id(one)] for one in error.exceptions if id(one) in numbers]
        record["members"], record["headline"] = members, _text(error.message)
        if len(members) < len(error.exceptions):
            record["notes"].append(f"rallypoint: {len(error.exceptions) - len(members)} of its exceptions were left out")
    lost: list[str] = []
    try:
        record["parts"] = _parts(error, dumps, lost)
    except Exception as problem:  # of the class, or of args
        record["notes"].append(f"rallypoint: the exception itself could not be sent: {_why(problem)}")
    if lost:
        record["notes"].append(f"rallypoint: left out, because it cannot be sent: {'; '.join(lost)}")
    return record


def _parts(error: BaseException, dumps: Dumps, lost: list[str]) -> Record:
    """Its class, arguments and attributes, each pickled."""
    kind = type(error)
    maker, args, state = _reduced(error)
    if maker is not kind or hasattr(kind.__reduce__, "__code__") or hasattr(kind.__reduce_ex__, "__code__"):
        return {"whole": _bounded(dumps, error)}  # it says itself how it is made
    parts: Record = {"kind": dumps(kind)}
    if not isinstance(error, BaseExceptionGroup):
        try:
            parts["args"] = _bounded(dumps, args)
        except Exception:
            parts["args"] = dumps(tuple(_one_of_args(one, f"args[{index}]", dumps, lost) for index, one in enumerate(args)))
    attributes: dict[str, bytes] = {}
    for name, value in state.items():
        if name == "__notes__":
            continue
        try:
            attributes[name] = _bounded(dumps, value)
        except Exception as problem:
            lost.append(f"{name} ({_why(problem)})")
    parts["attributes"] = attributes
    return parts


def _reduced(error: BaseException) -> tuple[object, tuple[Any, ...], dict[str, Any]]:
    reduced: Any = error.__reduce_ex__(2)
    maker, args = reduced[0], reduced[1]
    state = reduced[2] if len(reduced) > 2 else None
    return maker, tuple(args), dict(state) if isinstance(state, dict) else {}


def _one_of_args(value: object, path: str, dumps: Dumps, lost: list[str]) -> object:
    try:
        _bounded(dumps, value)
    except Exception as problem:
        lost.append(f"{path} ({_why(problem)})")
        return f"<{type(value).__name__} left out>"
    return value


def _bounded(dumps: Dumps, value: object) -> bytes:
    data = dumps(value)
    if len(data) > PART_BYTES_MOST:
        raise ValueError(f"{len(data)} bytes are more than {PART_BYTES_MOST}")
    return data


def _why(problem: BaseException) -> str:
    misfit = getattr(problem, "misfit", None)
    return misfit.name if misfit is not None else words.message_of(problem)[:200] or type(problem).__name__


# --- again ---


def rebuilt(records: list[Record], loads: Loads) -> BaseException:
    """The exception that `of` was given, its chain with it."""
    made: dict[int, BaseException] = {}
    # Members of a group come after it, causes after what they caused: from the last to the first, all that one needs is there.
    for number in reversed(range(len(records))):
        made[number] = _one(records[number], loads, made)
    for number, record in enumerate(records):
        error = made[number]
        for name in ("cause", "context"):
            other = made.get(record.get(name, -1)) if record.get(name) is not None else None
            if other is not None and other is not error:
                setattr(error, f"__{name}__", other)
        error.__suppress_context__ = bool(record.get("suppress", False))
    first = made[0]
    if first.__cause__ is not None:
        first.__context__ = first.__cause__
    first.__cause__ = RemoteTraceback(cells.named(records[0]["traceback"].rstrip("\n")))
    return first


def _one(record: Record, loads: Loads, made: dict[int, BaseException]) -> BaseException:
    error: BaseException | None = None
    members = [made[number] for number in record.get("members", ()) if number in made]
    if "parts" in record:
        try:
            error = _built(record, loads, members)
        except Exception as problem:
            record["notes"].append(f"rallypoint: the class of this exception cannot be had here: {_why(problem)}")
    if error is None and members:
        error = BaseExceptionGroup(record["headline"], members)
    if error is None:
        error = RemoteError(record["type"], record["message"])
    if record["notes"]:
        error.__dict__.pop("__notes__", None)  # with `whole` they came along
        for note in record["notes"]:
            error.add_note(note)
    return error


def _built(record: Record, loads: Loads, members: list[BaseException]) -> BaseException:
    parts = record["parts"]
    if "whole" in parts:
        whole = loads(parts["whole"])
        if not isinstance(whole, BaseException):
            raise TypeError(f"it came back as {type(whole).__name__}")
        return whole
    kind = loads(parts["kind"])
    if "members" in record:
        error: BaseException = BaseExceptionGroup.__new__(kind, record["headline"], members)
    else:
        args = loads(parts["args"])
        error = _by_c(kind, "__new__")(kind, *args)
        _by_c(kind, "__init__")(error, *args)
    for name, data in parts["attributes"].items():
        try:
            setattr(error, name, loads(data))
        except Exception as problem:
            record["notes"].append(f"rallypoint: left out: {name} ({_why(problem)})")
    return error


def _by_c(kind: type, name: str) -> Callable[..., Any]:
    """The nearest `__new__` or `__init__` that is the interpreter's own: it takes `args` as they are."""
    for base in kind.__mro__:
        method = base.__dict__.get(name)
        if method is not None and not hasattr(getattr(method, "__func__", method), "__code__"):
            return getattr(base, name)  # type: ignore[no-any-return]
    return getattr(BaseException, name)  # type: ignore[no-any-return]


def unreadable(problem: BaseException) -> BaseException:
    """When the records themselves cannot be read."""
    text = "".join(traceback.format_exception_only(type(problem), problem)).strip()
    error = RemoteError("an exception that cannot be read here", text)
    error.__cause__ = RemoteTraceback(text)
    return error
