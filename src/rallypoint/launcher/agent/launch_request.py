"""One call of `launch`, as the agent that carries it out needs it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Sequence

from rallypoint.launcher import exits, protocol
from rallypoint.launcher.agent.helper_processes import HelperProcesses
from rallypoint.launcher.protocol import Call, Interrupt, Outcome, Restarted


class CallerGone(Exception):
    """The caller of `launch` has ended: nobody waits for this job."""


class StoppedWhileJoining(Exception):
    """A signal came before all nodes had."""

    def __init__(self, name: str) -> None:
        self.status = exits.of_signal(signal.Signals[name])
        super().__init__(name)


class LaunchRequest:
    """A call with its descriptors, the line to its caller, and the helper processes that outlive
    it.
    """

    def __init__(
        self,
        call: Call,
        fds: list[int],
        *,
        line: socket.socket,
        caller: int,
        helpers: HelperProcesses,
        files_limit: tuple[int, int],
    ) -> None:
        """`fds` came with the call and are closed with this. `line`: to the caller; `caller`: its
        pidfd.
        """
        self.outputs = (fds[0], fds[1])
        self.payload = fds[2:]
        self.asked = call.asked
        self.timeout = call.timeout
        self.grace = call.grace
        self.line = line
        self.caller = caller
        self.helpers = helpers
        self.files_limit = files_limit

    def filenos(self) -> tuple[int, int]:
        """Return the descriptors that are readable when `interrupt` is to be called."""
        return self.line.fileno(), self.caller

    def interrupt(self) -> str:
        """Return the name of the signal that the caller has passed on. Raises `CallerGone`."""
        message = None
        with contextlib.suppress(BlockingIOError):  # a process that it forked has the line, too
            message, _ = protocol.receive(self.line, flags=socket.MSG_DONTWAIT)
        if not isinstance(message, Interrupt):
            raise CallerGone
        return message.signal

    def is_awaited(self) -> bool:
        """Return whether the caller lives and has not closed its line."""
        poll = select.poll()
        poll.register(self.line, 0)  # that it was closed is always told
        poll.register(self.caller, select.POLLIN)
        return not poll.poll(0)

    def tell(self, message: Restarted | Outcome, fds: Sequence[int] = ()) -> None:
        """Tell the caller, unless it has ended, which its pidfd says, too."""
        with contextlib.suppress(OSError):
            protocol.send(self.line, message, fds)

    def close(self) -> None:
        """Close the descriptors that came with the call."""
        for fd in (*self.outputs, *self.payload):
            os.close(fd)
