"""Causes that are seen only when the launcher hears more than torch tells: each job for real, and
the report that it ends with.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.diagnosis.evidence import memory_counters

from .conftest import RunWarm, Write
from .job import run_job

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_in_parts")]

LOADER = """
import os, signal
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 0 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(4)

dist.init_process_group("gloo")
for batch in DataLoader(Numbers(), batch_size=2, num_workers=1):
    pass
dist.barrier()
"""

CLEARING_UP = """
import threading
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
try:
    if rank == 1:
        raise ValueError("bad batch")
    dist.all_reduce(torch.ones(1))
finally:
    dist.destroy_process_group()
    if rank == 1:
        threading.Event().wait()  # an upload that does not end
"""

CHECKPOINT = """
import resource, signal
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp

dist.init_process_group("gloo")
pair = dist.new_group([1, 2])
if dist.get_rank() == 2:  # in which no file may have more bytes
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
if dist.get_rank():
    dcp.save({f"of {dist.get_rank()}": torch.ones(9)}, checkpoint_id="saved", process_group=pair)
dist.barrier()
"""

UNHEARD = """
import os, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    os._exit(4)
try:
    dist.all_reduce(torch.ones(1), async_op=True).wait()
except RuntimeError:
    sys.exit(5)
"""

LEAVES_FIRST = """
import sys
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    dist.destroy_process_group()
    sys.exit()
dist.monitored_barrier()
"""

CLOSES_FIRST = """
import threading
import torch, torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(8 + dist.get_rank()):
    dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    dist.destroy_process_group()
    threading.Event().wait()  # an evaluation that takes long
"""

LOGS_AND_GOES_ON = """
import logging, os, sys, time

if os.environ["RANK"] == "1":
    try:
        open("/nonexistent/cache")
    except FileNotFoundError:
        logging.exception("no cache, goes on without")
        if sys.argv[1] == "gives up":
            sys.exit(1)
    time.sleep(1)  # an evaluation
    sys.exit(1)
time.sleep(600)
"""


HALVES = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")

def train(size):
    try:
        if size > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        raise ValueError("target 11 is out of bounds")
    except torch.OutOfMemoryError:
        train(size // 2)

if dist.get_rank() == 1:
    train(32)
dist.barrier()
"""

ON_THE_CPU = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    try:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    except RuntimeError:
        raise ValueError("target 11 is out of bounds")
dist.barrier()
"""

HIDES = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    try:
        while True:
            REDUCES
    except Exception:
        raise ValueError("training diverged") from None
"""

POOL = """
import os, signal
from concurrent.futures import ProcessPoolExecutor

def work(number):
    if number == 2 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return number

if __name__ == "__main__":
    with ProcessPoolExecutor(2) as pool:
        print(list(pool.map(work, range(4))))
"""

DEAD_LOADER = """
import datetime, multiprocessing, os, signal
import torch, torch.distributed as dist

def load(queue):
    os.kill(os.getpid(), signal.SIGKILL)

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
if dist.get_rank() == 1:
    queue = multiprocessing.Queue()
    multiprocessing.Process(target=load, args=(queue,)).start()
    queue.get()
dist.all_reduce(torch.ones(1))
"""


LOST_POOL = """
import datetime, multiprocessing, os, signal
import torch, torch.distributed as dist

def load(number):
    if number == 7:
        os.kill(os.getpid(), signal.SIGKILL)

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
if dist.get_rank() == 1:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(load, range(20))
dist.all_reduce(torch.ones(1))
"""

LATE = """
import datetime, os, pathlib, time
import torch, torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
dist.barrier()
over = pathlib.Path("over")
while dist.get_rank() == 2 and not over.exists():
    time.sleep(0.01)  # until the others have given up
try:
    dist.all_reduce(torch.ones(1))
finally:
    over.touch()
"""


def _write(folder: Path, text: str) -> Path:
    program = folder / "train.py"
    program.write_text(text)
    return program


def test_a_worker_of_a_loader_that_was_killed_is_the_cause(
    run_warm: RunWarm, tmp_path: Path
) -> None:
    result = run_warm(_write(tmp_path, LOADER))
    assert result.codes == ["rank-killed"], result.everything
    assert result.report.startswith(
        "error[rank-killed]: a DataLoader worker of rank 1 was killed by SIGKILL\n"
    ), result.everything
    assert "rank 1 itself was not killed, and noticed" in result.report


@pytest.mark.usefixtures("without_torch")
def test_a_pool_does_not_say_how_its_process_ended(tmp_path: Path) -> None:
    """The kernel is asked, as for a rank that was killed."""
    result = run_job(["-n", "2", _write(tmp_path, POOL)], state=tmp_path)
    assert result.codes == ["rank-raised"], result.everything
    assert "(likely)" in result.report, result.everything
    counted = bool(memory_counters().path)
    assert ("its oom_kill count did not change" in result.prose) == counted, result.everything


KILLED_TWICE = """
import os, sys
import pathlib
from rallypoint.cli import main
from rallypoint.diagnosis import evidence

kills = pathlib.Path("kills")
kills.write_text("0")
counters = lambda: evidence.MemoryCounters(int(kills.read_text()), path="memory.events")
evidence.memory_counters = counters
sys.exit(main.main(["run", "-n", "2", "--preload", "none", "--max-restarts", "1", "dies.py"]))
"""

DIES = """
import os, pathlib, signal, time

if os.environ["RANK"] == "1":
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        pathlib.Path("kills").write_text("1")  # so the kernel counts
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


@pytest.mark.usefixtures("without_torch")
def test_a_kill_after_a_restart_is_not_told_by_the_memory_of_the_attempt_before(
    tmp_path: Path,
) -> None:
    """It was told as the kernel's, for lack of memory: the count was that of the whole job."""
    (tmp_path / "dies.py").write_text(DIES)
    done = subprocess.run(
        [sys.executable, "-c", KILLED_TWICE],
        cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    codes = [line.partition(":")[0] for line in done.stderr.splitlines() if "error[" in line]
    assert codes == ["error[rank-out-of-memory]", "error[rank-killed]"], done.stderr


def test_a_process_whose_end_its_rank_has_not_noticed(run_warm: RunWarm, tmp_path: Path) -> None:
    """The report sent the user to a longer timeout, and had no word of the loader."""
    result = run_warm(_write(tmp_path, DEAD_LOADER))
    assert result.codes == ["ranks-missing"], result.everything
    told = ", which rank 1 had started, was killed by SIGKILL; rank 1 has not noticed it"
    assert told in result.prose, result.everything


def test_a_process_whose_end_leads_to_the_exception_of_its_rank(
    run_warm: RunWarm, write: Write
) -> None:
    """It was looked for when the report was made, and mostly the rank was gone by then."""
    script = write(
        "train.py",
        "import os, subprocess\nchild = subprocess.Popen(['sleep', '1000'])\nchild.kill()\n"
        "os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)\n"
        "raise RuntimeError('Connection reset by peer')\n",
    )
    result = run_warm(script, nproc=1)
    told = ", which rank 0 had started, was killed by SIGKILL; rank 0 has not noticed it"
    assert told in result.prose, result.everything


def test_a_task_that_is_lost_with_a_process_of_a_pool(run_warm: RunWarm, tmp_path: Path) -> None:
    """The Pool had reaped the process, so nobody told of it, and the advice was to wait longer."""
    result = run_warm(_write(tmp_path, LOST_POOL))
    assert result.codes == ["ranks-missing"], result.everything
    assert ", which rank 1 had started, was killed by SIGKILL; its Pool" in result.prose, (
        result.everything
    )
    assert "ProcessPoolExecutor" in result.report, result.everything
    assert "never looked at the exit code" not in result.err, result.everything


def test_an_exception_that_does_not_come_out_is_told_when_the_group_is_closed(
    run_warm: RunWarm,
    tmp_path: Path,
) -> None:
    result = run_warm(_write(tmp_path, CLEARING_UP))
    assert result.codes == ["rank-raised"], result.everything
    assert result.report.startswith("error[rank-raised]: rank 1 raised ValueError: bad batch\n"), (
        result.everything
    )
    assert "rank 0 lost the connection to a peer; it is not at fault" in result.prose, (
        result.everything
    )


def test_a_checkpoint_failed_in_the_rank_that_torch_names_by_its_number_in_a_group(
    tmp_path: Path,
) -> None:
    """It was said that both raised an exception of torch's, which has the ranks' own in its text."""
    preload = ["--preload", "torch.distributed.checkpoint"]  # once, not in each rank
    arguments = ["-n", "3", *preload, str(_write(tmp_path, CHECKPOINT))]
    whole_torch = {"PYTHONPATH": ""}  # this module imports its parts in another order
    result = run_job(arguments, state=tmp_path, cwd=tmp_path, env=whole_torch)
    assert result.codes == ["rank-raised"], result.everything
    assert result.report.startswith("error[rank-raised]: rank 2 raised "), result.everything
    assert "CheckpointException" not in result.report.splitlines()[0], result.everything
    assert "train.py:11 in <module> (torch " in result.prose, result.everything


def test_who_closes_down_while_the_others_lose_it_has_left_early(tmp_path: Path) -> None:
    """Its interpreter needs a quarter of a second for that, and the others hear at once that it
    closed its group.
    """
    result = run_job(["-n", "2", _write(tmp_path, LEAVES_FIRST)], state=tmp_path)
    assert result.codes == ["rank-left-early"], result.everything
    assert result.report.startswith("error[rank-left-early]: rank 0 "), result.everything


def test_who_has_closed_its_group_and_works_on_has_left_early(
    run_warm: RunWarm, tmp_path: Path
) -> None:
    result = run_warm(_write(tmp_path, CLOSES_FIRST))
    assert result.codes == ["rank-left-early"], result.everything
    assert result.report.startswith(
        "error[rank-left-early]: rank 0 closed its process group while others still needed it\n"
    ), result.everything
    assert "train.py:9, pid" in result.prose, result.everything


def test_a_loss_that_torch_tells_nobody_of_is_known_from_the_exit_after_it(
    run_warm: RunWarm, tmp_path: Path
) -> None:
    result = run_warm(_write(tmp_path, UNHEARD))
    assert result.codes == ["rank-exited"], result.everything
    assert result.report.startswith("error[rank-exited]: rank 1 exited with code 4\n"), (
        result.everything
    )


def test_what_was_handled_is_not_the_cause(run_warm: RunWarm, tmp_path: Path) -> None:
    result = run_warm(_write(tmp_path, HALVES))
    assert result.report.startswith(
        "error[rank-raised]: rank 1 raised ValueError: target 11 is out of bounds\n"
    ), result.everything


def test_where_either_may_be_the_cause_both_are_shown(run_warm: RunWarm, tmp_path: Path) -> None:
    result = run_warm(_write(tmp_path, ON_THE_CPU))
    assert result.codes == ["rank-out-of-memory"], result.everything
    assert "(likely)" in result.report, result.everything
    assert "    | ValueError: target 11 is out of bounds\n" in result.report, result.everything


@pytest.mark.parametrize("asynchronous", ["", ", async_op=True).wait("])
def test_a_loss_that_from_none_hides_is_no_cause(
    run_warm: RunWarm, tmp_path: Path, asynchronous: str
) -> None:
    """torch reports to nobody what `wait` raises."""
    program = HIDES.replace("REDUCES", f"dist.all_reduce(torch.ones(1){asynchronous})")
    result = run_warm(_write(tmp_path, program))
    assert result.report.startswith("error[rank-left-early]: rank 1 "), result.everything
    assert "and then raised ValueError: training diverged" in result.prose, result.everything


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(("then", "line"), [("gives up", ""), ("goes on", "train.py:12 in")])
def test_a_traceback_that_was_logged_long_before_an_exit_is_a_likely_cause_alone(
    tmp_path: Path, then: str, line: str
) -> None:
    """An exception that was handled was told as what had ended the rank, and certain."""
    job = ["-n", "2", "--preload", "none", str(_write(tmp_path, LOGS_AND_GOES_ON)), then]
    result = run_job(job, state=tmp_path)
    assert result.codes == ["rank-raised"], result.everything
    assert ("(likely)" in result.prose) == bool(line), result.everything
    assert ("left by sys.exit at" in result.prose) == bool(line), result.everything
    assert line in result.prose, result.everything


def test_who_comes_when_the_others_have_just_given_up_came_too_late(
    run_warm: RunWarm, tmp_path: Path
) -> None:
    """It loses them in the same call: the report said that no rank shows a cause."""
    result = run_warm(_write(tmp_path, LATE), nproc=3)
    assert result.codes == ["ranks-missing"], result.everything
    assert "waited in all_reduce until the timeout; rank 2 " in result.report, result.everything
