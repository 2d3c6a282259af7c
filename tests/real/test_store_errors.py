"""What the report says when an error of the store leaves a rank: its code, what to do, and whose
fault it is.
"""

from __future__ import annotations

import re

import pytest

from .conftest import Run, RunWarm, Write

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_in_parts")]

WAITS = """
import os
import rallypoint
store = rallypoint.connect()
store.barrier("here", 2)
rank = int(os.environ["RANK"])
if rank == 0:
    store.wait("weights", timeout=2.0)
store.wait("never", timeout=60.0)
"""

WAITS_FOR_ONE_THAT_FAILED = """
import os
import rallypoint

store = rallypoint.connect()
store.barrier("here", 2)
if os.environ["RANK"] == "0":
    store.wait("weights", timeout=2.0)
raise ValueError("no such file: weights.pt")
"""

TOO_LARGE = """
import rallypoint

rallypoint.connect()["x" * 5000] = 1
"""


COMPUTES = """
import os
import time
import rallypoint

def build():
    while True:
        time.sleep(0.1)
store = rallypoint.connect()
store.barrier("here", 3)
if os.environ["RANK"] == "0":
    store.wait("weights", timeout=2.0)
elif os.environ["RANK"] == "1":
    store.wait("done")
else:
    build()
    store["weights"] = 1
"""


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    "way", [(), ("--fresh",), ("--plain",)], ids=["template", "fresh", "plain"]
)
def test_a_key_that_nobody_sets(run: Run, write: Write, way: tuple[str, ...]) -> None:
    """It names the line, the store's own page, and says that another rank may be the cause. With
    --plain the log has to do.
    """
    result = run(*way, "-n", "2", "train.py", cwd=write("train.py", WAITS).parent)
    assert (result.rc, result.codes) == (1, ["wait-timeout"]), result.everything
    assert result.report.startswith(
        'error[wait-timeout]: rank 0: nobody set "weights" in the store at unix://'
    ), result.everything
    assert "train.py:8 in <module> (rallypoint wait)" in result.report, result.everything
    assert "whoever was to do it was elsewhere when the time was up (likely)" in result.report, (
        result.everything
    )
    assert ("- rank 1  train.py:9 in <module> (rallypoint wait)" in result.report) == (
        way != ("--plain",)
    ), result.everything
    assert "\n  then   rank 1 was stopped\n" in result.report, (
        "nobody can say that it is not at fault"
    )
    assert result.report.endswith("  more   rallypoint explain wait-timeout\n"), result.everything


@pytest.mark.usefixtures("without_torch")
def test_where_the_others_stood(run: Run, write: Write) -> None:
    """The whole report, as it is read at three in the morning."""
    result = run("-n", "3", "train.py", cwd=write("train.py", COMPUTES).parent)
    told = re.sub(r"unix://\S+|pid \d+|/\S+/rank0.log:\d+", "...", result.report)
    assert told == (
        'error[wait-timeout]: rank 0: nobody set "weights" in the store at ... within 2 s\n'
        "\n"
        "  where  train.py:12 in <module> (rallypoint wait), ...\n"
        "  why    whoever was to do it was elsewhere when the time was up (likely)\n"
        "         - rank 1  train.py:14 in <module> (rallypoint wait)\n"
        "         - rank 2  train.py:8 in build\n"
        "  then   ranks 1-2 were stopped\n"
        "\n"
        "  logs   ...\n"
        "  more   rallypoint explain wait-timeout\n"
    ), result.everything


@pytest.mark.usefixtures("without_torch")
def test_who_waited_for_a_rank_that_failed_is_not_the_cause(run: Run, write: Write) -> None:
    """Whether its own error comes before it is stopped or not."""
    result = run("-n", "2", "train.py", cwd=write("train.py", WAITS_FOR_ONE_THAT_FAILED).parent)
    assert (result.rc, result.codes) == (1, ["rank-raised"]), result.everything
    assert result.report.startswith(
        "error[rank-raised]: rank 1 raised ValueError: no such file: weights.pt\n"
    ), result.everything
    assert "not at fault" in result.report, result.everything


@pytest.mark.usefixtures("without_torch")
def test_one_of_its_own_is_certain(run: Run, write: Write) -> None:
    result = run("-n", "2", "train.py", cwd=write("train.py", TOO_LARGE).parent)
    assert (result.rc, result.codes) == (1, ["key-too-long"]), result.everything
    # The second may come to it when the first has been judged.
    assert result.report.startswith(
        tuple(f"error[key-too-long]: {who}: " for who in ("both ranks", "rank 0", "rank 1"))
    ), result.everything
    assert "(likely)" not in result.report, result.everything


LEAVES = """
import os
import rallypoint
import torch.distributed as dist

store = rallypoint.connect()
store.add("here")
if os.environ["RANK"] == "1":
    os._exit(3)
if JOINS:
    dist.init_process_group("gloo")
store.wait("never")
"""


@pytest.mark.parametrize(
    ("joins", "where"),
    [
        (
            True,
            r"(before init_process_group, in the program|while running) \(since \+\d+\.\d\d s\), pid \d+",
        ),  # has rank 0 joined yet?
        (False, r"while running \(since \+\d+\.\d\d s\), pid \d+"),
    ],
    ids=["the others join", "nobody joins"],
)
def test_where_a_rank_was_that_left_after_it_had_used_the_store(
    run_warm: RunWarm, write: Write, joins: bool, where: str
) -> None:
    result = run_warm(write("train.py", LEAVES.replace("JOINS", str(joins))))
    assert result.codes == ["rank-exited"], result.everything
    assert re.search(rf"^  where  {where}$", result.report, re.MULTILINE), result.everything


@pytest.mark.usefixtures("without_torch")
def test_where_a_rank_of_a_plain_job_was_is_not_known(run: Run, write: Write) -> None:
    folder = write("train.py", LEAVES.replace("JOINS", "False")).parent
    result = run("--plain", "-n", "2", "train.py", cwd=folder)
    assert (result.rc, result.codes) == (3, ["rank-exited"]), result.everything
    assert re.search(r"^  where  pid \d+$", result.report, re.MULTILINE), result.everything
