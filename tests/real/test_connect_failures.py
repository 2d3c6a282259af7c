"""Ranks that cannot meet where their program sends them: torch says the same of all of it, the
report says which it was.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from .conftest import RunWarm, Write
from .job import Result

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_in_parts")]

# Seconds that each rank gives torch to meet the others: it keeps them, or tries for up to twice as
# long, or for ever.
TIMEOUT = 1.0

MEETS = f"""\
import os, sys
from datetime import timedelta
import torch.distributed as dist

method = sys.argv[1]
dist.init_process_group("gloo", init_method=method, rank=int(os.environ["RANK"]) + 1, world_size=3, timeout=timedelta(seconds={TIMEOUT}))
"""


@pytest.fixture
def nobody() -> Iterator[int]:
    """A port of 127.0.0.1 that is bound, so that nobody else can be there, and where nobody
    listens.
    """
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        yield int(bound.getsockname()[1])


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Another program that listens, and what it does: the port, and its process."""
    with subprocess.Popen(
        [sys.executable, "-c", request.param], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline()), process
        process.kill()


def met(run_warm: RunWarm, write: Write, address: str) -> Result:
    program = write("train.py", MEETS)
    return run_warm(program, f"tcp://{address}")


def first_line(result: Result) -> str:
    return result.report.partition("\n")[0]


def seconds_of_the_report(result: Result) -> float:
    """From when the first rank went to meet the others until the report."""
    joined = min(
        event["at"]
        for event in result.events
        if event["what"] == "phase" and event["details"]["phase"] == "joining"
    )
    (judged,) = [event["at"] for event in result.events if event["what"] == "report"]
    return float(judged) - float(joined)


def test_nobody_listens_there(run_warm: RunWarm, write: Write, nobody: int) -> None:
    result = met(run_warm, write, f"127.0.0.1:{nobody}")
    assert (result.rc, result.codes) == (1, ["port-refused"]), result.everything
    assert re.fullmatch(
        rf"error\[port-refused\]: (both ranks|rank \d) found nobody at 127\.0\.0\.1:{nobody}: nothing listens there",
        first_line(result),
    )
    assert (
        f"127.0.0.1:{nobody}: nothing listens there (Connection refused, errno 111)" in result.prose
    ), result.everything
    assert "no rank of this job came as rank 0" in result.prose, result.everything
    assert "train.py:6" in result.report, result.everything
    assert seconds_of_the_report(result) < 2 * TIMEOUT + 20, (
        "torch's own retries, on a busy machine"
    )


def test_a_name_that_has_no_address(run_warm: RunWarm, write: Write) -> None:
    result = met(run_warm, write, "no-such-host.invalid:29500")  # RFC 2606: it never has one
    assert (result.rc, result.codes) == (1, ["address-unresolved"]), result.everything
    # A resolver on a busy machine may need longer than the report waits for it.
    assert "could not reach no-such-host.invalid:29500: " in first_line(result)
    assert "getent hosts no-such-host.invalid" in result.report


WEB = """\
import http.server
class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""
DEAF = """\
import socket, time
listener = socket.create_server(("127.0.0.1", 0), backlog=0)
callers = [socket.socket() for _ in range(4)]
for caller in callers:
    caller.setblocking(False)
    caller.connect_ex(listener.getsockname())
print(listener.getsockname()[1], flush=True)
time.sleep(600)
"""
# Whatever it serves: the kernel connects callers to it, and it answers nothing once it is stopped.
STORE = """\
import socket, time
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("service", [WEB], indirect=True, ids=["web"])
def test_a_foreign_service_is_there(
    run_warm: RunWarm, write: Write, service: tuple[int, subprocess.Popen[str]]
) -> None:
    """torch waits for its answer for ever: no timeout of its own ends that."""
    port, web = service
    result = met(run_warm, write, f"127.0.0.1:{port}")
    assert (result.rc, result.codes) == (1, ["store-foreign"]), result.everything
    assert (
        f" met a foreign service at 127.0.0.1:{port}: it answered '<!DOCTYPE HTML>'"
        in first_line(result)
    )
    assert f"(pid {web.pid}, user " in result.prose, result.everything


@pytest.mark.parametrize("service", [DEAF], indirect=True, ids=["deaf"])
def test_packets_are_dropped(
    run_warm: RunWarm, write: Write, service: tuple[int, subprocess.Popen[str]]
) -> None:
    result = met(run_warm, write, f"127.0.0.1:{service[0]}")
    assert (result.rc, result.codes) == (1, ["address-unreachable"]), result.everything
    assert (
        f" could not reach 127.0.0.1:{service[0]}: no answer at all: packets to it are dropped, or it is off"
        in first_line(result)
    )


@pytest.mark.parametrize("service", [STORE], indirect=True, ids=["store"])
def test_the_store_is_stopped(
    run_warm: RunWarm, write: Write, service: tuple[int, subprocess.Popen[str]]
) -> None:
    port, store = service
    store.send_signal(signal.SIGSTOP)
    result = met(run_warm, write, f"127.0.0.1:{port}")
    assert (result.rc, result.codes) == (1, ["store-silent"]), result.everything
    assert (
        f"got no answer at 127.0.0.1:{port}: its process (pid {store.pid}) is stopped (state T)"
        in first_line(result)
    )
    assert f"kill -CONT {store.pid}" in result.report


STOPPED_LATER = """\
import os, signal, sys
from datetime import timedelta
import psutil
import torch.distributed as dist

def serves(process):
    return any(one.status == "LISTEN" and one.laddr.port == int(os.environ["MASTER_PORT"]) for one in process.net_connections("tcp"))

dist.init_process_group("gloo", timeout=timedelta(seconds=8))  # also what a busy machine has to meet
dist.barrier()
if dist.get_rank() == 0:
    (host,) = [one for one in psutil.Process(os.getppid()).children() if serves(one)]
    host.suspend()
    while host.status() != psutil.STATUS_STOPPED: pass  # on a busy machine it still answers for a moment
    print("stopped", host.pid, flush=True)
dist.barrier()
store = dist.distributed_c10d._get_default_store()
if sys.argv[1] == "get":
    store.get("nobody sets this")
else:
    store.add("number", 1)
"""


@pytest.mark.parametrize("asks", ["get", "add"])
def test_the_store_is_stopped_in_the_middle(run_warm: RunWarm, write: Write, asks: str) -> None:
    """torch hangs: in `get` though its time is up, in `add` there is none."""
    program = write("train.py", STOPPED_LATER)
    result = run_warm(program, asks)
    assert (result.rc, result.codes) == (1, ["store-silent"]), result.everything
    (stopped,) = re.findall(r"stopped (\d+)", result.out)
    assert re.search(
        r": (both ranks|rank \d) got no answer at 127\.0\.0\.1:\d+: its process", first_line(result)
    ), result.everything
    assert f"(pid {stopped}) is stopped (state T)" in first_line(result)
    assert f"kill -CONT {stopped}" in result.report
    assert (
        f"its process (pid {stopped}) is stopped; kill -CONT {stopped} lets it go on" in result.err
    )  # and long before, as a line
    at = "train.py:19" if asks == "get" else "train.py:21"
    assert at in result.report, result.everything


def test_a_program_that_tries_again_elsewhere_is_let(
    run_warm: RunWarm, write: Write, nobody: int
) -> None:
    """torch gives up late, and the program knows another place: nothing may end it before."""
    program = write(
        "train.py",
        "import os\nfrom datetime import timedelta\nimport torch\nimport torch.distributed as dist\n"
        "def meet(method, first):\n"
        "    dist.init_process_group('gloo', init_method=method, rank=int(os.environ['RANK']) + first, world_size=2 + first,\n"
        f"                            timeout=timedelta(seconds={TIMEOUT} if first else 60))\n"
        "try:\n"
        f"    meet('tcp://127.0.0.1:{nobody}', 1)\n"
        "except dist.DistNetworkError:\n"
        "    meet('env://', 0)\n"
        "total = torch.ones(1)\ndist.all_reduce(total)\nprint(total.item())\ndist.destroy_process_group()\n",
    )
    result = run_warm(program)
    assert (result.rc, result.of(0), result.of(1)) == (0, ["2.0"], ["2.0"]), result.everything


def test_the_held_port_under_this_machines_name(run_warm: RunWarm, write: Write) -> None:
    """MASTER_ADDR alone is changed, to a name of this machine: the same place, and the job
    goes on.
    """
    program = write(
        "train.py",
        "import os\nimport torch\nimport torch.distributed as dist\nos.environ['MASTER_ADDR'] = '127.0.0.2'\n"
        "dist.init_process_group('gloo')\ntotal = torch.ones(1)\ndist.all_reduce(total)\n"
        "print(total.item(), os.environ['MASTER_ADDR'])\ndist.destroy_process_group()\n",
    )
    result = run_warm(program)
    assert (result.rc, result.of(0), result.err) == (0, ["2.0 127.0.0.2"], ""), result.everything


def test_the_held_port_under_a_strange_name(run_warm: RunWarm, write: Write) -> None:
    program = write(
        "train.py",
        "import os\nimport torch.distributed as dist\nos.environ['MASTER_ADDR'] = 'no-such-host.invalid'\n"
        "dist.init_process_group('gloo')\n",
    )
    result = run_warm(program)
    assert (result.rc, result.codes) == (1, ["address-unresolved"]), result.everything
    assert "the ranks cannot meet at MASTER_ADDR=no-such-host.invalid: " in first_line(result)
    assert "set at train.py:3" in result.report


def test_what_a_spawned_process_raised(run_warm: RunWarm, write: Write) -> None:
    program = write(
        "train.py",
        "import torch.multiprocessing as mp\ndef work(rank):\n    raise ValueError('bad batch')\n"
        "if __name__ == '__main__':\n    mp.spawn(work, nprocs=1)\n",
    )
    result = run_warm(program, nproc=1)
    assert first_line(result) == "error[rank-raised]: rank 0 raised ValueError: bad batch", (
        result.everything
    )
    assert (
        "it was raised in process 0 of those that mp.spawn had started in rank 0" in result.report
    )
    assert "train.py:3 in work" in result.report
