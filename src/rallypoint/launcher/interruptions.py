"""Signal handlers of the program's that raise while a message is being sent: torch's handler of
SIGCHLD does, when a worker of a DataLoader died.

Python runs handlers between any two steps of the main thread, ours included. The exception is the
program's and must reach it, but the message must be sent first, whole and once.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")

TRIES = 3  # each one that fails took a signal of its own, in the millisecond that the others took


def raised_by_handler(error: BaseException) -> bool:
    """Tell whether a handler of a signal raised it, and not the code that it came through."""
    handlers = [
        handler
        for number in signal.valid_signals()
        if callable(handler := signal.getsignal(number))
    ]
    # It is C code, without a frame.
    if isinstance(error, KeyboardInterrupt) and signal.default_int_handler in handlers:
        return True
    functions = [
        one if hasattr(one, "__code__") or hasattr(one, "__func__") else type(one).__call__
        for one in handlers
    ]
    codes = {
        getattr(getattr(function, "__func__", function), "__code__", None) for function in functions
    }
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def whole(work: Callable[[], _Result]) -> _Result:
    """Return what `work` returns. When a handler raises in it, it is begun again, and then the
    handler's exception is raised: `work` must know what is done already."""
    first: BaseException | None = None
    for _ in range(TRIES):
        try:
            result = work()
            break
        except BaseException as error:
            if not raised_by_handler(error):
                raise
            first = first or error
    if first is None:
        return result
    try:
        raise first
    finally:
        del first  # its traceback has this frame
