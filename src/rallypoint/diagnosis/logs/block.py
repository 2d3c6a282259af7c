"""Blocks of lines that tell one thing together. Each takes one line after the other and says whether
it belongs to it. Ranks that share a terminal write into each other's tracebacks: what is no part of
one is left to the others, and two headers wait for two last lines.
"""

from __future__ import annotations

from rallypoint.diagnosis.evidence import Raised
from rallypoint.diagnosis.pattern import Pattern

HEADER = "Traceback (most recent call last):"
STRAY = 40  # lines of others that may stand inside a traceback before it is taken for cut off
KEPT = 400  # lines of one traceback; of a deeper one the middle is left out
MESSAGE_LINES = 14  # NCCL's and DDP's messages have up to ten
WORDS = 400  # characters of one line that are kept
FRAME = Pattern(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+)(?:, in ?(?P<function>\S*))?$')

_LONG = Pattern(
    r"NCCL [Ee]rror|HCCL error|error: Hccl|NPU (?:function )?error[,:]|waiting for$"
    r"|CUDA error|finished reduction|killed by signal|Failed to initialize NVML|You requested gpus?: |^\d+ validation errors? for "
)

ANOTHERS = Pattern(
    r"^(?:\[?[EWIF]\d{3,4} |\[\d{4}-|\[[EWI] |(?:INFO|WARNING|ERROR|CRITICAL)[: ]|Exception raised from|frame #\d+|[-=*]{20})"
)

_NATIVE = Pattern(r"^frame #\d+|^Exception raised from |^<omitting python frames>")


def goes_on(message: list[str]) -> bool:
    """Tell whether the next line may belong to a message: what ends with a colon has one more."""
    most = MESSAGE_LINES if _LONG.search(message[0]) else 1 + message[0].rstrip().endswith(":")
    return len(message) < most


def native(text: str) -> bool:
    """Tell whether a line is part of a C++ trace, which says where torch noticed a failure, and
    never why.
    """
    return bool(_NATIVE.match(text))


class Block:
    """Lines of one process that tell one thing together."""

    rank = -1  # that the words name, as mp.spawn's do
    ranks: tuple[int, ...] = ()  # that the words count
    stray = 0  # lines of others that stand inside
    ignored = False  # Python says that it is: of `__del__`, or while the interpreter closes down

    def __init__(self, number: int) -> None:
        self.start = self.last = number
        self.done = False

    def error(self) -> Raised | None:
        """Return the exception that the block tells of; None for none."""
        return None

    def errors(self) -> list[Raised]:
        """Return the exceptions that the block tells of."""
        error = self.error()
        return [error] if error is not None else []
