"""The coordination store beside torch's TCPStore (libuv): the same calls, in the same turn, one
party right after the other.

Each turn of each party is one run of `jobs/store_crowd.py`: a server in a process of its own,
clients in processes of theirs, all warm before anything is counted. Who begins changes from turn to
turn. "rallypoint" is what a user gets on the server's host (a Unix socket, and shared memory for
large values), "rallypoint, TCP" what one gets from another host, here over loopback.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from bench.harness import JOBS, Run, say
from bench.samples import Sample, Value

OURS, TCP, PEER = "rallypoint", "rallypoint, TCP", "TCPStore"

APART, TOGETHER = "two processors", "one processor"
PEER_BYTES = 8 * 2**20
"""The largest value that a TCPStore takes. One byte more, and it closes the connection."""

SIZES = (32, 2**10, 64 * 2**10, 2**20, 7 * 10**6, 64 * 2**20, 10**9)
BULK_BYTES = 64 * 2**20
PEER_BULK_BYTES = 7 * 10**6
"""What the uploaders of a TCPStore write: their 64 MiB would be refused."""

LIMIT = 120.0
"""Seconds for one turn of one party, unless a case says otherwise; beyond them it counts as not
measured.
"""

Outcome = dict[str, Any]
Read = Callable[[Outcome], dict[str, Value]]


def take_turns(
    turns: int, parties: Sequence[str], one: Callable[[str, int], Sample]
) -> Iterator[Sample]:
    """Every party in every turn; the one that began is the last in the next turn."""
    for turn in range(turns):
        first = turn % len(parties)
        for party in (*parties[first:], *parties[:first]):
            sample = one(party, turn)
            shown = "  ".join(
                f"{name} {value:.4g}"
                for name, value in sample.values.items()
                if isinstance(value, int | float)
            )
            say(f"  turn {turn}  {party:<16} {shown}  {sample.note[-300:]}")
            yield sample


def crowd(
    party: str, task: str, clients: int, limit: float = LIMIT, *, dns: str = "refused", **spec: Any
) -> Outcome:
    """One run of the crowd: its `results` and `phases`, or an `error`.

    TCPStore looks up the names of addresses when it connects. So that this is measured where it is
    the question (`dns="silent"`), and nowhere else, there is no DNS that could be slow: in a
    network namespace, if we may have one.
    """
    asked = json.dumps({"party": party, "task": task, "clients": clients, **spec})
    command = [sys.executable, str(JOBS / "store_crowd.py"), asked]
    if can_be_isolated():
        command = [sys.executable, str(JOBS / "without_dns.py"), dns, *command]
    with Run(command) as run:
        status = run.wait(limit)
        result = run.folder / "result.json"
        if result.exists():
            found: Outcome = json.loads(result.read_text())
            return found
        if status is None:
            return {"error": f"not done within {limit:g} s", "late": True}
        return {"error": f"exit status {status}: {run.output()[-500:]}"}


def sampled(party: str, turn: int, outcome: Outcome, read: Read, note: str = "") -> Sample:
    if "error" in outcome:
        return Sample(party, turn, {}, outcome["error"][-500:])
    return Sample(party, turn, read(outcome), note)


# --- small operations


def latency(turns: int, *, count: int = 10_000) -> Iterator[Sample]:
    """Microseconds per call of one client, and processor time per call at both ends.

    Twice: server and client on a processor each, and both on one. Left to itself the kernel does
    now this, now that, and the figures of a store change by a factor of two or three with it.
    """

    def one(party: str, turn: int) -> Sample:
        values: dict[str, Value] = {}
        for placed, suffix in ((APART, ""), (TOGETHER, "_together")):
            outcome = crowd(party, "latency", 1, warm=min(500, count), count=count, placed=placed)
            if "error" in outcome:
                return Sample(party, turn, {}, outcome["error"])
            values |= latency_values(outcome, suffix)
        return Sample(party, turn, values)

    yield from take_turns(turns, (OURS, TCP, PEER), one)


def latency_values(outcome: Outcome, suffix: str) -> dict[str, Value]:
    """In microseconds."""
    values: dict[str, Value] = {}
    phases = iter(outcome["phases"])
    for name, found in outcome["results"][0].items():
        before, after = next(phases), next(phases)
        values[f"{name}_p50{suffix}"] = found["p50"] * 1e6
        values[f"{name}_p99{suffix}"] = found["p99"] * 1e6
        values[f"{name}_client_cpu{suffix}"] = found["cpu"] * 1e6
        values[f"{name}_server_cpu{suffix}"] = (after["cpu"] - before["cpu"]) / found["count"] * 1e6
    return values


def throughput(clients: int, turns: int, *, seconds: float = 2.0) -> Iterator[Sample]:
    """Operations per second of so many clients, a process each."""

    def one(party: str, turn: int) -> Sample:
        return sampled(
            party, turn, crowd(party, "throughput", clients, warm=200, seconds=seconds), rates
        )

    yield from take_turns(turns, (OURS, TCP, PEER), one)


def rates(outcome: Outcome) -> dict[str, Value]:
    """From the first client's beginning to the last one's end; and microseconds of processor time
    per operation at both ends.
    """
    values: dict[str, Value] = {}
    phases = iter(outcome["phases"])
    for name in ("get", "add"):
        found = [result[name] for result in outcome["results"]]
        before, after = next(phases), next(phases)
        seconds = max(one["ended"] for one in found) - min(one["began"] for one in found)
        count = sum(one["count"] for one in found)
        values[f"{name}_rate"] = count / seconds
        values[f"{name}_client_cpu"] = sum(one["cpu"] for one in found) / count * 1e6
        values[f"{name}_server_cpu"] = (after["cpu"] - before["cpu"]) / count * 1e6
    return values


# --- values


def values(turns: int, *, sizes: Sequence[int] = SIZES, seconds: float = 0.5) -> Iterator[Sample]:
    """Bytes per second of writing one key over and over, and of reading it; the first write; and
    copying as much from here to there.
    """

    def one(party: str, turn: int) -> Sample:
        possible = [size for size in sizes if party != PEER or size <= PEER_BYTES]
        outcome = crowd(
            party,
            "values",
            1,
            limit=LIMIT + 60 * seconds,
            sizes=possible,
            seconds=seconds,
            most=2000,
        )
        return sampled(party, turn, outcome, bytes_per_second)

    yield from take_turns(turns, (OURS, TCP, PEER), one)


def bytes_per_second(outcome: Outcome) -> dict[str, Value]:
    """`set_7000000` and so on; `first_...` is the first write."""
    return {
        f"{name}_{size}": int(size) / seconds
        for size, found in outcome["results"][0].items()
        for name, seconds in found.items()
    }  # fmt: skip


def mixed(turns: int, *, seconds: float = 3.0) -> Iterator[Sample]:
    """Microseconds of a small get beside 0, 1 and 2 clients that write large values without a
    pause.
    """

    def one(party: str, turn: int) -> Sample:
        size = PEER_BULK_BYTES if party == PEER else BULK_BYTES
        return sampled(party, turn, crowd(party, "mixed", 3, size=size, seconds=seconds), beside)

    yield from take_turns(turns, (OURS, TCP, PEER), one)


def beside(outcome: Outcome) -> dict[str, Value]:
    """`p50_2`: beside two uploaders; `upload_2`: what these wrote, in bytes per second."""
    values: dict[str, Value] = {}
    reader, *uploaders = outcome["results"]
    for number, found in reader.items():
        values[f"p50_{number}"] = found["p50"] * 1e6
        values[f"p99_{number}"] = found["p99"] * 1e6
        rates = [one[number]["rate"] for one in uploaders if number in one]
        values[f"upload_{number}"] = sum(rates)
    return values


# --- many


def connect(clients: int, turns: int, peer_turns: int, *, limit: float = 300.0) -> Iterator[Sample]:
    """Seconds until so many processes have connected and passed one barrier, where no name server
    answers.

    The peer looks up names, and takes minutes: it takes part in `peer_turns` turns, and is given up
    after `limit`.
    """
    note = (
        ""
        if can_be_isolated()
        else "with this machine's own name server: a network namespace needs root"
    )

    def one(party: str, turn: int) -> Sample:
        return sampled(
            party, turn, crowd(party, "join", clients, limit=limit, dns="silent"), joined, note
        )

    for turn in range(turns):
        parties = (OURS, TCP, PEER) if turn < peer_turns else (OURS, TCP)
        for sample in take_turns(1, parties, one):
            yield Sample(sample.who, turn, sample.values, sample.note)


def joined(outcome: Outcome) -> dict[str, Value]:
    """From when all were let loose."""
    began, results = outcome["phases"][0]["at"], outcome["results"]
    return {
        "connected_seconds": max(one["connected"] for one in results) - began,
        "seconds": max(one["ended"] for one in results) - began,
    }  # fmt: skip


@cache
def can_be_isolated() -> bool:
    """Whether this process may make a network namespace: root, and no sandbox against it."""
    if os.geteuid() != 0:
        return False
    return (
        subprocess.run(
            [sys.executable, str(JOBS / "without_dns.py"), "refused", "true"],
            capture_output=True,
            check=False,
        ).returncode
        == 0
    )


def sessions(
    count: int, turns: int, *, processes: int = 8, limit: float = 180.0
) -> Iterator[Sample]:
    """Seconds until so many sessions of eight processes have joined, and passed one barrier; and
    what each costs the server.
    """

    def one(party: str, turn: int) -> Sample:
        return sampled(
            party, turn, crowd(party, "sessions", processes, limit=limit, sessions=count), read
        )

    def read(outcome: Outcome) -> dict[str, Value]:
        results, phases = outcome["results"], outcome["phases"]
        held = sum(one["sessions"] for one in results)
        join = max(one["connected"] for one in results) - min(one["began"] for one in results)
        passed = max(one["passed"] for one in results) - min(one["passing"] for one in results)
        memory = max(phase["resident"] for phase in phases) - phases[0]["resident"]
        return {
            "seconds": join + passed, "join_seconds": join, "barrier_seconds": passed, "sessions": held,
            "server_bytes": memory / held, "server_cpu": phases[-1]["cpu"] - phases[0]["cpu"],
        }  # fmt: skip

    yield from take_turns(turns, (OURS, TCP, PEER), one)


def storm(clients: int, turns: int, *, rounds: int = 5, limit: float = 180.0) -> Iterator[Sample]:
    """Seconds until the last of so many processes that connect at the same moment is connected,
    several times in a row.
    """

    def one(party: str, turn: int) -> Sample:
        return sampled(
            party, turn, crowd(party, "storm", clients, limit=limit, count=rounds), connected
        )

    yield from take_turns(turns, (OURS, TCP, PEER), one)


def connected(outcome: Outcome) -> dict[str, Value]:
    """The median round, the worst, and how many attempts failed in all."""
    seconds, failures = [], 0
    for rounds in zip(*(result["rounds"] for result in outcome["results"]), strict=True):
        seconds.append(max(one["ended"] for one in rounds) - min(one["began"] for one in rounds))
        failures += sum(bool(one["failure"]) for one in rounds)
    return {
        "seconds": statistics.median(seconds),
        "worst_seconds": max(seconds),
        "failures": failures,
    }
