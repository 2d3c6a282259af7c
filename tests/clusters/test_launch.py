"""`rallypoint.launch` in a program that mpirun or srun has started on several nodes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from . import mpirun

pytestmark = pytest.mark.usefixtures("without_torch")

PROGRAM = """
import json, os
import rallypoint

def f():
    return int(os.environ["RANK"]), os.environ["GROUP_RANK"]

rallypoint.launch(f, nproc=1, nnodes=2)
print("result", json.dumps(rallypoint.launch(f, nproc=2, nnodes=2)), flush=True)
"""
"""The second call finds the place that the first one has been told: a cluster tells it once."""


@pytest.mark.parametrize("name", mpirun.WHEELS)
def test_the_tasks_of_mpirun_make_a_call_together(name: str, tmp_path: Path) -> None:
    folder = mpirun.install(name)
    if isinstance(folder, str):
        pytest.skip(folder)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    start = [f"{folder}/bin/mpiexec"]
    if name != "mpich":
        start = [f"{folder}/bin/mpirun", "--allow-run-as-root", "--oversubscribe"]
        start += ["--bind-to", "none"]
    environ = {"OMPI_ALLOW_RUN_AS_ROOT": "1"}
    if name == "openmpi4":  # no key file is made, which would make the folder that it needs, too
        secret = tmp_path / "secret"
        secret.touch(0o600)
        secret.write_text("c2VjcmV0IG9mIGEgdGVzdCwgbG9uZyBlbm91Z2g=")
        environ |= {"XDG_STATE_HOME": str(tmp_path), "RALLYPOINT_SECRET_FILE": str(secret)}
    done = subprocess.run(
        [*start, "-n", "2", sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | environ,
    )
    found = [json.loads(text) for text in re.findall(r"^result (.*)$", done.stdout, re.MULTILINE)]
    whole = [[0, "0"], [1, "0"], [2, "1"], [3, "1"]]
    assert sorted(found, key=len) == [whole[2:], whole], done.stderr
