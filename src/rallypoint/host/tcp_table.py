"""The kernel's table of TCP sockets, and the processes that have them (proc_net_tcp.txt)."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from rallypoint.host import process_status
from rallypoint.host.kernel_files import text_of
from rallypoint.host.socket_addresses import address_of

LISTENING, TIME_WAIT = 0x0A, 0x06  # include/net/tcp_states.h


class TcpSocket(NamedTuple):
    """Entry of the table."""

    host: str
    port: int
    peer: str
    state: int
    uid: int
    inode: int


def tcp_sockets(low: int = 0, high: int = 65535, *, root: str = "/") -> Iterator[TcpSocket]:
    """Yield the sockets on these ports of this network namespace, as far as the kernel tells.

    `root` is for tests.
    """
    for name in ("tcp", "tcp6"):
        lines = text_of(root, "proc/self/net", name, most=-1).splitlines()  # none: IPv6 is off
        for fields in map(str.split, lines[1:]):
            # a busy server has tens of thousands of others
            if low <= int(fields[1][-4:], 16) <= high:
                peer, state = address_of(*_decode(fields[2])), int(fields[3], 16)
                yield TcpSocket(*_decode(fields[1]), peer, state, int(fields[7]), int(fields[9]))


def owners_of(inodes: set[int]) -> dict[int, list[int]]:
    """Return the processes that have these sockets open. The first of each family that shares one
    is enough for every inode, but a forked worker and its parent are both told, if they are met
    before all inodes are found."""
    owners: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc") if inodes else ()):
        for inode in inodes & process_status.sockets(int(name)):
            owners.setdefault(inode, []).append(int(name))
        if len(owners) == len(inodes):
            break
    return owners


def _decode(text: str) -> tuple[str, int]:
    """`0100007F:733C` -> ("127.0.0.1", 29500): 32-bit words in the machine's byte order."""
    address, port = text.split(":")
    words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
    raw = struct.pack(f"={len(words)}I", *words)
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, raw), int(port, 16)
