"""What the tests of examples/questions share: where the programs are, and a way to run one."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "questions"
PARTS = Path(__file__).parents[1] / "torch_without_compiler"
ONE_PROCESS = Path(__file__).parent / "one_process.py"

DEADLINE = 100.0
"""Seconds for one program, on a busy machine; most take three."""


def _environment(state: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RALLYPOINT")}
    return {**kept, "XDG_STATE_HOME": str(state)}


class OneProcess:
    """A process in which programs that import torch are run one after the other."""

    def __init__(self, state: Path) -> None:
        env = _environment(state)
        if not os.environ.get("RALLYPOINT_WHOLE_TORCH"):
            paths = filter(None, [str(PARTS), env.get("PYTHONPATH")])
            env["PYTHONPATH"] = os.pathsep.join(paths)
        # Without a pool of threads, which no process that is forked after it could use.
        env["OMP_NUM_THREADS"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, ONE_PROCESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            text=True,
        )

    def run(self, program: Path) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(program, file=self._process.stdin, flush=True)
        if not select.select([self._process.stdout], [], [], DEADLINE)[0]:
            self._process.kill()
            raise AssertionError(f"{program.name} was not over after {DEADLINE:g} s")
        found = json.loads(self._process.stdout.readline())
        return subprocess.CompletedProcess(
            program, found["status"], found["stdout"], found["stderr"]
        )

    def close(self) -> None:
        """End it."""
        self._process.communicate(timeout=DEADLINE)


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneProcess]:
    process = OneProcess(tmp_path_factory.mktemp("questions"))
    yield process
    process.close()


class Program:
    """Run one of them: as a user starts it, or, if most of its time is the import of torch, after
    others in one process.
    """

    def __init__(self, state: Path, request: pytest.FixtureRequest) -> None:
        self._state = state
        self._request = request

    def __call__(self, name: str) -> list[str]:
        """The lines that it prints; it must end well, and complain about nothing."""
        text = (FOLDER / name).read_text(encoding="utf-8")
        if "torch" in text and "subprocess" not in text:
            one_process: OneProcess = self._request.getfixturevalue("one_process")
            done = one_process.run(FOLDER / name)
        else:
            self._request.getfixturevalue("torch_in_parts" if "torch" in text else "without_torch")
            done = subprocess.run(
                [sys.executable, FOLDER / name],
                env=_environment(self._state),
                capture_output=True,
                text=True,
                timeout=DEADLINE,
                check=False,
            )
        assert (done.returncode, done.stderr) == (0, ""), (
            f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return [
            line for line in done.stdout.splitlines() if "[Gloo] Rank " not in line
        ]  # torch 2.8 says who is connected


@pytest.fixture
def program(tmp_path: Path, request: pytest.FixtureRequest) -> Program:
    return Program(tmp_path, request)
