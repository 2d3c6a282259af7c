from __future__ import annotations

import signal

import pytest

from rallypoint.diagnosis.report import Report
from rallypoint.launcher import exits


@pytest.mark.parametrize(
    ("code", "number", "words"),
    [
        (0, 0, "exit code 0"),
        (3, 0, "exit code 3"),
        (0, signal.SIGKILL, "SIGKILL"),
        (0, signal.SIGSEGV, "SIGSEGV"),
        (0, signal.SIGRTMIN + 5, "SIGRTMIN+5"),
        (0, signal.SIGRTMIN, "SIGRTMIN"),
        (0, 99, "signal 99"),
    ],
)
def test_describe(code: int, number: int, words: str) -> None:
    assert exits.describe(code, number) == words


@pytest.mark.parametrize(
    ("code", "number", "status"),
    [
        (1, 0, 1),  # raised
        (3, 0, 3),  # its own code
        (2, 0, 2),
        (75, 0, 75),
        (0, 0, 1),  # at fault though it said 0
        (0, signal.SIGKILL, 137),
        (0, signal.SIGSEGV, 139),
    ],
)
def test_status_of_the_rank_at_fault(code: int, number: int, status: int) -> None:
    assert exits.of_rank(code, number) == status


def test_status_of_a_run() -> None:
    first, second = (
        Report(code="rank-exited", headline="", exit_status=3),
        Report(code="rank-raised", headline="", exit_status=1),
    )
    assert exits.status() == 0
    assert exits.status(reports=[first, second]) == 3
    assert exits.status(interrupted_by="SIGINT") == 130
    assert exits.status(interrupted_by="SIGTERM") == 143
    assert exits.status(interrupted_by="SIGHUP") == 129
    assert exits.status(reports=[first], interrupted_by="SIGTERM") == 3


def test_our_own_statuses() -> None:
    assert (exits.OK, exits.RAISED, exits.USAGE, exits.INTERNAL, exits.TRY_AGAIN) == (
        0,
        1,
        2,
        70,
        75,
    )


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (137, "ended by SIGKILL"),
        (139, "ended by SIGSEGV"),
        (127, "not found"),
        (126, "could not be executed"),
        (3, ""),
        (255, ""),
    ],
)
def test_meaning_of_an_exit_code(code: int, words: str) -> None:
    assert exits.meaning(code).endswith(words)
    assert bool(exits.meaning(code)) == bool(words)
