"""Exceptions to messages and exit statuses."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.cli.error_exit import guarded
from rallypoint.errors import EnvironmentProblem

from ..python_path import python_path


def test_a_problem_of_the_machine_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise EnvironmentProblem(
            "port-in-use",
            "port 29500 is taken",
            why=("by pid 7",),
            help=(("choose another", "--master-port 0"),),
        )

    assert guarded(command) == 1
    err = capsys.readouterr().err
    assert err.startswith("error[port-in-use]: port 29500 is taken\n")
    assert "by pid 7" in err
    assert "--master-port 0" in err


def test_no_descriptor_left_is_no_fault_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise OSError(errno.EMFILE, "Too many open files", "/proc/7/stat")

    assert guarded(command) == 1
    err = capsys.readouterr().err
    assert err.startswith(
        "error[files-exhausted]: rallypoint has as many files open as it may have: [Errno 24] Too many open files:"
    )
    assert "ulimit -n 65536" in err


@pytest.mark.parametrize(
    "refusal",
    [
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable", "/usr/bin/python3"),
        RuntimeError("can't start new thread"),
    ],
)
def test_no_process_left_is_no_fault_of_ours(
    refusal: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    """What posix_spawn raises has a file name, and a thread's refusal is no OSError: both were
    shown as faults of rallypoint.
    """

    def command() -> int:
        raise refusal

    assert guarded(command) == 1
    err = capsys.readouterr().err
    assert err.startswith("error[start-failed]: this machine refuses another process or thread: ")
    assert "pids.max" in err


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES])
def test_an_interpreter_that_may_not_be_executed_is_no_fault_of_ours(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sandbox answers EPERM to clone3; the interpreter's file may have lost its permission."""

    def command() -> int:
        raise PermissionError(number, os.strerror(number), sys.executable)

    assert guarded(command) == 1
    err = capsys.readouterr().err
    assert err.startswith("error[start-failed]: this machine refuses another process or thread: ")
    assert sys.executable in err
    assert "ulimit" not in err
    assert "does not let the interpreter be executed" in err


def test_a_fault_of_ours_is_70_and_says_what_to_report(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        return len(None)  # type: ignore[arg-type]

    assert guarded(command) == 70
    err = capsys.readouterr().err
    assert err.startswith(
        "error[internal-error]: rallypoint itself failed: TypeError: object of type 'NoneType' has no len()\n"
    )
    assert f"Python {sys.version.split()[0]}, torch " in err
    assert "in command" in err  # the traceback
    assert "please report it" in err


def test_a_fault_in_showing_a_fault_is_70_too(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise ZeroDivisionError("the first fault")

    def broken() -> str:
        raise LookupError("the second fault")

    assert guarded(command, broken) == 70
    err = capsys.readouterr().err
    assert "the first fault" in err
    assert "the second fault" in err


def test_a_package_that_is_not_there_is_no_fault_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with the folder of another Python's packages: it was a traceback, and 70."""
    (tmp_path / "msgspec.py").write_text("raise ImportError('no msgspec._core')\n")
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    command = [sys.executable, "-P", "-m", "rallypoint", "run", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("cannot be imported: no msgspec._core\n")
    assert "Traceback" not in done.stderr


def test_ctrl_c_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise KeyboardInterrupt

    assert guarded(command) == 130
    assert capsys.readouterr().err == ""
