"""Network interfaces of this machine and their addresses.

psutil lists them. /sys is not asked: it shows the network namespace in which it was mounted.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import socket
import struct
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal

Kind = Literal[
    "loopback", "ethernet", "wireless", "infiniband", "bridge", "container", "tunnel", "virtual"
]
"""Purpose of an interface. "container": one end of a pair that leads into a container, or out of
this one; "tunnel": a VPN or another tunnel; "virtual": made by software, and none of the others."""

Scope = Literal["global", "link", "host"]
"""Reach of an address: everywhere that is routed, on one link (`fe80::`, `169.254.`), on this
machine."""

_SIOCETHTOOL, _GDRVINFO, _DRVINFO_BYTES = 0x8946, 3, 196  # include/uapi/linux/{sockios,ethtool}.h

_KINDS: dict[str, Kind] = {
    "bridge": "bridge", "openvswitch": "bridge", "veth": "container", "ipvlan": "container", "macvlan": "container",
    "tun": "tunnel", "wireguard": "tunnel", "vxlan": "tunnel", "geneve": "tunnel", "ip_gre": "tunnel", "dummy": "virtual",
    "bonding": "virtual", "team": "virtual", "ifb": "virtual", "802.1Q VLAN Support": "virtual",
}  # fmt: skip
"""Purpose by driver; the driver of a real card is none of these."""


@dataclass(frozen=True, slots=True)
class InterfaceAddress:
    """One address of an interface."""

    ip: str
    scope: Scope

    @property
    def version(self) -> int:
        """4 or 6."""
        return 6 if ":" in self.ip else 4


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface."""

    name: str
    kind: Kind
    up: bool  # switched on
    running: bool  # and there is something at the other end: a cable, a link
    addresses: tuple[InterfaceAddress, ...] = ()


def interfaces() -> tuple[Interface, ...]:
    """List every interface of this network namespace. `OSError` where it may not be asked (a
    sandbox)."""
    import psutil  # here: it takes 20 ms, and most commands need no interface

    found = []
    listed = psutil.net_if_addrs()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for name, stats in psutil.net_if_stats().items():
            flags = stats.flags.split(",")
            kind = (
                "loopback"
                if "loopback" in flags
                else _kind(name, _driver(sock, name), "pointopoint" in flags)
            )
            ips = [
                one.address.partition("%")[0]
                for one in listed.get(name, ())
                if one.family in (socket.AF_INET, socket.AF_INET6)
            ]
            addresses = tuple(InterfaceAddress(ip, scope(ip)) for ip in ips)
            found.append(Interface(name, kind, "up" in flags, stats.isup, addresses))
    return tuple(found)


def _driver(sock: socket.socket, name: str) -> str:
    """Return the name of an interface's driver, as ethtool does; "" when it has none."""
    told = ctypes.create_string_buffer(struct.pack("=I", _GDRVINFO), _DRVINFO_BYTES)
    with contextlib.suppress(OSError):
        fcntl.ioctl(
            sock, _SIOCETHTOOL, struct.pack("16sP16x", name.encode()[:15], ctypes.addressof(told))
        )
        return told.raw[4:36].rstrip(b"\0").decode("ascii", "replace")
    return ""


def _kind(name: str, driver: str, point_to_point: bool) -> Kind:
    if driver in _KINDS:
        return _KINDS[driver]
    if "ipoib" in driver:
        return "infiniband"
    if point_to_point:
        return "tunnel"
    return (
        "wireless" if name.startswith("wl") else "ethernet"
    )  # udev's names for wireless cards (systemd.net-naming-scheme(7))


def scope(ip: str) -> Scope:
    """Return how far a numeric address means the same. An IPv6 zone (`%eth0`) does not count."""
    address = ip_address(ip.partition("%")[0])
    return "host" if address.is_loopback else "link" if address.is_link_local else "global"
