"""What tests with real threads and processes share: results that are handed over, waits with a
deadline, programs of their own.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rallypoint import Store
from rallypoint.clock import Clock
from rallypoint.store.address import FORWARDED

from ..warm_python import WarmPopen

DEADLINE = 180.0
"""Seconds within which what is to come comes, on a busy machine."""


class Thread(threading.Thread):
    """Runs at once, and hands over what its function returned or raised."""

    def __init__(self, does: Callable[..., Any], *args: Any) -> None:
        super().__init__(daemon=True)
        self._does = does
        self._given = args
        self._error: BaseException | None = None
        self._result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._does(*self._given)
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join(DEADLINE)
        assert not self.is_alive(), "it still runs"
        if self._error is not None:
            raise self._error
        return self._result


def until(what: Callable[[], object], seconds: float = DEADLINE) -> None:
    """Wait for what can only be looked at."""
    clock = Clock()
    while not what():
        assert clock.elapsed() < seconds, "it did not come true"
        threading.Event().wait(0.005)


def let_servers_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients wait for what the server says when a wait is over. A busy machine may say it
    seconds late; that a client does not wait for it for long is for test_deadlines.py."""
    monkeypatch.setattr("rallypoint.store.client.session.GRACE", 5.0)


def transport(store: Store) -> str:
    """How a store is connected: "unix" or "tcp"; "" if it is not."""
    how = repr(store)
    return (
        "unix"
        if "connected by a Unix socket" in how
        else "tcp"
        if "connected by TCP" in how
        else ""
    )


def environment(**more: str) -> dict[str, str]:
    """This process's, without what a job or a user has said about rallypoint; what a proxy of the
    test has said stays.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name == FORWARDED or not name.startswith("RALLYPOINT")
    } | more


def output_of(program: str, *arguments: str, **more: str) -> list[str]:
    """The lines that a Python program printed, to stdout and stderr; it must have ended well."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stdout}"
    return done.stdout.splitlines()


@contextmanager
def kept_port() -> Iterator[str]:
    """A port for servers that listen there one after the other; nobody else gets it in between."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server does
        sock.bind(("127.0.0.1", 0))
        yield str(sock.getsockname()[1])


@contextmanager
def running(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program with pipes; killed at the end if it still runs."""
    with WarmPopen(
        [sys.executable, "-c", program, *arguments],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ended_well(pid: int) -> bool:
    """Whether a forked child has ended with status 0; it is killed when it does not end in time."""
    clock = Clock()
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        if clock.elapsed() > DEADLINE:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return False
        threading.Event().wait(0.005)


def descriptors() -> list[str]:
    """What this process has open, sorted."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}").split(":")[0])
        except FileNotFoundError:  # the one that lists them
            continue
    return sorted(found)
