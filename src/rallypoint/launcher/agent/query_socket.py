"""Socket of a running job: processes of the same user ask there where its ranks stand, or have it
stopped.

A Unix socket in a private folder, whose path stands in the run folder. A visitor sends one line and
gets a memory file with the answer, so the agent's loop never waits for a visitor that reads slowly,
or not at all.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from rallypoint.diagnosis.rank_snapshot import Standing
from rallypoint.host import memory_files, process_status, unix_sockets

# Seconds that a visitor waits for the answer: what the launcher allows itself, and as much again
# twice for a busy machine.
VISIT_DEADLINE = 5.0
# Descriptors that stay free for the job: answering takes three, and to end a rank the launcher needs
# a few, too. So it also bounds how many visitors there are at a time.
ROOM = 16
QUESTION = b"rallypoint stacks 1\n"  # the number changes when the answer does
STOP = b"rallypoint stop 1\n"
NAME = b"rallypoint name 1\n"
Asked = Literal["stacks", "stop", "name", ""]
"""Wish of a visitor; "" when it has no answer here, or the visitor has gone."""

_Answer = TypeVar("_Answer")


class DoorClosed(Exception):
    """Nobody listens there (any more)."""


class SentAway(DoorClosed):
    """The launcher took the connection and closed it: the job is over, or it has no descriptor for
    a visitor.
    """


class LauncherSilent(Exception):
    """The launcher took the connection and did not answer in time. `pid`: the process that listens
    there, 0 when it cannot be seen.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(f"pid {pid} did not answer")
        self.pid = pid


class OtherVersion(Exception):
    """The answer is in another form: the job was started by another version of rallypoint."""


class Stopping(msgspec.Struct, frozen=True):
    """The job is being stopped. `ranks`: those that had not ended. `longest`: seconds after which
    the launcher gives up what is left. `again`: it was being stopped before, and its ranks are
    killed now."""

    ranks: tuple[int, ...]
    grace: float
    longest: float
    again: bool = False


# --- outside
# --------------------------------------------------------------------------------------------------


def ask(path: str, timeout: float = VISIT_DEADLINE) -> Standing:
    """Ask where the ranks of the job behind this socket stand. `DoorClosed`, `LauncherSilent` after
    `timeout` seconds, `OtherVersion`.
    """
    with _asking(path, QUESTION, Standing, timeout) as (found, _):
        return found


def ask_name(path: str) -> Standing:
    """Ask which job is behind this socket. Its ranks are not asked, and not in the answer. Raises as
    `ask` does."""
    with _asking(path, NAME, Standing, VISIT_DEADLINE) as (found, _):
        return found


@contextlib.contextmanager
def stop(path: str, timeout: float = VISIT_DEADLINE) -> Iterator[tuple[Stopping, socket.socket]]:
    """Have the job behind this socket stopped. Yields what follows, and a connection that the launcher
    closes when the job is over. Raises as `ask` does."""
    with _asking(path, STOP, Stopping, timeout) as answer:
        yield answer


@contextlib.contextmanager
def _asking(
    path: str, question: bytes, kind: type[_Answer], timeout: float
) -> Iterator[tuple[_Answer, socket.socket]]:
    """Yield the answer, and the connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout)
        connected = False
        try:
            sock.connect(path)
            connected = True
            if os.geteuid() != 0 and not unix_sockets.is_same_user(sock):
                raise DoorClosed
            listener = unix_sockets.listener_of(sock)
            if process_status.is_stopped(listener):  # the kernel took the connection for it
                raise LauncherSilent(listener)
            sock.sendall(question)
            said, fds, _, _ = socket.recv_fds(sock, 1, 1)
        except (TimeoutError, BlockingIOError):  # BlockingIOError: as many wait already as may
            raise LauncherSilent(unix_sockets.listener_of(sock)) from None
        except OSError:
            raise (SentAway if connected else DoorClosed) from None
        if not fds:
            raise OtherVersion if said else SentAway
        try:
            answer = msgspec.msgpack.decode(memory_files.taken(fds[0]), type=kind)
        except (msgspec.DecodeError, msgspec.ValidationError):
            raise OtherVersion from None
        yield answer, sock


# --- in the agent
# --------------------------------------------------------------------------------------------------


class QuerySocket:
    """Listener for visitors. Nothing here waits. `EnvironmentProblem` ("socket-unavailable") when there
    is no folder for the socket.
    """

    def __init__(self) -> None:
        self._listener, self.path = unix_sockets.private_socket("door.sock")
        self._listener.setblocking(False)
        self._visitors: set[socket.socket] = set()
        self._staying: list[socket.socket] = []

    def fileno(self) -> int:
        """Return the descriptor that is readable when a visitor comes."""
        return self._listener.fileno()

    def accept_visitor(self) -> socket.socket | None:
        """Return the next visitor; None when it has gone again, is another user's process, or would take
        a descriptor that the job may need. `OSError` (EMFILE) when there is none left at all."""
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        # The kernel gives the lowest free number: one near the limit means that few are left.
        if (
            not unix_sockets.is_same_user(sock)
            or sock.fileno() >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - ROOM
        ):
            sock.close()
            return None
        sock.setblocking(False)
        self._visitors.add(sock)
        return sock

    def listen(self, visitor: socket.socket) -> Asked | None:
        """Return what it asks; None when there is nothing to read yet."""
        try:
            said = visitor.recv(len(QUESTION) + 1)  # the longest
        except BlockingIOError:
            return None
        except OSError:
            return ""
        questions: dict[bytes, Asked] = {QUESTION: "stacks", STOP: "stop", NAME: "name"}
        if said in questions:
            return questions[said]
        if said:
            with contextlib.suppress(OSError):
                visitor.send(b"?")
        return ""

    def answer(self, visitors: Sequence[socket.socket], answer: Any, *, stay: bool = False) -> None:
        """Hand visitors the answer, and close; or let them `stay`, to see the job's end."""
        content = msgspec.msgpack.encode(answer)
        for visitor in visitors:
            with contextlib.suppress(
                OSError
                # it did not wait, or was sent away; or nothing can be opened: it reads that nobody
                # answers
            ):
                fd = memory_files.create("rallypoint-standing", content)
                try:
                    socket.send_fds(visitor, [b"."], [fd])
                finally:
                    os.close(fd)
            if stay:
                self._visitors.discard(visitor)
                self._staying.append(visitor)
            else:
                self.hang_up(visitor)

    def hang_up(self, visitor: socket.socket) -> None:
        """Close the line to a visitor. May be called twice."""
        self._visitors.discard(visitor)
        visitor.close()

    def end(self) -> None:
        """Close the lines to visitors that have stayed: all of the job is written down."""
        for visitor in self._staying:
            visitor.close()

    def close(self) -> None:
        """Remove the socket with its folder, and send away all visitors but those that stay to see
        the job's end.
        """
        for visitor in [*self._visitors]:
            self.hang_up(visitor)
        self._listener.close()
        unix_sockets.remove(self.path)
