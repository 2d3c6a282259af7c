"""The soak of a job on several nodes without any node: the pure cores under one clock that a seed
moves (`rallypoint.testing.cluster`), very often, and once with thousands of nodes.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from bench.harness import ROOT, environment
from bench.outcome import Outcome
from bench.store_soak import written
from rallypoint.testing.cluster import SimulatedCluster

SIZES = ((1_000, 8), (10_000, 1), (10_000, 8))
"""Nodes, and ranks on each, of the jobs that are measured."""


def nodes_simulated(
    chance: random.Random, number: int, folder: Path, *, count: int = 1000
) -> Outcome:
    """So many jobs with faults, in a process of its own; the first repetition measures large ones,
    too.
    """
    first = chance.getrandbits(40)
    outcome = Outcome("simulated jobs", notes=[f"seeds {first} to {first + count - 1}"])
    with written(outcome, folder):
        variables = environment()
        variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), variables["PYTHONPATH"]])
        command = [sys.executable, "-m", "bench.cluster_soak", str(first), str(count), str(number)]
        done = subprocess.run(
            command, capture_output=True, text=True, env=variables, cwd=folder, check=False
        )
        if done.returncode or not done.stdout:
            outcome.wrong.append(f"exit status {done.returncode}: {done.stderr[-1000:]}")
            return outcome
        found = json.loads(done.stdout)
        outcome.counts = {"jobs": count, **found["counts"]}
        outcome.times = found["times"]
        for seed, reasons in found["wrong"].items():
            outcome.wrong.append(f"seed {seed}: {reasons[0]}")
    return outcome


def large(nodes: int, ranks: int) -> tuple[dict[str, float], list[str]]:
    """Form a world of so many nodes, fail in one rank and end. Times are of the lead's thread on a
    processor, without collections of garbage: that of a process with a node in it would be
    smaller than of one with thousands.
    """
    gc.disable()
    cluster = SimulatedCluster(nodes, nodes=nodes, ranks=ranks, faults=0, timer=time.thread_time)
    cluster.max_restarts = 0
    cluster.nodes[nodes // 2].fails = True
    wrong = cluster.run()
    gc.enable()
    gc.collect()
    each = cluster.messages / nodes
    if each > 12:
        wrong.append(f"{each:.1f} messages for each of {nodes} nodes")
    who = f"{nodes} nodes x {ranks}, {each:.1f} messages each"
    return {
        f"{who}: slowest decision": cluster.slowest,
        f"{who}: all decisions": cluster.deciding,
    }, wrong


def main(first: int, count: int, number: int) -> None:
    """Print what was found as JSON."""
    wrong: dict[int, list[str]] = {}
    counts: Counter[str] = Counter()
    times: dict[str, float] = {}
    for seed in range(first, first + count):
        cluster = SimulatedCluster(seed)
        if found := cluster.run():
            wrong[seed] = found
        counts += cluster.counts
    for nodes, ranks in SIZES if number == 0 else ():
        measured, found = large(nodes, ranks)
        times |= measured
        if found:
            wrong[nodes] = found
    print(json.dumps({"counts": counts, "times": times, "wrong": wrong}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
