"""Addresses of stores: `tcp://host:port`, `tcp://[::1]:port`, the same with `tls`, `unix:///path`."""

from __future__ import annotations

import os
from typing import NamedTuple

from rallypoint.errors import UsageError

FORWARDED = "RALLYPOINT_FORWARDED"
"""The variable that names addresses which forward to a store on purpose."""


class Address(NamedTuple):
    """A parsed address; `path` is set for a Unix socket, `host` and `port` otherwise."""

    host: str = ""
    port: int = 0
    path: str = ""
    tls: bool = False

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'tcp'}://{host}:{self.port}"


def is_forwarded(address: Address) -> bool:
    """Tell whether connections to this address are passed on, and the user has said that this is
    meant: of the place, with TLS or without."""
    place = str(address._replace(tls=False))
    return any(text.replace("tls://", "tcp://", 1) == place for text in _forwarded())


def set_forwarded(address: str, forwarded: bool) -> None:
    """Say in this process's environment, which its children inherit, that connections to `address`
    are passed on; or no more.
    """
    others = [text for text in _forwarded() if text != address]
    if found := [*others, address] if forwarded else others:
        os.environ[FORWARDED] = ",".join(found)
    else:
        os.environ.pop(FORWARDED, None)


def _forwarded() -> list[str]:
    return [
        found
        for text in os.environ.get(FORWARDED, "").split(",")
        if (found := text.strip().removesuffix("/"))
    ]


def parse(text: str) -> Address:
    """Parse an address. Raises UsageError `address-malformed`, with an address that would do, for
    anything else than the forms above. Spaces around it and one slash behind it, as copying
    leaves them there, are no part of it."""
    given, text = text, text.strip()
    if bare := text.strip("\"'"):
        if bare != text:
            raise _malformed(given, "there are quotes around it", bare.strip())
        text = text.removesuffix("/")
    kind, separator, rest = text.partition("://")
    if not separator:
        kind, rest = "tcp", text
        if text.startswith("/"):
            raise _malformed(given, "there is no scheme in front of it", f"unix://{text}")
    if kind == "unix":
        if not rest.startswith("/"):
            raise _malformed(
                given, "the path of a Unix socket is absolute", f"unix:///{rest.lstrip('/')}"
            )
        return Address(path=rest)
    if kind not in ("tcp", "tls"):
        raise _malformed(given, f"{kind} is no scheme of a store", f"tcp://{rest}")
    host, colon, digits = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        if rest.endswith("]") or (not _is_ipv6(host) and _is_ipv6(rest)):
            raise _malformed(given, "there is no port", f"{kind}://[{rest.strip('[]')}]:29500")
        raise _malformed(
            given,
            "an IPv6 address stands in brackets",
            f"{kind}://[{host.strip('[]')}]:{digits if _is_port(digits) else 29500}",
        )
    if not colon or not digits.isascii() or not digits.isdigit():
        raise _malformed(given, "there is no port", f"{kind}://{host if colon else rest}:29500")
    if not _is_port(digits):
        raise _malformed(
            given, f"a port lies between 1 and 65535, not at {digits}", f"{kind}://{host}:29500"
        )
    if not host or any(letter in host for letter in "/ @?#"):
        raise _malformed(given, "there is no host name", f"{kind}://127.0.0.1:{digits}")
    if not separator:
        raise _malformed(given, "there is no scheme in front of it", f"tcp://{text}")
    return Address(host, int(digits), tls=kind == "tls")


def _is_port(digits: str) -> bool:
    return digits.isascii() and digits.isdigit() and 1 <= int(digits) <= 65535


def _is_ipv6(text: str) -> bool:
    import ipaddress  # here: only for a malformed address

    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _malformed(text: str, why: str, right: str) -> UsageError:
    return UsageError(
        "address-malformed",
        f"{text!r} is not the address of a store: {why}",
        help=(("write it so", right),),
    )
