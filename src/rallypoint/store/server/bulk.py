"""Large values between sockets and shared memory, beside the loop: an upload must not hold up
anybody's `add`.

A few threads move bytes, a chunk at a time, by system calls during which the interpreter is free. A
socket that has nothing to give or no room costs no thread: its transfer goes back to the loop,
which watches the socket and submits it again. So a frozen peer holds up nobody, and a thousand
peers with large values need no thousand threads.
"""

from __future__ import annotations

import errno
import select
import socket
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal

from rallypoint.host import threads
from rallypoint.host.memory import Segment
from rallypoint.store.logger import logger

if TYPE_CHECKING:
    from rallypoint.store.server.connection import Peer

THREADS = 4
"""Copying is bound by memory, which two or three cores saturate; each further thread only competes
with the loop for the interpreter.
"""

CHUNK_BYTES = 512 * 1024
"""Bytes moved by one system call: fits a core's cache between socket and segment (4.1 GB/s; 256 KiB 3.5,
and the interpreter is asked for twice as often), and takes some 150 us, after which a server that
stops is noticed."""

TURN_BYTES = 64 * 1024 * 1024
"""Bytes after which the next transfer has its turn: some 20 ms, so that a value of 10 GB does not
keep one of 10 MB waiting."""

PATIENCE = 5
"""Milliseconds for the socket to become ready before the transfer goes back to the loop: on one
host the other end needs microseconds.
"""

log = logger()

Outcome = Literal["whole", "waiting", "turn", "gone", "no-memory"]


class Transfer:
    """The body of one frame, of which `at` bytes have been moved. Belongs to a thread while `moves`
    is set, otherwise to the loop."""

    __slots__ = ("at", "incoming", "moves", "outcome", "peer", "segment", "size", "sock")

    def __init__(self, peer: Peer, segment: Segment, *, incoming: bool, at: int = 0) -> None:
        """`at`: bytes of an incoming body that have been written already."""
        self.peer = peer
        self.sock = peer.sock  # non-blocking
        self.segment = segment
        self.size = segment.size
        self.incoming = incoming
        self.at = at
        self.moves = False
        self.outcome: Outcome = "turn"

    def __repr__(self) -> str:
        return f"<Transfer {'in' if self.incoming else 'out'}: {self.at} of {self.size} bytes, {self.outcome}>"

    def move(self, scratch: memoryview, stopped: Callable[[], bool]) -> Outcome:
        """Move bytes until the body is whole or something else is to be done."""
        ready = select.poll()
        ready.register(self.sock, select.POLLIN if self.incoming else select.POLLOUT)
        step = self._receive if self.incoming else self._send
        until = min(self.size, self.at + TURN_BYTES)
        while self.at < until:
            if stopped():
                return "gone"
            try:
                count = step(scratch[: min(len(scratch), self.size - self.at)])
            except BlockingIOError:
                if not ready.poll(PATIENCE):
                    return "waiting"
                continue
            except OSError:
                return "gone"
            except _NoMemory:
                return "no-memory"
            if not count:
                return "gone"
            self.at += count
        return "whole" if self.at == self.size else "turn"

    def _receive(self, scratch: memoryview) -> int:
        count = self.sock.recv_into(scratch)
        try:
            self.segment.write(scratch[:count], self.at)
        except OSError as error:
            self.at += count  # gone from the socket
            raise _NoMemory from error
        return count

    def _send(self, scratch: memoryview) -> int:
        # A copy, and not sendfile: the pages themselves would wait in the reader's socket, and
        # change under it when they are reused.
        return self.sock.send(scratch[: self.segment.read(scratch, self.at)], socket.MSG_NOSIGNAL)


class _NoMemory(Exception):
    """The kernel has no page for the segment. A failed socket is an OSError, too."""


class Movers:
    """The threads. `wake()` is called, from a thread, for each transfer that it gives back."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.moving: set[Transfer] = set()  # submitted and not yet taken back by the loop
        self._finished: deque[Transfer] = deque()
        self._wake = wake
        self._queue: SimpleQueue[Transfer | None] = SimpleQueue()
        self._threads: list[threads.OwnThread] = []
        self._stopped = False

    def submit(self, transfer: Transfer) -> None:
        """Let a thread move it, if none does yet. Until `take` returns it the loop does not touch
        it, or that direction of its socket. Raises OSError when no thread can be had."""
        if transfer.moves:  # what epoll said of its socket is older than that
            return
        if len(self.moving) >= len(self._threads) < THREADS:
            try:
                thread = threads.start(self._run, f"store's transfer {len(self._threads)}")
            except RuntimeError as error:
                if not self._threads:
                    log.warning("the store can move no large value: %s", error)
                    raise OSError(
                        errno.ENOMEM, str(error)
                    ) from error  # not EAGAIN, which means "later"
            else:
                self._threads.append(thread)
        transfer.moves = True
        self.moving.add(transfer)
        self._queue.put(transfer)

    def take(self) -> Transfer | None:
        """Take the next one that a thread has given back; its `outcome` says why."""
        if not self._finished:
            return None
        transfer = self._finished.popleft()
        transfer.moves = False
        self.moving.discard(transfer)
        return transfer

    def stop(self) -> None:
        """End the threads: what is under way is given back as "gone"."""
        self._stopped = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _run(self) -> None:
        scratch = memoryview(bytearray(CHUNK_BYTES))
        while (transfer := self._queue.get()) is not None:
            transfer.outcome = transfer.move(scratch, self._is_stopped)
            self._finished.append(transfer)
            del transfer  # the loop may drop the segment: no reference here shall keep it
            self._wake()

    def _is_stopped(self) -> bool:
        return self._stopped
