"""From command to first all_reduce, and what a rank costs: rallypoint beside torchrun, mp.spawn and
the standard library's forkserver.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench import harness
from bench.harness import JOBS, Run, rallypoint, say, torchrun
from bench.samples import Sample, Value

# Seconds after which a start counts as failed: several times what the slowest peer needs on two
# cores.
START_TIMEOUT = {2: 60.0, 4: 60.0, 16: 120.0, 64: 300.0, 128: 120.0, 256: 240.0}
# Seconds for a restarted job to run again. torchrun's ranks wait in the rendezvous of the attempt
# before, in vain, for far longer.
RESTART_TIMEOUT = 60.0


def launchers(ranks: int, script: str = "first_all_reduce.py") -> dict[str, list[str]]:
    """The command of each launcher for `ranks` ranks, rallypoint first."""
    return {
        "rallypoint": [
            *rallypoint(),
            "run",
            "-n",
            str(ranks),
            "--run-dir",
            "run",
            str(JOBS / script),
        ],
        "torchrun": [
            *torchrun(),
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            str(JOBS / script),
        ],
        "mp.spawn": [sys.executable, str(JOBS / "with_spawn.py"), str(ranks)],
        "forkserver": [sys.executable, str(JOBS / "with_forkserver.py"), str(ranks)],
    }


def first_all_reduce(ranks: int, turns: int, peers: dict[str, int]) -> Iterator[Sample]:
    """Seconds from the command to the end of the last rank's first all_reduce. `peers`: in how many
    of the turns each takes part.

    One interpreter that imports torch is part of every turn: the limit that physics leaves.
    """
    commands = launchers(ranks)
    for turn in range(turns):
        yield _import(turn)
        for who in ("rallypoint", *(peer for peer, count in peers.items() if turn < count)):
            yield _start(who, commands[who], ranks, turn)


def _import(turn: int) -> Sample:
    with Run([sys.executable, str(JOBS / "only_import.py")]) as run:
        marks = run.wait_for_marks("imported", 1, 60)
        seconds = marks[0].at - run.began if marks else None
    say(f"  turn {turn}  {'import torch':<12} {_shown(seconds)}")
    return Sample(
        "import torch", turn, {"seconds": seconds}, "" if marks else "it did not end within 60 s"
    )


def _start(who: str, command: list[str], ranks: int, turn: int, label: str = "") -> Sample:
    with Run(command) as run:
        marks = run.wait_for_marks("reduced", ranks, START_TIMEOUT.get(ranks, 240.0))
        complete = len(marks) == ranks
        status = run.wait(60) if complete else None
        seconds = max(mark.at for mark in marks) - run.began if complete else None
        whole = run.ended - run.began if run.ended is not None else None
        values: dict[str, Value] = {"seconds": seconds, "exit_seconds": whole, "status": status}
        if who == "rallypoint":
            forks = fork_times(run.folder / "run")
            values["fork"] = statistics.median(forks) if forks else None
        note = (
            "" if complete else f"{len(marks)} of {ranks} ranks came so far: {run.output()[-300:]}"
        )
    say(f"  turn {turn}  {label or who:<12} {_shown(seconds)}")
    return Sample(label or who, turn, values, note)


def fork_times(folder: Path) -> list[float]:
    """Seconds that the template's forks took, as the run's events have them."""
    path = folder / "events.jsonl"
    if not path.exists():
        return []
    events = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [
        float(event["details"]["fork"])
        for event in events
        if event["what"] == "worker-started" and "fork" in event.get("details", {})
    ]


def memory(ranks: int, turns: int) -> Iterator[Sample]:
    """Memory of a rank that has imported torch and waits, and of one that has met the others:
    medians over the ranks of a job.
    """
    commands = launchers(ranks, "idle.py")
    for turn in range(turns):
        for who in ("rallypoint", "torchrun"):
            with Run(commands[who]) as run:
                values: dict[str, Value] = {}
                for point, file in (("imported", "meet"), ("met", "end")):
                    marks = run.wait_for_marks(point, ranks, START_TIMEOUT.get(ranks, 120.0))
                    if len(marks) == ranks:
                        taken = [harness.memory(mark.pid) for mark in marks]
                        values |= {
                            f"{point}_{kind}": statistics.median(one[kind] for one in taken)
                            for kind in ("pss", "private")
                        }
                    (run.folder / file).touch()
                run.wait(60)
                note = "" if len(values) == 4 else f"not every rank came: {run.output()[-300:]}"
            say(
                f"  turn {turn}  {who:<12} "
                + "  ".join(
                    f"{name} {_number(value) / 2**20:.1f} MiB" for name, value in values.items()
                )
            )
            yield Sample(who, turn, values, note)


def _number(value: Value) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def slow_import(ranks: int, turns: int) -> Iterator[Sample]:
    """A script with an import of 5 s: torchrun, rallypoint, and rallypoint that imports it once,
    before the forks.
    """
    commands = launchers(ranks, "slow_import.py")
    preload = [
        *commands["rallypoint"][:-1],
        "--preload",
        "slow_package",
        commands["rallypoint"][-1],
    ]
    for turn in range(turns):
        yield _start("rallypoint", preload, ranks, turn, "--preload")
        yield _start("rallypoint", commands["rallypoint"], ranks, turn)
        yield _start("torchrun", commands["torchrun"], ranks, turn)


def commands(turns: int) -> Iterator[Sample]:
    """Seconds for the commands that must answer at once."""
    asked = {
        "rallypoint --help": [*rallypoint(), "--help"],
        "rallypoint run --help": [*rallypoint(), "run", "--help"],
        "rallypoint explain": [*rallypoint(), "explain"],
        "torchrun --help": [*torchrun(), "--help"],
    }
    for turn in range(turns):
        for who, command in asked.items():
            with Run(command) as run:
                status = run.wait(60)
                seconds = run.ended - run.began if run.ended is not None and status == 0 else None
                note = "" if status == 0 else f"exit status {status}: {run.output()[-300:]}"
            say(f"  turn {turn}  {who:<22} {_shown(seconds)}")
            yield Sample(who, turn, {"seconds": seconds}, note)


def restart(ranks: int, turns: int, peer_turns: int, peer_timeout: float) -> Iterator[Sample]:
    """Seconds from a rank's exit with code 3 to the end of the next attempt's first all_reduce on
    all ranks.
    """
    script = str(JOBS / "crash_once.py")
    asked = {
        "rallypoint": (
            [
                *rallypoint(),
                "run",
                "-n",
                str(ranks),
                "--max-restarts",
                "1",
                "--run-dir",
                "run",
                script,
            ],
            RESTART_TIMEOUT,
        ),
        "torchrun": (
            [
                *torchrun(),
                "--standalone",
                "--nproc-per-node",
                str(ranks),
                "--max-restarts",
                "1",
                script,
            ],
            peer_timeout,
        ),
    }
    for turn in range(turns):
        for who, (command, timeout) in asked.items():
            if who == "torchrun" and turn >= peer_turns:
                continue
            with Run(command) as run:
                crashed = run.wait_for_marks("crashed", 1, START_TIMEOUT.get(ranks, 60.0))
                again = run.wait_for_marks("again", ranks, timeout, attempt=1)
                recovered = len(again) == ranks and bool(crashed)
                seconds = max(mark.at for mark in again) - crashed[0].at if recovered else None
                status = run.wait(30 if recovered else 0)
                how = "and did not end" if status is None else f"and ended with status {status}"
                note = (
                    ""
                    if recovered
                    else f"{len(again)} of {ranks} ranks ran again within {time.monotonic() - run.began:.0f} s, {how}"
                )
            say(f"  turn {turn}  {who:<12} {_shown(seconds)}  {note}")
            yield Sample(who, turn, {"seconds": seconds, "recovered": recovered}, note)


def _shown(seconds: float | None) -> str:
    return f"{seconds:8.3f} s" if seconds is not None else "     -   "
