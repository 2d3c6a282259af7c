"""Print of a rank's traceback to whatever the program has put in the place of stderr. The launcher
shows it in any case."""

from __future__ import annotations

import os
import sys

from rallypoint.host import memory_files
from rallypoint.host.fd_passing import close_fds, file_behind
from rallypoint.launcher import exception_capture, interruptions


class StderrAsGiven:
    """Stderr as it is when the program begins: the stream `sys.stderr`, and the file behind
    descriptor 2. `is_kept`: that is a file of the user's, to which only this process writes the
    traceback."""

    def __init__(self, is_kept: bool = False) -> None:
        self._stream = sys.__stderr__
        self._file = file_behind(2)
        self._is_kept = is_kept

    def print_beside(self, error: BaseException) -> None:
        """Print the traceback of an exception as Python would, everywhere but to descriptor 2 as it
        was given.

        A logger in `sys.stderr`, what wraps its `write`, and a file that the program has put behind
        descriptor 2 get it.
        """
        moved = file_behind(2) != self._file
        if self._is_kept or moved:
            _print(error)
        elif sys.stderr is not self._stream or (
            sys.stderr is not None and "write" in vars(sys.stderr)
        ):
            _print_without_descriptor(error)


def _print(error: BaseException) -> None:
    try:
        sys.excepthook(type(error), error, error.__traceback__)
        if sys.stderr is not None:
            sys.stderr.flush()
    except Exception as problem:
        # what the program has put there cannot flush, or raises: Python passes over that, too
        if interruptions.raised_by_handler(problem):
            raise


def _print_without_descriptor(error: BaseException) -> None:
    """Print it while descriptor 2 leads into memory: most stand-ins write to their file and to the
    former stream. What others wrote to the descriptor meanwhile follows."""
    former = aside = -1
    try:
        former = os.dup(2)
        aside = memory_files.create("rallypoint")
    except OSError:  # no descriptor is left: better twice than not at all
        close_fds(former)
        _print(error)
        return
    try:
        os.dup2(aside, 2)
        try:
            _print(error)
        finally:
            os.dup2(former, 2)
        written = os.pread(aside, os.fstat(aside).st_size, 0)
    finally:
        os.close(former)
        os.close(aside)
    lines = tuple(
        line.encode()
        for line in exception_capture.sayable(exception_capture.traceback_text(error)).splitlines()
        if line.strip()
    )
    for line in written.splitlines(keepends=True):
        # torch's hook and others put something in front.
        if line.strip() and not line.rstrip().endswith(lines):
            os.write(2, line)
