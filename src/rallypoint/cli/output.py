"""Output of the commands: stdout and stderr, in colour or not, on so many columns."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from rallypoint.host import terminal

if TYPE_CHECKING:
    from rallypoint.diagnosis.report import Report


class OutputLost(Exception):
    """Standard output takes nothing, as when a disk is full."""


def write_out(text: str) -> None:
    """Write to stdout now: whatever a command prints there. Nothing when it was closed at the
    start, as Python's own `print`.

    `OutputLost`; `BrokenPipeError` when the reader has gone.
    """
    if not sys.stdout:
        return
    encoding = sys.stdout.encoding or "utf-8"  # a locale's may lack letters of a rank's words
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard(sys.stdout)
        raise OutputLost(f"cannot write to stdout: {os.strerror(error.errno or 0)}") from error


def write_err(text: str) -> None:
    """Write to stderr, if there is one and it takes anything: the exit status tells in any case."""
    if sys.stderr:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except OSError:
            discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Lead a stream to nowhere: what could not be written is kept, and would fail again at the
    interpreter's end (exit status 120).
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def rendered(reports: Report | Sequence[Report], error_format: str, stream: TextIO | None) -> str:
    """Return reports for a stream: JSON, or text as wide as its terminal and in its colours."""
    from rallypoint.diagnosis import render

    if error_format == "json":
        return f"{render.json(reports)}\n"
    return f"{render.text(reports, width=width(stream), color=wants_color(stream))}\n"


def wants_color(stream: TextIO | None) -> bool:
    """Tell whether to use colours there."""
    return terminal.wants_color(stream is not None and stream.isatty())


def filled(text: str, columns: int) -> str:
    """Fill the paragraphs of a text for `--help` to so many columns; what is indented, and the
    lines of use, stay as they are.
    """

    def part(paragraph: str) -> str:
        if paragraph.startswith(("usage:", " ")):
            return paragraph
        return "\n".join(
            textwrap.wrap(
                " ".join(paragraph.split()), columns, break_long_words=False, break_on_hyphens=False
            )
        )

    return "\n\n".join(map(part, text.strip("\n").split("\n\n"))) + "\n"


def columns(stream: TextIO | None) -> int | None:
    """Return the columns of a stream, for what need not be prose: COLUMNS, else the terminal's;
    None when there is neither.
    """
    try:
        fd = stream.fileno() if stream else -1
    except (OSError, ValueError):  # a stream without a descriptor
        fd = -1
    return terminal.columns(fd)


def width(stream: TextIO | None) -> int:
    """Return the columns to write prose in: COLUMNS, else the terminal's, else 92; at most 100."""
    return terminal.prose_columns(columns(stream))


FEWEST_BESIDE, BELOW = 24, 4
"""Columns that a row's last words need to stand beside the others, and how far in they stand below
them where there are fewer.
"""


def beside(head: str, words: str, columns: int | None) -> str:
    """Return a row whose last words may be long: beside its head, and filled there or below it
    where the row is longer than so many columns.

    None: one line, however long. `head` ends with the blanks before the words.
    """
    if columns is None or len(head) + len(words) <= columns:
        return f"{head}{words}".rstrip() + "\n"
    below = bool(head.strip()) and columns - len(head) < FEWEST_BESIDE
    indent = min(BELOW, columns // 4) if below else len(head)
    lines = textwrap.wrap(
        words, max(columns - indent, 8), break_long_words=False, break_on_hyphens=False
    )
    first = head.rstrip() if below else head + lines.pop(0)
    return "\n".join([first, *(" " * indent + line for line in lines)]) + "\n"
