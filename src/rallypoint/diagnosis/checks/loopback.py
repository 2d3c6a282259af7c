"""The loopback: ranks of one machine meet there."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

from rallypoint.diagnosis.checks.finding import Finding, fault, ok

PATIENCE = 1.0
"""Seconds for a packet from this machine to itself, which takes microseconds."""

HELLO = b"rallypoint doctor"


class Facts(NamedTuple):
    """What came of talking to oneself at 127.0.0.1."""

    step: str = ""  # what failed: "bind", "connect", "talk"; "" when nothing did
    problem: str = ""  # the system's words
    up: bool | None = None  # whether the interface is switched on; None: the kernel may not be asked


def check() -> tuple[Finding, ...]:
    return judge(look())


def look() -> Facts:
    step = "bind"
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(PATIENCE)
            step = "connect"
            with socket.create_connection(listener.getsockname(), PATIENCE) as near:
                far, _ = listener.accept()
                with far:
                    step = "talk"
                    far.settimeout(PATIENCE)
                    near.sendall(HELLO)
                    if far.recv(len(HELLO)) != HELLO:  # one segment: it comes whole or not at all
                        return Facts(step, "other bytes came than were sent", _is_up())
    except OSError as error:
        return Facts(step, os.strerror(error.errno) if error.errno else f"no answer within {PATIENCE:g} s", _is_up())
    return Facts(up=True)


def _is_up() -> bool | None:
    from rallypoint.host.interfaces import interfaces

    try:
        return any(one.up for one in interfaces() if one.kind == "loopback")
    except OSError:
        return None


def judge(facts: Facts) -> tuple[Finding, ...]:
    if not facts.step:
        return (ok("127.0.0.1 can be bound and connected to"),)
    does = {
        "bind": "nobody can listen on 127.0.0.1",
        "connect": "nobody can connect to 127.0.0.1",
        "talk": "what is sent to 127.0.0.1 is lost",
    }
    fact = f"{does[facts.step]}: {facts.problem}"
    if facts.up is False:
        return (fault("loopback-down", f"{fact}; the interface lo is switched off", ("switch it on, as root", "ip link set lo up")),)
    state = () if facts.up is None else ("the interface lo is switched on",)
    return (
        fault(
            "loopback-down",
            fact,
            ("see the interface, and what the firewall does with it", "ip address show dev lo && sudo nft list ruleset"),
            why=state,
        ),
    )
