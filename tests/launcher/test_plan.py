from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rallypoint.clusters.cluster import Cluster
from rallypoint.errors import UsageError
from rallypoint.host.devices import Build, Device, Look
from rallypoint.launcher import plan as plans
from rallypoint.launcher.dry_run import describe
from rallypoint.launcher.plan import (
    OLDEST_TORCH,
    Machine,
    Nodes,
    Options,
    Plan,
    alone,
    at_node,
    make,
    variables_of,
)
from rallypoint.launcher.program import Program, Task
from rallypoint.launcher.sizes import threads_of_a_rank
from rallypoint.world import Seat, World

SCRIPT = Program(kind="script", target="train.py", args=("--lr", "0.1"))
MACHINE = Machine(
    cpus=8,
    gpus=Look(),
    names=("node07.cluster", "node07", "10.0.0.7"),
    python="/env/bin/python",
    torch="2.13.0+cpu",
    now=datetime(2026, 11, 20, 11, 30, 15),
    suffix="a1b2",
    cwd="/home/ada/project",
    runs="/home/ada/.local/state/rallypoint/runs",
)


def plan(
    environ: dict[str, str] | None = None, machine: dict[str, Any] | None = None, **asked: Any
) -> Plan:
    return make(
        Options(program=asked.pop("program", SCRIPT), **asked),
        environ or {},
        msgspec.structs.replace(MACHINE, **(machine or {})),
    )


def gpus_here(number: int) -> Look:
    return Look(
        tuple(Device(name="NVIDIA H100 80GB HBM3") for _ in range(number)),
        driver="550.54.14" if number else "",
        cuda="12",
    )


def refused(
    environ: dict[str, str] | None = None, machine: dict[str, Any] | None = None, **asked: Any
) -> UsageError:
    with pytest.raises(UsageError) as refusal:
        plan(environ, machine, **asked)
    return refusal.value


# --- the environment contract
# ----------------------------------------------------------------------------------------


def test_environment_of_a_worker_is_torchruns() -> None:
    made = plan(nproc=2, max_restarts=3, role="trainer", run_id="exp7")
    seat = msgspec.structs.replace(alone(made), attempt=1, master_port=29500)
    assert variables_of(made, seat, 0) == {
        "RALLYPOINT_JOB": "20261120-113015-a1b2",
        "GROUP_RANK": "0",
        "ROLE_NAME": "trainer",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "exp7",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "4",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "ROLE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "1",
    }


def test_a_lone_rank_has_its_variables_in_the_dry_run_too() -> None:
    """The dry run said True, and the rank had False."""
    made = plan(nproc=1)
    assert variables_of(made, alone(made), 0)["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert "TORCHELASTIC_USE_AGENT_STORE=False" in describe(made)
    made = plan(nproc=1, plain=True)
    assert variables_of(made, alone(made), 0)["TORCHELASTIC_USE_AGENT_STORE"] == "True"


@pytest.mark.parametrize(
    ("task", "asked", "folders"),
    [
        (None, "", ["runs/job7/node1", "runs/job7/node1"]),
        (Task("f", "a.py:1", (), 0, "/", ()), "", ["runs/job7-1/node1", "runs/job7-3/node1"]),
        (Task("f", "a.py:1", (), 0, "/", ()), "mine", ["mine/node1", "mine/node1"]),
    ],
    ids=["run", "launch", "a named folder"],
)
def test_each_call_on_several_nodes_has_a_run_folder(
    task: Task | None, asked: str, folders: list[str]
) -> None:
    """A call that went well replaced the record of one that had failed, and then removed it."""
    for call, folder in zip((0, 2), folders, strict=True):
        made = plan(nodes=Nodes(count=2, call=call), run_dir=asked)
        made = msgspec.structs.replace(made, task=task)
        seat = Seat(0, 1, World.of([1, 1]), "10.0.0.1", 29500)
        assert at_node(made, seat, "job7", 0).run_dir.endswith(f"/{folder}")


def test_a_rank_on_another_node_has_the_numbers_of_its_seat() -> None:
    made = plan(nproc=2)
    seat = Seat(0, 1, World.of([4, 2, 1]), "10.0.0.1", 29500)
    given = variables_of(made, seat, 1)
    numbers = ("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK")
    assert [given[name] for name in numbers] == ["5", "1", "5", "1"]
    sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE")
    assert [given[name] for name in sizes] == ["7", "2", "7", "3"]
    assert given["MASTER_ADDR"] == "10.0.0.1"


def test_the_template_is_given_nothing_that_depends_on_the_world() -> None:
    assert plan(nproc=2).environment.keys() == {
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "OMP_NUM_THREADS",
    }


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"])
def test_what_the_user_has_set_stays(name: str) -> None:
    made = plan({name: "theirs"}, nproc=2)
    assert name not in made.environment  # inherited unchanged
    assert not any(remark.startswith(name) for remark in made.remarks)


def test_one_rank_keeps_all_threads() -> None:
    assert "OMP_NUM_THREADS" not in plan(nproc=1).environment


def test_choices_of_ours_are_remarks_and_not_notes() -> None:
    made = plan(nproc=2)
    assert made.notes == ()
    assert [remark.split("=")[0] for remark in made.remarks] == ["OMP_NUM_THREADS"]


def test_run_id_is_the_job_when_not_given() -> None:
    given = variables_of(plan(), alone(plan()), 0)
    assert given["TORCHELASTIC_RUN_ID"] == plan().job == "20261120-113015-a1b2"


def test_signals() -> None:
    made = plan(signals=("SIGUSR1", "SIGINT"))
    assert made.signals == ("SIGUSR1",)
    assert made.environment["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGUSR1,SIGINT"


def test_virtual_local_rank() -> None:
    made = plan(nproc=2, virtual_local_rank=True)
    rows = tuple(variables_of(made, alone(made), local_rank) for local_rank in range(2))
    assert [(row["LOCAL_RANK"], row["RANK"], row["CUDA_VISIBLE_DEVICES"]) for row in rows] == [
        ("0", "0", "0"),
        ("0", "1", "1"),
    ]
    rows = plan({"CUDA_VISIBLE_DEVICES": "4, 6"}, nproc=2, virtual_local_rank=True).rank_environment
    assert [row["CUDA_VISIBLE_DEVICES"] for row in rows] == ["4", "6"]
    error = refused({"CUDA_VISIBLE_DEVICES": "4,6"}, nproc=3, virtual_local_rank=True)
    assert (error.code, error.help[0][1]) == ("device-missing", "-n 2")
    assert "3 ranks" in error.headline
    assert "'4,6' lists 2" in error.headline


# --- how many ranks
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nproc", "gpus", "visible", "size"),
    [
        (None, 0, None, 1),
        (None, 4, None, 1),
        (3, 0, None, 3),
        (3, 8, None, 3),
        ("cpu", 4, None, 8),
        ("gpu", 4, None, 4),
        ("gpu", 4, "1,3", 2),
        ("auto", 4, None, 4),
        ("auto", 0, None, 8),
        ("auto", 4, "", 8),
    ],
)
def test_local_size(nproc: Any, gpus: int, visible: str | None, size: int) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert plan(environ, {"gpus": gpus_here(gpus)}, nproc=nproc).slots == size


def test_an_exported_store_is_said_to_be_another_one() -> None:
    exported = {"RALLYPOINT_STORE": "tcp://10.0.0.9:29500", "RALLYPOINT_SECRET_FILE": "secret"}
    (note,) = plan(exported).notes
    assert note.startswith("RALLYPOINT_STORE is not used: a job has its own store; ")
    assert note in describe(plan(exported))
    assert (
        plan(exported, program=Program(kind="command", target="./train")).notes == ()
    )  # it inherits the variable as it is
    assert (
        plan({**exported, "RALLYPOINT_JOB": "outer"}).notes == ()
    )  # a job inside a rank: nobody exported that
    assert plan({"RALLYPOINT_STORE": ""}).notes == ()


def test_unused_gpus_are_named() -> None:
    assert plan(machine={"gpus": gpus_here(4)}).notes == ("4 GPUs visible, 1 used; -n gpu",)
    assert plan(machine={"gpus": gpus_here(1)}).notes == ()
    assert plan({"CUDA_VISIBLE_DEVICES": "2"}, {"gpus": gpus_here(4)}).notes == ()
    assert plan(machine={"gpus": gpus_here(4)}, nproc=1).notes == ()  # asked for


def test_gpu_without_any() -> None:
    error = refused(nproc="gpu")
    assert (error.code, error.headline) == (
        "device-missing",
        "-n gpu: no NVIDIA GPU is visible here",
    )
    assert error.why == (
        "no NVIDIA driver is loaded, and no GPU is here",
        "no NVIDIA driver was found",
        "no NVIDIA GPU: there is no /dev/nvidia<n>",
        "CUDA_VISIBLE_DEVICES is not set",
    )
    error = refused({"CUDA_VISIBLE_DEVICES": ""}, {"gpus": gpus_here(2)}, nproc="gpu")
    assert error.why == (
        "CUDA_VISIBLE_DEVICES='' leaves none of the 2 GPUs: it is empty",
        "the NVIDIA driver is 550.54.14, which knows CUDA up to 12",
        "2 GPUs: NVIDIA H100 80GB HBM3",
        "CUDA_VISIBLE_DEVICES='' leaves no GPU: it is empty",
    )
    assert error.help[0] == ("let the job see the GPUs", "unset CUDA_VISIBLE_DEVICES")


CPU_ONLY, CUDA_13 = Build("2.13.0+cpu"), Build("2.13.0+cu130", "13.0")


def test_gpus_that_torch_cannot_use() -> None:
    error = refused(machine={"gpus": gpus_here(4), "build": CPU_ONLY}, nproc="gpu")
    assert error.headline == "-n gpu: the 4 GPUs here cannot be used"
    assert error.why == (
        "torch 2.13.0+cpu was built without CUDA",
        "the NVIDIA driver is 550.54.14, which knows CUDA up to 12",
        "4 GPUs: NVIDIA H100 80GB HBM3",
        "CUDA_VISIBLE_DEVICES is not set",
    )
    error = refused(machine={"gpus": gpus_here(4), "build": CUDA_13}, nproc="gpu")
    assert (
        error.why[0]
        == "the driver 550.54.14 knows CUDA up to 12, and torch 2.13.0+cu130 was built for CUDA 13.0"
    )
    newer = msgspec.structs.replace(
        gpus_here(4), newer=True
    )  # cuda-compat: the driver's number does not decide
    assert plan(machine={"gpus": newer, "build": CUDA_13}, nproc="gpu").slots == 4
    assert plan(machine={"gpus": gpus_here(4), "build": CPU_ONLY}, nproc="auto").slots == 8
    command = Program(kind="command", target="./train")  # has a torch of its own, or none
    assert (
        plan(machine={"gpus": gpus_here(4), "build": CPU_ONLY}, nproc="gpu", program=command).slots
        == 4
    )


def test_nccl_needs_a_gpu_for_each_rank() -> None:
    cuda_12 = {"gpus": gpus_here(2), "build": Build("2.13.0+cu126", "12.6")}
    assert plan(machine=cuda_12, nproc=2, backend="nccl").slots == 2
    assert plan(machine=cuda_12, nproc=3, backend="gloo").slots == 3
    assert plan(machine=cuda_12, nproc=3, backend="auto").slots == 3  # gloo, then
    error = refused(machine=cuda_12, nproc=3, backend="cpu:gloo,cuda:nccl")
    assert (
        error.headline
        == "backend='cpu:gloo,cuda:nccl' needs a GPU for each rank: 3 ranks, and 2 GPUs visible"
    )
    assert error.help == (
        ("start a rank for each GPU", "launch(..., nproc=2, backend='cpu:gloo,cuda:nccl')"),
        ("or take the backend that needs no GPU", 'launch(..., nproc=3, backend="gloo")'),
    )
    error = refused(machine={**cuda_12, "build": CPU_ONLY}, nproc=2, backend="nccl")
    assert error.headline == "backend='nccl' needs a GPU for each rank, and none can be used here"
    assert error.why[0] == "torch 2.13.0+cpu was built without CUDA"
    assert error.help == (
        ("take the backend that needs no GPU", 'launch(..., nproc=2, backend="gloo")'),
    )


def test_nccl_where_the_gpus_cannot_be_known() -> None:
    rocm = {"gpus": Look(), "build": Build("2.13.0+rocm6.4", other="ROCm 6.4")}
    assert plan(machine=rocm, nproc=2, backend="nccl").slots == 2
    windows = {"gpus": Look(hidden=True), "build": Build("2.13.0+cu126", "12.6")}
    assert plan(machine=windows, nproc=2, backend="nccl").slots == 2


# --- where they meet
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "address"),
    [
        ("", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("LOCALHOST", "127.0.0.1"),
        ("::1", "::1"),
    ],
)
def test_loopback(asked: str, address: str) -> None:
    made = plan(master_addr=asked)
    assert (made.master_addr, made.notes) == (address, ())


@pytest.mark.parametrize("asked", ["node07", "NODE07", "node07.cluster", "10.0.0.7"])
def test_own_name_means_loopback_and_says_so(asked: str) -> None:
    made = plan(master_addr=asked)
    assert made.master_addr == "127.0.0.1"
    assert made.notes == (
        f"{asked} is this machine, and every rank runs on it: they meet at 127.0.0.1",
    )


def test_another_machine_is_refused() -> None:
    error = refused(master_addr="node08")
    assert error.code == "several-nodes"
    assert error.headline.startswith("node08 is not known as an address of this machine")


def test_port_outside_the_range() -> None:
    assert plan(master_port=20050, port_range=(20000, 20100)).master_port == 20050
    assert (
        refused(master_port=29500, port_range=(20000, 20100)).headline
        == "--master-port 29500 is not in --port-range 20000-20100"
    )


def test_what_the_port_range_does_not_reach_is_said() -> None:
    (said,) = [
        remark for remark in plan(port_range=(20000, 20100)).remarks if "--port-range" in remark
    ]
    assert (
        "--port-range 20000-20100 holds for what rallypoint listens on; gloo and NCCL take ports of 32768-60999"
        in said
    )
    assert "sysctl -w net.ipv4.ip_local_port_range='20000 28191'" in said
    narrowed = plan(machine={"ephemeral": (20000, 20100)}, port_range=(20000, 20100))
    assert not [remark for remark in narrowed.remarks if "--port-range" in remark]


def test_interfaces_are_left_to_gloo_and_nccl_and_one_that_is_missing_is_said() -> None:
    there = {"interfaces": ("lo", "eth0")}
    assert not [name for name in plan(machine=there).environment if name.endswith("SOCKET_IFNAME")]
    assert plan(machine=there, environ={"GLOO_SOCKET_IFNAME": "eth0"}).notes == ()
    assert plan(machine=there, environ={"GLOO_SOCKET_IFNAME": "ib0"}).notes == (
        "GLOO_SOCKET_IFNAME=ib0 names no interface of this machine: lo, eth0",
    )


def test_a_place_on_a_shared_file_system() -> None:
    made = plan(rendezvous="/shared/job")
    assert (made.rendezvous, made.master_addr) == ("/shared/job", "127.0.0.1")
    assert "place       /shared/job, this job's alone while it runs\n" in describe(made)
    assert "place" not in describe(plan())


# --- how they start
# --------------------------------------------------------------------------------------------------


def test_start() -> None:
    assert plan().start == "template"
    assert plan(fresh=True).start == "fresh"
    assert plan(program=Program(kind="command", target="./a.out")).start == "exec"
    assert plan(program=Program(kind="module", target="pkg.train"), preload=("numpy",)).preload == (
        "numpy",
    )


def test_torch_is_needed_by_the_template_alone() -> None:
    error = refused(machine={"torch": ""})
    assert (error.code, error.headline) == (
        "torch-missing",
        "torch is not installed in /env/bin/python",
    )
    assert error.help[0][1].startswith("python -m pip install rallypoint")
    assert error.help[1] == ("install torch there", "/env/bin/python -m pip install torch")
    assert "whl/cpu" in error.help[2][1]
    assert plan(machine={"torch": ""}, fresh=True).torch == ""
    assert (
        plan(machine={"torch": ""}, program=Program(kind="command", target="./a.out")).start
        == "exec"
    )


@pytest.mark.parametrize("version", ["2.7.1", "1.13.1+cu117", "2.0"])
def test_old_torch(version: str) -> None:
    """2.7 was promised, and every job ended: "The libuv TCPStore backend does not support
    initialization with an listen fd".
    """
    error = refused(machine={"torch": version})
    assert (error.code, error.help[0][1]) == (
        "torch-too-old",
        "/env/bin/python -m pip install 'torch>=2.8'",
    )


@pytest.mark.parametrize("version", ["2.8.0", "2.13.0+cpu", "2.15.0a0+gitabc", "10.0", "unknown"])
def test_new_enough_torch(version: str) -> None:
    assert plan(machine={"torch": version}).torch == version


@pytest.mark.parametrize(
    "place",
    [
        "pyproject.toml",
        "src/rallypoint/diagnosis/explain/torch-too-old.md",
        "docs/reference/versions.md",
    ],
)
def test_every_place_says_the_same_bound(place: str) -> None:
    text = (Path(__file__).parents[2] / place).read_text("utf-8")
    said = re.findall(r"torch>=(\d+\.\d+)", text)
    assert set(said) == {".".join(map(str, OLDEST_TORCH))}


@pytest.mark.parametrize(
    "asked", [{"fresh": True}, {"program": Program(kind="command", target="x")}]
)
def test_preload_needs_a_template(asked: dict[str, Any]) -> None:
    assert refused(preload=("numpy",), **asked).headline.startswith(
        "--preload has no meaning with --"
    )


def test_another_interpreter_is_not_used() -> None:
    assert plan({"PYTHON_EXEC": "/other/python"}).notes == (
        "PYTHON_EXEC is not used: the workers run /env/bin/python",
    )
    assert plan({"PYTHON_EXEC": "/env/bin/python"}).notes == ()


def test_debug_rank() -> None:
    assert plan(nproc=2).debug_rank == 0
    assert plan(nproc=2, debug_rank=1).debug_rank == 1
    assert (
        refused(nproc=2, debug_rank=2).headline
        == "--debug-rank 2 is not a rank of this job: its ranks are 0-1"
    )
    assert (
        refused(debug_rank=1).headline
        == "--debug-rank 1 is not a rank of this job: its only rank is 0"
    )


# --- folders and logs
# ------------------------------------------------------------------------------------------------


def test_run_folder() -> None:
    assert plan().run_dir == "/home/ada/.local/state/rallypoint/runs/20261120-113015-a1b2"
    assert plan(run_dir="out/1").run_dir == "/home/ada/project/out/1"
    assert plan(run_dir="/data/1").run_dir == "/data/1"


def test_logs_by_default() -> None:
    logs = plan(nproc=3).logs
    assert (logs.redirects, logs.tee, logs.console, logs.log_dir) == (
        (0, 0, 0),
        (0, 0, 0),
        (0, 1, 2),
        "",
    )


def test_logs_by_rank() -> None:
    made = plan(
        nproc=12,
        redirects={0: 3, 11: 1},
        tee=2,
        local_ranks_filter=(0, 11),
        log_dir="logs",
        stdout_filters=("loss",),
    )
    assert made.logs.redirects == (3, *([0] * 10), 1)
    assert made.logs.tee == (2,) * 12
    assert made.logs.console == (0, 11)
    assert made.logs.log_dir == "/home/ada/project/logs"
    assert made.logs.stdout_filters == ("loss",)
    assert made.notes == ()


def test_log_files_without_a_place_go_to_the_run_folder() -> None:
    assert plan(run_dir="/run", tee=3).logs.log_dir == "/run/logs"
    assert plan(run_dir="/run", redirects={0: 0}).logs.log_dir == ""


def test_dev_null_means_no_files() -> None:
    logs = plan(nproc=2, log_dir="/dev/null", tee=3, redirects=1).logs
    assert (logs.redirects, logs.tee, logs.log_dir) == ((0, 0), (0, 0), "")


def test_ranks_that_are_not_there_are_said() -> None:
    made = plan(nproc=2, tee={0: 1, 5: 1, 6: 1}, local_ranks_filter=(7,))
    assert made.notes == (
        "-t names local ranks that this job has not: 5-6; its ranks are 0-1",
        "--local-ranks-filter names local ranks that this job has not: 7; its ranks are 0-1",
        "--local-ranks-filter leaves no rank to show: their words are in the logs alone",
    )
    assert made.logs.console == ()


# --- as people read it
# -----------------------------------------------------------------------------------------------


def test_dry_run_names_everything_that_is_set() -> None:
    made = plan(
        nproc=2, port_range=(20000, 20100), tee={1: 3}, notes=("--numa-binding has no effect here",)
    )
    text = describe(made)
    for name, value in made.environment.items():
        assert f"  {name}=" in text, (name, value)
    assert "1  RANK=1 LOCAL_RANK=1 ROLE_RANK=1" in text
    assert "program     train.py --lr 0.1" in text
    assert "127.0.0.1, a free port of 20000-20100" in text
    assert "stdout and stderr of local ranks 1" in text
    assert "  --numa-binding has no effect here\n" in text
    assert all(remark in text for remark in made.remarks)
    assert "imported torch 2.13.0+cpu" in text


def test_dry_run_hides_secrets() -> None:
    made = msgspec.structs.replace(
        plan(), environment={"MY_API_KEY": "hunter2", "ROLE_NAME": "default"}
    )
    assert "hunter2" not in describe(made)
    assert "MY_API_KEY='***'" in describe(made)


@pytest.mark.parametrize(
    ("program", "typed"),
    [
        (Program(kind="module", target="pkg.train", args=("a b",)), "-m pkg.train 'a b'"),
        (Program(kind="command", target="./a.out"), "--no-python ./a.out"),
    ],
)
def test_dry_run_shows_the_program_as_typed(program: Program, typed: str) -> None:
    assert f"program     {typed}\n" in describe(plan(program=program))


def test_a_plan_can_be_written_down_and_read_back() -> None:
    made = plan(nproc=2, port_range=(1, 2), tee={1: 3})
    assert msgspec.json.decode(msgspec.json.encode(made), type=Plan) == made


@pytest.mark.parametrize(
    ("cpus", "ranks", "threads"), [(64, 8, 8), (2, 8, 1), (7, 2, 3), (1, 1, 1)]
)
def test_a_rank_gets_its_share_of_the_processors(cpus: int, ranks: int, threads: int) -> None:
    assert threads_of_a_rank(cpus, ranks) == threads


# --- a stall
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "patience"),
    [
        ({"nproc": 2}, 300.0),
        ({"nproc": 1}, None),
        ({"nproc": 2, "stall": 7.5}, 7.5),
        ({"nproc": 1, "stall": 7.5}, 7.5),
        ({"nproc": 2, "stall": 0.0}, None),
        ({"nproc": 2, "plain": True}, None),
        ({"nproc": 2, "plain": True, "stall": 0.0}, None),
        ({"nproc": 2, "program": Program(kind="command", target="./x")}, None),
    ],
)
def test_a_stall_is_reported_without_being_asked_for_where_there_are_several_ranks(
    asked: dict[str, Any], patience: float | None
) -> None:
    """A hang in training was told only to those who had given --stall: nobody knows beforehand that
    a job will hang.
    """
    made = plan(**asked)
    assert made.patience(made.slots) == patience
    assert ("no rank has moved" in describe(made)) == (patience is not None)


@pytest.mark.parametrize(
    ("template", "prefixes"),
    [
        (None, None),
        ("", ("", "")),
        (
            "<${role_name} ${rank}/${local_rank} $other> ",
            ("<default 0/0 $other> ", "<default 1/1 $other> "),
        ),
    ],
)
def test_the_prefix_of_a_line_is_torchruns_template(
    template: str | None, prefixes: tuple[str, ...] | None
) -> None:
    made = plan(nproc=2, log_line_prefix_template=template)
    assert plans.prefixes(made, alone(made)) == prefixes


def test_torchruns_file_timer_is_said_to_be_missing() -> None:
    """The program ended with a KeyError, and nothing had said why."""
    (note,) = plan({"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}).notes
    assert note.startswith("TORCHELASTIC_ENABLE_FILE_TIMER has no effect here")
    assert plan({"TORCHELASTIC_ENABLE_FILE_TIMER": "0"}).notes == ()


def of_task(task: int, tasks: int, **machine: Any) -> tuple[list[dict[str, str]], Plan]:
    """Return the environment of each rank of a launcher that is one of several on its host."""
    cluster = Cluster(name="Tasks", local=(task, tasks))
    made = plan(machine=machine, nodes=Nodes(count=4, rank=task), cluster=cluster, nproc=2)
    seat = Seat(0, task, World.of([2, 2, 2, 2]), "10.0.0.7", 29500)
    return [variables_of(made, seat, local) for local in range(2)], made


@pytest.mark.parametrize("gpus", [0, 8])
def test_launchers_of_one_host_number_their_ranks_on(gpus: int) -> None:
    """LOCAL_RANK chooses a GPU of the host: two ranks with one number would share one."""
    found, made = of_task(1, 3, gpus=gpus_here(gpus))
    assert [(one["RANK"], one["LOCAL_RANK"]) for one in found] == [("2", "2"), ("3", "3")]
    assert {one["LOCAL_WORLD_SIZE"] for one in found} == {"6"}
    assert len(made.remarks) == len(plan(nproc=2).remarks)
    assert "task 1 of 3 on this host" in describe(made)


def test_launchers_with_gpus_of_their_own_count_them_from_0() -> None:
    """srun --gpus-per-task shows each task its own ones alone, with numbers from 0."""
    found, made = of_task(1, 3, gpus=gpus_here(2))
    assert [(one["RANK"], one["LOCAL_RANK"]) for one in found] == [("2", "0"), ("3", "1")]
    assert {one["LOCAL_WORLD_SIZE"] for one in found} == {"2"}
    assert len(made.remarks) == len(plan(nproc=2).remarks) + 1


@pytest.mark.parametrize(("all_cpus", "threads"), [(8, "1"), (64, "4")])
def test_launchers_of_one_host_share_its_processors_unless_each_has_its_own(
    all_cpus: int, threads: str
) -> None:
    """Eight tasks of one rank each would start a thread for every processor otherwise."""
    found, _ = of_task(1, 3, all_cpus=all_cpus)
    assert found[0]["OMP_NUM_THREADS"] == threads
