"""What the launcher says of its own, beside the ranks' words."""

from __future__ import annotations

import io
import sys

import pytest

from rallypoint.launcher import account


class Writes(io.StringIO):
    """A stream that remembers what it was given at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[str] = []

    def write(self, text: str) -> int:
        self.given.append(text)
        return len(text)


def test_a_line_is_written_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its newline came by itself, and the report in JSON got in between: a program could not read it."""
    stream = Writes()
    monkeypatch.setattr(sys, "stderr", stream)
    account._say_before_the_pump("rallypoint: cannot write report.json")
    assert stream.given == ["rallypoint: cannot write report.json\n"]
    monkeypatch.setattr(sys, "stderr", None)
    account._say_before_the_pump("nobody hears it")
