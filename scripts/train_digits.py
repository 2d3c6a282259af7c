"""Run examples/digits_ddp.py on 4 local ranks, then say how accurate the model is and how the start went.

Run by scripts/demo with .venv's Python; words behind the run folder are the example's. Times count from the moment the
command is started. Those of the launcher come from its events.jsonl, which counts from the launcher's start; those of a
first step are when its line arrived here.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RANKS = 4
ENOUGH = 0.95
"""Least accuracy: the training reaches 0.97 to 0.99 with any seed; a rank that learns alone, or not at all, does not."""

LONGEST = 300.0
"""Seconds after which a training that normally takes under 20 is given up."""

ROOT = Path(__file__).resolve().parent.parent
RUN = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".demo"
"""The run folder: its logs stay there to be looked at."""

# What the example imports beside torch; imported once, in the template.
PRELOAD = "sklearn.datasets"
COMMAND = (
    "rallypoint",
    "run",
    "-n",
    str(RANKS),
    "--preload",
    PRELOAD,
    "--run-dir",
    str(RUN),
    str(ROOT / "examples" / "digits_ddp.py"),
    *sys.argv[2:],
)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The launcher's events, in order; none when there is no such file."""
    try:
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    except FileNotFoundError:
        return []


def launcher_began(run: Path, events: list[dict[str, Any]]) -> float:
    """When the launcher's own clock began, in seconds since 1970: it writes plan.json just before its first event."""
    return (run / "plan.json").stat().st_mtime - float(events[0]["at"])


def timeline(
    events: list[dict[str, Any]], shift: float, first_steps: list[float]
) -> list[tuple[float, str]]:
    """What happened until the first step was done, as (seconds since the command, sentence), in order."""

    def last(what: str, phase: str = "") -> list[float]:
        found = [
            e["at"]
            for e in events
            if e["what"] == what and (not phase or e.get("details", {}).get("phase") == phase)
        ]
        return [max(found) + shift] if found else []

    moments = [
        (last("template-started"), "the template is started"),
        (
            last("template-ready"),
            f"it has imported torch, {PRELOAD.replace(',', ', ')}: once for all ranks",
        ),
        (last("c10d-ready"), "the store for init_process_group answers"),
        (last("worker-started"), f"all {RANKS} workers are forked from the template"),
        (last("phase", "running"), "all ranks have left init_process_group"),
        ([max(first_steps)] if first_steps else [], "all ranks have done their first step"),
    ]
    return sorted((at, sentence) for times, sentence in moments for at in times)


def main() -> int:
    shutil.rmtree(RUN, ignore_errors=True)
    shown = " ".join(part.replace(f"{ROOT}/", "") for part in COMMAND)
    print(f"$ {shown}", flush=True)

    program = Path(sys.executable).with_name(COMMAND[0])
    began, began_wall = time.monotonic(), time.time()
    process = subprocess.Popen(
        [program, *COMMAND[1:]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    # Ctrl-C reaches the launcher as well, and it says where each rank was: wait for that.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    signal.signal(signal.SIGALRM, lambda number, frame: process.terminate())
    signal.setitimer(signal.ITIMER_REAL, LONGEST)

    accuracy, first_steps = 0.0, {}
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if said := re.search(r"rank (\d+) on \S+: first step", line):
            first_steps[int(said[1])] = time.monotonic() - began
        elif said := re.search(r"test accuracy ([\d.]+)", line):
            accuracy = float(said[1])
    status = process.wait()
    took = time.monotonic() - began
    signal.setitimer(signal.ITIMER_REAL, 0)
    if status:
        late = f" (it was stopped after {LONGEST:.0f} s)" if took >= LONGEST else ""
        print(f"failed: the training ended with status {status}{late}", file=sys.stderr)
        return status if status > 0 else 128 - status

    print(f"\nstart-up, in seconds since the command; the training took {took:.1f} s in all")
    events = read_events(RUN / "events.jsonl")
    shift = launcher_began(RUN, events) - began_wall if events else 0.0
    for at, sentence in timeline(events, shift, list(first_steps.values())):
        print(f"  {at:6.2f}  {sentence}")
    if len(first_steps) < RANKS:
        print(
            f"failed: {len(first_steps)} of {RANKS} ranks said that they did a first step",
            file=sys.stderr,
        )
        return 1
    if accuracy < ENOUGH:
        print(f"failed: accuracy {accuracy:.2f}, less than {ENOUGH}", file=sys.stderr)
        return 1
    print(
        f"ok: accuracy {accuracy:.2f}, {RANKS} ranks, first step after {max(first_steps.values()):.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
