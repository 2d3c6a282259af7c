"""`rallypoint.launch` beside torchrunx and mp.spawn: a function in several processes of one host,
called from a program like a notebook.

Each turn of each party is one run of `jobs/like_a_notebook.py`: a program with threads, an event
loop and torch imported, which calls the same function once, and then again. Beside them one
interpreter that does nothing but `import torch`.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.harness import JOBS, Run
from bench.outcome import Outcome
from bench.samples import Sample
from bench.store import take_turns

OURS, TORCHRUNX, SPAWN, IMPORT = "rallypoint", "torchrunx", "mp.spawn", "import torch"

AGAIN = {OURS: 5, TORCHRUNX: 1, SPAWN: 1}
"""Calls after the first. The peers import torch anew in every rank of every call: one takes as long
as the other.
"""

LIMIT = 240.0
"""Seconds for one turn of one party; beyond them it counts as not measured."""

GROWTH_MOST = 5 * 2**20
"""Bytes that a program may have more after hundreds of launches: the promise of the design."""

OWN_SHARED_MEMORY = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs tmpfs /dev/shm && exec "$@"',
    "sh",
)
"""Before a command: with a /dev/shm of its own, in which nobody else on this machine puts anything.
Needs root.
"""


def measure(ranks: int, turns: int) -> Iterator[Sample]:
    """Samples of everyone. `first`: seconds of the first call, or of the import; `again`: the
    median of the further ones.
    """

    def one(party: str, turn: int) -> Sample:
        if party == IMPORT:
            with Run([sys.executable, str(JOBS / "only_import.py")]) as run:
                marks = run.wait_for_marks("imported", 1, 60)
                return Sample(
                    party,
                    turn,
                    {"first": marks[0].at - run.began if marks else None},
                    "" if marks else "it did not end within 60 s",
                )
        asked = json.dumps({"party": party, "ranks": ranks, "again": AGAIN[party]})
        with Run(
            [sys.executable, str(JOBS / "like_a_notebook.py"), asked], XDG_STATE_HOME="state"
        ) as run:
            status = run.wait(LIMIT)
            result = run.folder / "result.json"
            if not result.exists():
                return Sample(party, turn, {}, f"exit status {status}: {run.output()[-500:]}")
            told = json.loads(result.read_text())
        return Sample(
            party, turn, {"first": told["first"], "again": statistics.median(told["again"])}
        )

    yield from take_turns(turns, (IMPORT, OURS, TORCHRUNX, SPAWN), one)


def has_own_shared_memory() -> bool:
    """Whether `OWN_SHARED_MEMORY` works here: in many containers it does not, for root either."""
    try:
        return (
            subprocess.run(
                [*OWN_SHARED_MEMORY, "true"], capture_output=True, timeout=10, check=False
            ).returncode
            == 0
        )
    except OSError:
        return False


def often(chance: random.Random, number: int, folder: Path, *, count: int = 500) -> Outcome:
    """So many launches in one program: afterwards it holds what it held before."""
    outcome = Outcome(f"{count} launches")
    asked = json.dumps({"count": count, "ranks": chance.choice((1, 2, 3))})
    apart = OWN_SHARED_MEMORY if has_own_shared_memory() else ()
    with Run(
        [*apart, sys.executable, str(JOBS / "launch_often.py"), asked],
        folder=folder,
        XDG_STATE_HOME=str(folder / "state"),
    ) as run:
        status = run.wait(60 + 2.0 * count)
        result = folder / "result.json"
        (folder / "output").write_text(run.output())
        if not result.exists():
            outcome.wrong.append(f"exit status {status}: {run.output()[-1000:]}")
            return outcome
        told = json.loads(result.read_text())
        _, left = run.wait_until_gone(30.0)
        if left:
            outcome.wrong.append(f"{len(left)} processes are left")
    before, after = told["before"], told["after"]
    for name, had in before.items():
        if name == "shared" and not apart:
            outcome.notes.append(
                "shared: not counted, since others use /dev/shm, too, and one of our own needs root"
            )
            continue
        grown = after[name] - had
        if grown > (GROWTH_MOST if "memory" in name else 0):
            outcome.wrong.append(f"{name}: {had:,.0f} before, {after[name]:,.0f} after")
        outcome.notes.append(f"{name} {had:,.0f} -> {after[name]:,.0f}")
    outcome.times["one launch"] = statistics.median(told["seconds"])
    return outcome
