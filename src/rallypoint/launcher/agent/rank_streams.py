"""Standard streams of the ranks: what each gets for stdin, stdout and stderr, and the files of
torchrun's `--tee`, `--redirects` and `--log-dir`.
"""

from __future__ import annotations

import os
from typing import Literal

from rallypoint.host.fd_passing import is_open
from rallypoint.host.terminal import is_in_background
from rallypoint.launcher.agent.console import Console, keeps_copy
from rallypoint.launcher.agent.process_handles import RankHandle
from rallypoint.launcher.plan import STDERR, STDOUT, Plan, prefixes
from rallypoint.record.log_pump import worker_columns
from rallypoint.record.run_folder import RunFolder
from rallypoint.record.torchrun_files import TorchrunFiles
from rallypoint.world import Seat

_NAMES: dict[int, Literal["stdout", "stderr"]] = {STDOUT: "stdout", STDERR: "stderr"}


class RankStreams:
    """Maker of every rank's descriptors. What goes through a pipe is read by the console's log
    pump.
    """

    def __init__(
        self, plan: Plan, folder: RunFolder, console: Console, files: TorchrunFiles | None
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._console = console
        self._files = files

    def begin_attempt(self, number: int) -> None:
        """Make the attempt's folder for torchrun's files."""
        if self._files is None:
            return
        self._files.begin(number)
        logs = self._plan.logs
        for bit, filters in ((STDOUT, logs.stdout_filters), (STDERR, logs.stderr_filters)):
            if filters:
                self._console.pump.duplicate(
                    _NAMES[bit], self._files.filtered(number, _NAMES[bit]), filters, self._plan.role
                )

    def error_file(self, attempt: int, handle: RankHandle) -> str:
        """Return where `@record` may write a rank's error, "" when there is no place."""
        if self._files is not None:
            return self._files.error_file(attempt, handle.local_rank)
        return self._folder.file(f"rank{handle.rank}-attempt{attempt}-error.json")

    def open(self, seat: Seat, handle: RankHandle) -> tuple[list[int], int]:
        """Open a rank's stdin, stdout and stderr, to be passed on and closed here; return also the
        terminal for its debugger, or -1.

        Where the launcher's stdout and stderr are one file, the rank gets one pipe for both, so
        that its lines keep their order.
        """
        plan, alone, attempt = self._plan, seat.world.size == 1, seat.attempt
        has_stdin = (
            handle.rank == plan.debug_rank
            and plan.task is None
            and is_open(0)
            and not is_in_background(0)
        )
        stdin = os.dup(0) if has_stdin else os.open(os.devnull, os.O_RDONLY)
        terminal = 0 if has_stdin and os.isatty(0) and not alone else -1
        redirects, tee = plan.logs.redirects[handle.local_rank], plan.logs.tee[handle.local_rank]
        if (
            alone
            and not redirects
            and not keeps_copy(plan)
            and handle.local_rank in plan.logs.console
        ):
            self._console.give_away()
            return [stdin, _dup_or_null(1), _dup_or_null(2)], terminal
        if self._console.same_output and not redirects and not tee:
            reader, writer = os.pipe2(os.O_CLOEXEC)
            self._console.pump.attach(handle.local_rank, "both", reader)
            return [stdin, writer, os.dup(writer)], terminal
        return [
            stdin,
            *(self._open_one(attempt, handle, bit, redirects, tee) for bit in (STDOUT, STDERR)),
        ], terminal

    def _open_one(
        self, attempt: int, handle: RankHandle, bit: int, redirects: int, tee: int
    ) -> int:
        if redirects & bit and self._files is None:  # --log-dir /dev/null
            return os.open(os.devnull, os.O_WRONLY)
        kept = (redirects | tee) & bit
        file = (
            self._files.open(attempt, handle.local_rank, _NAMES[bit])
            if self._files is not None and kept
            else None
        )
        if file is not None and not tee & bit:
            return file
        reader, writer = os.pipe2(os.O_CLOEXEC)
        self._console.pump.attach(handle.local_rank, _NAMES[bit], reader, tee=file)
        return writer

    def columns(self, seat: Seat) -> int:
        """Return the columns that a rank's line has on our terminal, for COLUMNS; 0 when it is none
        or the rank has it itself.
        """
        if seat.world.size == 1:
            return 0
        return worker_columns(seat.ranks, prefixes=prefixes(self._plan, seat))


def _dup_or_null(fd: int) -> int:
    return os.dup(fd) if is_open(fd) else os.open(os.devnull, os.O_WRONLY)
