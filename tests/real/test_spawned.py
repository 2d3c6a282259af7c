"""Programs that start their own ranks with `mp.spawn` in a job of one rank: where those wait is
said, as for ranks of the launcher.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Run, RunWarm, Write
from .job import environment
from .test_roll_call import LAUNCHER, until
from .test_supervision import wait_for

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_in_parts")]

# The usual answer to "DDP is stuck": each process looks for a free port, and finds one of its own.
# Its import is that of torch's tutorial.
EACH_ITS_PORT = """\
import os
import socket
import sys
import torch.multiprocessing as mp
from torch.distributed import init_process_group

def work(rank, size):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(found.getsockname()[1])
    init_process_group("gloo", rank=rank, world_size=size)

if __name__ == "__main__":
    mp.start_processes(work, args=(2,), nprocs=2, start_method=sys.argv[1])
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_spawned_processes_that_look_for_each_other_at_different_ports(
    run_warm: RunWarm, write: Write, method: str
) -> None:
    """They waited for half an hour without a word; the same program with a rank for each was told
    after three seconds.
    """
    result = run_warm(write("train.py", EACH_ITS_PORT), method, nproc=1)
    assert (result.rc, result.codes) == (1, ["address-differs"]), result.everything
    assert re.search(r"rank 0: localhost:\d+.*rank 1: localhost:\d+", result.prose), (
        result.everything
    )


LATE = """\
import os
import sys
import time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def build_index():
    while not os.path.exists("go"):
        time.sleep(0.01)

def work(rank, size):
    if rank == 1:
        build_index()
    dist.init_process_group("gloo", rank=rank, world_size=size)
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"rank {rank}: {total.item():g}", flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", sys.argv[1]
    mp.spawn(work, args=(2,), nprocs=2)
"""


def test_a_spawned_process_that_is_late_is_named_and_shown(
    run: Run, write: Write, tmp_path: Path, port: int
) -> None:
    state = tmp_path / "state"
    shown: list[dict[str, object]] = []

    def act(launcher: subprocess.Popen[bytes]) -> None:
        until(
            state,
            lambda event: (
                event["what"] == "roll-call"
                and any("build_index" in line for line in event["details"]["lines"])
            ),
        )
        command = (sys.executable, "-P", "-m", "rallypoint", "stacks", "--error-format", "json")
        told = subprocess.run(
            command,
            env=environment(state, "asks"),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        shown.append(json.loads(told.stdout))
        (tmp_path / "go").touch()

    result = run(
        "-n",
        "1",
        "train.py",
        str(port),
        cwd=write("train.py", LATE).parent,
        launcher=LAUNCHER,
        state=state,
        act=act,
    )
    assert (result.rc, sorted(result.lines)) == (0, ["rank 0: 2", "rank 1: 2"]), result.everything
    sentence = str(shown[0]["sentence"])
    assert "rank 0" in sentence and "init_process_group" in sentence, sentence  # noqa: PT018
    assert "rank 1" in sentence and "build_index" in sentence, sentence  # noqa: PT018


ALONE = """\
import datetime
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank):
    dist.init_process_group(
        "gloo", init_method="file:///tmp/no/such/folder/meet", rank=rank, world_size=1,
        timeout=datetime.timedelta(seconds=1),
    )

if __name__ == "__main__":
    mp.spawn(work, nprocs=1)
"""


def test_the_traceback_of_a_spawned_process_has_no_frame_of_the_launcher(
    run: Run, write: Write
) -> None:
    result = run("-n", "1", "train.py", cwd=write("train.py", ALONE).parent)
    assert result.rc == 1
    assert "in work" in result.everything, result.everything
    assert "rallypoint/launcher" not in result.everything, result.everything


BY_FILE = """\
import multiprocessing
import os
import sys
import time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PLACE = os.path.abspath("meet")

def work(rank, size):
    dist.init_process_group("gloo", init_method=f"file://{PLACE}", rank=rank, world_size=size)
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"rank {rank}: {total.item():g}", flush=True)
    dist.destroy_process_group()

if multiprocessing.current_process().name == "SpawnProcess-2":
    while not (os.path.exists(PLACE) and os.path.getsize(PLACE)):
        time.sleep(0.01)

if __name__ == "__main__":
    mp.spawn(work, args=(2,), nprocs=2)
"""


def test_a_spawned_process_that_begins_after_another_has_written_the_rendezvous_file(
    run_warm: RunWarm, write: Write
) -> None:
    """Such a file counted as left over from an earlier run when it was older than the process, and
    not than the attempt.
    """
    result = run_warm(write("train.py", BY_FILE), nproc=1)
    assert (result.rc, sorted(result.lines)) == (0, ["rank 0: 2", "rank 1: 2"]), result.everything


MANY = """\
import os
import sys
import time
import torch.multiprocessing as mp

def work(index, name):
    while not os.path.exists(name):
        time.sleep(0.01)

def end(number, context):
    open(f"go{number}", "w").close()
    while not context.join():
        pass

def spawn(calls, size):
    former = None
    for number in range(calls):
        context = mp.start_processes(work, args=(f"go{number}",), nprocs=size, join=False, start_method="fork")
        if former is not None:  # one of an earlier call lives all the time
            end(number - 1, former)
        former = context
    end(calls - 1, former)
    for number in range(calls):
        os.remove(f"go{number}")
    print(calls, "x", size, "ended")

if __name__ == "__main__":
    spawn(16, 3)  # too many in all
    spawn(1, 20)  # too many at once
"""


def test_more_spawned_processes_than_the_launcher_has_descriptors_for(
    run: Run, write: Write
) -> None:
    """It kept two for each, also for those that had ended while another one lived, and ended the
    job when there were no more.
    """
    limited = ("prlimit", "--nofile=60", sys.executable, "-P", "-m", "rallypoint", "run")
    result = run("-n", "1", "train.py", cwd=write("train.py", MANY).parent, launcher=limited)
    assert (result.rc, result.lines) == (0, ["16 x 3 ended", "1 x 20 ended"]), result.everything


NOTICED = """\
import os
import signal
import time
import torch.multiprocessing as mp
import rallypoint

def work(index):
    while not os.path.exists("go"):
        time.sleep(0.01)
    assert not rallypoint.preempted()

if __name__ == "__main__":
    heard = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    context = mp.spawn(work, join=False)
    open("up", "w").close()
    while not heard:
        time.sleep(0.01)
    open("go", "w").close()
    while not context.join():
        pass
    print(rallypoint.preempted())
"""


def test_a_notice_is_for_the_rank_and_not_for_what_it_has_spawned(run: Run, write: Write) -> None:
    """A spawned process that asked took the notice from the line, and neither the rank nor the
    others ever heard of it.
    """
    folder = write("train.py", NOTICED).parent

    def act(launcher: subprocess.Popen[bytes]) -> None:
        wait_for((folder / "up").exists, "a process is spawned", launcher)
        launcher.send_signal(signal.SIGUSR1)

    result = run("-n", "1", "train.py", cwd=folder, act=act)
    assert (result.rc, result.lines) == (0, ["True"]), result.everything
