"""Jobs on a Ray cluster of two nodes: raylets of this machine, started by Ray's own test cluster."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import rallypoint
from rallypoint.clusters import ray as on_ray
from rallypoint.errors import EnvironmentProblem, WorkerError

from ..python_path import WITHOUT_TORCH

pytestmark = pytest.mark.timeout(120)

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'rallypoint[ray]'"
)

TELL = """
import os, sys, time
print("rank", *map(os.environ.get, ("RANK", "WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")), flush=True)
if sys.argv[1:] == ["stay"]:
    print("pid", os.getpid(), os.getppid(), flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster with two nodes of two CPUs each, and two GPUs as Ray believes. Its raylets give their environment to the actors."""
    module = importlib.import_module("ray.cluster_utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(WITHOUT_TORCH))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = module.Cluster()
        try:
            for _ in range(2):
                made.add_node(
                    num_cpus=2, num_gpus=2, object_store_memory=100 << 20, include_dashboard=False
                )
            patch.setenv("RAY_ADDRESS", made.address)
            yield made
        finally:
            made.shutdown()


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(TELL)
    command = [sys.executable, "-m", "rallypoint", "run", "--engine", "ray", "--nnodes", "2"]
    return subprocess.Popen(
        [*command, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pids_told(job: subprocess.Popen[str], count: int) -> list[int]:
    """Return the processes of the ranks, and their templates, once all have told them."""
    assert job.stdout is not None
    found: list[int] = []
    while len(found) < 2 * count:
        line = job.stdout.readline()
        assert line, job.communicate()
        if told := re.search(r"pid (\d+) (\d+)", line):
            found += map(int, told.groups())
    return found


def have_ended(pids: Sequence[int], within: float = 10.0) -> bool:
    until = time.monotonic() + within
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > until:
            raise AssertionError(f"{alive} live")
        time.sleep(0.05)
    return True


@needs_ray
@pytest.mark.usefixtures("cluster")
def test_a_program_runs_on_every_node(tmp_path: Path) -> None:
    job = started(tmp_path, "-n", "2", "train.py")
    out, err = job.communicate(timeout=110)
    ranks = sorted(re.findall(r"^\[\d\] rank (\d) 4 (\d) 1 0,1$", out, re.MULTILINE))
    assert ranks == [("0", "0"), ("1", "0"), ("2", "1"), ("3", "1")], err
    assert job.returncode == 0


@needs_ray
@pytest.mark.usefixtures("cluster", "without_torch")
def test_launch_returns_the_results_of_all_ranks_or_raises(capsys: Any) -> None:
    def rank(fails: int) -> tuple[int, str]:
        number = int(os.environ["RANK"])
        print("here is", number)
        if number == fails:
            raise ValueError("no luck")
        return number, os.environ["GROUP_RANK"]

    found = rallypoint.launch(rank, (-1,), nproc=2, nnodes=2, engine="ray")
    assert found == [(0, "0"), (1, "0"), (2, "1"), (3, "1")]
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[{n}] here is {n}" for n in range(4)]
    with pytest.raises(WorkerError) as failed:
        rallypoint.launch(rank, (3,), nproc=2, nnodes=2, engine="ray")
    assert failed.value.ranks == (3,)
    assert repr(failed.value.exceptions[0]) == "ValueError('no luck')"


@needs_ray
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_driver_ends_every_rank(tmp_path: Path, number: signal.Signals) -> None:
    job = started(tmp_path, "-n", "1", "train.py", "stay")
    pids = pids_told(job, 2)
    job.send_signal(number)
    _, err = job.communicate(timeout=110)
    assert job.returncode == 128 + number, err
    assert have_ended(pids)


@needs_ray
@pytest.mark.usefixtures("cluster")
def test_a_driver_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    job = started(tmp_path, "-n", "1", "train.py", "stay")
    pids = pids_told(job, 2)
    job.kill()
    job.communicate()
    assert have_ended(pids, 20.0)


@needs_ray
@pytest.mark.usefixtures("cluster")
def test_a_cluster_that_is_too_small_is_told_at_once() -> None:
    with pytest.raises(EnvironmentProblem) as refused:
        rallypoint.launch(print, nproc=3, nnodes=2, engine="ray")
    assert refused.value.code == "ray-unavailable"
    assert "its nodes have: 2 CPU, 2 GPU; 2 CPU, 2 GPU" in refused.value.why


@needs_ray
@pytest.mark.usefixtures("cluster")
def test_a_cluster_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("ray"), "__version__", "1.0.0")
    with pytest.raises(EnvironmentProblem) as refused:
        rallypoint.launch(print, nproc=2, nnodes=2, engine="ray")
    assert refused.value.code == "ray-unavailable"
    assert "1.0.0" in " ".join(refused.value.why)


@needs_ray
def test_a_head_that_does_not_answer_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(EnvironmentProblem) as refused:
        rallypoint.launch(print, nproc=2, nnodes=2, engine="ray")
    assert refused.value.code == "ray-unavailable"


def test_ray_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EnvironmentProblem) as refused:
        rallypoint.launch(print, nproc=2, nnodes=2, engine="ray")
    assert refused.value.code == "ray-unavailable"
    assert "pip install" in refused.value.help[0][1]


@needs_ray
def test_a_lost_raylet_is_a_lost_node(cluster: Any, tmp_path: Path) -> None:
    job = started(tmp_path, "-n", "1", "train.py", "stay")
    pids = pids_told(job, 2)
    (lost,) = [node for node in cluster.list_all_nodes() if node is not cluster.head_node]
    cluster.remove_node(lost, allow_graceful=False)
    _, err = job.communicate(timeout=110)
    assert re.search(r"^error\[(node|lead)-lost\]: ", err, re.MULTILINE), err
    assert job.returncode == 75
    assert have_ended(pids)


@pytest.mark.parametrize(
    ("nodes", "nproc", "share"),
    [
        ([{"CPU": 8}, {"CPU": 4}, {"CPU": 2}], 4, (4, 0)),
        ([{"CPU": 8, "GPU": 4}, {"CPU": 8, "GPU": 4}], 4, (4, 4)),
        ([{"CPU": 8, "GPU": 2}, {"CPU": 8, "GPU": 4}], 4, (4, 0)),
        ([{"CPU": 8, "GPU": 2}, {"CPU": 8, "GPU": 4}], "gpu", (2, 2)),
        ([{"CPU": 8, "GPU": 2}, {"CPU": 8, "GPU": 4}], "auto", (2, 2)),
        ([{"CPU": 8}, {"CPU": 4}], "auto", (4, 0)),
        ([{"CPU": 8}, {"CPU": 4}], None, (1, 0)),
        ([{"CPU": 8}, {"CPU": 4}], "gpu", None),
        ([{"CPU": 8}], 1, None),
        ([{"CPU": 8}, {}], 1, None),
    ],
)
def test_a_launcher_asks_for_a_cpu_for_each_rank_and_a_gpu_where_there_are(
    nodes: list[dict[str, float]], nproc: Any, share: tuple[int, int] | None
) -> None:
    if share is not None:
        assert on_ray.share_of(nodes, 2, nproc) == share
        return
    with pytest.raises(EnvironmentProblem):
        on_ray.share_of(nodes, 2, nproc)
