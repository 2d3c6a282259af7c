"""What a Python traceback in a rank's words tells: the exception, and what it was raised from or
passed on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from msgspec.structs import replace

from rallypoint.diagnosis.pattern import Pattern
from rallypoint.diagnosis.raised import LEFT_OUT, Frame, Raised, cut, joined
from rallypoint.diagnosis.render import ESCAPES

_IN_PROCESS = Pattern(r"^-- Process (\d+) terminated with the following error:$", re.MULTILINE)
_IN_POOL = Pattern(r'^[\w.]+\._?RemoteTraceback: *\n"""\n(.+?)\n"""$', re.MULTILINE | re.DOTALL)
_IN_TASK = Pattern(r"^(?:[\w.]+\.RayTaskError\(\w+\): )?ray::(.+)$", re.MULTILINE)


def in_process(error: Raised) -> tuple[str, Raised] | None:
    """Return words for another process in which this was raised, and what was: a process that
    `mp.spawn` had started, one of a pool, or the innermost task of Ray. None for any other
    error.
    """
    text = error.message
    if (found := _IN_PROCESS.search(text)) is not None:
        where = f"process {found[1]} of those that mp.spawn had started in"
        lines = text[found.end() :].rstrip().splitlines()
    elif (found := _IN_POOL.match(error.traceback)) is not None:
        where, lines = "a process of a pool, for", found[1].splitlines()
    elif ".RayTaskError(" in error.type:
        *_, found = (None, *_IN_TASK.finditer(text := ESCAPES.sub("", text)))
        if found is None:
            return None
        where = f"Ray's task {found[1]}, for"
        lines = [_TRACEBACK, *text[found.end() + 1 :].rstrip().splitlines()]
    else:
        return None
    inner = exception_in(lines)
    if inner is None:
        return None
    frames = error.frames + inner.frames  # none of the second may be the program's
    return where, replace(inner, frames=frames, at=error.at, call=error.call)


_BY_RPC = Pattern(r"\bOn WorkerInfo\(id=(\d+), name=(.+)\):$", re.MULTILINE)


def by_rpc(error: Raised) -> tuple[int, str, Raised] | None:
    """Return the number and the name of the worker of `torch.distributed.rpc` that was asked for a
    call, and what it raised in it; None for any other error.
    """
    found = _BY_RPC.search(error.message)
    inner = exception_in(error.message[found.end() :].rstrip().splitlines()) if found else None
    return (int(found[1]), found[2], replace(inner, at=error.at)) if found and inner else None


_OF_CHECKPOINT = Pattern(
    r"CheckpointException: CheckpointException ranks:dict_keys\(\[([\d, ]+)\]\)"
)
_OF_RANK = Pattern(r"^Traceback \(most recent call last\): \(RANK (\d+)\)$", re.MULTILINE)


def in_checkpoint(error: Raised) -> dict[int, Raised]:
    """Return what ranks raised while torch saved or loaded a checkpoint, by their numbers in the
    group that did: torch raises all of it in each of them. {} for any other error.

    Where a rank's part of the text was cut, it gets the first exception in the text.
    """
    text, joint, _ = error.traceback.partition(_DIRECTLY)
    found = _OF_CHECKPOINT.search(text)
    if found is None or not (joint or error.type.endswith("CheckpointException")):
        return {}
    outer = exception_in(text[: found.end()].splitlines())
    above = joined(error.frames, outer.frames) if outer else error.frames
    _, *parts = _OF_RANK.split(text[found.end() :])
    inner: dict[int, Raised] = {}
    for number, shown in zip(map(int, parts[::2]), parts[1::2], strict=True):
        block = None if LEFT_OUT in shown else _block([_TRACEBACK, *shown.splitlines()], 0)
        if block is not None:
            frames = joined(above, block[0].frames)
            inner[number] = replace(block[0], frames=frames, traceback=error.traceback, at=error.at)
    first = next(iter(inner.values()), None)
    return {n: inner.get(n, first) for n in map(int, re.findall(r"\d+", found[1]))} if first else {}


_DIRECTLY = "\nThe above exception was the direct cause of the following exception:\n"


def wrapped(error: Raised) -> Raised | None:
    """Return the first exception of a chain that was raised each `from` the one before, as the
    traceback shows it; None for any other.
    """
    before, joint, _ = error.traceback.partition(_DIRECTLY)
    inner = exception_in(before.rstrip().splitlines()) if joint else None
    return inner and replace(inner, at=error.at)


_IN_LOADER = Pattern(
    r"^Caught \w+ in DataLoader worker process (\d+)\.\s*Original Traceback", re.MULTILINE
)


def in_loader(message: str) -> tuple[str, str]:
    """Return the number of a DataLoader's worker and the line that names what it raised,
    "ValueError: bad image"; ("", "") for another message.
    """
    found = _IN_LOADER.search(message)
    if found is None:
        return "", ""
    lines = filter(_EXCEPTION.match, reversed(message[found.end() :].splitlines()))
    return next(((found[1], line) for line in lines), ("", ""))


def from_loader(error: Raised) -> Raised | None:
    """Return what a DataLoader's worker raised, with its frames: torch puts the worker's traceback
    into the message. None for any other error.
    """
    found = _IN_LOADER.search(error.message)
    if found is None:
        return None
    lines = error.message[found.end() :].rstrip().splitlines()[1:]
    return exception_in([_TRACEBACK, *lines])


# lines that may follow the last traceback: what threads and atexit still say, and the notes of an
# error of ours
AFTER_END = 12

_EXPLAIN = Pattern(
    r"\brallypoint explain ([a-z]+(?:-[a-z]+)+)\s*$"
)  # the last line that Python shows of an error of ours
_TRACEBACK = "Traceback (most recent call last):"
# Python goes on after it
IGNORED = Pattern(
    r"(?:Exception ignored (?:in|while|on)\b|Error in atexit\._run_exitfuncs|--- Logging error ---)"
)
# what Hydra, and CUDA's errors in torch, say below any exception
_CLOSING = Pattern(
    r"Set the environment variable HYDRA_FULL_ERROR|(?:CUDA|HIP) kernel errors might|For debugging consider"
    r"|Compile with `TORCH_USE_|Search for `"
)
_RANK = Pattern(
    r"^\[rank\d+\]: ?"
)  # torch's own excepthook puts it before each line once there is a group
_DURING = "During handling of the above exception, another exception occurred:"
_FRAME = Pattern(r'^  File "(?P<file>.*)", line (?P<line>\d+)(?:, in (?P<function>.*))?$')
_EXCEPTION = Pattern(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")


def exception_in(lines: Sequence[str]) -> Raised | None:
    """Return the exception that a Python traceback at the end of a log tells of; None when the log
    does not end in one.

    Of exceptions raised while another was handled it is the first one, as for
    `RankEvidence.raised`. Its `traceback` also shows the exceptions that it was raised `from`.
    """
    lines = [_RANK.sub("", line) for line in lines]
    starts = [i for i, line in enumerate(lines) if line == _TRACEBACK]
    found: Raised | None = None
    last = len(lines)
    for start in reversed(starts):
        block = _block(lines, start)
        if block is None:
            break
        raised, end = block
        if start and IGNORED.match(lines[start - 1]):
            found, last = None, start - 1
            continue
        after = lines[end:last]
        if found is None and any(map(str.strip, after[AFTER_END:])):
            return None  # it went on for long after that traceback: the traceback is not its end
        frames = joined(found.frames if found else (), raised.frames)
        raised = replace(_with_code(raised, after), is_open=found is not None, frames=frames)
        found, last = raised, start
        if _DURING not in lines[max(start - 2, 0) : start]:
            break
    first = last
    for start in reversed(starts):
        if _DIRECTLY.strip() in lines[max(first - 2, 0) : first] and start < first:
            first = start
    shown = "\n".join(lines[first:last])
    return replace(found, traceback=f"{shown}\n{found.traceback}") if found and shown else found


def other_traceback(lines: Sequence[str], than: str) -> str:
    """Return the last line of the first traceback in these lines that is not in this text, "" for
    none. A child of `multiprocessing` or the thread of a queue printed it, or it was handled.
    """
    lines = [_RANK.sub("", line) for line in lines]
    for i, line in enumerate(lines):
        if line == _TRACEBACK and not (i and IGNORED.match(lines[i - 1])):
            rest = lines[i + 1 :]
            at = next((n for n, one in enumerate(rest) if one and not one.startswith(" ")), 0)
            goes_on = {*rest[at + 1 : at + 4]} & {_DURING, _DIRECTLY.strip()}
            named = rest and not goes_on and _EXCEPTION.match(rest[at])
            last = (
                " ".join(map(str.strip, rest[at : at + 1 + rest[at].endswith(": ")]))
                if named
                else ""
            )
            if named and _bare(last)[:100] not in _bare(than):  # either may be cut
                return last
    return ""


_NO_LETTER = str.maketrans("", "", " \ufffd")  # a blank, and half a letter where a line was cut


def _bare(text: str) -> bytes:
    """Return a text to compare: no control sequences, no blanks, non-ASCII as escapes."""
    shown = filter(str.isprintable, ESCAPES.sub("", text).translate(_NO_LETTER))
    return "".join(shown).encode("ascii", "backslashreplace")


def went_on(lines: Sequence[str]) -> bool:
    """Tell whether something was written after the last traceback: then it may have been shown of
    an error that was handled.
    """
    lines = [_RANK.sub("", line) for line in lines]
    starts = [i for i, line in enumerate(lines) if line == _TRACEBACK]
    block = _block(lines, starts[-1]) if starts else None
    rest = lines[block[1] :] if block is not None else ()
    return any(line.strip() and not _CLOSING.match(line) for line in rest)


def _with_code(error: Raised, after: Sequence[str]) -> Raised:
    """Return an error of ours with the code that stands in its notes, which Python prints below
    it.
    """
    codes = [found[1] for found in map(_EXPLAIN.search, after) if found]
    ours = error.type.startswith("rallypoint.errors.") and codes
    return replace(error, code=codes[0]) if ours else error


_GOES_ON = Pattern(r"\s+(?!\d+%\|)\S")
"""A further line of an exception's message: no progress bar, which is drawn again at the end."""


def _block(lines: Sequence[str], start: int) -> tuple[Raised, int] | None:
    """Return the exception of the traceback that begins there, and the index behind it."""
    frames: list[Frame] = []
    for at in range(start + 1, len(lines)):
        line = lines[at]
        if (frame := _FRAME.match(line)) is not None:
            after = lines[at + 1] if at + 1 < len(lines) else ""
            source = after.strip() if after.startswith("    ") else ""
            frames.append(Frame(frame["file"], int(frame["line"]), frame["function"] or "", source))
        elif line and not line.startswith(" "):
            told = _EXCEPTION.match(line)
            if told is None:
                return None
            end = at + 1
            ours = told["type"].startswith("rallypoint.errors.")  # what follows are its notes
            while end < len(lines) and _GOES_ON.match(lines[end]) and not ours:
                end += 1
            shown, more = "\n".join(lines[start:end]), lines[at + 1 : end]
            message = "\n".join((told["message"] or "", *more))
            return Raised(told["type"], message, tuple(frames), shown), end
    return None


def error_file(text: str) -> Raised | None:
    """Return the exception in the file that `torch.distributed.elastic`'s `@record` writes; None
    when it is not such a file.

    `{"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "Traceback ...",
    "timestamp": "..."}}}`, or `message` a string.
    """
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: thousands of brackets
        return None
    message = told.get("message") if isinstance(told, dict) else None
    extra: object = None
    if isinstance(message, dict):
        extra, message = message.get("extraInfo"), message.get("message")
    if not isinstance(message, str) or not message:
        return None
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    traceback = cut(stack.rstrip("\n") if isinstance(stack, str) else message)
    from_stack = exception_in(traceback.splitlines())
    kind, colon, rest = message.partition(": ")
    if colon and re.fullmatch(r"[A-Za-z_][\w.]*", kind):
        return Raised(kind, rest, from_stack.frames if from_stack else (), traceback)
    return from_stack or Raised("Exception", message, (), traceback)
