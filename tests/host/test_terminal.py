"""How wide what is written may be."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios

import pytest

from rallypoint.host import terminal


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("40", 40),
        ("250", 250),
        ("0", None),
        ("x", None),
        ("\u00b2", None),
        ("9" * 50, 100),
        ("", None),
    ],
)
def test_the_variable_comes_first(
    given: str, found: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", given)
    assert terminal.columns(-1) == found


def test_the_terminals_own_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 57, 0, 0))
        assert terminal.columns(theirs) == 57
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
        assert terminal.columns(theirs) is None  # one that does not know
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize(("found", "columns"), [(None, 92), (1, 20), (57, 57), (250, 100)])
def test_prose(found: int | None, columns: int) -> None:
    assert terminal.prose_columns(found) == columns


def test_who_has_the_terminal() -> None:
    """A rank of a job in the background took what was typed to the shell: it is in a session of its
    own.
    """
    pid, master = pty.fork()
    if pid == 0:
        status = 2
        try:
            child = os.fork()
            if child == 0:
                os.setpgid(0, 0)
                os._exit(terminal.is_in_background(0))
            in_background = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            status = int(in_background != 1 or terminal.is_in_background(0))
        finally:
            os._exit(status)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        os.close(master)
