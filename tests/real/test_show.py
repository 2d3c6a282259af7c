"""`rallypoint show` of real jobs: the report as it was printed, a job that goes on, a launcher that
was killed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from .job import DEADLINE, RALLYPOINT, environment, run_job
from .test_supervision import said

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_in_parts")]


def show(state: Path, *arguments: str) -> str:
    """What `rallypoint show` prints, as wide as a report is without a terminal."""
    done = subprocess.run(
        [*RALLYPOINT[:-1], "show", *arguments],
        env=environment(state, "show"),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def test_the_report_is_the_one_that_was_printed(tmp_path: Path) -> None:
    result = run_job(["-n", "4", "family.py", "raise"], state=tmp_path)
    shown = show(tmp_path)
    assert result.report.strip() in shown
    assert "  command  rallypoint run -n 4 family.py raise\n" in shown
    assert re.search(
        r"^  ended    after .+ with exit status 1: rank 1 raised ValueError: boom$",
        shown,
        re.MULTILINE,
    )
    moments = [
        "started family.py",
        "template ready",
        "started ranks 0-3",
        "raised ValueError: boom",
        "reported rank-raised",
        "ended with 1",
    ]
    places = [shown.index(f"  {moment}") for moment in moments]
    assert places == sorted(places)
    assert f"  folder   {result.run_dir}\n" in shown
    assert "1 rank-raised  -n 4 family.py raise\n" in show(tmp_path, "--list")


def test_a_run_whose_log_folder_cannot_be_made_is_none(tmp_path: Path) -> None:
    """Its folder was left, and the list said that its launcher was killed."""
    result = run_job(["-t", "3", "--log-dir", "/proc/logs", "family.py"], state=tmp_path)
    assert (result.rc, result.codes) == (1, ["log-dir-unwritable"]), result.everything
    assert "family.py" not in (listed := show(tmp_path, "--list")), listed
    assert "killed" not in listed, listed


def test_a_job_that_goes_on_and_then_its_launcher_is_killed(tmp_path: Path) -> None:
    during = []

    def act(process: subprocess.Popen[bytes]) -> None:
        said(tmp_path, process, "is up", 2)
        during.append(show(tmp_path))
        os.kill(process.pid, signal.SIGKILL)

    run_job(["-n", "2", "family.py", "wait"], state=tmp_path, act=act)
    assert re.search(
        r"^  ended    not yet: it has been running for .+; where", during[0], re.MULTILINE
    )
    assert "started ranks 0-1" in during[0]
    assert "  ended    the launcher was killed, or the machine went down; last heard of " in show(
        tmp_path
    )
