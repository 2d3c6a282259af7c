"""The network interfaces of this machine and their addresses, as the kernel tells them (rtnetlink(7)).

Asked over a netlink socket: /sys shows the interfaces of the network namespace in which it was mounted, which in a container may be
another one, and it does not know addresses. Takes about a millisecond, needs no privilege, and starts no process.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal

Kind = Literal["loopback", "ethernet", "wireless", "infiniband", "bridge", "container", "tunnel", "virtual"]
"""What an interface is for. "container": one end of a pair that leads into a container, or out of this
one; "tunnel": a VPN or another tunnel; "virtual": made by software, and none of the others."""

Scope = Literal["global", "link", "host"]
"""How far an address means the same: everywhere that is routed, on one link (`fe80::`, `169.254.`), on this machine (`127.`, `::1`)."""

ANSWER_TIMEOUT = 1.0
"""Seconds for the kernel's whole answer, which takes a millisecond: it comes from memory, and what is not there by then does not come."""

_ANSWER_BYTES = 1 << 18  # more than the kernel puts into one message (32 KiB), so that none is cut off

# include/uapi/linux/{rtnetlink,if_link,if_addr,if,if_arp}.h
_NEWLINK, _GETLINK, _NEWADDR, _GETADDR, _DONE, _ERROR = 16, 18, 20, 22, 3, 2
_REQUEST_DUMP = 0x1 | 0x300  # NLM_F_REQUEST | NLM_F_DUMP
_LINK_NAME, _LINK_MTU, _LINK_INFO, _LINK_INFO_KIND = 3, 4, 18, 1
_ADDR_ADDRESS, _ADDR_LOCAL, _ADDR_FLAGS = 1, 2, 8
_UP, _RUNNING = 0x1, 0x40
_LOOPBACK_TYPE, _INFINIBAND_TYPE, _PPP_TYPE = 772, 32, 512
_TENTATIVE, _FAILED_DAD, _OPTIMISTIC = 0x40, 0x08, 0x04
_HEADER, _LINK, _ADDR, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BxHiII"), struct.Struct("=BBBBI"), struct.Struct("=HH")

_KINDS: dict[str, Kind] = {
    "bridge": "bridge", "openvswitch": "bridge", "veth": "container", "ipvlan": "container", "macvlan": "container",
    "tun": "tunnel", "wireguard": "tunnel", "ppp": "tunnel", "ipip": "tunnel", "gre": "tunnel", "gretap": "tunnel", "sit": "tunnel",
    "ip6tnl": "tunnel", "vti": "tunnel", "vxlan": "tunnel", "geneve": "tunnel", "xfrm": "tunnel", "ipoib": "infiniband",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class InterfaceAddress:
    """One address of an interface."""

    ip: str
    prefix: int  # bits of the network: 24 for 10.0.0.5/24
    scope: Scope
    ready: bool = True  # False: IPv6 that the kernel still checks for a double on the link, or found one: it cannot be bound

    @property
    def version(self) -> int:
        """4 or 6."""
        return 6 if ":" in self.ip else 4


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface."""

    name: str
    index: int
    kind: Kind
    up: bool  # switched on
    running: bool  # and there is something at the other end: a cable, a link
    mtu: int  # bytes of the largest packet
    addresses: tuple[InterfaceAddress, ...] = ()

    def __str__(self) -> str:
        state = "" if self.up and self.running else ", down" if not self.up else ", no link"
        listed = " ".join(f"{address.ip}/{address.prefix}" for address in self.addresses) or "no address"
        return f"{self.name} ({self.kind}{state}): {listed}"


def interfaces() -> tuple[Interface, ...]:
    """Every interface of this network namespace, in the kernel's order. `OSError` where it may not be asked (a sandbox)."""
    links = [_link(body) for body in _dump(_GETLINK, _NEWLINK)]
    addresses: dict[int, list[InterfaceAddress]] = {}
    for body in _dump(_GETADDR, _NEWADDR):
        index, address = _address(body)
        if address is not None:
            addresses.setdefault(index, []).append(address)
    return tuple(
        Interface(name, index, kind, bool(flags & _UP), bool(flags & _RUNNING), mtu, tuple(addresses.get(index, ())))
        for name, index, kind, flags, mtu in links
    )


def _dump(request: int, answer: int) -> Iterator[memoryview]:
    """The bodies of all messages of kind `answer` to a dump request."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as sock:
        sock.settimeout(ANSWER_TIMEOUT)
        sock.sendto(_HEADER.pack(_HEADER.size + _LINK.size, request, _REQUEST_DUMP, 1, 0) + bytes(_LINK.size), (0, 0))
        while True:
            data = memoryview(sock.recv(_ANSWER_BYTES))
            if not data:
                raise OSError("the kernel ended its answer early")
            while len(data) >= _HEADER.size:
                length, kind, _, _, _ = _HEADER.unpack_from(data)
                if kind == _DONE or length < _HEADER.size:
                    return
                if kind == _ERROR:
                    (number,) = struct.unpack_from("=i", data, _HEADER.size)
                    raise OSError(-number, os.strerror(-number))
                if kind == answer:
                    yield data[_HEADER.size : length]
                data = data[_aligned(length) :]


def _link(body: memoryview) -> tuple[str, int, Kind, int, int]:
    """Name, index, kind, flags, MTU."""
    _, hardware, index, flags, _ = _LINK.unpack_from(body)
    found = dict(_attributes(body[_LINK.size :]))
    name = _text(found.get(_LINK_NAME, b""))
    (mtu,) = struct.unpack_from("=I", found.get(_LINK_MTU, bytes(4)))
    made_of = _text(dict(_attributes(memoryview(found.get(_LINK_INFO, b"")))).get(_LINK_INFO_KIND, b""))
    return name, index, _kind(name, hardware, made_of), flags, mtu


def _kind(name: str, hardware: int, made_of: str) -> Kind:
    """By what the kernel says it is; a real card has no kind, and is told by its hardware type."""
    if hardware == _LOOPBACK_TYPE:
        return "loopback"
    if made_of:
        return _KINDS.get(made_of, "virtual")
    if hardware == _INFINIBAND_TYPE:
        return "infiniband"
    if hardware == _PPP_TYPE:
        return "tunnel"
    return "wireless" if name.startswith("wl") else "ethernet"  # udev's names for wireless cards (systemd.net-naming-scheme(7))


def _address(body: memoryview) -> tuple[int, InterfaceAddress | None]:
    """The interface's index and the address; None for another protocol's."""
    family, prefix, flags, _, index = _ADDR.unpack_from(body)
    found = dict(_attributes(body[_ADDR.size :]))
    raw = found.get(_ADDR_LOCAL) or found.get(_ADDR_ADDRESS) or b""  # of a tunnel the second is the other end
    if family not in (socket.AF_INET, socket.AF_INET6) or len(raw) not in (4, 16):
        return index, None
    if _ADDR_FLAGS in found:
        (flags,) = struct.unpack_from("=I", found[_ADDR_FLAGS])
    ip = socket.inet_ntop(family, raw)
    ready = not flags & _FAILED_DAD and (not flags & _TENTATIVE or bool(flags & _OPTIMISTIC))
    return index, InterfaceAddress(ip, prefix, scope(ip), ready)


def scope(ip: str) -> Scope:
    """How far a numeric address means the same. An IPv6 zone (`%eth0`) does not count."""
    address = ip_address(ip.partition("%")[0])
    return "host" if address.is_loopback else "link" if address.is_link_local else "global"


def _attributes(data: memoryview) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        if length < _ATTRIBUTE.size:
            return
        yield kind & 0x3FFF, bytes(data[_ATTRIBUTE.size : length])  # without the flags NLA_F_NESTED and NLA_F_NET_BYTEORDER
        data = data[_aligned(length) :]


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("utf-8", "replace")
