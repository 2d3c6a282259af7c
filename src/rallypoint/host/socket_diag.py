"""Bytes that the other side of a TCP connection has not read, over sock_diag(7): /proc/net does not
tell which connection of this machine they are in."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

ANSWER_TIMEOUT = 1.0
"""Seconds for the kernel's whole answer, which takes a millisecond: it comes from memory, and what
is not there by then does not come."""

# more than the kernel puts into one message (32 KiB), so that none is cut off
_ANSWER_BYTES = 1 << 18

# include/uapi/linux/{sock_diag,inet_diag,netlink}.h, include/net/tcp_states.h
_NETLINK_SOCK_DIAG, _BY_FAMILY, _DONE, _ERROR = 4, 20, 3, 2
_REQUEST_DUMP = 0x1 | 0x300  # NLM_F_REQUEST | NLM_F_DUMP
_ESTABLISHED = 1 << 1
_HEADER = struct.Struct("=IHHII")
# family, protocol, extensions, states, and a socket id that is not looked at
_ASK = struct.Struct("=BBBxI48x")
# port, the other side's, bytes received and not read, sent and not acknowledged, inode
_QUEUES = struct.Struct("=4x2s2s16x16x12x4xII4xI")


def unanswered(port: int) -> dict[int, int]:
    """Return the connections from here to a service on `port`, wherever it runs, that hold bytes
    for it: by the inode of this side's socket, how many.

    Bytes that the service, on this machine, has not read, or that no machine has acknowledged. For
    an instant that is so of every request; if the service is stopped, or its packets are dropped,
    it stays so.
    """
    wanted = port.to_bytes(2, "big")
    # the port of this side, bytes not acknowledged, inode
    asking: list[tuple[bytes, int, int]] = []
    unread: dict[bytes, int] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        # no such netlink family in a sandbox, or no IPv6
        with contextlib.suppress(OSError):
            for body in _established(family):
                here, there, received, sent, inode = _QUEUES.unpack_from(body)
                if there == wanted:
                    asking.append((here, sent, inode))
                if here == wanted and received:
                    unread[there] = received
    return {
        inode: sent + unread.get(here, 0)
        for here, sent, inode in asking
        if inode and (sent or here in unread)
    }


def _established(family: socket.AddressFamily) -> Iterator[memoryview]:
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG
    ) as sock:
        sock.settimeout(ANSWER_TIMEOUT)
        ask = _ASK.pack(family, socket.IPPROTO_TCP, 0, _ESTABLISHED)
        header = _HEADER.pack(_HEADER.size + len(ask), _BY_FAMILY, _REQUEST_DUMP, 1, 0)
        sock.sendto(header + ask, (0, 0))
        while data := memoryview(sock.recv(_ANSWER_BYTES)):
            while len(data) >= _HEADER.size:
                length, kind, _, _, _ = _HEADER.unpack_from(data)
                if kind in (_DONE, _ERROR) or length < _HEADER.size:
                    return
                yield data[_HEADER.size : length]
                data = data[(length + 3) & ~3 :]
