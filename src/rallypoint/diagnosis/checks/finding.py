"""What a check has to say, as data."""

from __future__ import annotations

from typing import Literal

import msgspec

from rallypoint.diagnosis.report import Help, Report

Mark = Literal["ok", "unknown", "note", "fault"]
"""`ok`: as it should be. `unknown`: it could not be looked at, which is no fault of the machine's. `note`: a job may run into it.
`fault`: it is broken, or most jobs will break by it."""


class Finding(msgspec.Struct, frozen=True):
    """One line of the doctor's."""

    mark: Mark
    fact: str  # complete when it is the only line in a chat message
    code: str = ""  # of the page that explains it; "" when there is nothing to explain
    why: tuple[str, ...] = ()  # what shows it, a line each
    help: tuple[Help, ...] = ()
    reports: tuple[Report, ...] = ()  # of the trial job that failed, its causes, the first one first
    check: str = ""  # whose line it is; filled in by the doctor where a check has one name only


def ok(fact: str, check: str = "") -> Finding:
    return Finding("ok", fact, check=check)


def unknown(fact: str, check: str = "") -> Finding:
    """`fact` says what could not be read, and why not."""
    return Finding("unknown", fact, check=check)


def note(code: str, fact: str, *help: tuple[str, str], why: tuple[str, ...] = ()) -> Finding:
    """`help`: (sentence, line to type or "") pairs."""
    return Finding("note", fact, code, why, tuple(Help(*one) for one in help))


def fault(code: str, fact: str, *help: tuple[str, str], why: tuple[str, ...] = ()) -> Finding:
    return Finding("fault", fact, code, why, tuple(Help(*one) for one in help))


def size(number: int) -> str:
    """`64.0 MiB`, `1.5 GiB`: bytes for people."""
    for unit, bytes_of in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= bytes_of:
            return f"{number / bytes_of:.1f} {unit}"
    return f"{number} bytes"
