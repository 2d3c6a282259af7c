"""Jobs under Slurm, MPI and Ray: how soon their ranks meet, beside what each engine takes to run
`hostname` on the same two nodes.

The nodes of Slurm and MPI are network namespaces of this machine; Ray's are two raylets of it.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from tests.clusters import mpirun, slurm_ground
from tests.clusters.slurm_ground import Slurm
from tests.nodes.netns import Cluster

from bench import nodes
from bench.harness import JOBS, Run, rallypoint, say
from bench.nodes import OURS
from bench.samples import Sample, Value

HOSTNAME = "hostname"
ALONE = ["hostname"]

NODES = 2

RANKS = 2
"""Ranks of each node."""

TIMEOUT = 120.0

OPEN_MPI_4, OPEN_MPI_5, MPICH = "openmpi4", "openmpi5", "mpich"

ENGINES = ("slurm", "slurm-script", OPEN_MPI_5, OPEN_MPI_4, MPICH, "ray")

JOB = [*rallypoint(), "run", "-n", str(RANKS), str(JOBS / "first_all_reduce.py")]

Starter = Callable[[list[str], Path], Run]
"""Start a command on both nodes, in a folder that it can write to."""


def start(engine: str, turns: int) -> Iterator[Sample]:
    """Seconds from the engine's command to the end of the last rank's first all_reduce; `beyond`:
    more than `hostname` took in this turn.
    """
    with _GROUNDS.get(engine, _mpi)(engine) as (starter, job, alone):
        for turn in range(turns):
            yield nodes.imports(turn)
            yield (bare := _sample(HOSTNAME, turn, starter, alone, 0))
            ours = _sample(OURS, turn, starter, job, NODES * RANKS)
            took, least = ours.values["seconds"], bare.values["seconds"]
            if isinstance(took, float) and isinstance(least, float):
                ours.values["beyond"] = took - least
            yield ours


def _sample(who: str, turn: int, starter: Starter, command: list[str], marks: int) -> Sample:
    values: dict[str, Value] = {"seconds": None}
    note = ""
    with tempfile.TemporaryDirectory(prefix="rallypoint-clusters-") as folder:
        given = {"BENCH_MARKS": f"{folder}/marks", "BENCH_FOLDER": folder}
        env = ["env", *(f"{name}={value}" for name, value in given.items())]
        with starter([*env, *command] if marks else command, Path(folder)) as run:
            found = run.wait_for_marks("reduced", marks or 1, TIMEOUT)
            status = run.wait(TIMEOUT)
            if marks and len(found) == marks:
                values["seconds"] = max(mark.at for mark in found) - run.began
            elif not marks and run.ended is not None:
                values["seconds"] = run.ended - run.began
            values["status"] = status
            if status or values["seconds"] is None:
                note = run.output().strip()[-500:]
    say(f"  turn {turn}  {who:<15} {nodes.shown(values)}{note}")
    return Sample(who, turn, values, note)


_Ground = tuple[Starter, list[str], list[str]]
"""How to start a command, our job's, and what is run alone."""


@contextmanager
def _slurm(engine: str) -> Iterator[_Ground]:
    if reason := slurm_ground.why_not():
        raise SystemExit(reason)
    with (
        tempfile.TemporaryDirectory(prefix="rallypoint-slurm-") as folder,
        Cluster(NODES + 1, Path(folder) / "nodes", shared_home=True) as cluster,
        Slurm(cluster, Path(folder) / "slurm") as slurm,
    ):
        tasks = [f"--nodes={NODES}", f"--ntasks={NODES}"]

        def line(command: list[str], folder: Path) -> list[str]:
            if engine == "slurm" or command == ALONE:
                return ["srun", *tasks, *command]
            # The launcher of a batch script starts its own step. How long sbatch waits for the end
            # of a job is its own affair, so `hostname` is that of srun here, too.
            out = f"--output={folder}/out"
            return ["sbatch", "--wait", *tasks, out, f"--wrap={shlex.join(command)}"]

        def starter(command: list[str], folder: Path) -> Run:
            inside = slurm.login.inside(line(command, folder), folder)
            return Run(inside, folder=folder, **_different(slurm.environment(slurm.login)))

        yield starter, JOB, ALONE


@contextmanager
def _mpi(engine: str) -> Iterator[_Ground]:
    installed = mpirun.install(engine)
    if isinstance(installed, str):
        raise SystemExit(installed)
    with (
        tempfile.TemporaryDirectory(prefix="rallypoint-mpi-") as folder,
        Cluster(NODES, Path(folder) / "nodes", shared_home=True) as cluster,
    ):
        shell = mpirun.remote_shell(cluster)
        hosts = [node.name for node in cluster.nodes]

        def starter(command: list[str], folder: Path) -> Run:
            line = mpirun.mpirun(engine, installed, shell, hosts, 1)
            inside = cluster[0].inside([*line, *command], folder)
            return Run(inside, folder=folder, HOME=str(cluster[0].home))

        yield starter, JOB, ALONE


@contextmanager
def _ray(engine: str) -> Iterator[_Ground]:
    made = importlib.import_module("ray.cluster_utils").Cluster()
    with tempfile.TemporaryDirectory(prefix="rallypoint-ray-") as ground:
        # actors have the environment of their raylet, not that of the command
        marks = Path(ground) / "marks"
        given = {"RAY_USAGE_STATS_ENABLED": "0", "BENCH_MARKS": str(marks)}
        try:
            with mock.patch.dict(os.environ, given):
                for _ in range(NODES):
                    made.add_node(
                        num_cpus=RANKS, object_store_memory=100 << 20, include_dashboard=False
                    )

            def starter(command: list[str], folder: Path) -> Run:
                marks.unlink(missing_ok=True)
                return Run(command, folder=Path(ground), RAY_ADDRESS=made.address)

            at = JOB.index("run") + 1
            job = [*JOB[:at], "--engine", "ray", "--nnodes", str(NODES), *JOB[at:]]
            yield starter, job, [sys.executable, str(JOBS / "ray_hostname.py")]
        finally:
            made.shutdown()


def _different(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if os.environ.get(name) != value}


_GROUNDS = {"slurm": _slurm, "slurm-script": _slurm, "ray": _ray}
