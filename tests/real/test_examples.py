"""The programs of examples/ that use the store do what they say, as a user starts them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Run, Write
from .test_local_sgd import PRELOAD
from .test_scripts_of_others import EXAMPLES, needs

pytestmark = pytest.mark.usefixtures("digits_alone")

DEADLINE = 100.0  # seconds
# One after the other in the same ranks: what both import is imported once.
BOTH = f"""\
import runpy
for name in ("store_search.py", "store_evaluator.py"):
    runpy.run_path(f"{EXAMPLES}/{{name}}", run_name="__main__")
"""


def test_counting_together() -> None:
    """Plain multiprocessing: the store is an argument, and none of 4 x 250 changes is lost, neither
    of add's nor of update's.
    """
    done = subprocess.run(
        [sys.executable, EXAMPLES / "store_counter.py"],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "total 1000, by worker {0: 250, 1: 250, 2: 250, 3: 250}\n"


@pytest.mark.torch
@needs("sklearn")
def test_one_list_of_settings_for_all_ranks_and_a_tester_beside_the_trainer(
    run: Run, write: Write
) -> None:
    """In the second, every version arrives, in order, as a state_dict that loads; the model gets
    better.
    """
    result = run("-n", "2", *PRELOAD, write("both.py", BOTH))
    assert result.rc == 0, result.everything
    told = result.of(0)
    assert len(told) == 11, result.everything
    best = re.fullmatch(r"best rate (\S+): accuracy (\S+)", told[-1])
    assert best, result.everything
    assert 0.001 <= float(best[1]) <= 1.0, result.everything
    assert float(best[2]) > 0.85, result.everything
    assert {line.split()[1] for line in told[:-1]} == {
        f"{10**e:g}" for e in (-4, -3.5, -3, -2.5, -2, -1.5, -1, -0.5, 0, 0.5)
    }

    rounds = [re.fullmatch(r"round (\d): test accuracy (\S+)", line) for line in result.of(1)]
    assert [int(line[1]) for line in rounds if line] == [1, 2, 3, 4, 5], result.everything
    accuracy = [float(line[2]) for line in rounds if line]
    assert accuracy[-1] > max(0.85, accuracy[0]), result.everything


def test_every_example_is_run_by_a_test() -> None:
    tests = "".join(
        path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py")
    )
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in tests] == []
