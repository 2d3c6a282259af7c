"""What every test here uses: a way to run a job."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from ..python_path import DIGITS_ALONE, TORCH_WITHOUT_COMPILER, python_path
from .job import Result, run_job
from .warm import WarmLauncher


class Run(Protocol):
    """`run_job`, with a state folder of its own for each call."""

    def __call__(self, *arguments: str | Path, **options: Any) -> Result: ...


class RunWarm(Protocol):
    """`WarmLauncher.run`."""

    def __call__(
        self, program: Path, *arguments: str, nproc: int = 2, **options: object
    ) -> Result: ...


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
def without_compiler(torch_in_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start jobs that compile nothing without torch._dynamo, which optimizers and
    DistributedDataParallel import; see `torch_without_compiler/sitecustomize.py`.
    """
    if not os.environ.get("RALLYPOINT_WHOLE_TORCH"):
        monkeypatch.setenv("PYTHONPATH", python_path(TORCH_WITHOUT_COMPILER))


@pytest.fixture
def digits_alone(without_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start jobs that take scikit-learn's digits without importing the rest of it; see
    `digits_alone/sklearn`.
    """
    monkeypatch.setenv("PYTHONPATH", python_path(DIGITS_ALONE))


@pytest.fixture(scope="session")
def warm_launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmLauncher]:
    """Keep a template with torch for all tests; scripts/matrix has it import torch as a whole."""
    whole = os.environ.get("RALLYPOINT_WHOLE_TORCH")
    env = {
        "PYTHONPATH": python_path() if whole else python_path(TORCH_WITHOUT_COMPILER),
        "OMP_NUM_THREADS": "1",  # else one rank has another template than several
    }
    launcher = WarmLauncher(tmp_path_factory.mktemp("warm"), env)
    yield launcher
    launcher.close()


@pytest.fixture
def run_warm(warm_launcher: WarmLauncher) -> Iterator[RunWarm]:
    """Run a program in ranks of a warm template; in the end nothing of them may be left."""
    yield warm_launcher.run
    assert "\n\n".join(warm_launcher.left_behind()) == ""


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


@pytest.fixture
def places() -> Iterator[Path]:
    """The folder for sockets: short enough for one, and empty at the end."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    yield folder
    left = [str(path) for path in folder.rglob("*")]
    shutil.rmtree(folder)
    assert left == []
