"""What every test here uses: a way to run a job."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from .job import Result, run_job


class Run(Protocol):
    """`run_job`, with a state folder of its own for each call."""

    def __call__(self, *arguments: str | Path, **options: Any) -> Result: ...


class Write(Protocol):
    """Write a program, or another file, into the test's folder; its path."""

    def __call__(self, name: str, text: str) -> Path: ...


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run `rallypoint run` with these arguments to its end."""
    count = 0

    def start(*arguments: str | Path, **options: Any) -> Result:
        nonlocal count
        count += 1
        options.setdefault("state", tmp_path / f"state{count}")
        return run_job(arguments, **options)

    return start


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write("train.py", text)`."""

    def put(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return put


@pytest.fixture
def port() -> Iterator[int]:
    """A port that the program of a test can listen on, and nobody else gets: the kernel gives away
    none that somebody has bound.
    """
    with socket.socket() as bound:
        bound.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # torch sets it, too: then both may have it while only one listens
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]
