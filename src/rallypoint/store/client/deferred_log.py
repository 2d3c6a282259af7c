"""Lines about a session for the program's log: a connection lost, one made again, a lease that is
over."""

from __future__ import annotations

import threading
from collections import deque
from typing import Literal

from rallypoint.host import threads

Level = Literal["info", "warning", "error"]

LINES = 1000
"""At most that wait to be written; the oldest go first."""


FLUSH_SECONDS = 0.5
"""Longest wait, at the end of a store object, for a log that is being written."""


class News:
    """Lines that wait to be written: `add` never does that, for a log may be slow, or use a store.
    `tell` is for between two calls.

    Our own threads have another one write. A log may stand still for ever: a signal handler's
    exception in the middle of Python's logging leaves its locks to the thread in which that was.
    Signs of life, and a connection that others wait for, go on.
    """

    __slots__ = ("_writer", "lines", "told_apart")

    def __init__(self) -> None:
        self.lines: deque[tuple[Level, str]] = deque(maxlen=LINES)
        self.told_apart = False  # a thread of ours is writing them
        self._writer: threading.Thread | None = None

    def add(self, level: Level, text: str) -> None:
        self.lines.append((level, text))

    def tell(self) -> None:
        """Write them, or, in a thread of ours, have them written."""
        if not self.lines:
            return
        if not threads.is_ours():
            self._write()
        elif not self.told_apart:
            self.told_apart = True
            try:
                self._writer = threads.start(self._tell_apart, "log")
            except RuntimeError:  # no more threads: whoever asks for something next writes it
                self.told_apart = False

    def flush(self) -> None:
        """Write what waits, and wait for a thread of ours that writes, `FLUSH_SECONDS` at most: the
        program may be at its end.
        """
        self.tell()
        writer = self._writer
        if writer is not None and writer is not threading.current_thread():
            writer.join(FLUSH_SECONDS)

    def _tell_apart(self) -> None:
        try:
            self._write()
        finally:
            self.told_apart = False
        self.tell()  # who saw that somebody tells has left it at that

    def _write(self) -> None:
        from rallypoint.store import (
            logger,
        )  # here: most programs never lose a connection, and logging takes 8 ms to load

        log = logger.logger()
        write = {"info": log.info, "warning": log.warning, "error": log.error}
        while self.lines:
            try:
                level, text = self.lines.popleft()
            except IndexError:  # another thread has written it
                return
            write[level](text)


def notice(text: str) -> None:
    """Write it now, also where nobody has set up a log: see `logbook.notice`."""
    from rallypoint.store import logger

    logger.notice(text)
