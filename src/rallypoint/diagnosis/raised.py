"""An exception that was seen in a rank, and the lines of its stack."""

from __future__ import annotations

import msgspec

from rallypoint.errors import Advice


class Frame(msgspec.Struct, frozen=True):
    """One line of a Python stack."""

    file: str
    line: int
    function: str
    source: str = ""  # the source line, stripped; "" when unknown


CUDA_START = "torch.cuda"
"""The `call` of an error that left torch's first use of CUDA in a process: `.cuda()`,
`.to("cuda")`.
"""


class Raised(msgspec.Struct, frozen=True):
    """An exception that was seen in a rank."""

    type: str  # qualified as Python prints it: "ValueError", "torch.distributed.DistNetworkError"
    message: str
    frames: tuple[Frame, ...]  # outermost first, ours and runpy's left out
    traceback: str  # as Python prints it (with causes and contexts), our frames left out
    at: float = 0.0  # seconds since the job's start
    # the torch call that it left: "init_process_group", "set_device", "all_reduce", ...; "" if none
    call: str = ""
    caught_at: Frame | None = None  # the except line of the program that caught it, if it did
    # seen while the program closed its group: it had not left the program yet, and perhaps never
    # did
    on_its_way: bool = False
    errno: int = 0
    filename: str = ""  # OSError's or SyntaxError's
    # of an exception of ours (init-method-invalid, store-file-stale), or of what our hook
    # recognised (group-twice)
    code: str = ""
    why: tuple[str, ...] = ()  # with a code: the facts
    help: Advice = ()  # with a code: (sentence, line to type)
