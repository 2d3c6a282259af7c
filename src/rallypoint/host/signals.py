"""Write signals down; the loop acts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from types import FrameType

# The signal that asks a worker for its stacks. Real-time, because SIGUSR1 and SIGUSR2 belong to schedulers and users; not the first
# ones, which glibc (32, 33) and profilers take; the same number in every process of a job, since the agent sends what the worker
# registered.
EVIDENCE_SIGNAL = signal.SIGRTMIN + 7


class SignalLog:
    """Writes down the signals that arrive, in order; `fileno()` becomes readable, `read()` returns them.

    A signal that was ignored when we started (SIGHUP under nohup, SIGINT of a background job) stays ignored: whoever started us
    has decided that. Must be made in the main thread; `close()` puts the former handlers back.
    """

    def __init__(self, wanted: Iterable[signal.Signals]) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._former_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._former: dict[signal.Signals, signal._HANDLER] = {}
        for number in wanted:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._former[number] = signal.signal(number, _written_by_the_interpreter)

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._read

    def read(self) -> list[signal.Signals]:
        """The signals since the last call, oldest first. Does not wait."""
        try:
            return [signal.Signals(number) for number in os.read(self._read, 4096) if number in self._former]
        except BlockingIOError:
            return []

    def close(self) -> None:
        """Put everything back. May be called twice."""
        if self._read < 0:
            return
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_wakeup)
        os.close(self._read)
        os.close(self._write)
        self._read = self._write = -1


def _written_by_the_interpreter(number: int, frame: FrameType | None) -> None:
    """Nothing: the interpreter has already put the number into the wake-up pipe."""


def ignored() -> tuple[int, ...]:
    """The signals that are ignored in this process and are not so by Python itself: what a child should ignore, too."""
    by_python = {signal.SIGPIPE, signal.SIGXFSZ}
    return tuple(int(s) for s in signal.valid_signals() if s not in by_python and signal.getsignal(s) == signal.SIG_IGN)


def name(number: int) -> str:
    """`SIGTERM`, or `signal 35` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
