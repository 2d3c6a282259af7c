"""An agent with a seat on the second of two nodes, without a lead: its ranks do not begin at 0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DEADLINE = 60.0

AGENT = """
import sys
from rallypoint.cli.main import main
from rallypoint.launcher.agent import agent
from rallypoint.world import Seat, World

agent.alone = lambda plan: Seat(0, 1, World.of([3, 2]), "127.0.0.1", 29611)
sys.exit(main(["run", "-n", "2", "--fresh", "--run-dir", *sys.argv[1:]]))
"""
PROGRAM = """
import os, time

print(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], flush=True)
print(os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], flush=True)
there = "printed" + os.environ["TORCHELASTIC_RESTART_COUNT"]
if os.environ["RANK"] == "4":
    while not os.path.exists(there):  # the other is stopped when this one has failed
        time.sleep(0.01)
    raise ValueError("nan")
open(there, "w").close()
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


def test_ranks_have_the_numbers_of_their_seat(folder: Path) -> None:
    """The first attempt had MASTER_PORT=0."""
    clean = {name: value for name, value in os.environ.items() if "RANK" not in name}
    done = subprocess.run(
        [sys.executable, "-c", AGENT, str(folder / "run"), "--max-restarts", "1", "train.py"],
        cwd=folder,
        env={**clean, "XDG_STATE_HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    first = [f"[{rank}] 127.0.0.1 29611" for rank in (3, 4)]
    assert [line for line in sorted(done.stdout.splitlines()) if "29611" in line] == first
    for local_rank, rank in enumerate((3, 4)):
        assert done.stdout.count(f"[{rank}] 1 {local_rank} 5\n") == 2, done.stdout
        log = (folder / "run" / f"rank{rank}.log").read_text()
        assert log.count(f"1 {local_rank} 5\n") == 2
    assert "rank 4 raised ValueError: nan" in done.stderr
    assert "restarting all 5 ranks" in done.stderr
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert {one["rank"] for one in events if one["what"] == "worker-started"} == {3, 4}
    assert not [one for one in events if one["what"] == "port-held"], "node 0 holds it"
