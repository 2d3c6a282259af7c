"""Real launchers that a cluster's variables alone tell of their job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rallypoint.clusters import secret_source

pytestmark = pytest.mark.usefixtures("without_torch")

RECORD = json.loads((Path(__file__).parent / "environments" / "openmpi4.json").read_text())
"""Two tasks of one host, which find each other by a folder in the home of the user."""

TELL = """
import json, os
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE TORCHELASTIC_RUN_ID"
print("told", json.dumps({name: os.environ[name] for name in names.split()}), flush=True)
assert os.environ["RANK"] == "0", "the rank that fails"
"""


def start(folder: Path, number: int) -> subprocess.Popen[str]:
    ours = ("RALLYPOINT_", "PET_", "SLURM_", "OMPI_", "PMI")
    environ = {name: text for name, text in os.environ.items() if not name.startswith(ours)}
    environ |= RECORD["common"] | RECORD["launchers"][number]["environ"]
    environ |= {"HOME": str(folder / "home"), "XDG_STATE_HOME": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "rallypoint", "run", "program.py"],
        cwd=folder, env=environ, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_tasks_without_flags_are_one_job_with_one_report(tmp_path: Path) -> None:
    """Both make the key of the user at once, and mpirun shows the words of both on one screen."""
    (tmp_path / "program.py").write_text(TELL)
    tasks = [start(tmp_path, number) for number in (0, 1)]
    try:
        said = [task.communicate(timeout=60) for task in tasks]
    finally:
        for task in tasks:
            if task.poll() is None:  # since this has failed; its guard ends its ranks
                task.kill()
                task.communicate()
    told: list[dict[str, Any]] = [
        json.loads(line.partition("told ")[2])
        for out, _ in said
        for line in out.splitlines()
        if "told " in line
    ]
    assert len(told) == 2, said
    for rank, one in enumerate(told):
        assert one == {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": "2",
            "TORCHELASTIC_RUN_ID": told[0]["TORCHELASTIC_RUN_ID"],
        }  # fmt: skip
    assert [task.returncode for task in tasks] == [1, 1]
    assert sum(err.count("error[") for _, err in said) == 1, said
    assert os.path.exists(secret_source.key_path({"HOME": str(tmp_path / "home")}))
