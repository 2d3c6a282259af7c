"""What the kernel tells of connections whose other side does not read."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from contextlib import closing

import pytest

from rallypoint.host import socket_diag

SOON = 20.0
"""Seconds in which the kernel has handed over, or counted, a few bytes."""


def lying(port: int, expected: dict[int, int]) -> dict[int, int]:
    """What lies in connections to `port` once it is what was expected, or at the end of the test's
    patience.
    """
    until = time.monotonic() + SOON
    while (seen := socket_diag.unanswered(port)) != expected and time.monotonic() < until:
        time.sleep(0.001)
    return seen


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_bytes_that_nobody_reads(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip("this machine has no IPv6")
    port = listener.getsockname()[1]
    with (
        closing(listener),
        socket.create_connection((host, port)) as asks,
        socket.create_connection((host, port)) as idle,
    ):
        inode = os.fstat(asks.fileno()).st_ino
        assert lying(port, {}) == {}
        asks.sendall(b"0123456789")
        assert lying(port, {inode: 10}) == {inode: 10}, "not even accepted"
        answers, _ = listener.accept()
        with closing(answers):
            assert lying(port, {inode: 10}) == {inode: 10}
            answers.recv(4)
            assert lying(port, {inode: 6}) == {inode: 6}
            answers.recv(6)
            answers.sendall(b"an answer that is not read is not the service's affair")
            assert lying(port, {}) == {}
            assert idle.fileno() >= 0


def test_what_does_not_fit_waits_on_this_side() -> None:
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as listener,
        closing(socket.create_connection(listener.getsockname())) as asks,
    ):
        asks.setblocking(False)
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                sent += asks.send(bytes(1 << 16))
        inode = os.fstat(asks.fileno()).st_ino
        assert lying(listener.getsockname()[1], {inode: sent}) == {inode: sent}
