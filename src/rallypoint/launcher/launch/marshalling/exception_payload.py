"""Exceptions that are sent to another process: records of an exception and its chain, and the
exceptions that are built from them again.

Each exception of the chain has a record of its own, so that one that cannot be sent does not take
the others with it. An exception is built again without its own `__init__`: the `__init__` of many
classes takes other arguments than `args` has, and plain pickle fails on those when it loads them.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from typing import Any

import msgspec

from rallypoint.diagnosis.raised import cut
from rallypoint.errors import RemoteError, RemoteTraceback
from rallypoint.launcher import exception_capture
from rallypoint.launcher.launch import notebook_cells

CHAIN_MOST = 50
"""Maximum exceptions of one chain or group. The traceback's text has the others, too."""

BYTES_MOST = 16 * 1024 * 1024
"""Maximum bytes of one exception: a batch that was kept for inspection, not a whole model."""

TEXT_BYTES_MOST = 256 * 1024
"""Maximum bytes of a message, a note, a traceback: as much as a person can scroll through."""

_set = BaseException.__setattr__
"""Setter of an attribute, past that of the class: a frozen dataclass refuses."""

Dumps = Callable[[object], bytes]
Loads = Callable[[bytes], Any]


class ExceptionRecord(msgspec.Struct):
    """One exception of a chain. Others of the chain are named by their number in it."""

    type: str
    message: str
    notes: list[str]
    cause: int | None = None
    context: int | None = None
    suppress: bool = False
    members: list[int] | None = None  # of a group
    data: bytes = b""  # pickle of the exception; empty when it cannot be sent


def records_of(error: BaseException, dumps: Dumps) -> tuple[str, list[ExceptionRecord]]:
    """Return the traceback's text, and the records of an exception, of its chain and members."""
    found = [*itertools.islice(exception_capture.chain(error), CHAIN_MOST)]
    numbers = {id(one): number for number, one in enumerate(found)}
    text = _text(exception_capture.traceback_text(error))
    return text, [_record(one, dumps, numbers) for one in found]


def records_of_type(error: BaseException) -> tuple[str, list[ExceptionRecord]]:
    """Return the records of an exception of which only the type's name can be had."""
    return "", [ExceptionRecord(type(error).__name__, "<message cannot be shown>", [])]


def _text(text: str) -> str:
    return cut(exception_capture.sayable(text), TEXT_BYTES_MOST)


def _record(error: BaseException, dumps: Dumps, numbers: dict[int, int]) -> ExceptionRecord:
    notes = getattr(error, "__notes__", None)
    record = ExceptionRecord(
        exception_capture.type_name(type(error)),
        _text(exception_capture.message_of(error)),
        [_text(note) for note in notes if isinstance(note, str)] if isinstance(notes, list) else [],
        numbers.get(id(error.__cause__)),
        numbers.get(id(error.__context__)),
        error.__suppress_context__,
    )
    if isinstance(error, BaseExceptionGroup):
        record.message = _text(error.message)
        record.members = [numbers[id(one)] for one in error.exceptions if id(one) in numbers]
        left_out = len(error.exceptions) - len(record.members)
        if left_out:
            record.notes.append(f"rallypoint: {left_out} of its exceptions were left out")
    try:
        record.data, left_out_because = _data(error, dumps, record)
        if left_out_because:
            record.notes.append(
                f"rallypoint: its attributes were left out, because they cannot be sent: {left_out_because}"
            )
    except Exception as problem:  # of the class, or of its own way to be pickled
        why = _why(problem)
        record.notes.append(f"rallypoint: the exception itself could not be sent: {why}")
    return record


def _data(error: BaseException, dumps: Dumps, record: ExceptionRecord) -> tuple[bytes, str]:
    """Pickle an exception whole, or as its class, arguments and attributes.

    When these cannot be sent the attributes are left out, and then the message goes in the place of
    the arguments. Returns the pickle and why something was left out.
    """
    kind = type(error)
    reduced: Any = error.__reduce_ex__(2)
    maker, args, *rest = reduced
    own = any(hasattr(method, "__code__") for method in (kind.__reduce__, kind.__reduce_ex__))
    if maker is not kind or own:
        return dumps(error), ""  # it says itself how it is made
    state = {name: one for name, one in (rest[0] if rest else {}).items() if name != "__notes__"}
    if record.members is not None:
        args = ()
    why = ""
    for sent, attributes in ((args, state), (args, None), ((record.message,), None)):
        try:
            return dumps((kind, sent, attributes or {})), why
        except Exception as problem:
            why = why or _why(problem)
    raise pickle.PicklingError(why)


def _why(problem: BaseException) -> str:
    return exception_capture.message_of(problem)[:200] or type(problem).__name__


# --- again ---


def rebuilt(text: str, records: list[ExceptionRecord], loads: Loads) -> BaseException:
    """Build the exception of `records_of` again, and its chain with it."""
    made: dict[int | None, BaseException] = {}
    # Members and causes come after an exception: from the last to the first, all it needs is there.
    for number in reversed(range(len(records))):
        made[number] = _one(records[number], loads, made)
    for number, record in enumerate(records):
        error = made[number]
        _set(error, "__cause__", made.get(record.cause))
        _set(error, "__context__", made.get(record.context))
        _set(error, "__suppress_context__", record.suppress)
    first = made[0]
    if first.__cause__ is not None:
        _set(first, "__context__", first.__cause__)
    _set(first, "__cause__", RemoteTraceback(notebook_cells.named(text.rstrip("\n"))))
    return first


def _one(
    record: ExceptionRecord, loads: Loads, made: dict[int | None, BaseException]
) -> BaseException:
    error: BaseException | None = None
    members = [made[number] for number in record.members or () if number in made]
    if record.data:
        try:
            error = _built(loads(record.data), record, members)
        except Exception as problem:
            why = _why(problem)
            record.notes.append(
                f"rallypoint: the class of this exception cannot be had here: {why}"
            )
    if error is None and members:
        error = BaseExceptionGroup(record.message, members)
    if error is None:
        error = RemoteError(record.type, record.message)
    error.__dict__.pop("__notes__", None)  # those of an exception that was sent whole
    if record.notes:
        _set(error, "__notes__", record.notes)
    return error


def _built(data: Any, record: ExceptionRecord, members: list[BaseException]) -> BaseException:
    if isinstance(data, BaseException):
        return data
    kind, args, state = data  # TypeError when its own way to be pickled made something else
    if record.members is not None:
        error: BaseException = BaseExceptionGroup.__new__(kind, record.message, members)
    else:
        error = _by_c(kind, "__new__")(kind, *args)
        _by_c(kind, "__init__")(error, *args)
    for name, value in state.items():
        _set(error, name, value)
    return error


def _by_c(kind: type, name: str) -> Any:
    """Return the interpreter's nearest `__new__` or `__init__`, which takes `args` as they are."""
    methods = (getattr(base, name) for base in kind.__mro__ if name in vars(base))
    return next(method for method in methods if not hasattr(method, "__code__"))
