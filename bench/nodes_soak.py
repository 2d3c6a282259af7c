"""`scripts/soak nodes`: something happens to one node of a job on two to four. Every node that can
speak must report it, and no process may be left on any of them.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.nodes.netns import Cluster

from bench import nodes
from bench.harness import LOOK, Run
from bench.nodes import FAULTS, OURS, Job
from bench.outcome import Outcome

RANKS = 2
"""Ranks of each node."""

END_TIMEOUT = 5.0
"""Seconds from when a launcher has left its namespaces until its exit status is there."""

WITHIN = 10.0
"""Seconds after a fault in which every node that can speak has reported and is free. The promise is
three; how many were slower is counted."""

PROMISED = 3.0

SEEN_AS_DEAD = ("agent-killed", "node-killed", "node-frozen")
"""Faults after which the host itself still answers."""

KINDS = (*FAULTS, "flap")

BLINK = 0.5
"""Seconds without a link that a node must bear. TCP sends again after 0.2, 0.6 and 1.4 s: after a
longer gap the next sign of life may come when a lease of two seconds has ended.
"""


@dataclass(frozen=True)
class Truth:
    """The first cause that a node must name: codes, and words of its headline or ranks."""

    codes: tuple[str, ...]
    words: tuple[str, ...] = ()  # one of them is in the headline
    rank: int | None = None


def truths(kind: str, count: int, number: int) -> dict[int, Truth]:
    """Return what each node must say after a fault of node `number`; a node that was killed is not
    there.
    """
    everybody = range(count)
    if kind == "rank-killed":
        return dict.fromkeys(everybody, Truth(("rank-killed",), rank=number * RANKS))
    lost = Truth(("lead-lost",) if number == 0 else ("node-lost",), _names(number))
    found = dict.fromkeys((other for other in everybody if other != number), lost)
    if number == 0 and count == 2 and kind not in SEEN_AS_DEAD:
        # nobody else is there to ask who of the two is cut off
        found[1] = Truth(("lead-lost", "node-isolated"))
    if kind in ("agent-killed", "node-killed"):
        return found
    # A node that is cut off cannot tell whether it is itself or all the others. Of two nodes the
    # lead sees the other one lost.
    alone = ("node-isolated", "lead-lost") if number else ("node-isolated", "node-lost")
    return {**found, number: Truth(alone)}


def _names(number: int) -> tuple[str, ...]:
    return (f"node {number}", f"{PREFIX}{number}")


PREFIX = "gpu"


def nodes_soak(chance: random.Random, turn: int, folder: Path) -> Outcome:
    """Do one fault to one node of a running job, and judge what every node says."""
    kind = KINDS[turn % len(KINDS)]
    count = chance.choice([2, 3, 4])
    number = chance.randrange(count)
    outcome = Outcome(
        f"{kind}, {'the lead' if number == 0 else 'another node'}", notes=[f"{count} nodes"]
    )
    with (
        Cluster(count, folder / "cluster", prefix=PREFIX) as cluster,
        nodes.job(cluster, OURS, RANKS, "loop.py", "--error-format", "json") as job,
    ):
        marks = job.wait_for_marks("looping")
        if len(marks) < job.complete:
            outcome.wrong.append(f"{len(marks)} of {job.complete} ranks came: {job.said()}")
        else:
            time.sleep(chance.uniform(0, 0.7))  # one sign of life to the next
            _act_and_judge(outcome, job, kind, number, chance)
        outcome.wrong += [f"left: {line}" for line in cluster.living()]
        _keep(outcome, job, folder)
    return outcome


def _act_and_judge(
    outcome: Outcome, job: Job, kind: str, number: int, chance: random.Random
) -> None:
    at = time.monotonic()
    if kind == "flap":
        kind = _flap(job, number, chance)
        outcome.what += f": {kind}"
        at = time.monotonic()
    else:
        FAULTS[kind](job, number)
    expected = truths(kind, job.cluster.count, number)
    frozen = kind == "node-frozen"
    waits = [node for node in expected if not (frozen and node == number)]
    ended = _ends(job, waits, at + WITHIN)
    if frozen:
        job.cluster[number].thaw()
        ended |= _ends(job, [number], time.monotonic() + WITHIN)
    slowest = 0.0
    for node in expected:
        if ended.get(node) is None:
            outcome.wrong.append(f"node {node} was not free within {WITHIN:g} s")
        elif node != number or not frozen:
            slowest = max(slowest, ended[node] - at)
    outcome.times["free"] = slowest
    outcome.counts["slower than promised"] = int(slowest > PROMISED)
    grades = {node: judge(truth, job.runs[node]) for node, truth in expected.items()}
    for node, (given, said) in grades.items():
        outcome.counts[given] = outcome.counts.get(given, 0) + 1
        if given != "right":
            outcome.wrong.append(f"{given}: node {node} says {said}, instead of {expected[node]}")


def _flap(job: Job, number: int, chance: random.Random) -> str:
    """Take a link down and up a few times, too short for a lease to end; the job must go on. Then
    kill a rank of that node.
    """
    for _ in range(chance.randint(2, 4)):
        job.cluster[number].unplug()
        time.sleep(chance.uniform(0.1, BLINK))
        job.cluster[number].plug()
        time.sleep(chance.uniform(1.0, 2.0))
    nodes.FAULTS["rank-killed"](job, number)
    return "rank-killed"


def _ends(job: Job, numbers: Sequence[int], until: float) -> dict[int, float]:
    """Return the moment at which no process of a node was left, of those where none is."""
    found: dict[int, float] = {}
    while len(found) < len(numbers) and time.monotonic() < until:
        for run in job.runs:
            run.process.poll()
        living = job.cluster.processes()
        at = time.monotonic()
        for number in numbers:
            if number not in found and not living[job.cluster[number]]:
                found[number] = at
        time.sleep(LOOK)
    return found


def judge(truth: Truth, run: Run) -> tuple[str, str]:
    """Return the grade of what one node printed ("right", "not known", "wrong", "wrong and
    certain"), and what it said.
    """
    documents = [
        json.loads(line) for line in run.output().splitlines() if line.startswith('{"exit_status"')
    ]
    if len(documents) != 1:
        return "wrong", f"{len(documents)} reports, exit status {run.process.poll()}"
    reports: list[dict[str, Any]] = documents[0]["reports"]
    if not reports:
        return "wrong", "a report without a cause"
    first = reports[0]
    confidence = first.get("confidence", "certain")
    said = f"{first['code']} ({confidence}): {first['headline']}"
    named = not truth.words or any(word in first["headline"] for word in truth.words)
    ranks = truth.rank is None or first.get("ranks") == [truth.rank]
    if first["code"] in truth.codes and named and ranks:
        status = run.wait(END_TIMEOUT)
        return ("right", said) if status else ("wrong", f"{said}; and exit status {status}")
    if first["code"] == "cause-unknown" or confidence != "certain":
        return "not known", said
    return "wrong and certain", said


def _keep(outcome: Outcome, job: Job, folder: Path) -> None:
    lines = [outcome.what, *outcome.notes, *(f"WRONG: {wrong}" for wrong in outcome.wrong)]
    for node, run in zip(job.cluster.nodes, job.runs, strict=True):
        lines += ["", f"--- {node.name}: exit status {run.process.poll()}", run.output()]
    (folder / "output").write_text("\n".join(lines))
