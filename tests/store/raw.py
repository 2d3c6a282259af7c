"""The smallest client that keeps to the protocol, for tests of the server that must not depend on
the real one.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
from collections import deque
from typing import Any

import pytest

from rallypoint.clock import Clock
from rallypoint.store.address import parse
from rallypoint.wire.frames import HEADER, header
from rallypoint.wire.handshake import HandshakeFailed, Joining
from rallypoint.wire.messages import (
    AnyReply,
    Freed,
    Identity,
    Refusal,
    Request,
    Value,
    Welcome,
    decode_reply,
    encode,
)

DEADLINE = 20.0
"""Seconds that any single wait of a test may take: a bound for a busy machine, never used up."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class In1970(Clock):
    """A clock by which it is 1970: the revisions of a server that has it begin at 0."""

    def wall(self) -> float:
        return 0.0


class Closed(Exception):
    """The server closed the connection."""


def plug(address: str) -> socket.socket:
    """A connected socket, nothing said yet."""
    where = parse(address)
    if where.path:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(DEADLINE)
        sock.connect(where.path)
        return sock
    sock = socket.create_connection((where.host, where.port), timeout=DEADLINE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def memory(data: bytes, seals: int = SEALS) -> int:
    """A memfd with these bytes."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    done = 0
    while done < len(data):
        done += os.pwrite(fd, memoryview(data)[done:], done)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


class Raw:
    """One connection and one session. Replies that were not asked for yet are in `notices`."""

    def __init__(
        self,
        address: str | socket.socket,
        secret: bytes,
        *,
        session: bytes | None = None,
        resume: bool = False,
        acked: int = 0,
        ttl: float = 30.0,
        job: str = "",
    ) -> None:
        self.session = session or os.urandom(16)
        self.sock = plug(address) if isinstance(address, str) else address
        self.notices: list[AnyReply] = []
        self.descriptors: deque[int] = deque()
        self.seq = self.acked = acked
        self._answered: set[int] = set()
        self._data = b""
        joining = Joining(
            secret,
            job,
            "test",
            session=self.session,
            nonce=os.urandom(32),
            identity=Identity("here", os.getpid()),
            ttl=ttl,
            resume=resume,
            acked=acked,
        )
        try:
            self.say(joining.start())
            while not isinstance(answer := joining.receive(self.frame()[0]), Welcome):
                self.say(answer)
        except BaseException:
            self.close()
            raise
        self.welcome = answer

    def say(self, message: bytes, body: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Send a frame."""
        data = header(len(message), len(body)) + message + body
        if fds:
            sent = self.sock.sendmsg(
                [data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            )
            data = data[sent:]
        if data:
            self.sock.sendall(data)

    def post(
        self,
        kind: type[Request],
        *fields: object,
        body: bytes = b"",
        fds: tuple[int, ...] = (),
        **named: object,
    ) -> int:
        """Send a request; its number."""
        self.seq += 1
        make: Any = kind
        self.say(encode(make(self.seq, self.acked, *fields, **named)), body, fds)
        return self.seq

    def say_begin(self, kind: type[Request], size: int, *fields: object) -> None:
        """Send a request that announces a body of this size, and nothing of the body."""
        self.seq += 1
        make: Any = kind
        message = encode(make(self.seq, self.acked, *fields))
        self.sock.sendall(header(len(message), size) + message)

    def ask(
        self,
        kind: type[Request],
        *fields: object,
        body: bytes = b"",
        fds: tuple[int, ...] = (),
        **named: object,
    ) -> Any:
        """Send a request and wait for its reply; what came with it is in `body` and
        `descriptors`.
        """
        seq = self.post(kind, *fields, body=body, fds=fds, **named)
        while (reply := self.reply()).seq != seq:
            self.notices.append(reply)
        return reply

    def reply(self) -> Any:
        """The next reply or notice."""
        message, self.body = self.frame()
        reply = decode_reply(message)
        self._answered.add(reply.seq)
        while self.acked + 1 in self._answered:
            self.acked += 1
            self._answered.remove(self.acked)
        return reply

    def frame(self) -> tuple[bytes, bytes]:
        """The next message and its body. Raises Closed at the end."""
        length, body = HEADER.unpack(self._exactly(HEADER.size))
        message = self._exactly(length)
        return message, self._exactly(body)

    def _exactly(self, count: int) -> bytes:
        parts = [self._data]
        there = len(self._data)
        while there < count:
            try:
                data, ancillary, _, _ = self.sock.recvmsg(
                    max(65536, count - there), socket.CMSG_SPACE(64)
                )
            except ConnectionError as error:
                raise Closed from error
            for _, _, raw in ancillary:
                fds = array.array("i")
                fds.frombytes(raw)
                self.descriptors.extend(fds)
            if not data:
                raise Closed
            parts.append(data)
            there += len(data)
        joined = b"".join(parts) if len(parts) > 1 else parts[0]
        self._data = joined[count:]
        return joined[:count]

    def shared(self, reply: Value) -> bytes:
        """The value that came in shared memory with this reply."""
        fd = self.descriptors.popleft()
        try:
            return os.pread(fd, reply.shared, 0)
        finally:
            os.close(fd)

    def freed(self) -> list[int]:
        """The segments reported so far."""
        return [
            number
            for notice in self.notices
            if isinstance(notice, Freed)
            for number in notice.numbers
        ]

    def close(self) -> None:
        self.sock.close()
        while self.descriptors:
            os.close(self.descriptors.popleft())

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def refused(address: str, secret: bytes, **options: Any) -> Refusal:
    """The refusal with which a connection ends."""
    with pytest.raises(HandshakeFailed) as caught:
        Raw(address, secret, **options).close()
    assert caught.value.refusal is not None
    return caught.value.refusal
