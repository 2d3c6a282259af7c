"""A batch system's notice (SIGUSR1, SIGUSR2) to the launcher: the ranks hear of it, and the job
goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .job import run_job
from .test_supervision import events, said, wait_for

pytestmark = pytest.mark.usefixtures("without_torch")

PROGRAM = """\
import os, signal, time
import rallypoint

rank, heard = int(os.environ["RANK"]), []
if rank == 0:
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
assert not rallypoint.preempted()
print("is up", flush=True)
while not rallypoint.preempted() or (rank == 0 and not heard):
    time.sleep(0.01)
print(f"rank {rank} saves, attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
"""


@pytest.mark.parametrize(
    "options",
    [(), ("--fresh",), ("--notice-signal", "usr1,WINCH")],
    ids=["forked", "fresh", "named"],
)
def test_a_notice_is_handed_to_the_ranks_and_the_job_goes_on(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """SIGUSR1 killed the launcher without a report, and so the job: Slurm's --signal=USR1@90 is to
    be passed on. Rank 1 has no handler, and would die of it."""
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)

    def act(process: subprocess.Popen[bytes]) -> None:
        said(tmp_path, process, "is up", 2)
        process.send_signal(signal.SIGUSR1)

    result = run_job(["-n", "2", *options, program], state=tmp_path, act=act)
    assert result.rc == 0, result.everything
    assert sorted(line for line in result.lines if "saves" in line) == [
        f"[{rank}] rank {rank} saves, attempt 0" for rank in range(2)
    ]
    assert (
        "rallypoint: SIGUSR1 came, and the job goes on: handed to rank 0; rank 1 has no handler for it"
        in result.err
    )


def test_a_restart_knows_of_a_notice_that_came_before(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        PROGRAM.replace("assert not rallypoint.preempted()", "")
        + "\nraise SystemExit(heard != [] and 3)\n"
    )

    def act(process: subprocess.Popen[bytes]) -> None:
        said(tmp_path, process, "is up", 2)
        process.send_signal(signal.SIGUSR1)

    text = program.read_text().replace(
        "(rank == 0 and not heard)",
        "(rank == 0 and not heard and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')",
    )
    program.write_text(text)
    result = run_job(["-n", "2", "--max-restarts", "1", program], state=tmp_path, act=act)
    assert result.rc == 0, result.everything
    assert "rank 1 saves, attempt 1" in result.out


@pytest.mark.parametrize("options", [("--plain",), ("--no-python",)])
def test_a_rank_that_is_not_looked_into_does_not_die_of_a_notice(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    program = tmp_path / ("train.py" if options == ("--plain",) else "train.sh")
    heard = tmp_path / "go"
    python = f"import os, time\nprint('is up', flush=True)\nwhile not os.path.exists({str(heard)!r}):\n    time.sleep(0.01)\n"
    shell = f"#!/bin/sh\necho is up\nwhile [ ! -e '{heard}' ]; do sleep 0.1; done\n"
    program.write_text(python if options == ("--plain",) else shell)
    program.chmod(0o755)

    def act(process: subprocess.Popen[bytes]) -> None:
        said(tmp_path, process, "is up", 2)
        process.send_signal(signal.SIGUSR2)
        wait_for(
            lambda: any(e["what"] == "signal-received" for e in events(tmp_path)),
            "it came",
            process,
        )
        heard.touch()

    result = run_job(["-n", "2", *options, program], state=tmp_path, act=act)
    assert result.rc == 0, result.everything
    assert "SIGUSR2 came, and the job goes on: ranks 0-1 have no handler for it" in result.err


def test_a_signal_that_is_to_stop_the_job_is_no_notice(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("import time\nprint('is up', flush=True)\ntime.sleep(1000)\n")

    def act(process: subprocess.Popen[bytes]) -> None:
        said(tmp_path, process, "is up", 2)
        process.send_signal(signal.SIGUSR1)

    result = run_job(
        ["-n", "2", "--signals-to-handle", "SIGTERM,SIGUSR1", program], state=tmp_path, act=act
    )
    assert result.rc == 128 + signal.SIGUSR1, result.everything
    refused = run_job(
        ["--signals-to-handle", "SIGUSR1", "--notice-signal", "USR1", program], state=tmp_path
    )
    assert refused.rc == 2
    assert "--notice-signal names SIGUSR1, which stops the job" in refused.err


HELPERS = """\
import os, signal
import rallypoint

def status(pid):
    with open(f"/proc/{pid}/status") as file:
        return dict(line.rstrip("\\n").split(":\\t", 1) for line in file if ":\\t" in line)

def children(pid):
    return {int(one) for one in open(f"/proc/{pid}/task/{pid}/children").read().split()}

def signals_helpers():
    given = [int(status(os.getpid())[key], 16) & 0xa00 for key in ("SigIgn", "SigBlk", "SigCgt")]  # SIGUSR1 and SIGUSR2
    rank, store = int(os.environ["RANK"]), rallypoint.connect()
    store.set(f"pid of {rank}", os.getpid())
    ranks = [store.wait(f"pid of {one}", timeout=60) for one in range(2)]
    template = os.getppid()
    agent = int(status(template)["PPid"])
    helpers = ({agent, template} | children(agent) | children(template)).difference(ranks)
    if rank == 0:
        for pid in helpers:
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGUSR2)
        store.set("all have them", True)
    store.wait("all have them", timeout=60)
    return agent, len(helpers), given
"""


@pytest.mark.parametrize("options", [(), ("--fresh",)], ids=["forked", "fresh"])
def test_a_notice_to_every_process_of_a_job_ends_no_helper(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Where Slurm tracks processes by their parents, its --signal goes to guard, template and c10d
    host, too. The ranks inherit nothing of what protects those."""
    program = tmp_path / "train.py"
    program.write_text(HELPERS + "print(signals_helpers()[1:])\n")
    result = run_job(["-n", "2", *options, program], state=tmp_path)
    assert result.rc == 0, result.everything
    assert sorted(result.lines[:2]) == [f"[{rank}] (4, [0, 0, 0])" for rank in range(2)], (
        result.everything
    )
    assert "error[" not in result.err


def test_a_notice_to_every_process_of_a_job_ends_no_agent_of_launch(tmp_path: Path) -> None:
    """The agent that `launch` keeps died of a SIGUSR1 that a batch system sends to every process,
    and so did the call.
    """
    program = tmp_path / "calls.py"
    program.write_text(
        HELPERS
        + "if __name__ == '__main__':\n"
        + "    told = [one for _ in range(2) for one in rallypoint.launch(signals_helpers, nproc=2)]\n"
        + "    print(len({agent for agent, _, _ in told}), [one[1:] for one in told])\n"
    )
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"1 {[(4, [0, 0, 0])] * 4}", done.stdout + done.stderr
