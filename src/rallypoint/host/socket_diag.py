"""Facts about TCP sockets that the kernel tells over sock_diag(7), and /proc/net does not.

Which are bound and do not listen (since Linux 6.8; they keep a port from everybody else), and in
which control group a socket was made: without root that is all that can be known of another user's
process, and it names the container, the service or the Slurm job.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from rallypoint.clock import Clock

ANSWER_TIMEOUT = 1.0
"""Seconds for the kernel's whole answer, which takes a millisecond: it comes from memory, and what
is not there by then does not come."""

GROUPS_TIMEOUT = 0.05
"""Seconds for looking through the folders of all control groups for a number: who has a port is to
be told within a tenth of one. A machine with ten thousand groups may need more, and then this is
not told."""

_ANSWER_BYTES = (
    1 << 18
)  # more than the kernel puts into one message (32 KiB), so that none is cut off

# include/uapi/linux/{sock_diag,inet_diag,netlink}.h, include/net/tcp_states.h
_NETLINK_SOCK_DIAG, _BY_FAMILY, _DONE, _ERROR = 4, 20, 3, 2
_REQUEST_DUMP = 0x1 | 0x300  # NLM_F_REQUEST | NLM_F_DUMP
_ESTABLISHED, _LISTENING, _BOUND_INACTIVE = 1 << 1, 1 << 10, 1 << 13
_CGROUP_ID = 21
_HEADER = struct.Struct("=IHHII")
_ASK = struct.Struct(
    "=BBBxI48x"
)  # family, protocol, extensions, states, and a socket id that is not looked at
_TOLD = struct.Struct(
    "=BBBB2s2x16s16x12x12xII"
)  # family, state, timer, tries, port (big-endian), address, ..., uid, inode
_QUEUES = struct.Struct(
    "=4x2s2s16x16x12x4xII4xI"
)  # port, the other side's, bytes received and not read, sent and not acknowledged, inode
_ATTRIBUTE, _NUMBER = struct.Struct("=HH"), struct.Struct("=Q")


class BoundSocket(NamedTuple):
    """One that is bound and does not listen."""

    host: str
    port: int
    uid: int
    inode: int


def bound_sockets() -> Iterator[BoundSocket]:
    """List those of this network namespace, IPv4 and IPv6; none where the kernel does not tell."""
    for family, body in _told(_BOUND_INACTIVE):
        _, _, _, _, port, raw, uid, inode = _TOLD.unpack_from(
            body
        )  # their state is told as TCP_CLOSE: all that comes was asked for
        host = socket.inet_ntop(family, raw[:4] if family == socket.AF_INET else raw)
        yield BoundSocket(host, int.from_bytes(port, "big"), uid, inode)


def unanswered(port: int) -> dict[int, int]:
    """Connections from here to a service on `port`, wherever it runs, that hold bytes for it: the
    inode of this side's socket, how many.

    Bytes that the service, on this machine, has not read, or that no machine has acknowledged. For
    an instant that is so of every request; of one whose service is stopped, or whose packets are
    dropped, it stays so.
    """
    wanted = port.to_bytes(2, "big")
    asking: list[
        tuple[bytes, int, int]
    ] = []  # the port of this side, bytes not acknowledged, inode
    unread: dict[bytes, int] = {}
    for _, body in _told(_ESTABLISHED):
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


def control_groups(inodes: set[int]) -> dict[int, str]:
    """Return the control groups (`/system.slice/docker-3f2a.scope`) in which these sockets were
    made; those that can be told.

    Only of sockets that listen or are merely bound: of connections a busy server has too many to go
    through.
    """
    numbers: dict[int, int] = {}
    for _, body in _told(_LISTENING | _BOUND_INACTIVE):
        inode = _TOLD.unpack_from(body)[-1]
        if inode in inodes and (number := dict(_numbers(body[_TOLD.size :])).get(_CGROUP_ID)):
            numbers[inode] = number
    paths = _paths(set(numbers.values())) if numbers else {}
    return {inode: paths[number] for inode, number in numbers.items() if number in paths}


def _paths(wanted: set[int]) -> dict[int, str]:
    """Return the folders of these control groups below where version 2 is mounted; a group's number
    is its folder's inode."""
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
        if os.path.exists(os.path.join(root, "cgroup.controllers")):
            break
    else:
        return {}
    found: dict[int, str] = {}
    waiting, clock = [root], Clock()
    while waiting and len(found) < len(wanted) and clock.elapsed() < GROUPS_TIMEOUT:
        folder = waiting.pop()
        try:
            entries = [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
        except OSError:  # it was removed meanwhile
            continue
        waiting += [entry.path for entry in entries]
        found |= {
            entry.inode(): entry.path.removeprefix(root)
            for entry in entries
            if entry.inode() in wanted
        }
    return found


def _told(states: int) -> Iterator[tuple[socket.AddressFamily, memoryview]]:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            yield from ((family, body) for body in _dump(family, states))
        except (
            OSError
        ):  # no such netlink family in a sandbox, or no IPv6: who asks has /proc/net, too
            continue


def _dump(family: socket.AddressFamily, states: int) -> Iterator[memoryview]:
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG
    ) as sock:
        sock.settimeout(ANSWER_TIMEOUT)
        ask = _ASK.pack(family, socket.IPPROTO_TCP, 0, states)
        sock.sendto(
            _HEADER.pack(_HEADER.size + len(ask), _BY_FAMILY, _REQUEST_DUMP, 1, 0) + ask, (0, 0)
        )
        while True:
            data = memoryview(sock.recv(_ANSWER_BYTES))
            if not data:
                return
            while len(data) >= _HEADER.size:
                length, kind, _, _, _ = _HEADER.unpack_from(data)
                if kind in (_DONE, _ERROR) or length < _HEADER.size:
                    return
                yield data[_HEADER.size : length]
                data = data[(length + 3) & ~3 :]


def _numbers(data: memoryview) -> Iterator[tuple[int, int]]:
    """Yield the attributes that hold a number of 64 bits."""
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        if length < _ATTRIBUTE.size:
            return
        if length == _ATTRIBUTE.size + _NUMBER.size:
            yield kind & 0x3FFF, _NUMBER.unpack_from(data, _ATTRIBUTE.size)[0]
        data = data[(length + 3) & ~3 :]
