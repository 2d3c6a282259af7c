"""Jobs of mpirun: what its variables say, the exchange of node 0's place, and real jobs under three MPIs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rallypoint.clusters import pmi, pmix
from rallypoint.clusters.cluster import Cluster as Found
from rallypoint.clusters.mpi import look
from rallypoint.errors import EnvironmentProblem, RallypointError, UsageError

from ..nodes.jobs import TELL, told
from ..nodes.netns import Cluster, Process
from .mpirun import WHEELS, Mpi, install

pytestmark = pytest.mark.usefixtures("torch_in_parts")

OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "PMIX_NAMESPACE": "prterun-node0-8395@1",
    "PMIX_RANK": "1",
    "PMIX_VERSION": "5.0.11rc1",
    "HOME": "/home/ada",
}
"""Variables of the second of two tasks, each on a host of its own."""

OPEN_MPI_4 = {
    **OPEN_MPI_5,
    "PMIX_NAMESPACE": "2032336897",
    "PMIX_VERSION": "3.2.5a1",
    "OMPI_MCA_orte_hnp_uri": "2032336896.0;tcp://10.77.0.1:44057",
    "OMPI_MCA_orte_precondition_transports": "fda763f156756b73-c6c2ab1771ef93dd",
}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "9",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "1",
}


class Files:
    """Machine of which every descriptor is open, or none."""

    def __init__(self, is_open: bool = True, files: Mapping[str, str] = {}) -> None:
        self.opened = is_open
        self.files = files

    def text(self, path: str) -> str:
        return self.files.get(path, "")

    def is_open(self, fd: int) -> bool:
        return self.opened

    def host(self) -> str:
        return "node1"


def found(environ: dict[str, str], *, is_open: bool = True) -> Found:
    cluster = look(environ, Files(is_open))
    assert cluster is not None
    return cluster


# --- what the variables say


@pytest.mark.parametrize(
    ("environ", "name", "exchange"),
    [(OPEN_MPI_5, "Open MPI", "pmix"), (OPEN_MPI_4, "Open MPI", ""), (MPICH, "MPICH", "pmi")],
)
def test_one_task_on_each_host_is_a_node(environ: dict[str, str], name: str, exchange: str) -> None:
    cluster = found(environ)
    assert (cluster.name, cluster.nodes, cluster.node) == (name, 2, 1)
    assert (cluster.slots, cluster.local, cluster.unclear) == (None, None, ())
    assert (cluster.exchange, bool(cluster.folder)) == (exchange, not exchange)
    assert cluster.one_screen


@pytest.mark.parametrize(
    ("environ", "own", "size"),
    [
        (OPEN_MPI_5, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        (MPICH, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ],
)
def test_several_tasks_on_a_host_are_a_rank_each(
    environ: dict[str, str], own: str, size: str
) -> None:
    cluster = found({**environ, own: "1", size: "2"})
    assert (cluster.nodes, cluster.node, cluster.slots, cluster.local) == (2, 1, 1, (1, 2))


def test_the_rank_within_the_node_is_no_number_of_a_node() -> None:
    """OMPI_COMM_WORLD_NODE_RANK is 0 on every host that has one task."""
    assert found({**OPEN_MPI_5, "OMPI_COMM_WORLD_NODE_RANK": "7"}).node == 1


def test_two_jobs_of_open_mpi_4_do_not_meet_in_one_folder() -> None:
    """Slurm sets the precondition variable to the number of its job, for each mpirun in it."""
    other = {**OPEN_MPI_4, "OMPI_MCA_orte_hnp_uri": "2032336896.0;tcp://10.77.0.1:44058"}
    one, two = found(OPEN_MPI_4), found(other)
    assert one.folder.startswith("/home/ada/.local/state/rallypoint/")
    assert one.folder != two.folder
    assert one.job != two.job
    assert not one.secret


@pytest.mark.parametrize("environ", [OPEN_MPI_5, OPEN_MPI_4, MPICH])
@pytest.mark.parametrize("two_on_a_host", [False, True])
def test_a_variable_that_is_missing_never_gives_another_world(
    environ: dict[str, str], two_on_a_host: bool
) -> None:
    if two_on_a_host:
        size = "MPI_LOCALNRANKS" if environ is MPICH else "OMPI_COMM_WORLD_LOCAL_SIZE"
        environ = {**environ, size: "2"}
    whole = found(environ)
    for name in environ:
        less = found({key: value for key, value in environ.items() if key != name})
        if not less.unclear:
            same = ("nodes", "node", "slots", "local", "exchange")
            assert [getattr(less, key) for key in same] == [getattr(whole, key) for key in same]
            assert bool(less.folder) == bool(whole.folder), name


@pytest.mark.parametrize("text", ["", "two", "-1"])
def test_a_number_that_is_none_is_unclear(text: str) -> None:
    assert found({**MPICH, "PMI_SIZE": text}).unclear
    assert found({**OPEN_MPI_5, "OMPI_COMM_WORLD_RANK": text}).unclear


def test_variables_that_are_left_over_are_a_job_on_one_node() -> None:
    """A shell that was started by mpiexec has PMI_FD, and not the socket."""
    cluster = found(MPICH, is_open=False)
    assert (cluster.nodes, cluster.exchange, cluster.unclear) == (1, "", ())
    assert cluster.notes


def test_one_task_needs_no_exchange() -> None:
    alone = {**OPEN_MPI_5, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}
    del alone["PMIX_NAMESPACE"]
    assert (found(alone).nodes, found(alone).unclear) == (1, ())


def test_a_step_of_slurms_that_has_pmi_is_slurms() -> None:
    by_slurm = {"SLURM_STEP_ID": "0", "PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "9"}
    assert look(by_slurm, Files()) is None
    assert found({**MPICH, "SLURM_STEP_ID": "0"}).name == "MPICH"  # mpiexec calls srun


@pytest.mark.parametrize(
    ("rank", "own", "daemon", "lines"),
    [("0", "3", "0-7", 1), ("1", "3", "0-7", 0), ("0", "0-3", "0-7", 0), ("0", "3", "3", 0)],
)
def test_a_task_that_is_bound_to_one_processor_is_told(
    rank: str, own: str, daemon: str, lines: int
) -> None:
    """mpirun binds one or two tasks on a host to a processor each, with all that they start."""
    processes = {
        "/proc/self/status": f"Name:\trallypoint\nPPid:\t7\nCpus_allowed_list:\t{own}\n",
        "/proc/7/status": f"Name:\tsh\nPPid:\t6\nCpus_allowed_list:\t{own}\n",
        "/proc/6/status": f"Name:\tprted\nPPid:\t1\nCpus_allowed_list:\t{daemon}\n",
    }
    cluster = look({**OPEN_MPI_5, "OMPI_COMM_WORLD_RANK": rank}, Files(files=processes))
    assert cluster is not None
    assert len(cluster.notes) == lines


# --- PMI


class Launcher:
    """The launcher's end of PMI: it answers each command by a table."""

    def __init__(self, answers: dict[str, str]) -> None:
        self.said: list[str] = []
        self.own, theirs = socket.socketpair()
        self.fd = theirs.detach()
        self._answers = answers
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        kept: dict[str, str] = {}
        for line in self.own.makefile("r"):
            words = dict(part.partition("=")[::2] for part in line.split())
            self.said.append(words["cmd"])
            answer = self._answers.get(words["cmd"])
            if answer == "close":
                break
            if answer is None:
                continue
            if words["cmd"] == "put":
                kept[words["key"]] = words["value"]
            answer = answer.replace("VALUE", kept.get(words.get("key", ""), ""))
            self.own.sendall(f"cmd={answer}\n".encode())
        self.own.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._thread.join()
        self.own.close()


ANSWERS = {
    "init": "response_to_init rc=0 pmi_version=1 pmi_subversion=2",
    "get_maxes": "maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024",
    "get_my_kvsname": "my_kvsname rc=0 kvsname=kvs_1",
    "put": "put_result rc=0",
    "barrier_in": "barrier_out tag=0",
    "get": "get_result rc=0 value=VALUE",
    "finalize": "finalize_ack rc=0",
}


def shared(text: str, step: str = "", answer: str | None = None, timeout: float = 10.0) -> str:
    """Share a text with a launcher that answers as hydra does, but for one step; None: not at all."""
    answers = {**ANSWERS, step: answer}
    launcher = Launcher({key: value for key, value in answers.items() if value is not None})
    try:
        return pmi.share({"PMI_FD": str(launcher.fd)}, text, timeout)
    except RallypointError:
        os.close(launcher.fd)  # it is open after an error alone
        raise
    finally:
        launcher.close()


@pytest.mark.parametrize("length", [1, 700, 5000])
def test_a_text_of_any_length_goes_through_pmi(length: int) -> None:
    """PMI's values have 1,024 bytes, no space and no line break; a host may have many addresses."""
    text = ("secret 29400 fd77::1,10.77.0.1=\n" * length)[:length]
    assert shared(text) == text
    assert shared(text, "get_maxes", "maxes vallen_max=256") == text


@pytest.mark.parametrize("step", list(ANSWERS))
def test_a_launcher_that_is_gone_is_an_error_at_once(step: str) -> None:
    with pytest.raises(UsageError) as error:
        shared("text", step, "close")
    assert error.value.code == "cluster-unclear"
    assert step in error.value.headline


def test_a_second_program_of_a_task_is_told_that_pmi_can_be_used_once() -> None:
    with pytest.raises(UsageError) as error:
        shared("text", "init", "close")
    assert pmi.ONCE in error.value.why
    with pytest.raises(UsageError) as error:
        shared("text", "get_maxes", "close")
    assert pmi.ONCE not in error.value.why


def test_a_refusal_by_the_launcher_is_an_error() -> None:
    with pytest.raises(UsageError, match="put"):
        shared("text", "put", "put_result rc=-1 msg=no_room")


def test_tasks_that_do_not_come_are_waited_for_until_the_deadline() -> None:
    with pytest.raises(EnvironmentProblem) as error:
        shared("text", "barrier_in", None, timeout=0.05)
    assert error.value.code == "join-timeout"


def test_a_descriptor_that_is_no_socket_is_an_error() -> None:
    reading, writing = os.pipe()
    with pytest.raises(UsageError) as error:
        pmi.share({"PMI_FD": str(reading)}, "", 1.0)
    assert error.value.code == "cluster-unclear"
    os.close(reading)
    os.close(writing)


# --- PMIx


def test_a_pmix_library_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / pmix.LIBRARY).write_text("no library")
    former = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # then the kernel reaps the child
    try:
        with pytest.raises(UsageError) as error:
            pmix.share({"PMIX_PREFIX": str(tmp_path)}, "", 1.0)
    finally:
        signal.signal(signal.SIGCHLD, former)
    assert error.value.code == "cluster-unclear"
    assert str(tmp_path) in "".join(error.value.why)


# --- real jobs

DIGITS = Path(__file__).parents[2] / "examples" / "digits_ddp.py"

RAISES = TELL + "if os.environ['RANK'] == '1': raise ValueError('a bad batch')\n"
RAISES += "import time; time.sleep(600)\n"

RUN = (sys.executable, "-m", "rallypoint", "run")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(2, tmp_path_factory.mktemp("mpi"), shared_home=True) as made:
        yield made


@pytest.fixture(params=list(WHEELS))
def mpi(request: pytest.FixtureRequest, nodes: Cluster) -> Iterator[Mpi]:
    """One of three MPIs on two nodes; a process that a test leaves on one is its failure."""
    folder = install(request.param)
    if isinstance(folder, str):
        pytest.skip(folder)
    yield Mpi(request.param, folder, nodes)
    left = nodes.reset()
    assert not left, "the test has left processes:\n" + "\n".join(left)


def places(mpi: Mpi) -> list[Path]:
    """Return the folders by which launchers have found each other."""
    return [*mpi.cluster[0].home.glob(".local/state/rallypoint/mpirun-*")]


def errors(process: Process) -> list[str]:
    return re.findall(r"^error\[([a-z-]+)\]", process.output(), re.MULTILINE)


REDUCES = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()}: {total.item():g}", flush=True)
dist.destroy_process_group()
"""


# The import of what learning needs is most of such a job: the other two MPIs add two numbers.
@pytest.mark.nodes
@pytest.mark.usefixtures("digits_quickly")
@pytest.mark.parametrize("mpi", ["openmpi5"], indirect=True)
def test_the_digits_are_learnt_on_two_nodes_without_a_flag(mpi: Mpi) -> None:
    job = mpi.start(*RUN, DIGITS, "--epochs", "3")
    assert job.wait(60) == 0, job.output()
    accuracy = re.search(r"test accuracy ([\d.]+)", job.output())
    assert accuracy is not None, job.output()
    assert float(accuracy[1]) > 0.9
    assert "rank 1 on cpu" in job.output()


@pytest.mark.nodes
@pytest.mark.parametrize("mpi", ["openmpi4", "mpich"], indirect=True)
def test_a_group_of_two_nodes_without_a_flag(mpi: Mpi, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(REDUCES)
    job = mpi.start(*RUN, program)
    assert job.wait(60) == 0, job.output()
    assert sorted(re.findall(r"rank \d: \d", job.output())) == ["rank 0: 2", "rank 1: 2"]


@pytest.mark.nodes
@pytest.mark.usefixtures("without_torch")
def test_one_task_for_each_rank(mpi: Mpi, tmp_path: Path) -> None:
    """On a host with several tasks the local rank is that of the task."""
    program = tmp_path / "program.py"
    program.write_text(TELL)
    job = mpi.start(*RUN, program, tasks=2)
    assert job.wait() == 0, job.output()
    ranks = told([job])
    assert [rank["RANK"] for rank in ranks] == ["0", "1", "2", "3"]
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"4"}
    assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1", "0", "1"]
    assert {rank["LOCAL_WORLD_SIZE"] for rank in ranks} == {"2"}
    assert len({rank["MASTER_ADDR"] for rank in ranks}) == 1
    assert places(mpi) == []


@pytest.mark.nodes
@pytest.mark.usefixtures("without_torch")
def test_a_wrong_option_is_one_error_on_one_screen(mpi: Mpi) -> None:
    """Each of 64 tasks showed it. Open MPI ends the other when the first one has failed."""
    job = mpi.start(*RUN, "--no-such-option", "train.py")
    assert job.wait() == 2, job.output()
    assert errors(job) == ["option-unknown"], job.output()
    assert len(re.findall("node 1 .*--no-such-option", job.output())) <= 1


@pytest.mark.nodes
@pytest.mark.usefixtures("without_torch")
def test_a_rank_that_raises_is_one_report_on_one_screen(mpi: Mpi, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(RAISES)
    job = mpi.start(*RUN, program)
    assert job.wait() == 1, job.output()
    assert errors(job) == ["rank-raised"], job.output()
    assert job.output().count("ValueError: a bad batch") <= 4, job.output()


@pytest.mark.nodes
@pytest.mark.usefixtures("without_torch")
def test_the_exit_status_of_a_rank_is_that_of_mpirun(mpi: Mpi, tmp_path: Path) -> None:
    """Two tasks on one host, which have nothing between them but loopback."""
    program = tmp_path / "program.py"
    program.write_text("import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' else 0)\n")
    job = mpi.start(*RUN, program, tasks=2, nodes=1)
    assert job.wait() == 3, job.output()


@pytest.mark.nodes
@pytest.mark.usefixtures("without_torch")
def test_the_end_of_mpirun_ends_all_ranks(mpi: Mpi, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(TELL + "import time; time.sleep(600)\n")
    job = mpi.start(*RUN, program)
    job.wait_for(r'"RANK": "1"')
    assert bool(places(mpi)) == (mpi.name == "openmpi4")
    os.kill(job.pid, 15)
    assert job.wait() != 0
    assert not errors(job)
    assert places(mpi) == []


@pytest.mark.nodes
@pytest.mark.parametrize("mpi", ["openmpi5"], indirect=True)
def test_a_pmix_server_that_is_gone_is_an_error(mpi: Mpi, tmp_path: Path) -> None:
    """The library finds a server of another mpirun's, which has ended."""
    program = tmp_path / "program.py"
    program.write_text("import os, json; print(json.dumps(dict(os.environ)))")
    job = mpi.start(sys.executable, program, nodes=1)
    assert job.wait() == 0
    environ = json.loads(job.output().splitlines()[0])
    with pytest.raises(RallypointError) as error:
        pmix.share(environ, "text", 5.0)
    assert error.value.code == "cluster-unclear"
