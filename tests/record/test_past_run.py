"""What is told of a run that was kept."""

from __future__ import annotations

import msgspec
import pytest

from rallypoint.record import past_run


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ""),
        ({"stall": 3.0}, "--stall 3 "),
        ({"master_port": 29500}, "--master-port 29500 "),
        (
            {"run_dir": "/srv/runs/a b", "run_dir_asked": True, "cwd": "/srv"},
            "--run-dir 'runs/a b' ",
        ),
        ({"run_dir": "/tmp/run", "run_dir_asked": True, "cwd": "/srv"}, "--run-dir /tmp/run "),
        ({"run_dir": "/home/ada/.local/state/rallypoint/runs/1", "cwd": "/srv"}, ""),
        ({"port_range": [20000, 20100]}, "--port-range 20000-20100 "),
        ({"max_restarts": 2, "on_failure": "continue"}, "--max-restarts 2 --on-failure continue "),
    ],
)
def test_the_command_starts_the_same_job_again(options: dict[str, object], words: str) -> None:
    planned = {
        "program": {"kind": "script", "target": "train.py", "args": ["--lr", "1"]},
        "slots": 4,
        **options,
    }
    plan = msgspec.convert(planned, past_run.KeptPlan)
    assert past_run.command(plan) == f"rallypoint run -n 4 {words}train.py --lr 1"
