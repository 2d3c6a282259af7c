"""Barriers, locks and shared tensors beside what torch and the standard library have for it, in the
same turn (averages: `average.py`).

As in `bench/store.py`: each turn of each party is one run of `jobs/store_crowd.py` (shared tensors:
`jobs/primitives_shared.py`), all warm before anything is counted, and who begins changes from turn
to turn.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from itertools import pairwise

from bench.harness import JOBS, Run
from bench.samples import Sample, Value
from bench.store import OURS, PEER, TCP, Outcome, crowd, sampled, take_turns

GLOO = "gloo"
GLOO_MEMBERS = 64
"""More are not measured with gloo, each of whose processes connects with each other."""

SPINNING, PAUSING = "TCPStore, spinning", "TCPStore, 1 ms pauses"
"""A lock of `compare_set`, tried without a pause, and with one."""

WHOLE, BLOCK, STANDARD = "SharedTensor.add_", "SharedTensor.locked", "multiprocessing.Lock"
"""`add_`, which is whole or absent if its process is killed; a plain `add_` inside `with
shared.locked()`; and inside `with lock`.
"""

SIZES = (4 * 2**10, 2**20)
"""Bytes of a shared tensor: what hardly costs more than its lock, and what does."""


# --- barriers


def barrier(members: int, turns: int, *, count: int = 100) -> Iterator[Sample]:
    """Seconds per barrier of so many processes, passed one right after the other."""

    def one(party: str, turn: int) -> Sample:
        return sampled(
            party,
            turn,
            crowd(party, "barrier", members, limit=180.0, warm=min(5, count), count=count),
            read,
        )

    def read(outcome: Outcome) -> dict[str, Value]:
        results, phases = outcome["results"], outcome["phases"]
        return {
            "seconds": (max(one["ended"] for one in results) - min(one["began"] for one in results))
            / count,
            "server_cpu": (phases[-1]["cpu"] - phases[0]["cpu"]) / count,
            "client_cpu": sum(one["cpu"] for one in results) / count,
        }

    parties = (OURS, TCP, PEER, GLOO) if members <= GLOO_MEMBERS else (OURS, TCP, PEER)
    yield from take_turns(turns, parties, one)


# --- locks


def lock(contenders: int, turns: int, *, seconds: float = 2.0) -> Iterator[Sample]:
    """So many processes want one lock, again and again, and do nothing while they have it."""

    def one(party: str, turn: int) -> Sample:
        return sampled(
            party, turn, crowd(party, "lock", contenders, trips=20, seconds=seconds), handed_over
        )

    yield from take_turns(turns, (OURS, TCP, SPINNING, PAUSING), one)


def handed_over(outcome: Outcome) -> dict[str, Value]:
    """`handover_p50`: microseconds from when one begins to give it back until another one has it.
    `trip`: of a small `get` by each of them, now and then: by a process that has slept, as one has
    that waits for a lock. `rate`: how often it was had per second, `most` and `least` by one of
    them; all of it while all of them want it."""
    results, phases = outcome["results"], outcome["phases"]
    began, until = max(one["began"] for one in results), min(one["until"] for one in results)
    had = sorted(
        (at, number)
        for number, one in enumerate(results)
        for at in one["had"]
        if began <= at < until
    )
    counts = [sum(number == one for _, one in had) for number in range(len(results))]
    between = sorted(
        later - earlier for (earlier, one), (later, other) in pairwise(had) if one != other
    )
    trip = statistics.median(seconds for one in results for seconds in one["trips"])
    whole = max(1, sum(len(one["had"]) for one in results))
    values: dict[str, Value] = {
        "trip": trip * 1e6, "rate": len(had) / (until - began), "most": max(counts), "least": min(counts),
        "fairness": max(counts) / min(counts) if min(counts) else None,
        "client_cpu": sum(one["cpu"] for one in results) / whole * 1e6,
        "server_cpu": (phases[2]["cpu"] - phases[1]["cpu"]) / whole * 1e6,
    }  # fmt: skip
    if between:
        middle = statistics.median(between)
        values |= {
            "handover_p50": middle * 1e6, "handover_p99": between[min(len(between) - 1, int(0.99 * len(between)))] * 1e6,
            "handover_trips": middle / trip,
        }  # fmt: skip
    return values


# --- shared tensors


def shared(processes: int, turns: int, *, seconds: float = 1.0) -> Iterator[Sample]:
    """How often per second so many processes add to one tensor, in turn by its lock; by the
    tensor's bytes. Every addition is counted in the tensor itself, so that none that is lost goes
    unseen."""

    def one(party: str, turn: int) -> Sample:
        asked = json.dumps(
            {"party": party, "processes": processes, "sizes": SIZES, "seconds": seconds}
        )
        with Run([sys.executable, str(JOBS / "primitives_shared.py"), asked]) as run:
            status = run.wait(60.0 + 10 * seconds)
            result = run.folder / "result.json"
            if not result.exists():
                return Sample(party, turn, {}, f"exit status {status}: {run.output()[-500:]}")
            return Sample(party, turn, json.loads(result.read_text()))

    yield from take_turns(turns, (WHOLE, BLOCK, STANDARD), one)
