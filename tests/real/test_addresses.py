"""Jobs on machines with odd names and ports, and at a place on a shared disk."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
from pathlib import Path

import pytest

from .conftest import Run, RunWarm, Write
from .job import DEADLINE, RALLYPOINT

GLOO = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()}: {total.item():g}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.root
@pytest.mark.torch
@pytest.mark.usefixtures("torch_in_parts")
def test_gloo_finds_its_way_on_one_node_though_its_name_stands_for_another(
    write: Write, tmp_path: Path
) -> None:
    """Why no interface is chosen for it (docs/design.md)."""
    program, hosts, resolver = write("train.py", GLOO), tmp_path / "hosts", tmp_path / "resolv.conf"
    hosts.write_text("127.0.0.1 localhost\n10.9.9.9 node07\n")
    resolver.write_text("nameserver 192.0.2.77\n")
    setup = f"set -e; ip link set lo up; hostname node07; mount --bind {hosts} /etc/hosts; mount --bind {resolver} /etc/resolv.conf\n"
    command = shlex.join((*RALLYPOINT, "-n", "2", "--run-dir", str(tmp_path / "run"), str(program)))
    done = subprocess.run(
        ["unshare", "-nmu", "bash", "-c", setup + command],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(
        line.partition("] ")[2] for line in done.stdout.splitlines() if ": 2" in line
    ) == ["rank 0: 2", "rank 1: 2"], done.stderr


@pytest.mark.usefixtures("without_torch")
def test_a_place_tells_of_the_present_attempt_and_outlives_restarts(
    run: Run, write: Write, tmp_path: Path
) -> None:
    place = tmp_path / "job"
    program = write(
        "train.py",
        "import json, os, pathlib, sys\n"
        f"(record,) = pathlib.Path({str(place)!r}).glob('*.json')\n"
        "told = json.loads(record.read_bytes())\n"
        "meets = os.environ['MASTER_ADDR'] + ':' + os.environ['MASTER_PORT']\n"
        "print(json.dumps([record.name, told['attempt'], told['address'] == meets]))\n"
        "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n",
    )
    result = run("--fresh", "--max-restarts", "1", "--rdzv-endpoint", f"file://{place}", program)
    assert result.rc == 0, result.everything
    assert [json.loads(line) for line in result.lines] == [
        ["1.json", 0, True],
        ["1.json", 1, True],
    ], result.everything
    assert json.loads((place / "1.json").read_bytes())["ended"] is True


@pytest.mark.usefixtures("without_torch")
def test_a_port_that_is_taken_is_told_before_anything_is_started(run: Run, write: Write) -> None:
    program = write("train.py", "print('started')\n")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        result = run("-n", "2", "--master-port", str(holder.getsockname()[1]), program)
        assert (result.rc, result.codes, result.out) == (1, ["port-in-use"], ""), result.everything
        assert not (result.state / "rallypoint").exists(), "no run, and so no import of torch"


@pytest.mark.usefixtures("without_torch")
def test_every_attempt_keeps_to_the_port_range(run: Run, write: Write) -> None:
    program = write(
        "train.py",
        "import os, sys\nprint(os.environ['MASTER_PORT'])\nsys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n",
    )
    result = run("--fresh", "--max-restarts", "1", "--port-range", "15000-15999", program)
    assert result.rc == 0, result.everything
    assert len(result.lines) == 2, result.everything
    assert all(15000 <= int(port) <= 15999 for port in result.lines), result.everything


@pytest.mark.usefixtures("without_torch")
def test_notes_are_said_before_the_other_nodes_have_come(run: Run, write: Write, port: int) -> None:
    """That a setting has no effect was said after ten minutes of waiting, or never."""
    secret = write("secret", "s" * 32)
    secret.chmod(0o600)
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}")
    settings = ("--rdzv-conf", "join_timeout=1,join_timeot=600", "--secret-file", secret)
    result = run("--nnodes", "2", *where, *settings, write("train.py", ""))
    assert result.rc == 75, result.everything
    assert "join_timeot=600" in result.err


@pytest.mark.torch
def test_a_port_that_the_program_binds_in_each_rank_is_not_taken_for_the_jobs_own(
    run_warm: RunWarm, write: Write, port: int
) -> None:
    """The error of Python's `socket` names no port, and the report told of MASTER_PORT's holder,
    the job itself.
    """
    program = write(
        "train.py",
        "import socket\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "held = socket.socket()\n"
        "try:\n"
        f"    held.bind(('127.0.0.1', {port}))\n"
        "    held.listen()\n"
        "finally:\n"
        "    dist.barrier()\n",
    )
    result = run_warm(program)
    assert (result.rc, result.codes) == (1, ["port-in-use"]), result.everything
    assert "every rank that runs this line" in result.err, result.everything
    assert "is listening" not in result.err, result.everything
    assert 'if os.environ["RANK"] == "0":' in result.err, result.everything
