"""A barrier in a job: the launcher knows of each rank what its session cannot say, and the errors
tell it.
"""

from __future__ import annotations

import re

import pytest

from .conftest import Run, Write

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_in_parts")]

MEETS = """
import os
import signal
import sys
import time
import rallypoint

rank = int(os.environ["RANK"])
how = sys.argv[1]
if how == "slow" and rank == 2:
    time.sleep(120.0)
store = rallypoint.connect()
if rank == 0:
    def report(error):
        print(error, flush=True)
        print(*error.absent, sep="\\n", flush=True)
        store.wait("rank 1 has said it", timeout=60.0)  # or it might be stopped before
        os._exit(3)
store.barrier("start", 3 if how != "slow" else 2)
if rank == 2:
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "gone":
        os._exit(0)
    elif how == "beyond":
        sys.exit(0)
if rank == 0 and how == "gone":
    while store.status()["sessions"] > 2:
        time.sleep(0.01)
try:
    store.barrier("epoch", 8 if how == "beyond" else 3, timeout=3.0 if rank == 0 else 60.0)
except rallypoint.BarrierTimeout as error:
    report(error)
except rallypoint.BarrierBroken as error:
    print(error, flush=True)
    store["rank 1 has said it"] = True
    os._exit(0)
"""


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("how", "known"),
    [
        ("slow", r"rank 2 \(pid \d+ on \S+, running for \d+ s, not connected to the store\)"),
        ("stopped", r"rank 2 \(pid \d+ on \S+, stopped by a signal, last heard of \d+\.\d s ago\)"),
        ("gone", r"rank 2 \(pid \d+ on \S+, ended \d+\.\d s ago with exit code 0\)"),
    ],
    ids=["slow", "stopped", "gone"],
)
def test_who_is_missing_and_what_the_launcher_sees_of_him(
    run: Run, write: Write, how: str, known: str
) -> None:
    result = run("-n", "3", write("train.py", MEETS), how)
    text, absent = result.of(0)[:2]

    assert re.fullmatch(known, absent), result.everything
    assert re.fullmatch(
        rf'the barrier "epoch" of 3 timed out after 3\.0 s: 2 arrived \(ranks 0-1\), missing: {known}',
        text,
    ), text
    [broken] = result.of(1)
    assert broken.startswith('the barrier "epoch" of 3 is broken: rank 0 (pid '), broken
    assert re.search(
        rf"gave up after \d+\.\d s; 2 arrived \(ranks 0-1\), missing: {known}$", broken
    ), broken
    assert result.rc == 3, result.everything


@pytest.mark.usefixtures("without_torch")
def test_a_size_beyond_the_job_is_told_as_that(run: Run, write: Write) -> None:
    result = run("-n", "3", write("train.py", MEETS), "beyond")
    assert "missing: rank 2 (pid " in result.of(0)[0], result.everything
    assert "ranks 3-7 (this job has no such rank)" in result.of(0)[0], result.everything


FAILS = """
import os
import rallypoint

store = rallypoint.connect()
if os.environ["RANK"] == "1":
    store.barrier("here", 2)
    raise ValueError("no such file: weights.pt")
store.barrier("here", 2)
store.barrier("epoch", 2)
"""

NEVER_COMES = """
import os
import time
import rallypoint

def build():
    while True:
        time.sleep(0.1)

store = rallypoint.connect()
store.barrier("start", 3)
if os.environ["RANK"] == "2":
    build()
store.barrier("epoch", 3, timeout=3.0)
"""


@pytest.mark.usefixtures("without_torch")
def test_whose_exception_left_the_others_alone_is_the_cause(run: Run, write: Write) -> None:
    result = run("-n", "2", write("train.py", FAILS))
    assert "error[rank-raised]: rank 1 raised ValueError: no such file: weights.pt" in result.err, (
        result.everything
    )
    assert "barrier" not in result.err.partition("rank 1 said")[0]


@pytest.mark.usefixtures("without_torch")
def test_one_report_for_a_barrier_to_which_one_never_came_and_it_says_where_he_is(
    run: Run, write: Write
) -> None:
    result = run("-n", "3", write("train.py", NEVER_COMES))
    assert result.err.count("error[") == 1, result.everything
    assert "error[barrier-timeout]: rank " in result.err
    assert re.search(r"- rank 2\s+\S*train\.py:8\s+in\s+build", result.err), result.everything
    assert "waited at a barrier that broke" in result.err
    assert result.rc == 1
