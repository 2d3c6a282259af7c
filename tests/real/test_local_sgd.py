"""Local SGD by `store.average`: it learns as DDP does, and goes on when a rank is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from .conftest import Run, Write
from .job import DEADLINE, Result, run_job
from .test_scripts_of_others import EXAMPLES, needs
from .test_supervision import events

pytestmark = [pytest.mark.usefixtures("digits_alone"), pytest.mark.torch, needs("sklearn")]

EXAMPLE = EXAMPLES / "local_sgd.py"
PRELOAD = ("--preload", "sklearn.datasets,torch._dynamo")  # once, and not in each rank
# Both have learnt by then, and from there on alike.
EPOCHS = ("--epochs", "3", "--lr", "6e-3")
# One after the other in the same ranks: what both import is imported once.
BOTH = f"""\
import runpy
for name in ("local_sgd.py", "digits_ddp.py"):
    runpy.run_path(f"{EXAMPLES}/{{name}}", run_name="__main__")
"""


def accuracies(result: Result) -> dict[int, float]:
    """What each rank that came to the end printed."""
    found = re.findall(r"^\[(\d)\] rank \1: test accuracy (\S+)$", result.out, re.MULTILINE)
    return {int(rank): float(accuracy) for rank, accuracy in found}


def test_it_learns_as_well_as_ddp(run: Run, write: Write) -> None:
    result = run("-n", "2", *PRELOAD, write("both.py", BOTH), *EPOCHS)
    assert result.rc == 0, result.everything
    found = accuracies(result)
    assert set(found) == {0, 1}, result.everything
    assert len(set(found.values())) == 1, result.everything  # the same model
    assert len([line for line in result.lines if "first step, loss" in line]) == 2, (
        result.everything
    )
    accuracy = re.search(r"^\[0\] test accuracy (\S+)$", result.out, re.MULTILINE)
    assert accuracy, result.everything
    assert abs(found[0] - float(accuracy[1])) <= 0.011, (found[0], accuracy[1])


def test_it_survives_the_death_of_a_rank(tmp_path: Path) -> None:
    """The exit status is still the failure's, and it is named; the others end with one model, which
    can read.
    """

    def kill_one(process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + DEADLINE
        while time.monotonic() < until and process.poll() is None:
            for path in tmp_path.glob("rallypoint/runs/*/rank1.log"):
                if b"step 8: the mean of 3 of 3" in path.read_bytes():
                    (started,) = (
                        found
                        for found in events(tmp_path)
                        if (found["what"], found.get("rank")) == ("worker-started", 1)
                    )
                    os.kill(started["details"]["pid"], signal.SIGKILL)
                    return
            time.sleep(0.02)

    arguments = (
        "-n",
        "3",
        *PRELOAD,
        "--on-failure",
        "continue",
        EXAMPLE,
        *EPOCHS,
        "--quorum",
        "2",
    )
    result = run_job(arguments, state=tmp_path, act=kill_one)
    assert result.codes == ["rank-killed"], result.everything
    assert result.rc == 128 + signal.SIGKILL, result.everything
    found = accuracies(result)
    assert set(found) == {0, 2}, result.everything
    assert len(set(found.values())) == 1, result.everything
    assert found[0] > 0.9, result.everything
    assert re.search(r"^\[0\] step \d+: the mean of 2 of 3$", result.out, re.MULTILINE), (
        result.everything
    )
