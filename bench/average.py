"""`store.average` beside gloo's all_reduce: one tensor of float32, in place, on one host.

Each turn of each party is one run of `jobs/average_ranks.py`, whose ranks are forked from one
process that has imported torch, have one thread each, and are warm before anything is counted. What
is timed is a call, from when all ranks are ready for it; a turn's figure is the median over its
calls of what the slowest rank took.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from bench.harness import JOBS, Run
from bench.samples import Sample
from bench.store import take_turns

OURS, GLOO = "rallypoint", "gloo"

LIMIT = 180.0
"""Seconds for one turn of one party; beyond them it counts as not measured."""

CALLS = {1: 200, 25: 30, 100: 12}
"""Calls that are counted in a turn, by megabytes: a second or two for the slowest."""


def measure(megabytes: int, ranks: int, turns: int) -> Iterator[Sample]:
    """Samples of both parties. `seconds`: per call; `first`: of the very first call, which gets its
    memory; `cpu`: seconds of processor time per call, of all ranks together."""

    def one(party: str, turn: int) -> Sample:
        asked = json.dumps(
            {
                "party": party,
                "megabytes": megabytes,
                "ranks": ranks,
                "calls": CALLS.get(megabytes, 12),
            }
        )
        with Run([sys.executable, str(JOBS / "average_ranks.py"), asked]) as run:
            status = run.wait(LIMIT)
            result = run.folder / "result.json"
            if not result.exists():
                return Sample(party, turn, {}, f"exit status {status}: {run.output()[-500:]}")
            told: list[dict[str, Any]] = json.loads(result.read_text())
        slowest = [max(calls) for calls in zip(*(one["seconds"] for one in told), strict=True)]
        cpu = sum(one["cpu"] for one in told) / len(slowest)
        first = max(one["first"] for one in told)
        return Sample(
            party,
            turn,
            {
                "seconds": statistics.median(slowest),
                "best": min(slowest),
                "first": first,
                "cpu": cpu,
            },
        )

    yield from take_turns(turns, (OURS, GLOO), one)
