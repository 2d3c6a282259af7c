"""A finding of the doctor: one line about the machine, as data."""

from __future__ import annotations

from functools import partial
from typing import Literal

import msgspec

from rallypoint.diagnosis.report import Help, Report

Mark = Literal["ok", "unknown", "note", "fault"]
"""Verdict of a finding. `ok`: as it should be. `unknown`: it could not be looked at, which is not a
fault of the machine. `note`: a job may run into it. `fault`: it is broken, or breaks most jobs."""


class Finding(msgspec.Struct, frozen=True):
    """One line of the doctor."""

    mark: Mark
    fact: str  # complete when it is the only line in a chat message
    code: str = ""  # of the page that explains it; "" when there is nothing to explain
    why: tuple[str, ...] = ()  # evidence, a line each
    help: tuple[Help, ...] = ()
    reports: tuple[Report, ...] = ()  # of the trial job that failed, the first cause first
    check: str = ""  # name of the check; filled in by the doctor where a check has one name only


def _problem(
    mark: Mark,
    code: str,
    fact: str,
    *help: tuple[str, str],
    why: tuple[str, ...] = (),
    check: str = "",
) -> Finding:
    """Make a finding. `help`: (sentence, line to type or "") pairs."""
    return Finding(mark, fact, code, why, tuple(Help(*pair) for pair in help), check=check)


def ok(fact: str, check: str = "") -> Finding:
    return Finding("ok", fact, check=check)


def unknown(fact: str, check: str = "") -> Finding:
    """`fact` says what could not be read, and why not."""
    return Finding("unknown", fact, check=check)


note = partial(_problem, "note")
fault = partial(_problem, "fault")
