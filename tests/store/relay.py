"""A relay between clients and a server that cuts the stream into small pieces and puts bytes of its
own into it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from types import TracebackType

FORWARDED = "RALLYPOINT_FORWARDED"


class Relay:
    """Listens at `address` and passes on what comes, at most `piece` bytes at a time. Use it as a
    context manager.
    """

    def __init__(self, target: str, piece: int = 65536, pause: float = 0.0) -> None:
        """`target`: a server's address, tcp://host:port. `pause`: seconds after each piece of full
        length.
        """
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._piece = piece
        self._pause = pause
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def say_to_clients(self, data: bytes) -> None:
        """Send this on every connection, as if the server had said it. No request may be
        under way.
        """
        for client, _ in self._pairs:
            with contextlib.suppress(OSError):  # one that has ended
                client.sendall(data)

    def say_to_server(self, data: bytes) -> None:
        """Send this on every connection, as if the client had said it. No request may be on its
        way.
        """
        for _, server in self._pairs:
            with contextlib.suppress(OSError):
                server.sendall(data)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            server = socket.create_connection(self._target)
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs.append((client, server))
            self._run(self._pass, client, server)
            self._run(self._pass, server, client)

    def _pass(self, source: socket.socket, drain: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(self._piece):
                drain.sendall(data)
                if self._pause and len(data) == self._piece:
                    threading.Event().wait(self._pause)
        for sock in (source, drain):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _run(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        thread.start()
        self._threads.append(thread)

    def __enter__(self) -> Relay:
        os.environ[FORWARDED] = (
            self.address
        )  # a client refuses a store that something else passes on, unless it is told
        self._run(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.environ.pop(FORWARDED, None)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for pair in self._pairs:
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60.0)
        for pair in self._pairs:
            for sock in pair:
                sock.close()
