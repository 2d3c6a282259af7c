"""A short, seeded form of the soak of ports, and that it can fail."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

from bench.harness import JOBS, environment

from bench import port_soak, soak

DEADLINE = 60.0  # seconds; it takes one


def test_no_port_is_handed_out_twice_and_none_is_lost(tmp_path: Path) -> None:
    with soak.squatter(tmp_path):
        outcome = port_soak.ports(random.Random(1), 0, tmp_path, count=80, processes=5)
    assert outcome.wrong == []
    assert outcome.counts["ports held"] == 80


def test_a_port_that_somebody_has_already_is_wrong(tmp_path: Path) -> None:
    low = port_soak._free_range(random.Random(2))
    for port in range(low, low + port_soak.RANGE):
        (tmp_path / str(port)).touch()
    command = [
        sys.executable,
        str(JOBS / "port_holder.py"),
        "20",
        "7",
        str(low),
        str(low + port_soak.RANGE - 1),
        str(tmp_path),
    ]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE, check=True, env=environment()
    )
    told = [json.loads(line) for line in done.stdout.splitlines()]
    in_range = [one for one in told if low <= one["port"] < low + port_soak.RANGE]
    assert in_range
    assert {one["wrong"] for one in in_range} == {"it was handed out twice"}
    assert {one["wrong"] for one in told if one not in in_range} == {""}
