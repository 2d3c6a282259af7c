"""Handles of the template and of the c10d host."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence

from rallypoint.host import processes, system_calls
from rallypoint.launcher import protocol
from rallypoint.launcher.protocol import Packet, Setup

# Seconds in which the template reads when its socket is full: a fork takes milliseconds, on a busy
# machine tenths.
SEND_DEADLINE = 10.0


class TemplateHandle:
    """The template: ordered through one socket, watched by pidfd."""

    def __init__(self, pid: int, line: socket.socket, *, imports: bool) -> None:
        """`pid` and `line`: see `spawn.start_template`. It waits for its `set_up`."""
        self.imports = imports
        self.is_set_up = False
        self.pid = pid
        self.pidfd = system_calls.pidfd_open(pid)
        self.socket = line
        protocol.limit_sends(line, SEND_DEADLINE)

    def set_up(self, setup: Setup) -> None:
        """Tell it what it is there for. It is ready, and says so, when it has imported
        everything.
        """
        self.order(setup)
        self.is_set_up = True

    def order(self, message: Packet, fds: Sequence[int] = ()) -> None:
        """Send an order. When the template is gone nothing happens here: its pidfd tells
        the loop.
        """
        try:
            protocol.send(self.socket, message, fds)
        except (
            BlockingIOError
        ):  # it has not read for so long that nothing can be started or ended with it any more
            processes.send(self.pidfd, signal.SIGKILL)
        except (BrokenPipeError, ConnectionResetError):
            return

    def reap(self) -> tuple[int, int]:
        """Wait for its end: (exit code, signal). (0, 0) when it was reaped before, or does not end,
        though it was killed (state D).
        """
        if self.pidfd < 0:
            return 0, 0
        pidfd, self.pidfd = self.pidfd, -1
        return processes.reap(self.pid, pidfd) or (0, 0)

    def end(self) -> None:
        """SIGKILL and reap; nothing when it has ended already."""
        if self.pidfd >= 0:
            processes.send(self.pidfd, signal.SIGKILL)
            self.reap()
        self.socket.close()


class HostHandle:
    """A c10d host and the attempt's listening address."""

    def __init__(self, address: str) -> None:
        self.address = address  # host:port
        self.port = int(address.rpartition(":")[2])
        self.pid = 0
        self.pidfd = -1
        self.served = False

    def started(self, pid: int) -> None:
        """Note the process that the template has forked."""
        self.pid, self.pidfd = pid, system_calls.pidfd_open(pid)

    def end(self) -> None:
        """SIGKILL, and wait until its socket is closed (it is, when the process has ended)."""
        if self.pidfd >= 0:
            processes.send(self.pidfd, signal.SIGKILL)
            processes.wait_for_ends([self.pidfd], 2.0)
            pidfd, self.pidfd = self.pidfd, -1
            os.close(pidfd)
