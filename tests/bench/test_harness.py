from __future__ import annotations

import os
import signal
import sys
import time

import pytest
from bench.harness import JOBS, Run

from bench import death, harness

MARK = f"import sys; sys.path.insert(0, {str(JOBS)!r}); from marks import mark; mark('here')"


def test_a_run_is_timed_and_its_output_kept() -> None:
    with Run([sys.executable, "-c", f"{MARK}; print('a word')"]) as run:
        assert run.wait(30) == 0
        [mark] = run.wait_for_marks("here", 1, 30)
        assert run.output() == "a word\n"
        at = run.printed_at("^a word$")
        assert run.ended is not None
        assert at is not None
        assert run.began < mark.at < run.ended
        assert mark.pid == run.pid
        assert run.printed_at("another") is None
    assert not run.folder.exists()


def test_marks_of_an_attempt() -> None:
    with Run([sys.executable, "-c", MARK], RANK="3", TORCHELASTIC_RESTART_COUNT="1") as run:
        assert run.wait(30) == 0
        assert [(mark.rank, mark.attempt) for mark in run.marks("here")] == [(3, 1)]
        assert run.marks("here", attempt=0) == []
        assert run.marks("elsewhere") == []


def test_waiting_for_marks_ends_with_the_launcher() -> None:
    with Run([sys.executable, "-c", "pass"]) as run:
        assert run.wait_for_marks("here", 1, 60) == []


def test_what_is_left_is_found_in_a_session_of_its_own_and_killed() -> None:
    script = (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\n"
    )
    with Run([sys.executable, "-c", script]) as run:
        assert run.wait(30) == 0
        left = run.wait_until_gone(0)[1]
        assert left == [int(run.output(30))]
        run.clean_up()
        assert run.living() == []


def test_a_launcher_that_does_not_end_in_time_has_no_status() -> None:
    with Run(["sleep", "600"]) as run:
        assert run.wait(0) is None
        assert run.ended is None
        assert harness.send(run.pid, signal.SIGKILL)
        assert run.wait(30) == -signal.SIGKILL
        run.wait_until_gone(30)
    assert not harness.send(run.pid, 0)


def test_memory_of_this_process() -> None:
    found = harness.memory(os.getpid())
    assert 0 < found["private"] <= found["pss"]


def test_the_clock_of_marks_is_ours() -> None:
    before = time.monotonic()
    with Run([sys.executable, "-c", MARK]) as run:
        run.wait(30)
        assert before < run.marks("here")[0].at < time.monotonic()


def test_what_a_launcher_has_set_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "PET_NPROC_PER_NODE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    assert not {"RANK", "PET_NPROC_PER_NODE", "TORCHELASTIC_RUN_ID"} & harness.environment().keys()
    assert harness.environment(RANK="2")["RANK"] == "2"


@pytest.mark.parametrize(
    ("who", "output", "cause"),
    [
        (
            "rallypoint",
            "[1] a line\n\nerror[rank-killed]: rank 2 was killed by SIGKILL\n",
            "rank 2: rank-killed",
        ),
        ("rallypoint", "error[rank-raised]: ranks 0-1 raised\n", ""),
        ("rallypoint", "Traceback (most recent call last):\n", ""),
        (
            "torchrun",
            "Failures:\n[1]:\n  rank      : 1 (local_rank: 1)\nRoot Cause (first observed failure):\n[0]:\n  time      : t\n"
            "  rank      : 3 (local_rank: 3)\n  exitcode  : -6 (pid: 12)\n",
            "rank 3: exit code -6",
        ),
        ("torchrun", "Failures:\n  <NO_OTHER_FAILURES>\n", ""),
    ],
)
def test_blamed(who: str, output: str, cause: str) -> None:
    assert death.blamed(who, output) == cause
