"""Words and numbers as reports write them: signals, sizes, moments, lines that are cut."""

from __future__ import annotations

import signal as signals
from collections.abc import Sequence

from rallypoint.diagnosis import tracebacks
from rallypoint.diagnosis.evidence import Ended, Raised
from rallypoint.host import signals as host_signals

signal_name = host_signals.name  # one spelling everywhere

LINE_CHARACTERS = 400  # of one quoted line; a rank can print megabytes without a newline
HEADLINE_MESSAGE = (
    160  # characters of an exception's message in the headline: two lines of a terminal
)
# of an exception of ours: it names those who are missing, and one that is cut off is the one that
# is looked for
HEADLINE_OURS = 400
EVIDENCE_LINES = 7  # of a list with a line for each rank or place


def named(error: Raised) -> str:
    """Return `ValueError: the message's first line`; of what a DataLoader's worker raised, that."""
    worker, inner = tracebacks.in_loader(error.message)
    if inner:
        return f"{first_line(inner)} (in DataLoader worker process {worker})"
    line = first_line(error.message)
    return ": ".join(filter(None, (error.type, line)))


def since(at: float) -> str:
    """Return a moment of the job: `+0.31 s`."""
    return f"+{at:.2f} s"


def cut(line: str, most: int = LINE_CHARACTERS) -> str:
    """Return a line, shortened with a note when it is far too long."""
    return line if len(line) <= most else f"{line[:most]} ... ({len(line) - most} more characters)"


_CRASHES: dict[int, str] = {
    signals.SIGSEGV: "native code touched memory that it does not have",
    signals.SIGABRT: "native code gave up (abort): an assertion, or a C++ exception that nobody caught",
    signals.SIGBUS: "native code touched mapped memory that has nothing behind it",
    signals.SIGFPE: "native code divided by zero, or the like",
    signals.SIGILL: "native code has an instruction that this processor does not know",
    signals.SIGSYS: "a system call was made that is forbidden here (seccomp)",
    signals.SIGTRAP: "native code stopped at a breakpoint or an assertion",
}

CRASHES = frozenset(_CRASHES)


def crash_words(number: int) -> str:
    """Return what native code did that ends by this signal; "" for another signal."""
    return _CRASHES.get(number, "")


def has_name(number: int) -> bool:
    """Tell whether this is the number of a signal with a name."""
    return number in list(signals.Signals)


def ending(ended: Ended) -> str:
    """Return how a process ended: `died: SIGKILL`, `exited with code 1`."""
    return (
        f"died: {signal_name(ended.signal)}" if ended.signal else f"exited with code {ended.code}"
    )


def shortened(text: str, most: int) -> str:
    """Return the text, cut to fit."""
    return text if len(text) <= most else text[: most - 4] + " ..."


def first_line(message: str, most: int = HEADLINE_MESSAGE) -> str:
    """Return the first line of a message that has words, cut to fit a headline. One that ends with a
    colon says what is wrong in the next.
    """
    # torch.load says it below advice to load the file all the same
    if unread := message.partition("WeightsUnpickler error:")[2].strip():
        message = f"Weights only load failed: {unread}"
    lines = filter(None, map(str.strip, message.splitlines()))
    line = next(lines, "").removeprefix(": ")
    return shortened(f"{line} {next(lines, '')}".rstrip() if line.endswith(":") else line, most)


def listed(lines: Sequence[str]) -> tuple[str, ...]:
    """Return lines of evidence, of a long list the first ones and how many more."""
    if len(lines) <= EVIDENCE_LINES:
        return tuple(lines)
    return (*lines[: EVIDENCE_LINES - 1], f"and {len(lines) - EVIDENCE_LINES + 1} more")
