"""Every rank's stacks, grouped; the odd one first.

Reads what `faulthandler` writes (Python 3.11 to 3.14), leaves out our own frames and the interpreter's, and says a stack in one line:
`train.py:42 in step (torch all_reduce)`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

import msgspec

from rallypoint.diagnosis.evidence import Frame

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_HEADER = re.compile(r"^(Current thread|Thread) 0x[0-9a-fA-F]+(?: \[(?P<name>[^\]]*)\])?(?: \(most recent call first\))?:")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
# The launcher. The store is no part of it: programs call it, and a report says so as it does of torch ("rallypoint wait").
_OURS = re.compile(r"(^|/)rallypoint/(launcher|diagnosis|cli|host|record)/(\w+/)?\w+\.py$|(^|/)rallypoint/__main__\.py$")
_INTERPRETER = re.compile(r"^<(string|frozen (runpy|importlib.*))>$|(^|/)(runpy|importlib/_bootstrap\w*)\.py$")
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/(?P<path>.+)$")
_STDLIB = re.compile(r".*/lib(?:64)?/python3\.\d+t?/(?P<path>.+)$")
# Names inside torch that say nothing: decorators around the call that the program made.
WRAPPERS = frozenset(
    ("wrapper", "wrapper_func", "wrapped", "_wrapped_call_impl", "_call_impl", "inner", "decorate_context", "_fn", "__call__")
)


class Thread(msgspec.Struct, frozen=True):
    """One thread of a dump."""

    current: bool  # the thread that took the signal, or crashed
    frames: tuple[Frame, ...]  # outermost first, ours and the interpreter's left out
    name: str = ""


class Group(msgspec.Struct, frozen=True):
    """Ranks that stand at the same place."""

    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]


def parse(dump: str) -> tuple[Thread, ...]:
    """The threads of the last dump in `dump`, as faulthandler orders them: the newest first, the main thread last.

    Lines that are no part of a Python stack are passed over. A dump that was cut short gives what is whole.
    """
    dumps: list[list[Thread]] = [[]]
    frames: list[Frame] | None = None
    current, name = False, ""

    def close() -> None:
        if frames is not None:
            dumps[-1].append(Thread(current, tuple(reversed([f for f in frames if not hidden(f)])), name))

    for line in dump.splitlines():
        header = _HEADER.match(line)
        if header:
            close()
            frames, current, name = [], header.group(1) == "Current thread", header.group("name") or ""
        elif (found := _FRAME.match(line)) is not None:
            if frames is not None:
                number = found.group("line")
                frames.append(Frame(found.group("file"), int(number) if number.isdigit() else 0, found.group("function")))
        elif not line.startswith("  ") and frames is not None:
            close()
            frames = None
            if line.startswith("Fatal Python error"):
                dumps.append([])
    close()
    for threads in reversed(dumps):
        if threads:
            return _last_dump(threads)
    return ()


def _last_dump(threads: list[Thread]) -> tuple[Thread, ...]:
    """A rank that was asked twice has two dumps in one text: exactly one thread of each is the current one and the main thread ends it."""
    marks = [i for i, thread in enumerate(threads) if thread.current]
    if len(marks) < 2:
        return tuple(threads)
    size = len(threads) // len(marks)
    return tuple(threads[-size:]) if size * len(marks) == len(threads) else tuple(threads[marks[-2] + 1 :])


def main_frames(dump: str) -> tuple[Frame, ...]:
    """The main thread's stack, outermost first: faulthandler writes it last. () when there is none."""
    threads = parse(dump)
    return threads[-1].frames if threads else ()


def current_frames(dump: str) -> tuple[Frame, ...]:
    """The stack of the thread that crashed or took the signal, outermost first; () when the dump names none."""
    return next((thread.frames for thread in parse(dump) if thread.current), ())


def hidden(frame: Frame) -> bool:
    """True for frames that are neither the program's nor a library's: the launcher's, runpy's, importlib's, `<string>`."""
    return bool(_OURS.search(frame.file) or _INTERPRETER.search(frame.file))


def library(frame: Frame) -> str:
    """ "torch" for a frame of site-packages/torch, "threading" for one of the standard library, "" for the program's own."""
    if frame.file.startswith(_PACKAGE):  # also where it is not installed, but run from its source
        return "rallypoint"
    found = _PACKAGES.match(frame.file)
    if found is None:
        found = _STDLIB.match(frame.file)
    if found is not None:
        return found.group("path").partition("/")[0].removesuffix(".py")
    return frame.file.strip("<>").removeprefix("frozen ") if frame.file.startswith("<frozen ") else ""


def own_index(frames: tuple[Frame, ...]) -> int:
    """The index of the innermost frame that belongs to the program and not to a library; the last one when none does; -1 for ()."""
    own = [i for i, frame in enumerate(frames) if not library(frame)]
    return own[-1] if own else len(frames) - 1


def own_frame(frames: tuple[Frame, ...]) -> Frame | None:
    """The frame at `own_index`."""
    return frames[own_index(frames)] if frames else None


def root_of(program: str, frames: Iterable[Frame]) -> str:
    """The folder that paths may be shown relative to: the one from which `program` was typed; "" when no frame tells."""
    typed = program.removeprefix("./")
    if not typed or typed.startswith(("/", "..")):
        return ""
    for frame in frames:
        if frame.file.endswith("/" + typed):
            return frame.file[: -len(typed)]
    return ""


def shown(path: str, root: str = "") -> str:
    """A path as a person at `root` would open it."""
    return path[len(root) :] if root and path.startswith(root) else path


def describe(frame: Frame, root: str = "") -> str:
    """`train.py:88 in train_step`."""
    place = f"{shown(frame.file, root)}:{frame.line}"
    return f"{place} in {frame.function}" if frame.function else place


def place(frames: tuple[Frame, ...], root: str = "") -> str:
    """A stack in one line: the program's innermost frame, and the library call that it is in; "" for ()."""
    if not frames:
        return ""
    index = own_index(frames)
    inner = [frame for frame in frames[index + 1 :] if frame.function not in WRAPPERS] or list(frames[index + 1 :])
    called = f" ({library(inner[0])} {inner[0].function})" if inner and library(inner[0]) else ""
    return describe(frames[index], root) + called


def group(stacks: Mapping[int, tuple[Frame, ...]]) -> tuple[Group, ...]:
    """Ranks with the same stack together, the odd one (the smallest group) first; equally large ones by their lowest rank."""
    together: dict[tuple[Frame, ...], list[int]] = {}
    for rank in sorted(stacks):
        together.setdefault(stacks[rank], []).append(rank)
    groups = [Group(tuple(ranks), frames) for frames, ranks in together.items()]
    return tuple(sorted(groups, key=lambda g: (len(g.ranks), g.ranks[0])))
