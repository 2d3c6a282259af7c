"""Programs that choose where their ranks meet, and programs that hide or spoil the meeting."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import Run, RunWarm, Write
from .job import Result

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_in_parts")]

# Seconds in which the launcher ends after a rank went home with its error hidden. Half a second is
# what the bench measures; the program's own start, and a machine that runs other things, too, are
# in here.
SOON = 90.0

SUM = """\
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()}: {total.item():g}", flush=True)
dist.destroy_process_group()
"""
TUTORIAL = f"""\
import os
import torch
import torch.distributed as dist

os.environ["MASTER_ADDR"] = "localhost"
os.environ["MASTER_PORT"] = "@"
dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
{SUM}"""
BY_METHOD = f"""\
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
{SUM}"""


@pytest.fixture
def squatter() -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Another program that listens on a port: the port, and its process."""
    code = "import socket\ns = socket.create_server(('127.0.0.1', 0))\nprint(s.getsockname()[1], flush=True)\nwhile True: s.accept()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline()), process
        process.kill()


# --- a meeting point of the program's own
# ---------------------------------------------------------------------------


# Two forked ranks do so in examples/questions/B6. A new interpreter imports torch, so there is one.
def test_a_tutorial_that_sets_its_own_port_works(run: Run, write: Write, port: int) -> None:
    program = write("train.py", TUTORIAL.replace("@", str(port)))
    result = run("--fresh", "train.py", cwd=program.parent)
    assert (result.rc, result.lines) == (0, ["rank 0: 1"]), result.everything
    (held,) = [event["details"]["port"] for event in result.events if event["what"] == "port-held"]
    assert (
        result.err
        == f"rallypoint: train.py:6 sets MASTER_PORT={port}; the held port {held} is not used\n"
    ), result.everything


def test_setdefault_leaves_the_held_port(run_warm: RunWarm, write: Write) -> None:
    program = write(
        "train.py",
        "import os\nimport torch\nimport torch.distributed as dist\nos.environ.setdefault('MASTER_PORT', '29500')\n"
        "os.environ['MASTER_ADDR'] = 'localhost'\ndist.init_process_group('gloo')\n" + SUM,
    )
    result = run_warm(program)
    assert (result.rc, result.of(0), result.of(1), result.err) == (
        0,
        ["rank 0: 2"],
        ["rank 1: 2"],
        "",
    ), result.everything


def test_tcp(run_warm: RunWarm, write: Write, port: int) -> None:
    program = write("train.py", BY_METHOD)
    result = run_warm(program, f"tcp://127.0.0.1:{port}")
    assert (result.rc, result.of(0), result.of(1)) == (0, ["rank 0: 2"], ["rank 1: 2"]), (
        result.everything
    )
    assert result.err.startswith(
        f"rallypoint: train.py:5 names tcp://127.0.0.1:{port}; the held port "
    ), result.everything
    assert len(result.err.splitlines()) == 1, result.everything


def test_a_file_twice_in_a_row(run_warm: RunWarm, write: Write, tmp_path: Path) -> None:
    program = write("train.py", BY_METHOD)
    for _ in range(2):
        result = run_warm(program, f"file://{tmp_path}/meeting")
        assert (result.rc, result.of(0), result.of(1), result.err) == (
            0,
            ["rank 0: 2"],
            ["rank 1: 2"],
            "",
        ), result.everything


def test_a_file_that_a_killed_run_left(run_warm: RunWarm, write: Write, tmp_path: Path) -> None:
    """Its ranks would look for processes that are gone: a hang, or a refused connection, in about a
    third of the runs of plain torch.
    """
    meeting = tmp_path / "meeting"
    killed = write(
        "killed.py", BY_METHOD.split("total")[0] + "dist.barrier()\nos.kill(os.getpid(), 9)\n"
    )
    assert run_warm(killed, f"file://{meeting}").codes == ["rank-killed"]
    assert meeting.stat().st_size > 0
    program = write("train.py", BY_METHOD)
    result = run_warm(program, f"file://{meeting}")
    assert (result.rc, result.codes) == (1, ["store-file-stale"]), result.everything
    assert f"the rendezvous file {meeting} is left over from an earlier run" in result.report
    assert "given at train.py:5" in result.report
    assert f"rm {meeting}" in result.report
    assert "Traceback" not in result.err, result.everything


def test_a_file_of_a_node_that_was_ready_long_before(
    run: Run, write: Write, tmp_path: Path, port: int
) -> None:
    """The second node's template has a slow module to import. Its ranks took the file that rank 0
    had made for one of an earlier run, since it was older than their own start.
    """
    meeting, key = tmp_path / "meeting", tmp_path / "key"
    key.write_text("a secret of this test's own\n")
    key.chmod(0o600)
    program = write("train.py", BY_METHOD)
    write(
        "slow.py",
        "import os, time\n"
        "while not os.environ.get('RANK') and not os.path.exists('meeting'): time.sleep(0.01)\n"
        "time.sleep(0.1)\n",
    )
    job = ["--nnodes", "2", "--secret-file", str(key), "--rdzv-backend", "c10d"]
    job += ["--rdzv-endpoint", f"127.0.0.1:{port}"]
    words = [str(program), f"file://{meeting}"]
    nodes: list[Result] = []

    def second(process: subprocess.Popen[bytes]) -> None:
        nodes.append(run(*job, "--preload", "slow", *words, cwd=tmp_path))

    nodes.append(run(*job, *words, cwd=tmp_path, act=second))
    for node in nodes:
        assert (node.rc, node.report) == (0, ""), node.everything
    said = sorted(line for node in nodes for line in node.lines)
    assert said == ["[0] rank 0: 2", "[1] rank 1: 2"]


# --- meeting points that cannot work
# --------------------------------------------------------------------------------


def test_every_rank_sets_another_port(run_warm: RunWarm, write: Write, port: int) -> None:
    program = write(
        "train.py",
        f"import os\nimport torch.distributed as dist\nos.environ['MASTER_PORT'] = str({port} + int(os.environ['RANK']))\n"
        "dist.init_process_group('gloo')\n",
    )
    result = run_warm(program)
    assert (result.rc, result.codes) == (1, ["address-differs"]), result.everything
    lines = result.report.splitlines()
    assert f"         - rank 0: 127.0.0.1:{port}, from train.py:3" in lines, result.everything
    assert f"         - rank 1: 127.0.0.1:{port + 1}, from train.py:3" in lines, result.everything
    assert result.seconds < SOON, "torch alone waits for five minutes"
    assert "Traceback" not in result.err, result.everything
    assert not re.search("Interrupted system call|frame #", result.out + result.err), (
        "20 lines a rank that our own signal brings about"
    )


def test_a_port_that_another_program_has(
    run_warm: RunWarm, write: Write, squatter: tuple[int, subprocess.Popen[str]]
) -> None:
    number, holder = squatter
    program = write("train.py", TUTORIAL.replace("@", str(number)))
    result = run_warm(program)
    assert (result.rc, result.codes) == (1, ["port-in-use"]), result.everything
    assert result.report.startswith(
        f"error[port-in-use]: rank 0 could not listen on port {number}: it is in use\n"
    ), result.everything
    assert f"(pid {holder.pid}, user " in result.prose, result.everything
    assert "train.py:6" in result.report, result.everything
    assert result.seconds < SOON


def test_the_port_asked_for_is_taken(run: Run, squatter: tuple[int, subprocess.Popen[str]]) -> None:
    number, holder = squatter
    result = run("-n", "2", "--master-port", str(number), "facts.py")
    assert (result.rc, result.codes, result.out) == (1, ["port-in-use"], ""), result.everything
    assert f"(pid {holder.pid}, user " in result.prose, result.everything


# One that is judged as it is written (tests/diagnosis/test_init_method.py has them all), and one by
# what is on the disk.
WRONG = {
    "127.0.0.1:29500": 'init_method="tcp://127.0.0.1:29500"',
    "file:///no/such/folder/x": "mkdir -p /no/such/folder",
}


@pytest.mark.parametrize("method", WRONG)
def test_a_method_that_cannot_work_is_corrected(
    run_warm: RunWarm, write: Write, method: str
) -> None:
    program = write("train.py", BY_METHOD)
    result = run_warm(program, method)
    assert (result.rc, result.codes) == (1, ["init-method-invalid"]), result.everything
    assert f"             {WRONG[method]}" in result.report.splitlines(), result.everything
    assert "train.py:5" in result.report
    assert "Traceback" not in result.err, result.everything
    assert len(result.err.splitlines()) <= 20, result.everything


# --- programs that spawn their own ranks
# ----------------------------------------------------------------------------

SPAWNS = """\
import os
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, size):
    for port in sys.argv[1:]:
        if port != "as set":
            os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port)
        dist.init_process_group("gloo", rank=rank, world_size=size)
        total = torch.ones(1)
        dist.all_reduce(total)
        print(f"port {port}, rank {rank}: {total.item():g}", flush=True)
        dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, args=(2,), nprocs=2)
"""


# Ranks that a new interpreter starts are in the next test.
def test_a_program_that_spawns_its_ranks_runs_as_one(
    run_warm: RunWarm, write: Write, port: int
) -> None:
    """They meet at the port as set, and at one of the program's own."""
    result = run_warm(write("train.py", SPAWNS), "as set", str(port), nproc=1)
    said = [f"port {one}, rank {rank}: 2" for one in (port, "as set") for rank in range(2)]
    assert (result.rc, sorted(result.lines), result.err) == (0, said, ""), result.everything


STARTS_PROCESSES = """\
import multiprocessing
import os

def work(rank):
    import torch.distributed as dist
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}", flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    processes = [multiprocessing.get_context("spawn").Process(target=work, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
"""


def test_a_lone_rank_whose_own_processes_are_ranks_gives_them_the_port(
    run: Run, write: Write
) -> None:
    """Only `torch.multiprocessing.spawn` had the held port given back; ranks that
    `multiprocessing.Process` starts found it in use.
    """
    result = run("--fresh", "-n", "1", write("train.py", STARTS_PROCESSES))
    assert (result.rc, sorted(result.lines)) == (0, ["rank 0 of 2", "rank 1 of 2"]), (
        result.everything
    )


LOADS = """\
import os
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

if __name__ == "__main__":
    print(sum(int(one) for one in DataLoader(range(4), num_workers=1, multiprocessing_context="spawn")))
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
"""


def test_a_lone_rank_meets_where_it_was_told_after_the_port_was_given_back(
    run_warm: RunWarm, write: Write
) -> None:
    """The new interpreter was a loader's and no rank: the rank has the port to itself, and nothing
    is said of it.
    """
    result = run_warm(write("train.py", LOADS), nproc=1)
    assert (result.rc, result.out) == (0, "6\n"), result.everything
    assert "rallypoint:" not in result.err, result.everything


STORES = """\
import os, socket
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed import rpc

host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
for name in (host, "localhost", "127.0.0.2", socket.gethostname()):
    store = dist.TCPStore(name, port, size, is_master=rank == 0, timeout=timedelta(seconds=60))
    store.set(f"{name} {rank}", "here")
    store.wait([f"{name} {other}" for other in range(size)])
store, *_ = next(dist.rendezvous("env://"))
assert store.get(f"{host} 0") == b"here"
store, *_ = next(dist.rendezvous(f"tcp://127.0.0.2:{port}", rank, size))
assert store.get(f"{host} 0") == b"here"
for name in (socket.gethostname(), "127.0.0.2"):
    dist.init_process_group("gloo", init_method=f"tcp://{name}:{port}", rank=rank, world_size=size)
    dist.barrier()
    dist.destroy_process_group()
dist.init_process_group("gloo", store=dist.TCPStore(host, port, size, rank == 0), rank=rank, world_size=size)
dist.destroy_process_group()
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
print(rpc.rpc_sync(f"worker{(rank + 1) % size}", max, args=(rank, 7)), flush=True)
rpc.shutdown()
"""


# test_contract.py has three forked ranks, and a new interpreter, with fewer stores.
def test_a_store_of_the_programs_own_at_the_held_port(
    run_warm: RunWarm, write: Write, port: int
) -> None:
    """Under another name of this machine (127.0.1.1 of Debian's /etc/hosts, the host's own name, an
    interface's address) `tcp://` found it in use, and a TCPStore waited 300 s for nobody.
    """
    result = run_warm(write("train.py", STORES), port_range=(port, port))
    assert (result.rc, result.of(0), result.of(1)) == (0, ["7"], ["7"]), result.everything


def test_a_store_of_a_lone_new_interpreter_at_the_held_port(
    run: Run, write: Write, port: int
) -> None:
    """It was told that the port is in use."""
    result = run("--fresh", "-n", "1", "--master-port", str(port), write("train.py", STORES))
    assert (result.rc, result.lines) == (0, ["7"]), result.everything


def test_a_program_that_spawns_its_ranks_and_is_started_twice(
    run_warm: RunWarm, write: Write, squatter: tuple[int, subprocess.Popen[str]]
) -> None:
    """One warning; and nobody waits: each group's rank 0 asks for the port itself (as clients all
    of them would wait for minutes).
    """
    alone = SPAWNS.replace("args=(2,), nprocs=2", "args=(1,), nprocs=1")  # each imports torch
    program = write("train.py", alone)
    result = run_warm(program, str(squatter[0]))
    warning = (
        "warning[spawn-inside-run]: each of the 2 ranks starts ranks of its own at train.py:18\n"
    )
    assert result.err.startswith(warning), result.everything
    assert result.err.count("spawn-inside-run") == 2, (
        result.everything
    )  # the headline, and `rallypoint explain`
    assert result.rc == 1, result.everything
    assert "in use" in result.report, result.everything
    assert result.seconds < SOON


# --- errors that the program hides, and ranks that leave
# ------------------------------------------------------------


def test_opening_the_group_twice(run_warm: RunWarm, write: Write) -> None:
    program = write(
        "train.py",
        "import torch.distributed as dist\n\ndef setup():\n    dist.init_process_group('gloo')\n\n"
        "setup()\ndist.init_process_group('gloo')\n",
    )
    result = run_warm(program)
    assert (result.rc, result.codes) == (1, ["group-twice"]), result.everything
    assert "first opened at train.py:4" in result.report, result.everything
    assert "again at train.py:7" in result.report, result.everything


def test_a_second_opening_that_is_caught_harms_nobody(run_warm: RunWarm, write: Write) -> None:
    program = write(
        "train.py",
        "import torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\ntry:\n    dist.init_process_group('gloo')\n"
        "except ValueError:\n    pass\n" + SUM,
    )
    result = run_warm(program)
    assert (result.rc, result.of(0), result.err) == (0, ["rank 0: 2"], ""), result.everything


HIDES = """\
import os
import torch
import torch.distributed as dist

def main():
    try:
        if os.environ["RANK"] == "1":
            FAILS
        dist.init_process_group("gloo")
    except Exception as error:
        print("something went wrong:", type(error).__name__)
        return
    dist.barrier()

main()
"""


IN_INIT = (
    "dist.init_process_group('gloo', rank=5, world_size=2)",
    "init_process_group",
    "rank=5 and world_size=2",
)
NO_GPU = "os.environ['CUDA_VISIBLE_DEVICES'] = ''; "


@pytest.mark.parametrize(
    ("fails", "call", "error"),
    [
        IN_INIT,
        ("torch.cuda.set_device(1000)", "set_device", "Error"),  # more than any machine has
        (NO_GPU + "torch.ones(1).cuda()", "torch.cuda", "Error: "),
        (NO_GPU + "torch.nn.Linear(1, 1).to('cuda')", "torch.cuda", "Error: "),
    ],
    ids=["init_process_group", "set_device", "cuda", "to"],
)
def test_an_error_that_the_program_hides(
    run_warm: RunWarm, write: Write, fails: str, call: str, error: str
) -> None:
    """The rank prints it, returns and exits with 0, and the others would wait for it until their
    timeout of many minutes.
    """
    error_is_named(run_warm(write("train.py", HIDES.replace("FAILS", fails))), call, error)


# What is caught is found in the same place of a forked and of a new rank: one row is enough of it.
def test_an_error_that_the_program_hides_in_a_new_interpreter(run: Run, write: Write) -> None:
    fails, call, error = IN_INIT
    program = write("train.py", HIDES.replace("FAILS", fails))
    result = run("--fresh", "-n", "2", "train.py", cwd=program.parent)
    assert result.rc == 1, result.everything
    error_is_named(result, call, error)


def error_is_named(result: Result, call: str, error: str) -> None:
    assert result.seconds < SOON
    assert result.codes == ["error-swallowed"], result.everything
    (said,) = result.of(1)
    assert said.startswith("something went wrong:"), result.everything
    headline = result.report.splitlines()[0]
    assert headline.startswith(
        f"error[error-swallowed]: rank 1 caught an error of {call} and left: "
    ), headline
    assert error in headline
    assert "train.py:10" in result.report, "the except line"
    assert "rank 0 was stopped; it is not at fault" in result.report
    ends = {event["rank"]: event["at"] for event in result.events if event["what"] == "ended"}
    (judged,) = [event["at"] for event in result.events if event["what"] == "report"]
    assert judged - ends[1] < SOON / 10


PROBES = """\
import os
import torch
import torch.distributed as dist

os.environ["CUDA_VISIBLE_DEVICES"] = ""
try:
    torch.ones(1).cuda()
except (AssertionError, RuntimeError):
    print("goes on without a GPU")
if JOINS:
    dist.init_process_group("gloo")
    dist.barrier()
if os.environ["RANK"] == "0":
    raise ValueError("bad batch")
"""


@pytest.mark.parametrize("joins", [True, False])
def test_who_tries_whether_there_is_a_gpu_is_not_at_fault(
    run_warm: RunWarm, write: Write, joins: bool
) -> None:
    result = run_warm(write("train.py", PROBES.replace("JOINS", str(joins))))
    assert (result.rc, result.codes) == (1, ["rank-raised"]), result.everything
    assert "rank 0 raised ValueError: bad batch" in result.report
    assert "torch.cuda" not in result.report, result.everything


def test_the_first_exception_is_the_cause(run_warm: RunWarm, write: Write) -> None:
    program = write(
        "train.py",
        "import torch.distributed as dist\ntry:\n    dist.init_process_group('gloo', rank=7, world_size=2)\n"
        "finally:\n    dist.destroy_process_group()\n",
    )
    result = run_warm(program)
    assert (result.rc, result.codes) == (1, ["rank-out-of-range"]), result.everything
    assert "was called with rank=7 and world_size=2" in result.report.splitlines()[0], (
        result.everything
    )
    assert "AssertionError" not in result.report
    assert "  where  train.py:3 in <module>" in result.report, result.everything


def test_a_rank_that_leaves_before_the_meeting(run_warm: RunWarm, write: Write) -> None:
    program = write(
        "train.py",
        "import os, sys\nimport torch.distributed as dist\nif os.environ['RANK'] == '1':\n    print('nothing to do')\n    sys.exit(0)\n"
        "dist.init_process_group('gloo')\n",
    )
    result = run_warm(program)
    assert (result.rc, result.codes) == (1, ["rank-left-early"]), result.everything
    for fact in (
        "rank 1 returned while others still needed it",
        "rank 0 waits in init_process_group",
        "rank 1 never called init_process_group",
    ):
        assert fact in result.report, result.everything
    assert result.seconds < SOON


@pytest.mark.parametrize("store", ["dist.HashStore()", "dist.PrefixStore('a', dist.HashStore())"])
def test_a_store_that_no_other_process_sees_is_refused(
    run_warm: RunWarm, write: Write, store: str
) -> None:
    """Each rank waited in its own until the timeout, and then for an unknown cause."""
    program = write(
        "train.py",
        "import os\nimport torch.distributed as dist\nrank = int(os.environ['RANK'])\n"
        f"dist.init_process_group('cpu:gloo', store={store}, rank=rank, world_size=2)\n",
    )
    result = run_warm(program)
    assert (result.rc, result.codes) == (1, ["address-differs"]), result.everything
    assert "  where  train.py:4 in <module>" in result.report, result.everything
