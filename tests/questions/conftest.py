"""What the tests of examples/questions share: where the programs are, and a way to run one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ..one_process import DEADLINE, OneProcess, environment

FOLDER = Path(__file__).parents[2] / "examples" / "questions"


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
        if "torch" in text and "import subprocess" not in text:
            one_process: OneProcess = self._request.getfixturevalue("one_process")
            done = one_process.run(FOLDER / name)
        else:
            self._request.getfixturevalue("torch_in_parts" if "torch" in text else "without_torch")
            done = subprocess.run(
                [sys.executable, FOLDER / name],
                env=environment(self._state),
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
