"""When something dies: how long until the cause is said, whether it is the right one, and what is
left.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator

from bench import harness
from bench.harness import JOBS, Run, rallypoint, say, torchrun
from bench.samples import Sample, Value

RANKS = 4
CULPRIT = 2
START_TIMEOUT = (
    60.0  # seconds for four ranks to come up under the slower launcher, several times over
)
# seconds for a launcher to end after the death. torchrun gives its ranks 30 s before it kills them
END_TIMEOUT = 60.0
LEFT_AFTER = 2.0  # seconds after a launcher's own death: what lives then is left

_REPORT = {
    "rallypoint": r"^(error|stopped)\[[a-z-]+\]: ",
    "torchrun": r"^Root Cause \(first observed failure\)",
}


def launchers(script: str) -> dict[str, list[str]]:
    """The command of each for four ranks."""
    return {
        "rallypoint": [
            *rallypoint(),
            "run",
            "-n",
            str(RANKS),
            "--run-dir",
            "run",
            str(JOBS / script),
        ],
        "torchrun": [
            *torchrun(),
            "--standalone",
            "--nproc-per-node",
            str(RANKS),
            str(JOBS / script),
        ],
    }


def blamed(who: str, output: str) -> str:
    """What a launcher's report says the cause was, in a form that both can be compared in: `rank 2:
    rank-killed`, "" without one.
    """
    if who == "rallypoint":
        found = re.search(r"^error\[([a-z-]+)\]: .*?\brank (\d+)\b", output, re.MULTILINE)
        return f"rank {found[2]}: {found[1]}" if found else ""
    found = re.search(
        r"Root Cause \(first observed failure\):.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)",
        output,
        re.DOTALL,
    )
    return f"rank {found[1]}: exit code {found[2]}" if found else ""


def killed(turns: int) -> Iterator[Sample]:
    """One of four ranks is SIGKILLed while all reduce; the others lose their connection to it."""
    for turn in range(turns):
        for who, command in launchers("loop.py").items():
            with Run(command) as run:
                marks = run.wait_for_marks("looping", RANKS, START_TIMEOUT)
                victim = next((mark.pid for mark in marks if mark.rank == CULPRIT), 0)
                if len(marks) < RANKS or not victim:
                    yield _failed_to_start(who, turn, run)
                    continue
                died = time.monotonic()
                harness.send(victim, signal.SIGKILL)
                yield _outcome(who, turn, run, died)


def raised(turns: int) -> Iterator[Sample]:
    """One of four ranks raises ValueError; the others wait for it in an all_reduce."""
    for turn in range(turns):
        for who, command in launchers("loop.py").items():
            with Run(command, BENCH_RAISES=str(CULPRIT)) as run:
                marks = run.wait_for_marks("looping", RANKS, START_TIMEOUT)
                (run.folder / "now").touch()
                raising = run.wait_for_marks("raised", 1, 10) if len(marks) == RANKS else []
                if not raising:
                    yield _failed_to_start(who, turn, run)
                    continue
                yield _outcome(who, turn, run, raising[0].at)


def _outcome(who: str, turn: int, run: Run, died: float) -> Sample:
    status = run.wait(END_TIMEOUT)
    output = run.output()
    reported = run.printed_at(_REPORT[who])
    cause = blamed(who, output)
    values: dict[str, Value] = {
        "report_seconds": reported - died if reported is not None else None,
        "exit_seconds": run.ended - died if run.ended is not None else None,
        "status": status,
        "lines": len(output.strip("\n").splitlines()),
        "cause": cause,
        "right": cause.startswith(f"rank {CULPRIT}:"),
    }
    say(
        f"  turn {turn}  {who:<12} "
        + "  ".join(f"{name} {_shown(value)}" for name, value in values.items())
    )
    return Sample(
        who, turn, values, "" if status is not None else f"it had not ended after {END_TIMEOUT:g} s"
    )


def launcher_killed(turns: int) -> Iterator[Sample]:
    """The launcher is SIGKILLed; each rank has two children, one of them in a session of its own,
    and a DataLoader worker.
    """
    for turn in range(turns):
        for who, command in launchers("family.py").items():
            with Run(command) as run:
                if len(run.wait_for_marks("looping", RANKS, START_TIMEOUT)) < RANKS:
                    yield _failed_to_start(who, turn, run)
                    continue
                before = len(run.living())
                harness.send(run.pid, signal.SIGKILL)
                took, left = run.wait_until_gone(LEFT_AFTER)
                values: dict[str, Value] = {
                    "before": before,
                    "left": len(left),
                    "gone_seconds": None if left else took,
                }
            say(
                f"  turn {turn}  {who:<12} "
                + "  ".join(f"{name} {_shown(value)}" for name, value in values.items())
            )
            yield Sample(who, turn, values)


def interrupted(turns: int) -> Iterator[Sample]:
    """Ctrl-C (SIGINT to the launcher's process group, as a terminal sends it) while three ranks
    wait in C for the fourth.
    """
    for turn in range(turns):
        for who, command in launchers("absent.py").items():
            with Run(command) as run:
                if len(run.wait_for_marks("here", RANKS, START_TIMEOUT)) < RANKS:
                    yield _failed_to_start(who, turn, run)
                    continue
                time.sleep(
                    1.0
                )  # not for anything to happen: so that the three stand in the call for certain
                asked = time.monotonic()
                os.killpg(run.pid, signal.SIGINT)
                status = run.wait(END_TIMEOUT)
                output = run.output()
                reported = run.printed_at(_REPORT[who]) if who == "rallypoint" else None
                values: dict[str, Value] = {
                    "report_seconds": reported - asked if reported is not None else None,
                    "exit_seconds": run.ended - asked if run.ended is not None else None,
                    "status": status,
                    "lines": len(output.strip("\n").splitlines()),
                }
            say(
                f"  turn {turn}  {who:<12} "
                + "  ".join(f"{name} {_shown(value)}" for name, value in values.items())
            )
            yield Sample(
                who,
                turn,
                values,
                "" if status is not None else f"it had not ended after {END_TIMEOUT:g} s",
            )


def _failed_to_start(who: str, turn: int, run: Run) -> Sample:
    note = f"it did not come up: {run.output()[-300:]}"
    say(f"  turn {turn}  {who:<12} {note}")
    return Sample(who, turn, {}, note)


def _shown(value: Value) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
