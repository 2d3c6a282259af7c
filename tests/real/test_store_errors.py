"""What the report says when an error of the store leaves a rank: its code, what to do, and whose fault it is."""

from __future__ import annotations

import pytest

from .conftest import Run, Write

pytestmark = pytest.mark.torch

WAITS = """
import os
import rallypoint

store = rallypoint.connect()
rank = int(os.environ["RANK"])
if rank == 0:
    store.wait("weights", timeout=0.5)
store.wait("never", timeout=60.0)
"""

WAITS_FOR_ONE_THAT_FAILED = """
import os
import rallypoint

store = rallypoint.connect()
if os.environ["RANK"] == "0":
    store["here"] = True
    store.wait("weights", timeout=0.2)
store.wait("here", timeout=30.0)
raise ValueError("no such file: weights.pt")
"""

TOO_LARGE = """
import rallypoint

rallypoint.connect()["x" * 5000] = 1
"""


@pytest.mark.parametrize("way", [(), ("--fresh",), ("--plain",)], ids=["template", "fresh", "plain"])
def test_a_key_that_nobody_sets(run: Run, write: Write, way: tuple[str, ...]) -> None:
    """It names the line, the store's own page, and says that another rank may be the cause. With --plain the log has to do."""
    result = run(*way, "-n", "2", "train.py", cwd=write("train.py", WAITS).parent)
    assert (result.rc, result.codes) == (1, ["wait-timeout"]), result.everything
    assert result.report.startswith("error[wait-timeout]: rank 0: nobody set 'weights' in the store at unix://"), result.everything
    assert "train.py:8 in <module> (rallypoint wait)" in result.report, result.everything
    assert "(likely)" in result.report, result.everything
    assert "rank 1 was stopped; it is not at fault" in result.report, result.everything
    assert result.report.endswith("  more   rallypoint explain wait-timeout\n"), result.everything


def test_who_waited_for_a_rank_that_failed_is_not_the_cause(run: Run, write: Write) -> None:
    """Its own error comes a moment later, and stands under `then`."""
    result = run("-n", "2", "train.py", cwd=write("train.py", WAITS_FOR_ONE_THAT_FAILED).parent)
    assert (result.rc, result.codes) == (1, ["rank-raised"]), result.everything
    assert result.report.startswith("error[rank-raised]: rank 1 raised ValueError: no such file: weights.pt\n"), result.everything
    assert "not at fault" in result.report, result.everything


def test_one_of_its_own_is_certain(run: Run, write: Write) -> None:
    result = run("-n", "2", "train.py", cwd=write("train.py", TOO_LARGE).parent)
    assert (result.rc, result.codes) == (1, ["key-too-long"]), result.everything
    assert result.report.startswith("error[key-too-long]: both ranks: "), result.everything
    assert "(likely)" not in result.report, result.everything
