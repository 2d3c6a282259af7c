"""Launcher in a batch script of Slurm's, with stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, sys
from rallypoint.clusters import slurm_step
sys.exit(slurm_step.start(os.environ))
"""

SRUN = """
import fcntl, os, socket, sys
lock = open("lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
with socket.socket(socket.AF_UNIX) as node:
    node.connect(os.environ["RALLYPOINT_OWN_STEP"].partition(" ")[2])
    node.sendall(b"place and secret\\n")
    print(sys.stdin.readline().strip(), flush=True)
    open("asked").close()
    node.sendall(b"3\\n")
sys.exit(9)
"""
"""Step whose node 0 ends with status 3, and another node with 9."""

SQUEUE = """
import fcntl
open("asked", "w").close()
fcntl.flock(open("lock"), fcntl.LOCK_EX)
"""
"""Controller that is slow: the step ends while it is asked for it."""


SILENT_SRUN = """
import os, socket, sys
with socket.socket(socket.AF_UNIX) as node:
    node.connect(os.environ["RALLYPOINT_OWN_STEP"].partition(" ")[2])
    sys.exit(9 if sys.stdin.read() == "" else 1)
"""
"""Step whose node 0 stands still before it has said where it is."""


def commands(folder: Path, **texts: str) -> dict[str, str]:
    """Make programs that stand for Slurm's; return the environment of a job that finds them."""
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
        python, program = shlex.quote(sys.executable), shlex.quote(str(folder / f"{name}.py"))
        (folder / name).write_text(f"#!/bin/sh\nexec {python} {program}\n")
        (folder / name).chmod(0o700)
    return {**os.environ, "SLURM_JOBID": "7", "PATH": f"{folder}:{os.environ['PATH']}"}


def test_a_job_ends_as_node_0_says_also_while_the_controller_is_asked(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "asked")
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env=commands(tmp_path, srun=SRUN, squeue=SQUEUE),
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "place and secret\n"
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(30) == 3


def test_a_node_0_that_ends_before_it_is_heard_has_its_status(tmp_path: Path) -> None:
    """Place and status were read at once, where the controller was slow, and the status was lost."""
    both = SRUN.replace('secret\\n")', 'secret\\n3\\n")').replace('    open("asked").close()\n', "")
    env = commands(tmp_path, srun=both.replace('    node.sendall(b"3\\n")\n', ""))
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=tmp_path, env=env, timeout=30, check=False)
    assert done.returncode == 3


def test_a_node_0_that_stands_still_holds_nobody_up(tmp_path: Path) -> None:
    quick = SCRIPT.replace("sys.exit", "slurm_step.TALK = 0.1\nsys.exit")
    env = commands(tmp_path, srun=SILENT_SRUN)
    command = [sys.executable, "-c", quick]
    done = subprocess.run(command, cwd=tmp_path, env=env, timeout=30, check=False)
    assert done.returncode == 9
