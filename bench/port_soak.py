"""`scripts/soak ports`: many processes hold ports beside a squatter. None may be handed out twice,
none lost.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from bench.harness import JOBS, environment
from bench.outcome import Outcome

RANGE = 300  # ports that the processes and the squatter share: few, so that they meet
LIMIT = 120.0  # seconds for all; on an idle machine it takes three


def ports(
    chance: random.Random,
    number: int,
    folder: Path,
    *,
    count: int = 1000,
    processes: int = 20,
    limit: float = LIMIT,
) -> Outcome:
    """`count` ports held in all, by so many processes at a time, half of them from a range
    of 300.
    """
    marks = folder / "held"
    marks.mkdir(parents=True)
    low = _free_range(chance)
    outcome = Outcome("ports", notes=[f"{processes} processes, range {low}-{low + RANGE - 1}"])
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        holders = []
        for index in range(processes):
            share = count // processes + (index < count % processes)
            command = [
                sys.executable,
                str(JOBS / "port_holder.py"),
                str(share),
                str(chance.random()),
                str(low),
                str(low + RANGE - 1),
            ]
            log = stack.enter_context((folder / f"holder{index}").open("w"))
            holder = subprocess.Popen(
                [*command, str(marks)], stdout=log, stderr=subprocess.STDOUT, env=environment()
            )
            stack.callback(holder.kill)
            holders.append(holder)
        for holder in holders:
            try:
                holder.wait(max(0.0, began + limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                outcome.wrong.append(f"process {holder.pid} had not ended after {limit:g} s")
                holder.kill()
                holder.wait()
            if holder.returncode:
                outcome.wrong.append(f"process {holder.pid} ended with status {holder.returncode}")
    outcome.times["all"] = time.monotonic() - began
    told = [
        line
        for index in range(processes)
        for line in (folder / f"holder{index}").read_text().splitlines()
    ]
    found = [json.loads(line) for line in told if line.startswith("{")]
    wrong = Counter(one["wrong"] for one in found if one["wrong"])
    outcome.wrong += [f"{times} times: {what}" for what, times in wrong.items()]
    if len(found) != count:
        outcome.wrong.append(f"{len(found)} of {count} ports were told of")
    outcome.counts = {
        "ports held": len(found) - sum(wrong.values()),
        "numbers used": len({one["port"] for one in found}),
    }
    return outcome


def _free_range(chance: random.Random) -> int:
    """The first of RANGE neighbouring ports below the kernel's own, of which the first and the last
    are free.
    """
    while True:
        low = chance.randrange(15000, 32000 - RANGE)
        with (
            contextlib.suppress(OSError),
            socket.create_server(("127.0.0.1", low)),
            socket.create_server(("127.0.0.1", low + RANGE - 1)),
        ):
            return low
