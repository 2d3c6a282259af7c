"""Every rank's stacks, grouped; the odd one first.

Reads what `faulthandler` writes (Python 3.11 to 3.14), leaves out our own frames and the
interpreter's, and says a stack in one line: `train.py:42 in step (torch all_reduce)`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import msgspec

from rallypoint.diagnosis.evidence import Frame, RankEvidence
from rallypoint.diagnosis.pattern import Pattern

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_HEADER = Pattern(
    r"^(Current thread|Thread) 0x[0-9a-fA-F]+(?: \[(?P<name>[^\]]*)\])?(?: \(most recent call first\))?:"
)
_FRAME = Pattern(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
# The launcher. The store is no part of it: programs call it, and a report says so as it does of
# torch ("rallypoint wait").
_OURS = Pattern(
    r"(^|/)rallypoint/(launcher|diagnosis|cli|host|record)/(\w+/)*\w+\.py$|(^|/)rallypoint/__main__\.py$"
)
_INTERPRETER = Pattern(r"^<frozen (runpy|importlib.*)>$|(^|/)(runpy|importlib/_bootstrap\w*)\.py$")
# The text of `python -c`. Our own processes begin with a line of it, and dataclasses write
# functions that say they stand in it, with names in underscores; a function with another name is
# one that somebody typed there, and started with `launch`.
_TYPED = "<string>"
_PACKAGES = Pattern(r".*/(?:site|dist)-packages/(?P<path>.+)$")
# "file:function" of a Cython frame. The file has its path on the machine that built the library.
_BUILT = Pattern(
    r"(?![/\\<]|[A-Za-z]:)(?:[^:]+\.(?:pyx|px[id]):|(?=(?:src/|lib/)?(?P<of>\w+)/[^:]*\.py:(?P=of)\.)[^:]+:)(?P<module>\w*)"
)
_STDLIB = Pattern(r"(?:.*/lib(?:64)?/python3\.\d+t?|[A-Za-z]:/.*/[Ll]ib)/(?P<path>.+)$")
# Names inside torch that say nothing: decorators around the call that the program made.
WRAPPERS = frozenset(
    (
        "wrapper",
        "wrapper_func",
        "wrapped",
        "_wrapped_call_impl",
        "_call_impl",
        "inner",
        "inner_func",
        "inner_fn",
        "auto_init_wrapper",
        "decorate_context",
        "_fn",
        "__call__",
    )
)

# Functions of torch.distributed that return only when the other ranks of the group have called
# them, too. Sending and receiving are not among them: these meet one other rank, and rightly stand
# in different lines.
COLLECTIVES = frozenset(
    (
        "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_gather_tensor", "all_reduce",
        "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather",
        "gather_object", "init_process_group", "monitored_barrier", "new_group", "reduce", "reduce_scatter", "reduce_scatter_tensor",
        "reduce_scatter_single",
        "scatter", "scatter_object_list", "_sync_module_states", "_verify_param_shape_across_processes",
    )
)  # fmt: skip
_DISTRIBUTED = Pattern(
    r"(^|/)torch/distributed/(distributed_c10d|_functional_collectives|nn/functional|utils)\.py$"
)
_DDP = Pattern(r"(^|/)torch/nn/parallel/distributed\.py$")
_PRIVATE = Pattern(r"_[^_]")  # `_call_impl`, `_wrapper`
_BACKWARD = Pattern(r"(^|/)torch/(_tensor|autograd/(__init__|graph))\.py$")
_LOADER = Pattern(r"(^|/)torch/utils/data/dataloader\.py$")
_POOL = Pattern(r"(^|/)multiprocessing/pool\.py$")
# A rank in one of these is being looked at by a person.
_DEBUGGERS = Pattern(
    r"(^|/)(pdb|bdb|pudb/\w+|IPython/terminal/debugger|IPython/core/debugger|ipdb/\w+|debugpy/.+|pydevd\w*)\.py$"
)

MOST_THREADS = 100  # that faulthandler writes


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
    """Return the threads of the last dump in `dump`, as faulthandler orders them: the newest first,
    the main thread last.

    Lines that are no part of a Python stack are passed over. A dump that was cut short gives what
    is whole.
    """
    threads: list[tuple[bool, str, list[Frame]]] = []
    inside = False  # the line before belonged to a stack
    for line in dump.splitlines():
        header, frame = _HEADER.match(line), _FRAME.match(line)
        if header:
            inside = True
            threads.append((header[1] == "Current thread", header["name"] or "", []))
        elif frame is not None and inside:
            number = int(frame["line"]) if frame["line"].isdigit() else 0
            threads[-1][2].append(Frame(frame["file"], number, frame["function"]))
        elif not line.startswith("  "):
            inside = False
            if line.startswith("Fatal Python error"):
                threads.clear()
    return _last_dump([Thread(current, _shown(frames), name) for current, name, frames in threads])


def _last_dump(threads: list[Thread]) -> tuple[Thread, ...]:
    """Return the threads of the last dump in a text: a rank that was asked twice has two of them.
    Exactly one thread of each is the current one, and the main thread ends it.
    """
    marks = [i for i, thread in enumerate(threads) if thread.current]
    if len(marks) < 2:
        return tuple(threads)
    size, uneven = divmod(len(threads), len(marks))
    return tuple(threads[marks[-2] + 1 :] if uneven else threads[-size:])


def main_frames(dump: str) -> tuple[Frame, ...]:
    """Return the main thread's stack, outermost first: faulthandler writes it last. () when there
    is none.

    Of more than a hundred threads it writes the newest hundred only. Then it is the one that took
    the signal, which the kernel gives to the main thread if it can; () when that is not among them
    either.
    """
    threads = parse(dump)
    if len(threads) >= MOST_THREADS:
        return current_frames(dump)
    return threads[-1].frames if threads else ()


def current_frames(dump: str) -> tuple[Frame, ...]:
    """Return the stack of the thread that crashed or took the signal, outermost first; () when the
    dump names none.
    """
    return next((thread.frames for thread in parse(dump) if thread.current), ())


def last_stack(rank: RankEvidence) -> tuple[Frame, ...]:
    """Return the frames where the rank stood, or crashed; outermost first."""
    return rank.stack or current_frames(rank.stack_text) or current_frames("\n".join(rank.said))


def _shown(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    kept: list[Frame] = []
    for one in reversed([*frames]):
        if not hidden(one, first=not kept):
            kept.append(one)
    return tuple(kept)


def hidden(frame: Frame, *, first: bool = True) -> bool:
    """Tell whether a frame is neither the program's nor a library's: the launcher's, runpy's,
    importlib's, that of a first line. `first`: no frame of the program stands before it.
    """
    if frame.file == _TYPED:
        return first and (frame.function == "<module>" or frame.function.startswith("__"))
    return bool(_OURS.search(frame.file) or _INTERPRETER.search(frame.file))


def library(frame: Frame) -> str:
    """Return "torch" for a frame of site-packages/torch, "threading" for one of the standard
    library, "pandas" for a frame of its Cython code, "" for the program's own.
    """
    if frame.file.startswith(_PACKAGE):  # also where it is not installed, but run from its source
        return "rallypoint"
    if frame.file.startswith("<frozen "):
        return frame.file.strip("<>").removeprefix("frozen ")
    if (built := _BUILT.match(f"{frame.file}:{frame.function}")) is not None:
        return built["module"] or "Cython"
    inside = library_path(frame.file)
    return inside.partition("/")[0].removesuffix(".py") if inside != frame.file else ""


def own_index(frames: tuple[Frame, ...]) -> int:
    """Return the index of the innermost frame that belongs to the program and not to a library; the
    last one when none does; -1 for ().
    """
    own = [i for i, frame in enumerate(frames) if not library(frame)]
    # Libraries, too, make functions from text: "<string>", "<__array_function__ internals>".
    in_files = [i for i in own if not frames[i].file.startswith("<")]
    return (in_files or own or [len(frames) - 1])[-1]


def own_frame(frames: tuple[Frame, ...]) -> Frame | None:
    """Return the frame at `own_index`."""
    return frames[own_index(frames)] if frames else None


def _below(frames: tuple[Frame, ...]) -> list[Frame]:
    """Return the frames of the call that the program's innermost line is in, outermost first."""
    return [
        one
        for one in frames[own_index(frames) + 1 :]
        if one.function not in WRAPPERS and not _OURS.search(one.file)
    ]


def root_of(program: str, frames: Iterable[Frame]) -> str:
    """Return the folder that paths may be shown relative to: the one from which `program` was
    typed; "" when no frame tells.
    """
    typed = program.removeprefix("./")
    if not typed or typed.startswith(("/", "..")):
        return ""
    found = (frame.file for frame in frames if frame.file.endswith("/" + typed))
    return next(found, "").removesuffix(typed)


def shown(path: str, root: str = "") -> str:
    """Return a path as a person at `root` would open it."""
    return path.removeprefix(root)


def describe(frame: Frame, root: str = "") -> str:
    """Return `train.py:88 in train_step`."""
    place = f"{shown(frame.file, root)}:{frame.line}"
    return f"{place} in {frame.function}" if frame.function else place


def place(frames: tuple[Frame, ...], root: str = "") -> str:
    """Return a stack in one line: the program's innermost frame, and the library call that it is
    in; "" for ().
    """
    own = own_frame(frames)
    if own is None:
        return ""
    inner = [*_below(frames), *frames[own_index(frames) + 1 :]][:1]
    called = [
        f" ({library(one)} {one.function.rpartition('.')[2]})" for one in inner if library(one)
    ]
    return describe(own, root) + "".join(called)


def collective(frames: tuple[Frame, ...]) -> tuple[str, int] | None:
    """Return the collective that a stack is in, as the program calls it, and the index of its
    frame; None when it is in none.
    """
    for i, frame in enumerate(frames):
        if frame.function in COLLECTIVES and _DISTRIBUTED.search(frame.file):
            wraps = any(one.function == "__init__" and _DDP.search(one.file) for one in frames[:i])
            return "DistributedDataParallel()" if wraps else frame.function, i
    return None


def in_distributed(frames: tuple[Frame, ...]) -> bool:
    """Tell whether a stack ends in torch.distributed, where a rank waits for others."""
    return bool(frames) and "/torch/distributed/" in frames[-1].file


def waits(frames: tuple[Frame, ...]) -> bool:
    """Tell whether a stack is where a rank waits for others, or sends them something."""
    return in_distributed(frames) or bool(waits_in_ddp(frames))


def leaves_collective(frames: tuple[Frame, ...]) -> bool:
    """Tell whether an exception is on its way out of a collective: torch logs it there."""
    inner = [frame.file for frame in frames if "/torch/distributed/" in frame.file]
    return bool(inner) and inner[-1].endswith("/c10d_logger.py")


def waits_in_ddp(frames: tuple[Frame, ...]) -> str:
    """Return where a stack may wait for the other ranks though no collective stands in it:
    "backward()", in which DDP averages gradients, or "DDP's forward()", in which it sends buffers;
    "" for other places."""
    inner = frames[own_index(frames) + 1 :]
    if any(_DDP.search(frame.file) for frame in inner):
        return "DDP's forward()"
    back = any("backward" in frame.function and _BACKWARD.search(frame.file) for frame in inner)
    return "backward()" if back else ""


POINT_TO_POINT = frozenset(("send", "recv", "isend", "irecv", "batch_isend_irecv"))


def waited_in(frames: tuple[Frame, ...]) -> str:
    """Return the call that an error about other ranks left: as `waits_in_ddp`, or a call of torch
    that makes collectives inside, such as "torch's clip_grad_norm_()" of DTensors. "" for `recv`.
    """
    inner = frames[own_index(frames) + 1 :]
    inside = any("/torch/distributed/" in frame.file for frame in inner)
    inside = inside and not any(frame.function in POINT_TO_POINT for frame in inner)
    return waits_in_ddp(frames) or (called(frames) if inside else "")


def waits_in_pool(frames: tuple[Frame, ...]) -> bool:
    """Tell whether a stack is in a call of `multiprocessing.Pool`."""
    return any(_POOL.search(frame.file) for frame in frames)


def called(frames: tuple[Frame, ...]) -> str:
    """Return the call that the program's innermost line is in, as a person would name it:
    "all_reduce", "DataLoader.__next__", "threading.join", "torch's backward()"; "" when it is in
    none, or in one without Python frames (`time.sleep`)."""
    found, inner = collective(frames), _below(frames)
    if found is not None or not inner:
        return found[0] if found is not None else ""
    frame = next((one for one in inner if not _PRIVATE.match(one.function)), inner[0])
    function, module = frame.function, library(frame)
    if function == "<module>" and module:
        return f"the import of {module}"
    if _LOADER.search(frame.file):
        fetches = any(one.function == "__next__" for one in inner)
        return f"DataLoader.{'__next__' if fetches else function}"
    if _is_standard(frame):
        return f"{os.path.basename(frame.file).removesuffix('.py')}.{function}"
    return f"{module}'s {function}()" if module else function


def trimmed(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return a stack without what the standard library does inside the call that it is in: a wait
    that polls is at one place, not at several.
    """
    end = len(frames)
    while end > 1 and _is_standard(frames[end - 1]) and _is_standard(frames[end - 2]):
        end -= 1
    return frames[:end]


def debugged(frames: tuple[Frame, ...]) -> bool:
    """Tell whether a stack stands in a debugger, as after `breakpoint()`."""
    return any(_DEBUGGERS.search(frame.file) for frame in frames)


def _is_standard(frame: Frame) -> bool:
    return bool(_STDLIB.match(frame.file)) and not _PACKAGES.match(frame.file)


def library_path(path: str) -> str:
    """Return the file of a library without the folder that it is installed in:
    `torch/distributed/distributed_c10d.py`; others as they are.
    """
    found = _PACKAGES.match(path) or _STDLIB.match(path)
    return found["path"] if found else path


def group(stacks: Mapping[int, tuple[Frame, ...]]) -> tuple[Group, ...]:
    """Return ranks with the same stack together, the odd one (the smallest group) first; equally
    large ones by their lowest rank.
    """
    together: dict[tuple[Frame, ...], list[int]] = {}
    for rank in sorted(stacks):
        together.setdefault(stacks[rank], []).append(rank)
    groups = [Group(tuple(ranks), frames) for frames, ranks in together.items()]
    return tuple(sorted(groups, key=lambda g: (len(g.ranks), g.ranks[0])))
