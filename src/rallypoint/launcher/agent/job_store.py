"""Store of one attempt: an address from the start, a server from the first client on.

A job on several nodes has it on node 0, where it listens on TCP, too; the others know its address.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rallypoint.host import memory_files, process_status, unix_sockets
from rallypoint.host.fd_passing import close_fds
from rallypoint.launcher.exits import describe
from rallypoint.store.discovery import SECRET_FILE_BYTES, new_secret

if TYPE_CHECKING:
    from rallypoint.launcher.agent.process_handles import RankHandle
    from rallypoint.store.certificate import TlsIdentity
    from rallypoint.store.server.server import Server
    from rallypoint.store.state.attendance import Sighting


class JobStore:
    """A Unix socket and a secret of their own for each attempt, so that no key of one that has
    ended is found by the next.

    A job that does not use its store costs three descriptors and a folder: nothing is imported and
    no thread runs before `serve`. `EnvironmentProblem` ("socket-unavailable") when there is no
    folder for the socket, OSError when descriptors run out.
    """

    def __init__(
        self,
        job: str,
        secret: bytes | None = None,
        listener: socket.socket | None = None,
        identity: TlsIdentity | None = None,
    ) -> None:
        """`secret`, `listener`: of a job on several nodes, which the other nodes know. `identity`:
        of TLS, which they speak."""
        self._job = job
        self._identity = identity
        self._server: Server | None = None
        unix, self.path = unix_sockets.private_socket("store.sock")
        self._listeners = [unix] if listener is None else [unix, listener]
        try:
            self.secret = memory_files.create_sealed("rallypoint-secret", secret or new_secret())
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        for listener in self._listeners:
            listener.close()
        unix_sockets.remove(self.path)

    def __repr__(self) -> str:
        return f"<JobStore {self.address}: {'serving' if self._server else 'not used yet'}>"

    @property
    def address(self) -> str:
        """Value of RALLYPOINT_STORE."""
        return f"unix://{self.path}"

    def filenos(self) -> list[int]:
        """Return descriptors of which one is readable when the first client has come; not to be
        watched any more after `serve`.
        """
        return [listener.fileno() for listener in self._listeners]

    def serve(self, ranks: Sequence[RankHandle], now: Callable[[], float]) -> None:
        """Start the server. The client that made one of `filenos` readable is accepted by it. Raises what a
        thread or an import may raise.

        `ranks` are those of the attempt, and `now` the clock that their times are of: an error that
        a rank is missing says what is seen of it here.
        """
        from rallypoint.store.server.server import Server

        server = Server(
            listeners=self._listeners,
            secret=os.pread(self.secret, SECRET_FILE_BYTES, 0),
            job=self._job,
            address=self.address,
            identity=self._identity,
            roster=lambda: roster(ranks, now()),
        )
        server.start()
        self._server = server

    def stop(self, reason: str) -> None:
        """Tell the clients, close, remove the folder. May be called twice."""
        if self._server is not None:
            self._server.stop(reason)
            self._server = None
        self._close()
        secret, self.secret = self.secret, -1
        close_fds(secret)


class StoreElsewhere:
    """Store of an attempt that is served on node 0, as another node knows it."""

    path = ""  # nothing here is to be removed

    def __init__(self, address: str, secret: bytes) -> None:
        """`address`: tcp://host:port, or tls://, by which this node reaches it."""
        self.address = address
        self.secret = memory_files.create_sealed("rallypoint-secret", secret)

    def __repr__(self) -> str:
        return f"<StoreElsewhere {self.address}>"

    def filenos(self) -> list[int]:
        """Return nothing to watch: nobody is served here."""
        return []

    def stop(self, reason: str) -> None:
        """Forget the secret. May be called twice."""
        secret, self.secret = self.secret, -1
        close_fds(secret)


_PHASES = {
    # a program that joins no process group stays in this phase, whatever it does
    "importing": "running",
    "joining": "in init_process_group",
    "running": "running",
    "finishing": "leaving",
    "done": "leaving",
}
"""Phases in which a rank stays for a while, in words that "for 41 s" can follow."""


def roster(ranks: Sequence[RankHandle], now: float) -> dict[int, Sighting]:
    """Describe what is seen of each rank. Called by the store's thread while the agent goes on: it reads one
    attribute at a time, each of which is whole, and a rank that ends meanwhile may be described as
    it was before."""
    from rallypoint.store.state.attendance import Sighting

    host = os.uname().nodename
    return {handle.rank: Sighting(host, handle.pid, _seen(handle, now)) for handle in ranks}


def _seen(handle: RankHandle, now: float) -> str:
    if not handle.pid:
        return "not started yet"
    ended = handle.ended
    if ended is not None:
        return (
            f"ended {max(0.0, now - ended.at):.1f} s ago with {describe(ended.code, ended.signal)}"
        )
    try:
        status = process_status.status(handle.pid)
    except OSError:  # no descriptor left, or /proc hides it: the rest is known all the same
        return "alive"
    if status is None or status.state in "ZX":
        return "ended"
    if status.state in "Tt":
        return "stopped by a signal" if status.state == "T" else "held by a debugger"
    phase = _PHASES.get("running" if handle.failed_to_join else handle.phase)
    if phase is None:
        return "before its program began" if handle.phase == "preparing" else "alive"
    return f"{phase} for {max(0.0, now - handle.phase_at):.0f} s"
