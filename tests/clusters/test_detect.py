"""Clusters: what they tell a launcher without flags, and what flags change of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import msgspec
import pytest

from rallypoint.cli import args, run_options
from rallypoint.clusters.cluster import Cluster, Unclear
from rallypoint.clusters.detect import detect
from rallypoint.errors import UsageError
from rallypoint.launcher.plan import Options

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[01-02]",
    "SLURM_NODEID": "1",
}
"""Variables of a step that has one task on each of two nodes."""


def asked(line: str, cluster: Cluster | None, environ: Mapping[str, str] = {}) -> Options:
    return run_options.read(args.take_apart(f"{line} train.py".split(), environ), lambda: cluster)


def refused(line: str, cluster: Cluster | None) -> UsageError:
    with pytest.raises(UsageError) as refusal:
        asked(line, cluster)
    return refusal.value


TWO = Cluster(name="Two", nodes=2, node=1, slots=4, host="node0", ports=(20000, 20001), job="7.0")


def test_outside_of_clusters_nothing_is_found() -> None:
    assert detect({"PATH": "/bin", "RANK": "1"}) is None


def test_outside_of_clusters_no_module_of_one_is_loaded() -> None:
    """Starts outside of clusters are the most, and a module costs each of them half a millisecond."""
    program = """
import sys
from rallypoint.clusters.detect import MARKS, detect
assert detect({"PATH": "/bin"}) is None
print(*({f"rallypoint.clusters.{name}" for name, _ in MARKS} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []


def test_a_process_of_a_job_of_ours_has_its_place_from_that_job() -> None:
    """A rank that srun's launcher has started inherits srun's variables, and may start a job."""
    assert detect(STEP) is not None
    rank = {"RALLYPOINT_JOB": "a1", "RALLYPOINT_FAMILY": "b2"}
    found = detect({**STEP, **rank}, Hidden())
    assert found is not None
    assert (found.nodes, found.left_over) == (1, True)
    # sbatch hands these on, too, and the job that a rank had submitted was on one node in silence.
    assert "RALLYPOINT_JOB=a1" in found.notes[0]
    one = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "gpu01"}
    assert detect({**STEP, **one, **rank}, Hidden()) is None


def test_a_job_that_a_user_has_named_for_connect_hides_no_cluster() -> None:
    """Each node would have trained alone."""
    assert detect({**STEP, "RALLYPOINT_JOB": "mine"}) is not None


def test_a_cluster_fills_in_what_was_not_given() -> None:
    wanted = asked("", TWO)
    nodes = wanted.nodes
    assert nodes is not None
    assert (nodes.count, nodes.rank, nodes.host, nodes.ports) == (2, 1, "node0", (20000, 20001))
    assert (wanted.nproc, nodes.job, wanted.run_id) == (4, "7.0", "7.0")
    assert nodes.by_cluster
    assert (wanted.master_port, wanted.notes) == (0, ())


@pytest.mark.parametrize(
    ("line", "notes"),
    [
        ("-n 2", 1),
        ("-n 4", 0),  # what the cluster says, too
        ("--nnodes 3", 1),
        ("--node-rank 0", 1),
        ("--rdzv-backend c10d --rdzv-endpoint other:1", 1),
        ("--master-addr other --node-rank 1", 1),
        ("--rdzv-id mine", 0),
    ],
)
def test_flags_win_each_with_a_line(line: str, notes: int) -> None:
    wanted = asked(line, TWO)
    assert len(wanted.notes) == notes
    assert wanted.nodes is not None


def test_a_place_that_was_given_decides_who_leads() -> None:
    wanted = asked("--rdzv-backend c10d --rdzv-endpoint other:1", TWO)
    assert wanted.nodes is not None
    assert (wanted.nodes.rank, wanted.nodes.host, wanted.nodes.ports) == (None, "other", (1,))
    assert not wanted.nodes.by_cluster


@pytest.mark.parametrize("line", ["--nnodes 1", "--standalone"])
def test_a_job_on_one_node_asks_no_cluster(line: str) -> None:
    def fails() -> Cluster:
        raise AssertionError

    wanted = run_options.read(args.take_apart(f"{line} train.py".split(), {}), fails)
    assert (wanted.nodes, wanted.cluster, wanted.nproc) == (None, None, None)


def test_a_master_port_is_where_the_ranks_meet() -> None:
    wanted = asked("--master-port 30000", TWO)
    assert wanted.nodes is not None
    assert (wanted.master_port, wanted.nodes.host) == (30000, "node0")


def test_a_gap_is_refused_unless_flags_fill_it() -> None:
    gap = Unclear(("nnodes",), "COUNT is not set")
    cluster = Cluster(name="Gap", node=1, host="node0", unclear=(gap,))
    error = refused("", cluster)
    assert (error.code, error.headline) == ("cluster-unclear", "COUNT is not set")
    wanted = asked("--nnodes 2", cluster)
    assert wanted.nodes is not None
    assert (wanted.nodes.count, wanted.nodes.rank) == (2, 1)


def test_a_place_that_is_given_leaves_the_number_of_this_node_open() -> None:
    """At --rdzv-endpoint nodes get numbers as they come: none is asked for."""
    gap = Unclear(("nnodes", "node_rank", "rdzv_endpoint"), "COUNT is not set")
    cluster = Cluster(name="Gap", unclear=(gap,))
    wanted = asked("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0:29400", cluster)
    assert wanted.nodes is not None
    assert (wanted.nodes.count, wanted.nodes.rank) == (2, None)
    assert refused("--nnodes 2 --node-rank 1", cluster).code == "cluster-unclear"


@pytest.mark.parametrize(
    ("line", "cluster"),
    [
        ("", Cluster(name="No place", nodes=2, node=1)),
        ("--nnodes 2", Cluster(name="Fewer", nodes=4, node=3, host="node0")),
    ],
)
def test_what_does_not_fit_together_is_refused(line: str, cluster: Cluster) -> None:
    assert refused(line, cluster).code == "cluster-unclear"


@pytest.mark.parametrize(
    ("line", "kill_after", "grace"),
    [
        ("", 30.0, 25.0),  # before SIGKILL by the cluster there is time for the report
        ("", 3.0, 1.0),
        ("", 300.0, 30.0),
        ("--grace 40", 30.0, 40.0),
        ("--shutdown-timeout 40", 30.0, 40.0),
    ],
)
def test_the_grace_ends_before_the_patience_of_the_cluster(
    line: str, kill_after: float, grace: float
) -> None:
    assert asked(line, msgspec.structs.replace(TWO, kill_after=kill_after)).grace == grace


class Hidden:
    """A machine that shows nothing but open descriptors: variables are believed there."""

    def __init__(self, *fds: int) -> None:
        self._fds = fds

    def text(self, path: str) -> str:
        return ""

    def is_open(self, fd: int) -> bool:
        return fd in self._fds

    def host(self) -> str:
        return "gpu02"


STEPS = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
TASK = {
    "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"
}  # fmt: skip
"""Variables of a task of MPICH's."""


def test_of_two_clusters_the_inner_one_is_asked_and_the_outer_one_named() -> None:
    """mpiexec starts its tasks in a step of Slurm's, and they have that one's variables, too."""
    found = detect({**STEPS, **TASK}, Hidden(9))
    assert found is not None
    assert (found.name, found.nodes, found.node) == ("MPICH", 4, 3)
    assert any("inside Slurm" in line for line in found.because)


def test_variables_that_are_left_over_of_an_inner_cluster_hide_no_outer_one() -> None:
    """srun in a shell that mpiexec had started: each node would have trained alone."""
    found = detect({**STEPS, **TASK}, Hidden())
    assert found is not None
    assert (found.name, found.nodes, found.node) == ("Slurm", 2, 1)
    alone = detect(TASK, Hidden())
    assert alone is not None
    assert (alone.nodes, alone.left_over) == (1, True)


def test_variables_that_are_left_over_of_slurm_hide_no_pod() -> None:
    """Each pod would have trained alone, and was said to be started by Slurm."""
    pod = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": "1",
        "LWS_LEADER_ADDRESS": "llm-0.llm",
    }
    found = detect({**pod, "SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}, Hidden())
    assert found is not None
    assert (found.name, found.nodes, found.node) == ("Kubernetes", 2, 1)
    assert not any("Slurm" in line for line in found.because)


def test_an_empty_variable_names_no_place() -> None:
    wanted = asked("", TWO, {"PET_MASTER_ADDR": "", "PET_RDZV_ENDPOINT": ""})
    assert wanted.nodes is not None
    assert (wanted.nodes.rank, wanted.nodes.host, wanted.notes) == (1, "node0", ())
