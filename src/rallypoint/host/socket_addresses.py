"""Addresses as sockets take them, and as people write them."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterable

Place = tuple[socket.AddressFamily, tuple[object, ...]]
"""A family, and an address as its sockets take it."""


def described(family: socket.AddressFamily, sockaddr: tuple[object, ...]) -> str:
    """`127.0.0.1:29500`, `[::1]:29500`, the path of a Unix socket."""
    host, *port = map(str, sockaddr)
    return host if family == socket.AF_UNIX else address_of(host, int(port[0]))


def address_of(host: str, port: int) -> str:
    """`127.0.0.1:29500`, `[::1]:29500`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def by_turns(found: list[Place]) -> list[Place]:
    """IPv6 and IPv4 by turns, the resolver's first choice first (RFC 8305)."""
    first = [entry for entry in found if entry[0] == found[0][0]]
    others = [entry for entry in found if entry not in first]
    pairs = itertools.zip_longest(first, others)
    return [entry for pair in pairs for entry in pair if entry is not None]


def numeric(host: str, port: int) -> list[Place]:
    """Return the address itself, when `host` is one; nothing for a name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except (OSError, ValueError):
            continue
        return [(family, (host, port) if family == socket.AF_INET else (host, port, 0, 0))]
    return []


def places_of(host: str, timeout: float) -> list[Place]:
    """Return the addresses of a name, or `host` itself when it is one; [] when there is none, or the
    resolver gives no answer in `timeout` seconds."""
    if found := numeric(host, 0):
        return found
    from rallypoint.host import resolver

    return [
        place
        for ip in resolver.ask([host], timeout=timeout)[host].found
        for place in numeric(ip, 0)
    ]


def is_own(places: Iterable[Place]) -> bool:
    """Tell whether this machine has one of these addresses: only its own may be bound."""
    for family, sockaddr in places:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind((sockaddr[0], 0))
            return True
    return False
