"""Names and addresses by which a machine reaches itself alone."""

from __future__ import annotations

LOOPBACK = {
    "127.0.0.1": "127.0.0.1",
    "localhost": "127.0.0.1",
    "::1": "::1",
    "0:0:0:0:0:0:0:1": "::1",
    "ip6-localhost": "::1",
}
"""Addresses that these stand for on every machine."""


def is_loopback(host: str) -> bool:
    """Tell whether a name or address is one of them, as far as it can be told without asking
    anybody."""
    return host.strip("[]").lower() in LOOPBACK
