"""What a Python that was built against an old C library lacks, asked of the kernel."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys

import pytest

from rallypoint.host import system_calls


def test_the_numbers_are_those_that_this_python_knows() -> None:
    names = ["MFD_CLOEXEC", "MFD_ALLOW_SEALING", "P_PIDFD"]
    assert [getattr(system_calls, name) for name in names] == [getattr(os, name) for name in names]
    names = [
        "F_ADD_SEALS",
        "F_GET_SEALS",
        "F_SEAL_SEAL",
        "F_SEAL_SHRINK",
        "F_SEAL_GROW",
        "F_SEAL_WRITE",
    ]
    assert [getattr(system_calls, name) for name in names] == [
        getattr(fcntl, name) for name in names
    ]


def test_a_process_is_watched_signalled_and_told_from_its_successors() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        pidfd = system_calls._pidfd_open(child.pid)
        try:
            assert not os.get_inheritable(pidfd)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            assert not poll.poll(0)
            system_calls._pidfd_send_signal(pidfd, signal.SIGKILL)
            assert poll.poll(30_000)
            assert child.wait(30) == -signal.SIGKILL
            with pytest.raises(ProcessLookupError):
                system_calls._pidfd_send_signal(pidfd, 0)
        finally:
            os.close(pidfd)
    with pytest.raises(ProcessLookupError):
        system_calls._pidfd_open(2**22 + 1)  # beyond the largest pid


def test_a_file_in_memory() -> None:
    fd = system_calls._memfd_create(
        "rallypoint-test", system_calls.MFD_CLOEXEC | system_calls.MFD_ALLOW_SEALING
    )
    try:
        assert not os.get_inheritable(fd)
        assert os.readlink(f"/proc/self/fd/{fd}") == "/memfd:rallypoint-test (deleted)"
        os.write(fd, b"here")
        fcntl.fcntl(fd, system_calls.F_ADD_SEALS, system_calls.F_SEAL_WRITE)
        with pytest.raises(PermissionError):
            os.write(fd, b"more")
        assert fcntl.fcntl(fd, system_calls.F_GET_SEALS) == system_calls.F_SEAL_WRITE
    finally:
        os.close(fd)


def test_a_machine_whose_memfd_number_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start reports what is lacking by OSError; another error was "a fault in rallypoint"."""
    monkeypatch.setattr(system_calls, "_MEMFD_CREATE", {})
    with pytest.raises(OSError, match="not implemented"):
        system_calls._memfd_create("rallypoint-test")
