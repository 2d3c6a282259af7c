"""An exception that was seen in a rank, and the lines of its stack."""

from __future__ import annotations

import msgspec
from msgspec.structs import force_setattr

from rallypoint.errors import Advice


class Frame(msgspec.Struct, frozen=True):
    """One line of a Python stack."""

    file: str
    line: int
    function: str
    source: str = ""  # the source line, stripped; "" when unknown


def joined(outer: tuple[Frame, ...], inner: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the frames of an exception below those that led to where it was caught: they stand in
    the traceback of the one that came then, and its own begins there.
    """
    for at, frame in enumerate(outer):
        if inner and (frame.file, frame.function) == (inner[0].file, inner[0].function):
            return outer[:at] + inner
    return inner or outer


MESSAGE_BYTES = 16 * 1024
"""Bytes of an exception's message that are kept: every message of torch's is shorter, and nearly a
hundred regular expressions are searched for in each.
"""

TRACEBACK_BYTES = 80 * 1024
"""Bytes of its traceback, in which few are: the longest line that is read of a log, and frames. A
packet has room for both.
"""


LEFT_OUT = " bytes left out ...]"


def cut(text: str, limit: int = TRACEBACK_BYTES) -> str:
    """Shorten a text to so many bytes: the middle goes, head and tail stay."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return text
    half = limit // 2 - 25  # the line between them counts, too
    end = len(data) - half
    # The tail begins with a whole line, if one begins soon: a piece of one would end a traceback.
    end = data.find(b"\n", end, end + 500) + 1 or end
    between = f"\n  [... {end - half}{LEFT_OUT}\n".encode()
    return (data[:half] + between + data[end:]).decode("utf-8", "ignore")


CUDA_START = "torch.cuda"
"""The `call` of an error that left torch's first use of CUDA in a process: `.cuda()`,
`.to("cuda")`.
"""


class Raised(msgspec.Struct, frozen=True):
    """An exception that was seen in a rank. Long texts lose their middle, wherever they came
    from: a rank, an error file, a log.
    """

    type: str  # qualified as Python prints it: "ValueError", "torch.distributed.DistNetworkError"
    message: str
    frames: tuple[Frame, ...]  # outermost first, ours and runpy's left out
    traceback: str  # as Python prints it (with causes and contexts), our frames left out
    at: float = 0.0  # seconds since the job's start
    # the torch call that it left: "init_process_group", "set_device", "all_reduce", ...; "" if none
    call: str = ""
    # seconds before `at` at which the call, or backward(), began and ended; (0, 0): not known
    wait: tuple[float, float] = (0.0, 0.0)
    caught_at: Frame | None = None  # the except line of the program that caught it, if it did
    # seen while the program closed its group: it had not left the program yet, and perhaps never
    # did
    on_its_way: bool = False
    member: int = -1  # the number that torch gives this rank in a checkpoint that failed; -1: none
    errno: int = 0
    filename: str = ""  # OSError's or SyntaxError's
    # folder near the program with the module that Python did not find; "" for none
    module_folder: str = ""
    # of an exception of ours (init-method-invalid, store-file-stale), or of what our hook
    # recognised (group-twice)
    code: str = ""
    why: tuple[str, ...] = ()  # with a code: the facts
    help: Advice = ()  # with a code: (sentence, line to type)
    is_open: bool = False  # another came while it was handled, and either may be at fault

    def __post_init__(self) -> None:
        """Bound what the rules search in."""
        force_setattr(self, "message", cut(self.message, MESSAGE_BYTES))
        force_setattr(self, "traceback", cut(self.traceback))
