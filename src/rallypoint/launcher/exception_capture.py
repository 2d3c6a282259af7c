"""Exceptions of the user's program as evidence, without our own frames."""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache, reduce
from types import FrameType, TracebackType
from typing import Any

from rallypoint.diagnosis import stacks
from rallypoint.diagnosis.evidence import Frame, Raised
from rallypoint.diagnosis.raised import joined
from rallypoint.errors import RallypointError
from rallypoint.launcher import interruptions

_OUR_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TYPED = "<string>"  # the text of `python -c`, as our own processes begin, or of `exec`
_RUNPY = "<frozen runpy>"  # a fresh `python -m` has it, too, but hides it
SOURCE_LINE_MOST = 500  # characters of a source line: generated code has lines of a megabyte
FRAMES_MOST = 60  # of one exception: a recursion has a thousand that say the same
SOURCE_BYTES_MOST = 2 * 1024 * 1024  # a larger source file is not searched for its except clauses

# where an exception remembers that it was told about: builtin exceptions take no weak references
SERIAL = "_rallypoint_serial"
_WAIT = "_rallypoint_wait"  # and when the call that it left began, and ended


def is_ours(filename: str, function: str = "<module>", *, first: bool = True) -> bool:
    """Tell whether a code object is the launcher's: of its files, or the first line of one of its
    processes. A function with a name that was typed behind `-c` is the user's; those that
    dataclasses write have names with underscores. `first`: no frame of the program stands before
    it: a program may `exec` text. As `stacks.hidden` has it."""
    if filename == _TYPED:
        return first and (function == "<module>" or function.startswith("__"))
    return filename.startswith(_OUR_FOLDER) or filename == _RUNPY


def without_ours(tb: TracebackType | None) -> TracebackType | None:
    """Return a traceback without our frames."""
    kept: list[TracebackType] = []
    while tb is not None:
        code = tb.tb_frame.f_code
        if not is_ours(code.co_filename, code.co_name, first=not kept):
            kept.append(tb)
        tb = tb.tb_next
    following: TracebackType | None = None
    for one in reversed(kept):
        following = TracebackType(following, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return following


def strip(error: BaseException) -> None:
    """Take our frames out of an exception and of all that hang from it."""
    for one in chain(error):
        # Past its own `__setattr__`: that of a frozen dataclass refuses.
        BaseException.with_traceback(one, without_ours(one.__traceback__))


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its causes, contexts and members of groups, each once, latest first."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
        waiting += [one.__context__, one.__cause__]


def to_first(error: BaseException) -> tuple[list[BaseException], bool]:
    """Return the exceptions back to the one that began a chain: along `__context__` ("during
    handling of the above ..."), as far as there is no `raise ... from`. And whether it is open
    which of them is at fault.

    `finally: dist.destroy_process_group()` after a failed init ends in an AssertionError that hides
    the reason; an explicit `from` is what the program means and is kept. What a program catches by
    its kind to go on is over: its other way failed. A group of one, as `asyncio.TaskGroup` raises
    it, says no more than its member.
    """
    path, lines, is_open = [error], dict[FrameType, int](), False
    while len(path) < FRAMES_MOST:
        before = error.__context__
        if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            before = error.exceptions[0]
        elif error.__suppress_context__:  # a cause sets it, too
            break
        lines.update(traceback.walk_tb(error.__traceback__))
        if before is None or (over := _is_over(before, error, lines)):
            break
        is_open |= over is None
        error = before
        path.append(error)
    return path, is_open


# What programs catch to go another way, also where they clear up.
_EXPECTED = {
    "ImportError", "ModuleNotFoundError", "AttributeError", "KeyError", "IndexError", "LookupError", "StopIteration", "Empty",
    "FileNotFoundError", "FileExistsError", "NotImplementedError",
}  # fmt: skip
# They are also caught to clear up: torch raises RuntimeError for nearly everything.
_BROAD = {"BaseException", "Exception", "RuntimeError"}


def _is_over(
    before: BaseException, error: BaseException, lines: dict[FrameType, int]
) -> bool | None:
    """Tell whether the program had caught `before` to go on when `error` was raised; None when the
    source does not show it. `lines`: where `error` and those after it passed each frame.

    A `finally`, a `with` and a clause that ends the program do not go on. A library says in other
    words what it catches.
    """
    if not before.__traceback__:
        return False
    frame = before.__traceback__.tb_frame
    file, line = frame.f_code.co_filename, lines.get(frame, 0)
    if not (clause := _clause_at(file, line)):
        return False
    last = clause.body[-1]
    if line < last.lineno and re.match(r"raise|(\w+\.)?_?exit\b", ast.unparse(last)):
        return False
    own = stacks.library_path(file) == file
    names = {kind.__name__ for kind in type(before).__mro__}
    names = names - _BROAD if own and isinstance(error, Exception) else names & _EXPECTED
    return _fits(clause.type, names) or (None if own else False)


@cache
def _clause_at(file: str, line: int) -> ast.ExceptHandler | None:
    """Return the innermost except clause around a line."""
    found = None
    for node in _nodes(file, "except"):
        if isinstance(node, ast.ExceptHandler) and node.lineno <= line <= (node.end_lineno or 0):
            found = node
    return found


def on_its_way(frame: FrameType | None) -> Exception | None:
    """Return the exception that the program is clearing up after in `frame`, or in a function that
    called it; None when there is none.

    A `finally`, an except clause or a `with` has it in hand. One that an outer except clause has
    caught to go another way (`except ImportError:`) is over.
    """
    error = sys.exc_info()[1]
    if not isinstance(error, Exception) or error.__traceback__ is None:
        return None
    while frame is not error.__traceback__.tb_frame:
        if frame is None:
            return None
        frame = frame.f_back
    names = {kind.__name__ for kind in type(error).__mro__} & _EXPECTED
    clause = _clause_at(frame.f_code.co_filename, frame.f_lineno)
    return None if clause and _fits(clause.type, names) else error


def type_name(kind: type[BaseException]) -> str:
    """Return an exception type's name as Python prints it: without `builtins.` and `__main__.`."""
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return module + kind.__qualname__


def message_of(error: BaseException) -> str:
    """Return `str(error)`, also when that raises."""
    try:
        return str(error)
    except BaseException as problem:
        # A signal handler of the program's raised, and not `__str__`.
        if interruptions.raised_by_handler(problem):
            raise
        return f"<message cannot be shown: {type_name(type(problem))}>"


def traceback_text(error: BaseException) -> str:
    """Return the traceback as Python prints it, with the last 1,000 calls; our frames left out."""
    try:
        shown = traceback.TracebackException.from_exception(error, limit=-1000)
        waiting: list[traceback.TracebackException | None] = [shown]
        while waiting:
            one = waiting.pop()
            if one is not None:
                kept: list[traceback.FrameSummary] = []
                for frame in one.stack:
                    if not is_ours(frame.filename, frame.name, first=not kept):
                        kept.append(frame)
                one.stack[:] = kept
                waiting += [one.__cause__, one.__context__, *(one.exceptions or ())]
        return "".join(shown.format())
    except Exception as problem:
        # An exception whose __str__ or __notes__ raises must not hide that there was one.
        if interruptions.raised_by_handler(problem):
            raise
        return f"{type_name(type(error))}: {message_of(error)}\n(its traceback cannot be shown: {type_name(type(problem))})\n"


def frames_of(tb: TracebackType | None) -> tuple[Frame, ...]:
    """Return the user's frames of a traceback, outermost first."""
    found = list(traceback.walk_tb(without_ours(tb)))
    if len(found) > FRAMES_MOST:
        del found[FRAMES_MOST // 2 : -FRAMES_MOST // 2]
    return tuple(
        _frame(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in found
    )


def sayable(text: str) -> str:
    """Return text that can be sent and printed: names that are not UTF-8 (surrogates in Python) are
    written as `\\udce9`.
    """
    return text.encode("utf-8", "backslashreplace").decode()


def _frame(filename: str, line: int, function: str) -> Frame:
    source = sayable(linecache.getline(filename, line).strip())[:SOURCE_LINE_MOST]
    return Frame(sayable(filename), line, sayable(function), source)


def timed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function; an exception that leaves it remembers when the call began and ended."""
    began = time.monotonic()
    try:
        return original(*args, **kwargs)
    except Exception as error:
        error.__dict__[_WAIT] = (began, time.monotonic())
        raise


def raised(error: BaseException, *, call: str = "", caught_at: Frame | None = None) -> Raised:
    """Return the exception that began `error`'s chain, with the whole chain's traceback."""
    path, is_open = to_first(error)
    first = path[-1]
    number = first.errno if isinstance(first, OSError) and isinstance(first.errno, int) else 0
    filename = first.filename if isinstance(first, OSError | SyntaxError) else None
    ours = first if isinstance(first, RallypointError) else None
    frames = reduce(joined, (frames_of(one.__traceback__) for one in path))[-FRAMES_MOST:]
    now = time.monotonic()
    began, ended = next((one.__dict__[_WAIT] for one in path if _WAIT in one.__dict__), (now, now))
    return Raised(
        type=sayable(type_name(type(first))),
        message=sayable(message_of(first)),
        frames=frames,
        traceback=sayable(traceback_text(error)),
        call=call,
        wait=(now - began, now - ended),
        caught_at=caught_at,
        member=_member(error),
        errno=number,
        filename=sayable(filename) if isinstance(filename, str) else "",
        module_folder=sayable(_folder_of(first, frames)),
        code=ours.code if ours else str(first.__dict__.get("_rallypoint_code", "")),
        why=ours.why if ours else tuple(first.__dict__.get("_rallypoint_why", ())),
        help=ours.help if ours else (),
        is_open=is_open,
    )


def _member(error: BaseException) -> int:
    """Return this rank's number in the group of a checkpoint of torch's that failed, else -1."""
    told = (one for one in chain(error) if type(one).__name__ == "CheckpointException")
    frames = (frame.f_locals for one in told for frame, _ in traceback.walk_tb(one.__traceback__))
    groups = (one["self"] for one in frames if type(one.get("self")).__name__ == "_DistWrapper")
    return int(next((group.rank for group in groups), -1))


def _folder_of(error: BaseException, frames: tuple[Frame, ...]) -> str:
    """Return the folder that holds a module which Python did not find: the working directory, that
    of the importing file, or the parent of either; "" when none does.
    """
    file = frames[-1].file if frames else ""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if name and name not in sys.modules and stacks.library_path(file) == file:
        with contextlib.suppress(OSError):  # the working directory has been removed
            near = [os.getcwd(), os.path.dirname(os.path.abspath(file))]
            for folder in (*near, *map(os.path.dirname, near)):
                path = os.path.join(folder, name)
                inside = set(os.listdir(path) if os.path.isdir(path) else ()) - {"setup.py"}
                if os.path.isfile(f"{path}.py") or any(one.endswith(".py") for one in inside):
                    return folder
    return ""


def serials(error: BaseException) -> list[int]:
    """Return the numbers of the exceptions that the agent was told of and that this one tells of,
    too: not of those that were over, or hidden by `from`, which may speak of a lost peer."""
    return [one.__dict__[SERIAL] for one in to_first(error)[0] if SERIAL in one.__dict__]


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the nearest caller that is neither ours nor torch's."""
    while frame is not None and (
        is_ours(frame.f_code.co_filename, frame.f_code.co_name)
        or f"{os.sep}torch{os.sep}" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return frame


def line_of(frame: FrameType | None) -> str:
    """Return `train.py:88`, as short as it can be opened from the working directory."""
    if frame is None:
        return ""
    return f"{shown_path(frame.f_code.co_filename)}:{frame.f_lineno}"


def shown_path(path: str) -> str:
    """Return a path relative to the working directory when it lies below it."""
    with contextlib.suppress(OSError, ValueError):
        relative = os.path.relpath(path)
        if not relative.startswith(".."):
            path = relative
    return sayable(path)


def except_line(error: BaseException, frame: FrameType | None) -> Frame | None:
    """Return the except clause that will catch `error`, which is on its way through `frame` and its
    callers; None when there is none.

    Read from the source: the nearest `try` around each caller's current line with a clause that
    names a class of the exception.
    """
    names = {"", *(kind.__name__ for kind in type(error).__mro__)}
    while frame is not None:
        code = frame.f_code
        if not is_ours(code.co_filename) and (
            found := _clause(code.co_filename, frame.f_lineno, names)
        ):
            return _frame(code.co_filename, found, code.co_name)
        frame = frame.f_back
    return None


def _clause(filename: str, line: int, names: set[str]) -> int | None:
    """Return the line of the except clause in the innermost `try` around a line."""
    found = [
        (node.body[0].lineno, -handler.lineno)
        for node in _nodes(filename, "except")
        if isinstance(node, ast.Try)
        and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0)
        for handler in node.handlers
        if _fits(handler.type, names)
    ]
    return -max(found)[1] if found else None  # the innermost starts last; its first clause counts


def _nodes(filename: str, word: str) -> Iterator[ast.AST]:
    """Yield the syntax tree of a source file, its outermost statements first; nothing of a file
    without this word, or that cannot be read."""
    source = "".join(linecache.getlines(filename))
    if not is_ours(filename) and word in source and len(source) <= SOURCE_BYTES_MOST:
        # It may not be the text that runs, or not Python; or the stack is deep (3.11).
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, SystemError):
            yield from ast.walk(ast.parse(source))


def unguarded_line(frame: FrameType | None) -> str:
    """Return the line of the program's top level that runs now, `train.py:30`, when a mere import
    of the program would run it as well; "" when it stands below `if __name__ == "__main__":`, or
    cannot be seen."""
    while frame is not None and not (
        frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"
    ):
        frame = frame.f_back
    if frame is None:
        return ""
    module = next(_nodes(frame.f_code.co_filename, ""), None)
    for node in module.body if isinstance(module, ast.Module) else ():
        if node.lineno <= frame.f_lineno <= (node.end_lineno or 0):
            asks = isinstance(node, ast.If) and any(
                isinstance(one, ast.Name) and one.id == "__name__" for one in ast.walk(node.test)
            )
            return "" if asks else line_of(frame)
    return ""


def _fits(kind: ast.expr | None, names: set[str]) -> bool:
    """Tell whether a clause's kind is one of these; "": that of a bare `except:`."""
    if isinstance(kind, ast.Tuple):
        return any(_fits(one, names) for one in kind.elts)
    return getattr(kind, "attr", getattr(kind, "id", "")) in names


def current_frame(depth: int = 0) -> FrameType | None:
    """Return the caller's frame, or one further up."""
    try:
        return sys._getframe(depth + 1)
    except ValueError:
        return None
