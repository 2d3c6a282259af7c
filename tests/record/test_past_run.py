"""What is told of a run that was kept."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from rallypoint.record import kept_plan, past_run, run_list

from ..store.situations import alarm


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
        (
            {"nodes": {"count": 2, "host": "gpu01", "ports": [29400], "secret_file": "key"}},
            "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint gpu01:29400 --secret-file key ",
        ),
        (
            {"nodes": {"count": 2, "host": "fd00::1", "ports": [29400], "rank": 1}},
            "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint '[fd00::1]:29400' --node-rank 1 ",
        ),
        (
            {
                "nodes": {"count": 2, "rank": 1, "host": "gpu01", "ports": [29501, 29502]},
                "master_port": 29500,
            },
            "--master-port 29500 --nnodes 2 --master-addr gpu01 --node-rank 1 ",
        ),
        (
            {
                "nodes": {
                    "count": 2,
                    "host": "gpu01",
                    "ports": [29400],
                    "job": "7",
                    "local_addr": "10.0.0.2",
                    "is_host": False,
                    "join_timeout": 30.0,
                    "timeout": 10.0,
                    "tls": True,
                }
            },
            "--tls --nnodes 2 --rdzv-backend c10d --rdzv-endpoint gpu01:29400 --rdzv-id 7 "
            "--local-addr 10.0.0.2 --rdzv-conf is_host=false,join_timeout=30 --node-timeout 10 ",
        ),
        (
            {"nodes": {"count": 2, "folder": "/shared/job7"}},
            "--nnodes 2 --rdzv-endpoint file:///shared/job7 ",
        ),
        (
            {"nodes": {"count": 2, "folder": "/shared/job.7", "job": "7"}},
            "--nnodes 2 --rdzv-endpoint file:///shared/job --rdzv-id 7 ",
        ),
        (  # the place was that job's
            {"nodes": {"count": 2, "host": "n1", "ports": [20016], "job": "7", "by_cluster": True}},
            "",
        ),
        ({"nodes": {"count": 2, "secret_file": "key", "by_cluster": True}}, "--secret-file key "),
        ({"logs": {"prefix": "${rank}> "}}, "--log-line-prefix-template '${rank}> ' "),
        ({"logs": {"prefix": ""}}, "--log-line-prefix-template '' "),
    ],
)
def test_the_command_starts_the_same_job_again(options: dict[str, object], words: str) -> None:
    planned = {
        "program": {"kind": "script", "target": "train.py", "args": ["--lr", "1"]},
        "slots": 4,
        **options,
    }
    plan = msgspec.convert(planned, kept_plan.KeptPlan)
    assert kept_plan.command(plan) == f"rallypoint run -n 4 {words}train.py --lr 1"


@pytest.mark.parametrize(("nodes", "said"), [(None, ""), ({"count": 3}, ", nnodes=3")])
def test_a_call_of_launch_is_shown_with_its_nodes(
    nodes: dict[str, object] | None, said: str
) -> None:
    """A call for several nodes was shown as one for this node alone."""
    task = {"name": "train", "line": "/srv/train.py:12"}
    plan = msgspec.convert({"task": task, "slots": 2, "nodes": nodes}, kept_plan.KeptPlan)
    assert kept_plan.command(plan) == f"rallypoint.launch(train, nproc=2{said}) at /srv/train.py:12"


def test_a_pipe_in_a_run_folder_keeps_no_reader_waiting(tmp_path: Path) -> None:
    """`show`, `stop` and the start of a job stood in open()."""

    def hangs() -> None:
        pytest.fail("it waits")

    folder = tmp_path / "1"
    folder.mkdir()
    for name in ("plan.json", "events.jsonl", "report.json", "running", "rank0.log"):
        os.mkfifo(folder / name)
    with alarm(5.0, hangs):
        assert run_list.past_runs(str(tmp_path)) == []
        (folder / "plan.json").unlink()
        (folder / "plan.json").write_text('{"job": "1"}')
        assert [run.job for run in run_list.past_runs(str(tmp_path))] == ["1"]
        assert past_run.read(str(folder)).events == ()
        assert past_run.tail(str(folder / "rank0.log"), 1) == ()
