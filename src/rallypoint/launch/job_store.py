"""The store of one attempt: an address from the start, a server from the first client on."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from rallypoint.host import processes, sockets

if TYPE_CHECKING:
    from rallypoint.store.server import Server

SECRET_BYTES = 32  # as long as the SHA-256 that is keyed with it: more adds nothing


class JobStore:
    """A Unix socket and a secret of their own for each attempt, so that no key of one that has ended is found by the next.

    A job that does not use its store costs three descriptors and a folder: nothing is imported and no thread runs before `serve`.
    `EnvironmentProblem` ("socket-unavailable") when there is no folder for the socket, OSError when descriptors run out.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._server: Server | None = None
        self._listener, self.path = sockets.private_socket("store.sock")
        try:
            self.secret = processes.sealed_memory_file("rallypoint-secret", os.urandom(SECRET_BYTES))
        except BaseException:
            self._listener.close()
            sockets.remove(self.path)
            raise

    def __repr__(self) -> str:
        return f"<JobStore {self.address}: {'serving' if self._server else 'not used yet'}>"

    @property
    def address(self) -> str:
        """What RALLYPOINT_STORE says."""
        return f"unix://{self.path}"

    def fileno(self) -> int:
        """Readable when the first client has come; not to be watched any more after `serve`."""
        return self._listener.fileno()

    def serve(self) -> None:
        """Start the server. The client that made `fileno` readable is accepted by it. Raises what a thread or an import may raise."""
        from rallypoint.store.server import Server

        server = Server(listeners=[self._listener], secret=os.pread(self.secret, SECRET_BYTES, 0), job=self._job, address=self.address)
        # Its threads inherit the mask: signals are the loop's, which waits in epoll and must be the one that is woken.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            server.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._server = server

    def stop(self, reason: str) -> None:
        """Tell the clients, close, remove the folder. May be called twice."""
        if self._server is not None:
            self._server.stop(reason)
            self._server = None
        self._listener.close()
        sockets.remove(self.path)
        if self.secret >= 0:
            os.close(self.secret)
            self.secret = -1
