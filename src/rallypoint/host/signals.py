"""Write signals down; the loop acts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from types import FrameType

# The signal that asks a worker for its stacks. One that does nothing to a process without a
# handler: a rank may execute another program between our look whether it has one and the signal, or
# while the signal waits for it. Of those SIGURG is the one that nobody else uses: the kernel sends
# it only to a process that asked for it (F_SETOWN), debuggers pass it on without a word, and Go has
# taken it for the same reasons.
EVIDENCE_SIGNAL = signal.SIGURG

# The signal that asks whether Python's own handlers run: its handler blocks it, which /proc shows.
# It is sent with one that asks a rank to stop, never to a rank that is to go on: unlike the one
# above it cannot be kept from ending a system call early (EINTR).
ATTENTION_SIGNAL = signal.SIGRTMIN + 8


class SignalLog:
    """Writes down the signals that arrive, in order; `fileno()` becomes readable, `read()` returns
    them.

    A signal that was ignored when we started (SIGHUP under nohup, SIGINT of a background job) stays
    ignored: whoever started us has decided that. One that was blocked is not any longer: a thread
    that blocks signals hands its mask on to every program that it starts, mostly without a reason.
    Must be made in the main thread; `close()` puts the former handlers back.
    """

    def __init__(self, wanted: Iterable[signal.Signals]) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._former_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._former: dict[signal.Signals, signal._HANDLER] = {}
        for number in wanted:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._former[number] = signal.signal(number, _written_by_the_interpreter)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._former)

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._read

    def read(self) -> list[signal.Signals]:
        """Return the signals since the last call, oldest first. Does not wait."""
        try:
            return [
                signal.Signals(number)
                for number in os.read(self._read, 4096)
                if number in self._former
            ]
        except BlockingIOError:
            return []

    def close(self) -> None:
        """Put everything back. May be called twice."""
        if self._read < 0:
            return
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_wakeup)
        fds, self._read, self._write = (self._read, self._write), -1, -1
        for fd in fds:
            os.close(fd)


def _written_by_the_interpreter(number: int, frame: FrameType | None) -> None:
    """Do nothing: the interpreter has already put the number into the wake-up pipe."""


def show_attention() -> None:
    """Let `ATTENTION_SIGNAL` show that this process's main thread came back to the interpreter
    after it was sent. In the main thread."""
    signal.signal(ATTENTION_SIGNAL, _block)


def _block(number: int, frame: FrameType | None) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})


def ignored() -> tuple[int, ...]:
    """Return the signals that are ignored in this process and are not so by Python itself: what a
    child should ignore, too."""
    by_python = {signal.SIGPIPE, signal.SIGXFSZ}
    return tuple(
        int(s)
        for s in signal.valid_signals()
        if s not in by_python and signal.getsignal(s) == signal.SIG_IGN
    )


def name(number: int) -> str:
    """`SIGTERM`; `SIGRTMIN+5` for the real-time ones, most of which have no names of their own;
    `signal 77` for what is none."""
    if signal.SIGRTMIN < number < signal.SIGRTMAX:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
