"""`rallypoint.launch` over several nodes: programs that make the same call together."""

from __future__ import annotations

import json
import re
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rallypoint.errors import UsageError
from rallypoint.launcher.agent import results_elsewhere
from rallypoint.launcher.launch import launch

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("without_torch")]

PROGRAM = """
import json, os, sys, time
import rallypoint

def f():
    rank = int(os.environ["RANK"])
{body}

options = json.loads(sys.argv[1])
for refused in options.pop("refused", ()):
    try:
        if options["node_rank"] == 0:
            rallypoint.launch(f, **refused)
    except rallypoint.RallypointError as error:
        print("refused", error.code)
try:
    for _ in range(options.pop("calls", 1) - 1):
        rallypoint.launch(f, nproc=2, nnodes=2, **options)
    print("result", json.dumps(rallypoint.launch(f, nproc=2, nnodes=2, **options), default=len))
except rallypoint.WorkerError as error:
    print("result", json.dumps([error.report.code, error.ranks, repr(error.exceptions[0]), error.results]))
except KeyboardInterrupt:
    print("result", json.dumps("interrupted"))
except rallypoint.RallypointError as error:
    print("result", json.dumps([error.code, str(error).splitlines()[0]]))
"""

Start = Callable[..., list["subprocess.Popen[str]"]]


@pytest.fixture
def place(port: int) -> str:
    """Return an endpoint that is free, and that nobody else gets."""
    return f"127.0.0.1:{port}"


@pytest.fixture
def start(tmp_path: Path, place: str) -> Iterator[Start]:
    """Start the program of each node: `body` is the function's, and the rest options. What still
    runs at the end is killed.
    """
    started: list[subprocess.Popen[str]] = []

    def begin(
        body: str, *, nodes: Sequence[int] = (0, 1), **options: Any
    ) -> list[subprocess.Popen[str]]:
        program, secret = tmp_path / "program.py", tmp_path / "secret"
        program.write_text(PROGRAM.format(body=textwrap.indent(textwrap.dedent(body), "    ")))
        secret.touch(0o600)
        secret.write_text(secrets.token_hex(32))
        started.extend(
            subprocess.Popen(
                [
                    sys.executable,
                    str(program),
                    json.dumps(
                        {
                            "node_rank": node,
                            "rdzv_endpoint": place,
                            "secret_file": str(secret),
                            **options,
                        }
                    ),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for node in nodes
        )
        return started

    yield begin
    for one in started:
        with one:  # closes its pipes, which a later test would see
            one.kill()


def results(programs: list[subprocess.Popen[str]]) -> list[Any]:
    found = []
    for program in programs:
        out, err = program.communicate(timeout=60)
        told = re.search(r"^result (.*)$", out, re.MULTILINE)
        assert told, (out, err)
        found.append(json.loads(told[1]))
    return found


def test_node_0_returns_the_results_of_all_and_the_others_their_own(start: Start) -> None:
    found = results(start("return rank, os.environ['GROUP_RANK'], 'x' * 3_000_000 * (rank == 2)"))
    whole = [[0, "0", ""], [1, "0", ""], [2, "1", "x" * 3_000_000], [3, "1", ""]]
    assert found == [whole, whole[2:]]


def test_calls_follow_each_other(start: Start) -> None:
    """A node may leave a call, and make the next, before the lead has left it."""
    found = results(start("time.sleep(0.1 * (3 - rank)); return rank", calls=3))
    assert found == [[0, 1, 2, 3], [2, 3]]


def test_the_exception_of_a_rank_elsewhere_is_raised_on_each_node(start: Start) -> None:
    body = """
    if rank == 3:
        raise ValueError("no luck")
    return rank
    """
    here, there = results(start(body))
    assert here[:3] == ["rank-raised", [3], "ValueError('no luck')"]
    assert there[:3] == here[:3]


def test_a_result_that_is_too_large_for_the_way_is_named(start: Start) -> None:
    size = results_elsewhere.RESULT_MOST
    here, there = results(start(f"return len(b'x' * {size}) if rank < 3 else bytes({size})"))
    assert here[0] == "result-unsupported"
    assert "rank 3" in here[1]
    assert there == [size, size]


def test_a_call_that_takes_too_long_is_so_on_each_node(start: Start) -> None:
    found = results(start("time.sleep(600)", timeout=5))
    assert [one[0] for one in found] == ["launch-timeout"] * 2


def test_a_node_that_waits_for_the_others_heeds_ctrl_c(start: Start, place: str) -> None:
    (one,) = start("return rank", nodes=[0])
    host, port = place.split(":")
    while True:
        try:
            socket.create_connection((host, int(port))).close()
            break
        except ConnectionRefusedError:  # until node 0 listens
            assert one.poll() is None
    one.send_signal(signal.SIGINT)
    assert results([one]) == ["interrupted"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"nnodes": 0}, "usage"),
    ({"nnodes": 2}, "several-nodes"),
    ({"nnodes": 2, "rdzv_endpoint": "node0:29400"}, "secret-missing"),
    ({"nnodes": 2, "rdzv_endpoint": "no:de:0"}, "usage"),
    ({"nnodes": 2, "rdzv_endpoint": "node0:nine"}, "usage"),
    ({"nnodes": 2, "rdzv_endpoint": "node0", "node_rank": 2}, "usage"),
    ({"engine": "dask"}, "usage"),
]


@pytest.mark.parametrize(("options", "code"), REFUSED)
def test_a_call_that_cannot_be_is_refused(options: dict[str, Any], code: str) -> None:
    with pytest.raises(UsageError) as refused:
        launch.launch(print, **options)
    assert refused.value.code == code


def test_nodes_meet_also_after_calls_of_one_that_came_to_nothing(
    start: Start, tmp_path: Path
) -> None:
    """All nodes make the same calls, in one order, and know them by their number: after a call
    that was refused, or to which no other node came, each next one was told to be another job's.
    """
    alone = {"nnodes": 2, "rdzv_endpoint": "127.0.0.1:1", "node_rank": 1, "timeout": 0.5}
    where = {"secret_file": str(tmp_path / "secret")}
    programs = start(
        "return rank", refused=[*(options for options, _ in REFUSED), {**alone, **where}]
    )
    there = programs[1].communicate(timeout=60)
    here = programs[0].communicate(timeout=60)
    told = [line for line in here[0].splitlines() if line.startswith("re")]
    assert told == [
        *(f"refused {code}" for _, code in REFUSED),
        "refused join-timeout",
        "result [0, 1, 2, 3]",
    ], here
    assert "result [2, 3]" in there[0], there
