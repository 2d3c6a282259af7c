from __future__ import annotations

import signal

import pytest

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
