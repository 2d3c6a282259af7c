"""Jobs on two nodes of a real Slurm: one line in a batch script, with srun and without."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.nodes.jobs import TELL
from tests.nodes.netns import Cluster, command_line, wait_until

from rallypoint.host.process_status import status

from ..python_path import WITHOUT_TORCH, python_path
from . import slurm_ground
from .slurm_ground import Job, Slurm

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.skipif(bool(slurm_ground.why_not()), reason=slurm_ground.why_not()),
]

PYTHON = shlex.quote(sys.executable)
RUN = f"{PYTHON} -m rallypoint run"

EXAMPLES = Path(__file__).parents[2] / "examples"

FREE_WITHIN = 5.0
"""Seconds after which a cancelled job has left nothing on any node."""

LATE = 10.0
"""Seconds that something may be later than promised on a busy machine."""

STAYS = (
    TELL
    + """
import signal, time
def noticed(number, frame): print("noticed", number, flush=True)
def stopped(number, frame):
    print("stopped", number, flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1)  # it saves
    print("saved", flush=True)
    os._exit(0)
signal.signal(signal.SIGUSR1, noticed)
signal.signal(signal.SIGTERM, stopped)
print("up", flush=True)
time.sleep(600)
"""
)

RESUMES = """
import os, pathlib, sys
step = pathlib.Path("checkpoint")
at = int(step.read_text()) if step.exists() else 0
print("from", at, "restarts", os.environ.get("SLURM_RESTART_COUNT", "0"), flush=True)
if at == 0:
    step.write_text("7")
    sys.exit(75)
"""


@pytest.fixture(scope="module")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    with (
        Cluster(3, folder / "nodes", shared_home=True) as cluster,
        Slurm(cluster, folder / "slurm") as made,
    ):
        yield made


@pytest.fixture
def slurm(_shared: Slurm) -> Iterator[Slurm]:
    """Slurm on two nodes, that all tests of this module share; a job that is left fails its test."""
    yield _shared
    _shared.ask("scancel", "--user=root")
    free = wait_until(lambda: not _shared.processes(), FREE_WITHIN + LATE)
    left = [] if free else _shared.processes()
    assert not left, "the test has left processes:\n" + "\n".join(left)


def submit(slurm: Slurm, folder: Path, script: str, program: str, *options: str) -> Job:
    """Submit a job of a program that needs no torch, on both nodes."""
    (folder / "train.py").write_text(program)
    env = {"PYTHONPATH": python_path(WITHOUT_TORCH)}
    return slurm.submit(folder, script, "--nodes=2", *options, env=env)


def world(output: str) -> list[tuple[str, ...]]:
    """Return rank, world size, local rank, local world size and node of each rank."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    told = [line for line in output.splitlines() if "env {" in line]
    return sorted(
        tuple(re.findall(rf'"{name}": "(\d+)"', line)[0] for name in names) for line in told
    )


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.usefixtures("digits_quickly")
def test_training_reads_digits_as_well_as_on_one_machine(slurm: Slurm, tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the digits ship inside scikit-learn")
    line = f"{shlex.quote(str(EXAMPLES / 'digits_ddp.py'))} --epochs 1"
    script = f"{RUN} {line}; {RUN} --nnodes 1 -n 2 {line}"
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    output = slurm.submit(tmp_path, script, "--nodes=2", env=env).wait()
    found = re.findall(r"test accuracy (\S+)", output)
    assert len(found) == 2, output
    assert len({*found}) == 1, found  # the same digits in the same order, whatever the machines
    assert float(found[0]) > 0.75


@pytest.mark.parametrize("before", ["", "srun "])
def test_one_line_is_a_job_on_both_nodes(slurm: Slurm, tmp_path: Path, before: str) -> None:
    job = submit(slurm, tmp_path, f"{before}{RUN} train.py; echo status $?", TELL)
    output = job.wait()
    assert world(output) == [("0", "2", "0", "1", "0"), ("1", "2", "0", "1", "1")], output
    assert "status 0" in output
    assert "RALLYPOINT_OWN_STEP" not in output


def test_three_tasks_on_two_nodes_are_three_ranks(slurm: Slurm, tmp_path: Path) -> None:
    line = f"{RUN} train.py && echo again && srun --mpi=pmi2 {RUN} train.py"
    own, by_srun = submit(slurm, tmp_path, line, TELL, "--ntasks=3").wait().split("again\n")
    ranks = [("0", "3", "0", "2"), ("1", "3", "1", "2"), ("2", "3", "0", "1")]
    assert [rank[:4] for rank in world(own)] == ranks, own  # two launchers
    assert [rank[:4] for rank in world(by_srun)] == ranks, by_srun  # three
    assert [rank[4] for rank in world(own)] == ["0", "0", "1"]


def test_scancel_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, f"{RUN} train.py", STAYS)
    job.wait_for(r"\] up", 2)
    slurm.ask("scancel", job.number)
    at = time.monotonic()
    assert wait_until(lambda: not slurm.processes(), FREE_WITHIN + LATE), slurm.processes()
    print(f"free after {time.monotonic() - at:.2f} s")
    assert job.output().count("] saved") == 2, job.output()


def test_signals_of_the_launcher_in_the_script_reach_the_ranks(
    slurm: Slurm, tmp_path: Path
) -> None:
    """`--signal=B:USR1@60` is for the script alone, and `timeout` for what it has started."""
    script = f"{RUN} train.py & echo $! > launcher; wait; echo status $?; wait $!; echo status $?"
    job = submit(slurm, tmp_path, f"trap : USR1 TERM\n{script}", STAYS)
    job.wait_for(r"\] up", 2)
    node = slurm.nodes[0]
    for number, said in (("USR1", "noticed 10"), ("TERM", "stopped 15")):
        node.run(["kill", f"-{number}", (tmp_path / "launcher").read_text().strip()])
        job.wait_for(said, 2)
    assert re.search(r"stopped\[interrupted\]: .*SIGTERM", job.wait())


def test_a_launcher_that_is_killed_ends_the_job_with_75(slurm: Slurm, tmp_path: Path) -> None:
    """srun's own status is 137 then."""
    job = submit(slurm, tmp_path, f"{RUN} train.py; echo status $?", STAYS)
    job.wait_for(r"\] up", 2)
    node = slurm.nodes[1]
    found = [status(pid) for pid in node.processes() if "rallypoint run" in command_line(pid)]
    # The oldest: its guard, a fork of it, has the same command line.
    launcher = min((one for one in found if one is not None), key=lambda one: one.started)
    node.signal(signal.SIGKILL, [launcher.pid])
    output = job.wait()
    assert "error[node-lost]: node 1 (node2, rank 1) was lost" in output
    assert "status 75" in output


def test_a_job_that_ends_with_75_goes_on_from_its_checkpoint(slurm: Slurm, tmp_path: Path) -> None:
    again = '[ $status = 75 ] && scontrol requeue "$SLURM_JOB_ID"'
    script = f"{RUN} train.py\nstatus=$?\n{again}\nexit $status"
    output = submit(slurm, tmp_path, script, RESUMES, "--requeue").wait()
    assert "from 0 restarts 0" in output
    assert len(re.findall("from 7 restarts 1", output)) == 2, output


def test_what_is_unclear_is_refused_and_a_shell_is_no_job(slurm: Slurm, tmp_path: Path) -> None:
    script = f"srun env 'SLURM_STEP_NODELIST=node[1-' {RUN} train.py; echo status $?"
    job = submit(slurm, tmp_path, script, TELL)
    env = {"PYTHONPATH": str(WITHOUT_TORCH)}
    output = job.wait()
    assert "error[cluster-unclear]: SLURM_STEP_NODELIST=node[1- is not a host list" in output
    assert "status 2" in output
    shell = slurm.login.start(
        ["salloc", "--nodes=2", *shlex.split(RUN), "train.py"],
        env=slurm.environment(slurm.login, **env),
        cwd=tmp_path,
    )
    assert shell.wait() == 0
    assert world(shell.output()) == [("0", "1", "0", "1", "0")], shell.output()
    assert "is its shell's" in shell.output()


CALLS = """
import json, os
import rallypoint

def f():
    return int(os.environ["RANK"]), os.environ["GROUP_RANK"]

for ranks in 1, 2:
    print("result", json.dumps(rallypoint.launch(f, nproc=ranks, nnodes=2)), flush=True)
"""


def test_a_program_that_srun_has_started_calls_launch_on_both_nodes(
    slurm: Slurm, tmp_path: Path
) -> None:
    output = submit(slurm, tmp_path, f"srun {PYTHON} train.py", CALLS).wait()
    found = re.findall(r"^result (.*)$", output, re.MULTILINE)
    whole = '[[0, "0"], [1, "0"], [2, "1"], [3, "1"]]'
    there = '[[2, "1"], [3, "1"]]'
    assert sorted(found) == sorted(['[[0, "0"], [1, "1"]]', '[[1, "1"]]', whole, there]), output
