"""Slurm's variables read: what a process of a batch script or step is told, and what is unclear."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.clusters import slurm
from rallypoint.clusters.cluster import Cluster

# --- lists


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("n[001-003,9],login-b", ["n001", "n002", "n003", "n9", "login-b"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[0-1]n[8-9]", ["r0n8", "r0n9", "r1n8", "r1n9"]),
        ("a[1-2]b[3,5],c", ["a1b3", "a1b5", "a2b3", "a2b5", "c"]),
        ("gpu[1-2].cluster.org", ["gpu1.cluster.org", "gpu2.cluster.org"]),
    ],
)
def test_a_host_list_is_what_slurm_means(text: str, names: list[str]) -> None:
    assert slurm.hosts(text) == names


@pytest.mark.parametrize(
    "text",
    ["node[1-", "node[1-2]]", "node1-2]", "node[3-1]", "node[a-b]", "node[]", "node[1-]", "a,,b",
     "a b", "", "n[1-9999999]", "n[1-999][1-999]", "(null)"],
)  # fmt: skip
def test_a_host_list_with_a_typo_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a|hosts"):
        slurm.hosts(text)


_PLAIN = st.from_regex(r"[a-z][a-z-]{0,3}", fullmatch=True)


@st.composite
def _range(draw: st.DrawFn) -> str:
    first = draw(st.integers(0, 1200))
    last = first + draw(st.integers(0, 12))
    width = draw(st.integers(0, 5))
    return f"{first:0{width}}" if first == last else f"{first:0{width}}-{last:0{width}}"


_BRACKETS = st.lists(_range(), min_size=1, max_size=3).map(lambda found: f"[{','.join(found)}]")
_HOST = st.lists(st.tuples(_PLAIN, _BRACKETS).map("".join), max_size=2).flatmap(
    lambda parts: st.just("".join(parts)) if parts else _PLAIN
)


@cache
def _conf(folder: Path) -> Path:
    conf = folder / "slurm.conf"
    conf.write_text("ClusterName=a\nSlurmctldHost=localhost\nNodeName=b\nPartitionName=c Nodes=b\n")
    return conf


@pytest.mark.skipif(not shutil.which("scontrol"), reason="scontrol was not found: slurm-wlm")
def test_host_lists_are_read_as_scontrol_reads_them(tmp_path: Path) -> None:
    @settings(max_examples=8)
    @given(st.lists(_HOST, min_size=20, max_size=60))
    def compare(lists: list[str]) -> None:
        text = ",".join(lists)  # many in one: a process for each would take minutes
        done = subprocess.run(
            ["scontrol", "show", "hostnames", text],
            env={"SLURM_CONF": str(_conf(tmp_path))},
            capture_output=True,
            text=True,
            check=True,
        )
        assert slurm.hosts(text) == done.stdout.split()

    compare()


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1(x2)", [1, 1]), ("1,2(x2),10", [1, 2, 2, 10])],
)
def test_tasks_of_nodes_are_listed(text: str, numbers: list[int]) -> None:
    assert slurm.counts(text) == numbers


@pytest.mark.parametrize("text", ["", "2(x", "2(3)", "a", "1,,2", "1(x999999)"])
def test_tasks_with_a_typo_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of tasks"):
        slurm.counts(text)


# --- what a process is told


class Machine:
    """Files of a machine whose process was started by a step ("" by none, None: hidden)."""

    def __init__(self, step: str | None) -> None:
        self.files = {
            "/proc/self/stat": "30 (python (3) x) S 20 30 20 0",
            "/proc/20/stat": "20 (slurm_script) S 10 20 20 0",
            "/proc/10/stat": "10 (slurmstepd) S 1 10 10 0" if step else "10 (bash) S 1 10 10 0",
            "/proc/10/cmdline": f"slurmstepd: [17.{step}]    ",
            "/proc/1/stat": "1 (systemd) S 0 1 1 0",
            "/proc/2/comm": "kthreadd\n",
        }
        if step is None:
            del self.files["/proc/10/stat"], self.files["/proc/2/comm"]

    def text(self, path: str) -> str:
        return self.files.get(path, "")

    def is_open(self, fd: int) -> bool:
        return fd == 14

    def host(self) -> str:
        return "node2"


def env(text: str) -> dict[str, str]:
    """Return Slurm's variables from a line of them without their prefix."""
    pairs = (word.partition("=") for word in text.split())
    return {name if name.startswith("R") else f"SLURM_{name}": value for name, _, value in pairs}


JOB = "JOB_ID=17 JOBID=17 JOB_NODELIST=node[1-2] JOB_NUM_NODES=2 NNODES=2 NODELIST=node[1-2] "
BATCH = env(JOB + "TASKS_PER_NODE=1(x2) NODEID=0 PROCID=0 LOCALID=0") | {"SLURMD_NODENAME": "node1"}
STEP = env(
    JOB + "STEP_ID=0 STEPID=0 STEP_NODELIST=node[1-2] STEP_NUM_NODES=2 STEP_NUM_TASKS=2"
    " STEP_TASKS_PER_NODE=1(x2) NTASKS=2 NPROCS=2 NODEID=1 PROCID=1 LOCALID=0"
)
RANKS = STEP | env(
    "STEP_NUM_TASKS=3 STEP_TASKS_PER_NODE=2,1 NTASKS=3 NPROCS=3 NODEID=0 PROCID=1 LOCALID=1"
)
HET_STEP = STEP | env("STEP_ID=3 JOB_NODELIST=node1 HET_SIZE=2")
"""Variables as Slurm 22.05 sets them: `sbatch -N 2`, `srun`, `srun -n 3` on two nodes."""


def seen(environ: Mapping[str, str], step: str | None = "0") -> Cluster:
    found = slurm.look(environ, Machine(step))
    assert found is not None
    return found


def headlines(cluster: Cluster) -> list[str]:
    return [gap.headline for gap in cluster.unclear]


def test_a_step_has_a_launcher_on_each_node() -> None:
    found = seen(STEP)
    assert (found.nodes, found.node, found.slots, found.local) == (2, 1, None, None)
    assert (found.host, found.job, found.one_screen) == ("node1", "17.0", True)
    assert len(found.ports) == slurm.PORTS
    assert found.unclear == ()


def test_a_step_of_fewer_nodes_than_the_job_is_not_the_job() -> None:
    one = env("STEP_NODELIST=node2 STEP_NUM_NODES=1 STEP_NUM_TASKS=1 STEP_TASKS_PER_NODE=1")
    assert seen(STEP | one).nodes == 1


def test_more_tasks_than_nodes_are_one_for_each_rank() -> None:
    found = seen(RANKS)
    assert (found.nodes, found.node, found.slots, found.local) == (3, 1, 1, (1, 2))
    assert found.unclear == ()


def test_a_batch_script_on_several_nodes_starts_a_step() -> None:
    found = seen(BATCH, "batch")
    assert (found.nodes, found.starts, found.slots) == (2, True, None)
    assert seen(BATCH | env("JOB_NUM_NODES=1 JOB_NODELIST=node1"), "batch").starts is False


def test_the_tasks_that_a_job_asked_for_are_its_ranks() -> None:
    several = env("NTASKS=3 TASKS_PER_NODE=2,1")
    assert seen(BATCH | several, "batch").slots == 2
    here = {slurm.OWN_STEP: "2,1 /tmp/x"}
    assert [seen(STEP | here | env(f"NODEID={node}")).slots for node in (0, 1)] == [2, 1]
    # without -n the list has the processors; sbatch in a step hands on that step's number
    assert seen(BATCH | env("TASKS_PER_NODE=48(x2)"), "batch").slots is None
    assert seen(BATCH | env("TASKS_PER_NODE=48(x2) NTASKS=1"), "batch").slots is None


def test_a_step_of_the_launchers_own_is_told_by_its_standard_input() -> None:
    found = seen(STEP | {slurm.OWN_STEP: "1 /tmp/x"})
    assert (found.exchange, found.nodes, found.node) == (slurm.OWN, 2, 1)


def test_node_0_is_told_by_pmi_where_the_step_has_it() -> None:
    assert seen(STEP | {"PMI_FD": "14"}).exchange == "pmi"
    assert seen(STEP | {"PMI_FD": "15"}).exchange == ""  # closed: of an outer step
    assert seen(STEP | {"PMI_FD": "14", slurm.OWN_STEP: "1 /tmp/x"}).exchange == slurm.OWN


def test_variables_of_an_outer_step_are_not_the_batch_scripts() -> None:
    found = seen(STEP | BATCH, "batch")  # sbatch was typed in a step
    assert (found.nodes, found.starts) == (2, True)


def test_a_job_of_several_components_needs_srun() -> None:
    """The components are one step, but srun's standard input is that of the first alone."""
    parts = env(
        "HET_SIZE=2 JOB_NUM_NODES=1 JOB_NODELIST=node1 JOB_NODELIST_HET_GROUP_0=node1"
        " JOB_NODELIST_HET_GROUP_1=big[1-2] JOB_NUM_NODES_HET_GROUP_0=1 JOB_NUM_NODES_HET_GROUP_1=2"
    )
    found = seen(BATCH | parts, "batch")
    assert (found.nodes, found.host, len(found.unclear)) == (3, "node1", 1)
    assert "srun --het-group=0-1" in found.unclear[0].help[0][1]
    assert len(seen(BATCH | parts | env("HET_SIZE=3"), "batch").unclear) == 2
    assert seen(HET_STEP).nodes == 2


@pytest.mark.parametrize("step", ["", "interactive", "extern"])
def test_variables_that_are_left_over_in_a_shell_are_no_job(step: str) -> None:
    found = seen(BATCH, step)
    assert (found.nodes, found.starts, found.unclear) == (1, False, ())
    assert "SLURM_JOB_ID=17 is its shell's" in found.notes[0]


@pytest.mark.parametrize(
    ("environ", "nodes", "starts"),
    [
        (STEP, 2, False),
        (BATCH, 2, True),
        (env(JOB), 1, False),  # salloc
        (
            STEP | env("STEP_ID=4294967290 STEP_NUM_NODES=1"),
            1,
            False,
        ),  # its shell on the first node
    ],
)
def test_where_processes_are_hidden_the_variables_are_believed(
    environ: dict[str, str], nodes: int, starts: bool
) -> None:
    found = seen(environ, None)
    assert (found.nodes, found.starts) == (nodes, starts)


def test_a_job_that_was_requeued_has_another_name() -> None:
    assert seen(STEP | env("RESTART_COUNT=2") | {"SLURM_RESTART_COUNT": "2"}).job == "17.0.2"
    assert seen(STEP | {"SLURM_RESTART_COUNT": "0"}).job == "17.0"


def test_the_end_of_the_job_is_told_by_newer_versions() -> None:
    assert seen(STEP | {"SLURM_JOB_END_TIME": "1795521423"}).ends == 1795521423.0
    assert seen(STEP).ends is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("ClusterName=a\nkillwait = 60\n", 60.0), ("#KillWait=5", 30.0), ("", 30.0)],
)
def test_slurm_waits_before_sigkill_as_its_configuration_says(text: str, seconds: float) -> None:
    machine = Machine("0")
    machine.files["/x/slurm.conf"] = text
    found = slurm.look(STEP | {"SLURM_CONF": "/x/slurm.conf"}, machine)
    assert found is not None
    assert found.kill_after == seconds


def test_steps_of_one_host_try_ports_of_their_own() -> None:
    blocks = [seen(STEP | {"SLURM_JOB_ID": str(job)}).ports for job in range(1000, 1700)]
    assert len({port for block in blocks for port in block}) == 700 * slurm.PORTS
    assert all(block == tuple(sorted(block, reverse=True)) for block in blocks)
    assert all(slurm.FIRST_PORT <= min(block) <= max(block) <= slurm.LAST_PORT for block in blocks)


# --- what is unclear


@pytest.mark.parametrize(
    ("change", "headline"),
    [
        ("STEP_NODELIST=node[1-", "SLURM_STEP_NODELIST=node[1- is not a host list: node[1- is not a host"),
        ("STEP_NUM_NODES=two", "SLURM_STEP_NUM_NODES=two is not a number"),
        ("STEP_NUM_NODES=3", "SLURM_STEP_NUM_NODES=3 and SLURM_STEP_NODELIST=node[1-2] contradict each other"),
        ("STEP_NUM_TASKS=3", "SLURM_STEP_NUM_TASKS=3 and SLURM_STEP_TASKS_PER_NODE=1(x2) contradict each other"),
        ("STEP_TASKS_PER_NODE=1(x", "SLURM_STEP_TASKS_PER_NODE=1(x is not a list of tasks: 1(x is not a number of tasks"),
        ("NODEID=-1", "SLURM_NODEID=-1 is not a number"),
    ],
)  # fmt: skip
def test_a_contradiction_is_said_and_not_guessed(change: str, headline: str) -> None:
    assert headline in headlines(seen(STEP | env(change)))


def _essence(found: Cluster) -> tuple[object, ...]:
    place = found.exchange or found.host
    return found.nodes, found.node, found.slots, found.local, place, found.starts


@pytest.mark.parametrize("step", ["0", None])
@pytest.mark.parametrize("environ", [STEP, RANKS, HET_STEP, STEP | {slurm.OWN_STEP: "2,1 /tmp/x"}])
def test_a_step_without_one_variable_is_the_same_or_unclear(
    environ: dict[str, str], step: str | None
) -> None:
    whole = _essence(seen(environ, step))
    for name in environ.keys() - {slurm.OWN_STEP}:
        found = seen({k: v for k, v in environ.items() if k != name}, step)
        assert found.unclear or _essence(found) == whole, f"without {name}: {found}"


def test_a_batch_script_without_one_variable_is_the_same_or_unclear() -> None:
    whole = _essence(seen(BATCH, "batch"))
    for name in BATCH:
        found = seen({k: v for k, v in BATCH.items() if k != name}, "batch")
        assert found.unclear or _essence(found) == whole, f"without {name}: {found}"
