"""What the tests of examples/questions share: where the programs are, and a way to run one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "questions"

DEADLINE = 100.0
"""Seconds for one program, on a busy machine; most take three."""


class Program:
    """Run one of them, as a user starts it."""

    def __init__(self, state: Path, request: pytest.FixtureRequest) -> None:
        self._state = state
        self._request = request

    def __call__(self, name: str, *arguments: str) -> list[str]:
        """The lines that it prints; it must end well, and complain about nothing."""
        if "torch" not in (FOLDER / name).read_text(encoding="utf-8"):
            self._request.getfixturevalue("without_torch")
        else:
            self._request.getfixturevalue("torch_in_parts")
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("RALLYPOINT")
        }
        done = subprocess.run(
            [sys.executable, FOLDER / name, *arguments],
            env={**environment, "XDG_STATE_HOME": str(self._state)},
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
