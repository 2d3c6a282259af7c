"""Processes that a rank's program starts itself, and that fail: nobody may take the rank's exit
code 0 for all of it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from ..real import job
from ..real.job import DEADLINE

run_job = partial(job.run_job, fork=True)

FAILING = """\
import multiprocessing, os, signal

def work(how):
    if how == "interrupted":
        raise KeyboardInterrupt
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=work, args=(how,)) for how in ("interrupted", "killed", "well")]
    for one in started:
        one.start()
    for one in started[:2]:
        one.join()  # the third one is left to the interpreter
    print("end")
"""

UNGUARDED = """\
import multiprocessing

def work():
    print("never comes here")

one = multiprocessing.get_context("spawn").Process(target=work)
one.start()
one.join()
"""

# A failure that the program asks for, ends that it wants, a pool, and one that fails when the
# program has left it to the interpreter.
LOOKED_AT = """\
import concurrent.futures, multiprocessing, os, sys, time

def work(value):
    return value

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    seen = context.Process(target=sys.exit, args=(3,))
    seen.start()
    seen.join()
    assert seen.exitcode == 3
    for end in ("terminate", "kill"):
        unwanted = context.Process(target=time.sleep, args=(1000,))
        unwanted.start()
        getattr(unwanted, end)()
        unwanted.join()
    context.Process(target=time.sleep, args=(1000,), daemon=True).start()
    with context.Pool(2) as pool:
        assert pool.map(work, [1, 2]) == [1, 2]
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        assert list(pool.map(work, [1, 2])) == [1, 2]
    if os.environ["RANK"] == "1":
        context.Process(target=sys.exit, args=(4,), name="late").start()
"""


def _script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "work.py"
    path.write_text(text)
    return str(path)


def _told(err: str) -> str:
    """What is said of processes, without what differs from run to run."""
    found = re.search(r"^rallypoint: (?:a|\d+) process.*", err, re.MULTILINE | re.DOTALL)
    return (
        re.sub(r"started at \S+/", "started at ", re.sub(r"pid \d+", "pid N", found[0]))
        if found
        else ""
    )


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("start", [[], ["--fresh"]], ids=["forked", "fresh"])
def test_processes_that_failed_unseen_are_named_in_the_last_lines(
    tmp_path: Path, start: list[str]
) -> None:
    result = run_job(["-n", "1", *start, _script(tmp_path, FAILING)], state=tmp_path)
    assert (result.rc, result.report) == (0, ""), result.everything
    assert _told(result.err).splitlines() == [
        "rallypoint: 2 processes that rank 0 had started failed, and its program never looked at the exit code:",
        "  ForkProcess-1, pid N, started at work.py:13: exited with code 1",
        "  ForkProcess-2, pid N, started at work.py:13: died: SIGKILL",
    ], result.everything
    assert [
        len(event["details"]["pids"])
        for event in result.events
        if event["what"] == "children-failed"
    ] == [2]


@pytest.mark.usefixtures("without_torch")
def test_those_of_several_ranks_are_told_together(tmp_path: Path) -> None:
    result = run_job(["-n", "4", _script(tmp_path, FAILING)], state=tmp_path)
    assert result.rc == 0, result.everything
    told = _told(result.err).splitlines()
    assert (
        told[0]
        == "rallypoint: 8 processes that ranks 0-3 had started failed, and their program never looked at the exit code:"
    )
    assert told[1] == "  ForkProcess-1 of rank 0, pid N, started at work.py:13: exited with code 1"
    assert told[7:] == ["  and 2 more"]


@pytest.mark.usefixtures("without_torch")
def test_a_process_that_was_spawned_from_an_unguarded_line(tmp_path: Path) -> None:
    result = run_job(["-n", "1", _script(tmp_path, UNGUARDED)], state=tmp_path)
    assert result.rc == 0, result.everything
    assert _told(result.err).splitlines() == [
        "rallypoint: a process that rank 0 had started failed, and its program never looked at the exit code:",
        "  SpawnProcess-1, pid N, started at work.py:7: exited with code 1",
        f"  {tmp_path}/work.py:7 runs again in every new process: rallypoint explain main-unguarded",
    ], result.everything


@pytest.mark.usefixtures("without_torch")
def test_who_was_looked_at_or_stopped_by_the_program_has_not_failed_unseen(tmp_path: Path) -> None:
    """Of rank 0 nothing is said; rank 1 leaves one behind."""
    result = run_job(["-n", "2", _script(tmp_path, LOOKED_AT)], state=tmp_path)
    assert result.rc == 0, result.everything
    assert _told(result.err).splitlines() == [
        "rallypoint: a process that rank 1 had started failed, and its program never looked at the exit code:",
        "  late, pid N, started at work.py:23: exited with code 4",
    ], result.everything


@pytest.mark.usefixtures("without_torch")
def test_a_pool_that_replaces_a_process_has_not_looked_at_it(tmp_path: Path) -> None:
    """It does not do again what that one had to do, and tells nobody."""
    program = """\
import multiprocessing, os

if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(1) as pool:
        lost = [pool.apply_async(os._exit, (code,)) for code in (3, 0, 4)]
        assert pool.map(abs, [-1]) == [1]  # in the fourth process
"""
    result = run_job(["-n", "1", _script(tmp_path, program)], state=tmp_path)
    assert result.rc == 0, result.everything
    assert _told(result.err).splitlines()[1:] == [
        "  ForkPoolWorker-1, pid N, started at work.py:4: exited with code 3",
        "  ForkPoolWorker-3, pid N: exited with code 4",
    ], result.everything


@pytest.mark.usefixtures("without_torch")
def test_of_a_rank_that_was_stopped_nothing_is_said(tmp_path: Path) -> None:
    program = FAILING.replace(
        'print("end")',
        'import sys, time; sys.exit(7) if os.environ["RANK"] == "1" else time.sleep(1000)',
    )
    result = run_job(["-n", "2", _script(tmp_path, program)], state=tmp_path)
    assert result.rc == 7, result.everything
    assert "2 processes that rank 1 had started failed" in result.err, result.everything


# Words in which torch, multiprocessing and programs name a process that has ended.
NAMED = [
    "DataLoader worker (pid {}) is killed by signal: Killed. ",
    "DataLoader worker (pid(s) 7, {}) exited unexpectedly",
    "<Process name='Process-1' pid={} parent=1 stopped exitcode=-SIGKILL>",
]


@pytest.mark.usefixtures("without_torch")
def test_who_is_named_by_what_the_rank_raised_is_not_said_again(tmp_path: Path) -> None:
    """A worker of a DataLoader was killed; below the report that named it stood that the program
    never looked at it.
    """
    raised = f"{NAMED!r}[int(os.environ['RANK'])].format(started[1].pid)"
    program = FAILING.replace('print("end")', f"raise RuntimeError({raised})")
    options = ["-n", str(len(NAMED)), "--on-failure", "continue"]
    result = run_job([*options, _script(tmp_path, program)], state=tmp_path)
    assert result.rc == 1, result.everything
    assert "died: SIGKILL" not in result.err, result.everything  # but the other, which is not named
    for rank in range(len(NAMED)):
        assert f"ForkProcess-1 of rank {rank}, " in _told(result.err), result.everything


@pytest.mark.usefixtures("torch_in_parts")
def test_a_killed_worker_of_a_loader_is_told_once(tmp_path: Path) -> None:
    program = """\
import os, signal
import torch.utils.data

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return index

list(torch.utils.data.DataLoader(Data(), batch_size=None, num_workers=1))
"""
    result = run_job(["-n", "1", _script(tmp_path, program)], state=tmp_path)
    assert result.rc == 1, result.everything
    assert "a DataLoader worker of rank 0 was killed" in result.report, result.everything
    assert _told(result.err) == "", result.everything


@pytest.mark.usefixtures("without_torch")
def test_those_of_a_function_are_told_on_the_callers_stderr(tmp_path: Path) -> None:
    program = tmp_path / "work.py"
    program.write_text(
        "import multiprocessing, os\nimport rallypoint\n\n"
        "def work():\n"
        "    one = multiprocessing.get_context('fork').Process(target=os._exit, args=(3,))\n"
        "    one.start()\n    one.join()\n    return 'well'\n\n"
        "print(rallypoint.launch(work, nproc=2))\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=DEADLINE, check=True
    )
    assert done.stdout == "['well', 'well']\n", done.stderr
    assert _told(done.stderr).splitlines() == [
        "rallypoint: 2 processes that ranks 0-1 had started failed, and their program never looked at the exit code:",
        "  ForkProcess-1 of rank 0, pid N, started at work.py:6: exited with code 3",
        "  ForkProcess-1 of rank 1, pid N, started at work.py:6: exited with code 3",
    ], done.stderr
