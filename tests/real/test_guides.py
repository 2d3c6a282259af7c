"""Every program, cell, test and command of the guides is run."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import pytest

import rallypoint

from ..one_process import OneProcess
from .job import GLOO

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_in_parts")]

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
DEADLINE = 100.0


def blocks(page: str, heading: str) -> list[str]:
    """The code blocks of a guide whose first line is this comment."""
    found = re.findall(
        r"```python\n(.*?)```", (GUIDES / page).read_text(encoding="utf-8"), re.DOTALL
    )
    assert all(one.startswith("# ") for one in found), f"every block of {page} says what it is"
    return [one for one in found if one.startswith(f"# {heading}\n")]


def run(folder: Path, *command: str) -> str:
    environ = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return GLOO.sub("", done.stdout)


class Program(Protocol):
    """Run a program that a guide has; what it prints."""

    def __call__(self, text: str) -> str: ...


@pytest.fixture
def program(one_process: OneProcess, tmp_path: Path) -> Program:
    def printed(text: str) -> str:
        (tmp_path / "program.py").write_text(text)
        done = one_process.run(tmp_path / "program.py")
        assert done.returncode == 0, done.stdout + done.stderr
        return GLOO.sub("", done.stdout)

    return printed


def test_from_mp_spawn(program: Program, port: int) -> None:
    (before,), (after,) = blocks("from-mp-spawn.md", "before"), blocks("from-mp-spawn.md", "after")
    assert '"29512"' in before
    before = before.replace("29512", str(port))  # which another test, or suite, may have
    assert program(before) == program(after) == "{0: 1.0, 1: 1.0}\n"


def test_from_torchrun(program: Program, tmp_path: Path) -> None:
    (script,) = blocks("from-torchrun.md", "train.py")
    (tmp_path / "train.py").write_text(script)
    commands = re.findall(
        r"^    ((?:torchrun|rallypoint) .*)$",
        (GUIDES / "from-torchrun.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(commands) == 3
    for command in commands:
        name, *arguments = shlex.split(command)
        module = {"torchrun": "torch.distributed.run", "rallypoint": "rallypoint"}[name]
        said = run(
            tmp_path, sys.executable, "-m", module, *arguments
        )  # torchrun's ranks write into each other's lines
        assert sorted(re.findall(r"rank \d of 2: 2", said)) == [
            "rank 0 of 2: 2",
            "rank 1 of 2: 2",
        ], command
    (after,) = blocks("from-torchrun.md", "after, from Python")
    assert program(after) == "[2.0, 2.0]\n"


def test_in_a_notebook(program: Program) -> None:
    """As one program; the cells of the example are run in a kernel (`test_notebook.py`)."""
    printed = program("\n".join(blocks("in-a-notebook.md", "a cell")))
    page = (GUIDES / "in-a-notebook.md").read_text(encoding="utf-8")
    shown = re.findall(r"^    (\[\d\] .*)$", page, re.MULTILINE)
    assert sorted(printed.splitlines()) == shown


def test_in_asyncio(program: Program) -> None:
    assert program("\n".join(blocks("in-asyncio.md", "in an event loop"))) == "8 yes 0.1\n"


def test_the_reference(program: Program) -> None:
    text = (GUIDES.parent / "reference" / "launch.md").read_text(encoding="utf-8")
    assert program("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))) == ""


def test_the_reference_has_the_signature_and_every_argument() -> None:
    text = (GUIDES.parent / "reference" / "launch.md").read_text(encoding="utf-8")
    line = " ".join(
        next(
            block
            for block in re.findall(r"((?:^    .*\n)+)", text, re.MULTILINE)
            if "launch(fn" in block
        ).split()
    )
    parameters = [
        one.replace(annotation=one.empty)
        for one in inspect.signature(rallypoint.launch).parameters.values()
    ]
    assert line.replace('"', "'") == f"launch{inspect.Signature(parameters)}"
    assert all(f"`{one.name}`" in text for one in parameters)


def test_in_tests(tmp_path: Path) -> None:
    tests = [*blocks("in-tests.md", "before"), *blocks("in-tests.md", "after")]
    assert len(tests) == 3
    for number, text in enumerate(tests):
        (tmp_path / f"test_{number}.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
    ]
    plugin = ["-p", "rallypoint.testing.pytest_plugin"] if not _installed() else []
    assert "3 passed" in run(tmp_path, *command, *plugin)


def _installed() -> bool:
    from importlib.metadata import entry_points

    return any(
        point.value == "rallypoint.testing.pytest_plugin"
        for point in entry_points(group="pytest11")
    )
