"""Exception on its way to another process: records of what of it can be sent, and the exception
again.

Each exception of the chain is a record of its own, so that one that cannot be sent does not take
the others with it. An exception is built again without its own `__init__`: many a class takes other
arguments there than `args` has, and plain pickle fails on those where they arrive.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from rallypoint.errors import RemoteError, RemoteTraceback
from rallypoint.launcher import exception_capture
from rallypoint.launcher.launch import notebook_cells
from rallypoint.launcher.protocol import cut

CHAIN_MOST = 50
"""Maximum exceptions of one chain or group. The traceback's text has the others, too."""

BYTES_MOST = 16 * 1024 * 1024
"""Maximum bytes of one exception: a batch that was kept for inspection, not a whole model."""

TEXT_BYTES_MOST = 256 * 1024
"""Maximum bytes of a message, a note, a traceback: as much as a person can scroll through."""

Record = dict[str, Any]
Dumps = Callable[[object], bytes]
Loads = Callable[[bytes], Any]


def records_of(error: BaseException, dumps: Dumps) -> list[Record]:
    """Return the records of an exception and of its chain and members, itself first."""
    found = _chain(error)
    numbers = {id(one): number for number, one in enumerate(found)}
    records = [_record(one, dumps, numbers) for one in found]
    records[0]["traceback"] = _text(exception_capture.traceback_text(error))
    return records


def text_of(error: BaseException, _: Dumps) -> list[Record]:
    """Return a record of the exception's texts alone."""
    return [{**_texts(error), "traceback": _text(exception_capture.traceback_text(error))}]


def name_of(error: BaseException) -> list[Record]:
    """Return a record of an exception whose texts cannot be had."""
    message = "<message cannot be shown>"
    return [{"type": type(error).__name__, "message": message, "notes": [], "traceback": ""}]


def _chain(error: BaseException) -> list[BaseException]:
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
        "type": exception_capture.type_name(type(error)),
        "message": _text(exception_capture.message_of(error)),
        "notes": [_text(note) for note in notes if isinstance(note, str)]
        if isinstance(notes, list)
        else [],
    }


def _text(text: str) -> str:
    return cut(exception_capture.sayable(text), TEXT_BYTES_MOST)


def _record(error: BaseException, dumps: Dumps, numbers: dict[int, int]) -> Record:
    record = _texts(error)
    record["cause"] = numbers.get(id(error.__cause__))
    record["context"] = numbers.get(id(error.__context__))
    record["suppress"] = error.__suppress_context__
    if isinstance(error, BaseExceptionGroup):
        members = [numbers[id(one)] for one in error.exceptions if id(one) in numbers]
        record["members"], record["headline"] = members, _text(error.message)
        left_out = len(error.exceptions) - len(members)
        if left_out:
            record["notes"].append(f"rallypoint: {left_out} of its exceptions were left out")
    try:
        record["data"] = _data(error, dumps, record)
    except Exception as problem:  # of the class, or of args
        why = _why(problem)
        record["notes"].append(f"rallypoint: the exception itself could not be sent: {why}")
    return record


def _data(error: BaseException, dumps: Dumps, record: Record) -> bytes:
    """Pickle an exception whole, or as its class, arguments and attributes.

    Attributes that cannot be sent are left out; in the place of such arguments goes the message.
    """
    kind = type(error)
    reduced: Any = error.__reduce_ex__(2)
    maker, args, *rest = reduced
    own = any(hasattr(method, "__code__") for method in (kind.__reduce__, kind.__reduce_ex__))
    if maker is not kind or own:
        return dumps(error)  # it says itself how it is made
    state = {name: one for name, one in (rest[0] if rest else {}).items() if name != "__notes__"}
    if "members" in record:
        args = ()
    try:
        return dumps((kind, args, state))
    except Exception:
        lost: list[str] = []

    def goes(name: str, value: object) -> bool:
        try:
            return bool(dumps(value))
        except Exception as problem:
            lost.append(f"{name} ({_why(problem)})")
            return False

    state = {name: one for name, one in state.items() if goes(name, one)}
    if not goes("args", args):
        args = (record["message"],)
    left_out = "; ".join(lost)
    record["notes"].append(f"rallypoint: left out, because it cannot be sent: {left_out}")
    return dumps((kind, args, state))


def _why(problem: BaseException) -> str:
    kind = getattr(problem, "kind", None)
    if kind is not None:
        return str(kind.name)
    return exception_capture.message_of(problem)[:200] or type(problem).__name__


# --- again ---


def rebuilt(records: list[Record], loads: Loads) -> BaseException:
    """Build the exception of `records_of` again, and its chain with it."""
    made: dict[int, BaseException] = {}
    # Members and causes come after an exception: from the last to the first, all it needs is there.
    for number in reversed(range(len(records))):
        made[number] = _one(records[number], loads, made)
    for number, record in enumerate(records):
        error = made[number]
        for name in ("cause", "context"):
            other = made.get(record.get(name, -1))
            if other is not None and other is not error:
                setattr(error, f"__{name}__", other)
        error.__suppress_context__ = bool(record.get("suppress", False))
    first = made[0]
    if first.__cause__ is not None:
        first.__context__ = first.__cause__
    first.__cause__ = RemoteTraceback(notebook_cells.named(records[0]["traceback"].rstrip("\n")))
    return first


def _one(record: Record, loads: Loads, made: dict[int, BaseException]) -> BaseException:
    error: BaseException | None = None
    members = [made[number] for number in record.get("members", ()) if number in made]
    if "data" in record:
        try:
            error = _built(loads(record["data"]), record, members)
        except Exception as problem:
            why = _why(problem)
            record["notes"].append(
                f"rallypoint: the class of this exception cannot be had here: {why}"
            )
    if error is None and members:
        error = BaseExceptionGroup(record["headline"], members)
    if error is None:
        error = RemoteError(record["type"], record["message"])
    error.__dict__.pop("__notes__", None)  # those of an exception that was sent whole
    for note in record["notes"]:
        error.add_note(note)
    return error


def _built(data: Any, record: Record, members: list[BaseException]) -> BaseException:
    if isinstance(data, BaseException):
        return data
    if not isinstance(data, tuple):
        raise TypeError(f"it came back as {type(data).__name__}")
    kind, args, state = data
    if "members" in record:
        error: BaseException = BaseExceptionGroup.__new__(kind, record["headline"], members)
    else:
        error = _by_c(kind, "__new__")(kind, *args)
        _by_c(kind, "__init__")(error, *args)
    for name, value in state.items():
        setattr(error, name, value)
    return error


def _by_c(kind: type, name: str) -> Callable[..., Any]:
    """Return the nearest `__new__` or `__init__` of the interpreter, which takes `args` as they
    are."""
    for base in kind.__mro__:
        method = base.__dict__.get(name)
        if method is not None and not hasattr(getattr(method, "__func__", method), "__code__"):
            return getattr(base, name)  # type: ignore[no-any-return]
    return getattr(BaseException, name)  # type: ignore[no-any-return]


def unreadable(problem: BaseException) -> BaseException:
    """Make the exception for records that cannot be read."""
    text = "".join(traceback.format_exception_only(type(problem), problem)).strip()
    error = RemoteError("an exception that cannot be read here", text)
    error.__cause__ = RemoteTraceback(text)
    return error
