"""`scripts/soak`: do one thing very often, at random moments, and count what went wrong. The output
of every failure is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench import (
    cluster_soak,
    harness,
    launch,
    lease_soak,
    log_soak,
    nodes_soak,
    port_soak,
    primitives_soak,
    store_soak,
)
from bench.harness import JOBS, Run, rallypoint, say
from bench.outcome import Mode, Outcome

# Seconds for one job of a few ranks on a machine that is busy with others; the slowest that was
# ever seen took a fifth of it.
RUN_TIMEOUT = 60.0
# Seconds in which everything must be gone after a SIGKILL of ours: the promise (architecture.md
# section 6).
GONE_WITHIN = 2.0
_INTERRUPTED = r"^[a-z]+\[interrupted\]: "
# Seconds from Ctrl-C to the launcher's end. The ranks of these jobs have no handler that takes its
# time.
INTERRUPT_TIMEOUT = 5.0


def run_command(ranks: int, script: str, *options: str) -> list[str]:
    return [
        *rallypoint(),
        "run",
        "-n",
        str(ranks),
        *options,
        "--run-dir",
        "run",
        str(JOBS / script),
    ]


# --- root-cause


def root_cause(chance: random.Random, number: int, folder: Path) -> Outcome:
    """Rank 2 of 4 is SIGKILLed at a random moment; the peers raise, abort or exit on the lost
    connection. Exactly rank 2 must be named.
    """
    answer = ("raise", "abort", "exit")[number % 3]
    moment = chance.choice(["before-init", "during-init", "loop", "finalisation"])
    killer = chance.choice(["self", "outside"])
    longest = {"before-init": 0.05, "during-init": 0.03, "loop": 0.4, "finalisation": 0.3}[moment]
    delay = chance.uniform(0, longest)
    outcome = Outcome(f"{answer}, {moment}, {killer}", notes=[f"delay {delay:.4f}"])
    extra = {
        "SOAK_ANSWER": answer,
        "SOAK_MOMENT": moment,
        "SOAK_KILLER": killer,
        "SOAK_DELAY": str(delay),
    }
    with _watched(outcome, run_command(4, "peers.py"), folder, extra) as run:
        marks = run.wait_for_marks("moment", 1, RUN_TIMEOUT)
        if not marks:
            outcome.wrong.append("rank 2 never came to the moment")
            return outcome
        killed_at = time.monotonic()
        if killer == "outside":
            time.sleep(delay)
            killed_at = time.monotonic()
            harness.send(marks[0].pid, signal.SIGKILL)
        status = run.wait(RUN_TIMEOUT)
        if killer == "self" and (killed := run.marks("killed")):
            killed_at = killed[0].at
        if run.ended is not None:
            outcome.times["exit"] = run.ended - killed_at
        if (reported := run.printed_at(r"^[a-z]+\[[a-z-]+\]: ")) is not None:
            outcome.times["report"] = reported - killed_at
        _judge_root_cause(outcome, run, status)
    return outcome


def _judge_root_cause(outcome: Outcome, run: Run, status: int | None) -> None:
    ends = [
        event
        for event in _events(run.folder / "run")
        if event["what"] == "ended" and event.get("rank") == 2
    ]
    died = any(event["details"].get("signal") == "SIGKILL" for event in ends)
    if (
        not died and ends and "finalisation" in outcome.what
    ):  # the signal came when it had ended already: a good run
        outcome.what = "too late: rank 2 had ended"
        if status != 0:
            outcome.wrong.append(f"exit status {status} though no rank died")
        return
    reports = _reports(run.folder / "run")
    named = [(report["code"], report.get("ranks", [])) for report in reports]
    if named != [("rank-killed", [2])]:
        outcome.wrong.append(f"named {named} instead of rank 2")
    if not re.search(r"^error\[rank-killed\]: rank 2 ", run.output(), re.MULTILINE):
        outcome.wrong.append("the report on the screen does not begin with rank 2")
    if status != 128 + signal.SIGKILL:
        outcome.wrong.append(f"exit status {status} instead of {128 + signal.SIGKILL}")


# --- restarts


def restarts(chance: random.Random, number: int, folder: Path) -> Outcome:
    """A rank ends at a random moment of the first attempt; with --max-restarts 1 the second must
    meet, reduce and end well.
    """
    how, moment = (
        chance.choice(["exit", "kill", "raise"]),
        chance.choice(["before-init", "during-init", "loop"]),
    )
    delay = chance.uniform(0, {"before-init": 0.05, "during-init": 0.03, "loop": 0.3}[moment])
    rank = chance.randrange(4)
    outcome = Outcome(f"{how}, {moment}", notes=[f"rank {rank}, delay {delay:.4f}"])
    extra = {
        "SOAK_HOW": how,
        "SOAK_MOMENT": moment,
        "SOAK_DELAY": str(delay),
        "SOAK_RANK": str(rank),
    }
    with _watched(
        outcome, run_command(4, "crash_anywhere.py", "--max-restarts", "1"), folder, extra
    ) as run:
        status = run.wait(RUN_TIMEOUT)
        crashed, again = run.marks("crashed"), run.marks("again", attempt=1)
        if crashed and len(again) == 4:
            outcome.times["running again"] = max(mark.at for mark in again) - crashed[0].at
        if not crashed:
            outcome.wrong.append("no rank crashed: nothing was tested")
        if len(again) != 4 or status != 0:
            outcome.wrong.append(f"{len(again)} of 4 ranks ran again, exit status {status}")
    return outcome


# --- launches


def launches(chance: random.Random, number: int, folder: Path) -> Outcome:
    """Two ranks meet once, with default ports and the default run folder, beside many others and a
    squatter.
    """
    time.sleep(chance.uniform(0, 0.3))
    outcome = Outcome("launch")
    command = [*rallypoint(), "run", "-n", "2", str(JOBS / "first_all_reduce.py")]
    with _watched(
        outcome, command, folder, {"XDG_STATE_HOME": str(folder.parent / "state")}
    ) as run:
        status = run.wait(RUN_TIMEOUT * 3)
        marks = run.marks("reduced")
        if len(marks) == 2:
            outcome.times["first all_reduce"] = max(mark.at for mark in marks) - run.began
        if len(marks) != 2 or status != 0:
            outcome.wrong.append(f"{len(marks)} of 2 ranks met, exit status {status}")
        elif run.output().strip():
            outcome.wrong.append("a job that went well printed something")
    return outcome


@contextmanager
def squatter(folder: Path) -> Iterator[Callable[[], int]]:
    """A process that binds every port that falls free; what is yielded says how many it has
    taken.
    """
    counter = folder / "squatter"
    with subprocess.Popen(
        [sys.executable, str(JOBS / "squatter.py"), str(counter)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it watches
        try:
            yield lambda: int(counter.read_text()) if counter.exists() else 0
        finally:
            process.kill()


# --- kills


@dataclass(frozen=True)
class Moment:
    """Some time after the command was given, or after the first rank came to its first line: then
    the whole job is there soon.
    """

    after: str  # "the command" or "the first rank"
    delay: float  # seconds

    @classmethod
    def choose(cls, chance: random.Random) -> Moment:
        """The first tenth of a second, the whole start-up and the running job, about
        equally often.
        """
        longest = chance.choice([0.1, 1.5, 0.0])
        return (
            cls("the command", chance.uniform(0, longest))
            if longest
            else cls("the first rank", chance.uniform(0, 1.5))
        )

    def __str__(self) -> str:
        return f"{self.delay:.4f} s after {self.after}"

    def wait(self, run: Run) -> None:
        """Until the moment."""
        since = run.began
        if self.after == "the first rank":
            run.wait_until(
                lambda: (
                    any(run.marks(name) for name in FIRST_MARKS) or run.process.poll() is not None
                ),
                RUN_TIMEOUT,
            )
            since = time.monotonic()
        time.sleep(max(0.0, since + self.delay - time.monotonic()))

    def state(self, run: Run) -> str:
        """How far the job is: what is counted beside what was done to it."""
        return "ranks running" if any(run.marks(name) for name in FIRST_MARKS) else "starting"


FIRST_MARKS = (
    "parent",
    "here",
    "looping",
)  # what the jobs family.py, absent.py and loop.py write first


def kills(
    chance: random.Random, number: int, folder: Path, *, within: float = GONE_WITHIN
) -> Outcome:
    """SIGKILL for one of ours, or two at once, at a random moment from the first on. Nothing may be
    left `within` seconds later.
    """
    target = ("agent", "template", "guard", "agent+template")[number % 4]
    moment, stubborn = Moment.choose(chance), chance.random() < 0.5
    outcome = Outcome(target, notes=[str(moment)])
    extra = {"SOAK_STUBBORN": "1"} if stubborn else {}
    with _watched(outcome, run_command(3, "family.py"), folder, extra, survivors=False) as run:
        moment.wait(run)
        outcome.what += f", {moment.state(run)}{', that ignore SIGTERM' if stubborn else ''}"
        pids = {"agent": run.pid, **run.children()}
        wanted = [pids[name] for name in target.split("+") if name in pids]
        if len(wanted) < len(target.split("+")):
            outcome.what = f"agent, instead of {target}: not there yet"
            wanted = [run.pid]
        before = len(run.living())
        for pid in wanted:
            harness.send(pid, signal.SIGKILL)
        took, left = run.wait_until_gone(within)
        outcome.notes.append(f"{before} processes before")
        if left:
            outcome.wrong.append(
                f"left after {within:g} s of {before}: "
                + "; ".join(_described(pid) for pid in left)
            )
            more, still = run.wait_until_gone(8.0)
            outcome.notes.append(f"after {within + more:.1f} s: {len(still)} left")
        else:
            outcome.times["gone"] = took
    return outcome


def _described(pid: int) -> str:
    try:
        status = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if ":\t" in line
        )
    except OSError:
        return f"pid {pid} (gone meanwhile)"
    stat = status.get("State", "?")
    return (
        f"pid {pid} parent {status.get('PPid')} state {stat[:1]} {harness.command_line(pid)[:80]!r}"
    )


# --- ctrl-c


def ctrl_c(chance: random.Random, number: int, folder: Path) -> Outcome:
    """Ctrl-C, sometimes twice, at a random moment: exit status 130, a report, no traceback of ours,
    nothing left.
    """
    script = chance.choice(["family.py", "absent.py", "loop.py"])
    moment, twice = Moment.choose(chance), chance.random() < 0.25
    outcome = Outcome(f"{script}{', twice' if twice else ''}", notes=[str(moment)])
    with _watched(outcome, run_command(3, script), folder) as run:
        moment.wait(run)
        outcome.what += f", {moment.state(run)}"
        asked = time.monotonic()
        _interrupt(run)
        if twice:
            time.sleep(chance.uniform(0, 0.5))
            _interrupt(run)
        status = run.wait(INTERRUPT_TIMEOUT)
        if run.ended is not None:
            outcome.times["exit"] = run.ended - asked
        output = run.output()
        if (reported := run.printed_at(_INTERRUPTED)) is not None:
            outcome.times["report"] = reported - asked
        elif status == 130:
            outcome.notes.append("no report")
        ours = re.search(r"rallypoint/(cli|launch|record|host|diagnosis)/\w+\.py", output)
        if ours:
            outcome.wrong.append("a traceback of ours")
        elif status != 128 + signal.SIGINT and not _explained(outcome, run, status, twice=twice):
            outcome.wrong.append(f"exit status {status} instead of 130")
    return outcome


def _explained(outcome: Outcome, run: Run, status: int | None, *, twice: bool) -> bool:
    """Whether another status than 130 is Python's own: a shell makes 130 of an end by SIGINT."""
    if status in (1, -signal.SIGINT) and not (run.folder / "run").exists():
        # the interpreter ends, or shows its own KeyboardInterrupt
        outcome.what = "before the first line of ours"
        return True
    if twice and status == -signal.SIGINT and run.printed_at(_INTERRUPTED) is not None:
        outcome.what += ", the second while the interpreter ended"
        return True
    return False


def _interrupt(run: Run) -> None:
    try:
        os.killpg(run.pid, signal.SIGINT)  # as a terminal sends it: to the whole foreground group
    except ProcessLookupError:
        pass  # it has ended by the first


# --- stop-saves


def stop_saves(chance: random.Random, number: int, folder: Path) -> Outcome:
    """A job is stopped at a random moment while most of its ranks wait in a collective for a slower
    one: by SIGTERM, with a flag that the ranks agree on, or by Ctrl-C, with `except
    KeyboardInterrupt`, sometimes twice at once. Each rank must save, none may be killed."""
    ranks, how, call = (
        (2, 8)[number % 2],
        ("flag", "interrupt")[number // 2 % 2],
        ("sync", "async", "ddp")[number // 4 % 3],
    )
    slow, step = chance.randrange(ranks), chance.choice([0.02, 0.2, 1.0])
    twice = how == "interrupt" and chance.random() < 0.25
    outcome = Outcome(
        f"{ranks} ranks, {how}, {call}{', twice at once' if twice else ''}",
        notes=[f"rank {slow} takes {step} s a step"],
    )
    extra = {"SAVES_HOW": how, "SAVES_CALL": call, "SAVES_STEP": str(step), "SAVES_SLOW": str(slow)}
    with _watched(outcome, run_command(ranks, "saves.py", "--grace", "60"), folder, extra) as run:
        if len(run.wait_for_marks("looping", ranks, RUN_TIMEOUT)) < ranks:
            outcome.wrong.append("the ranks never came to their loop")
            return outcome
        time.sleep(chance.uniform(0, 1.0))
        asked = time.monotonic()
        if how == "flag":
            harness.send(run.pid, signal.SIGTERM)
        for _ in range((1 + twice) if how == "interrupt" else 0):
            _interrupt(run)
        status = run.wait(RUN_TIMEOUT * 2)
        if run.ended is not None:
            outcome.times["exit"] = run.ended - asked
        saved = len(run.marks("saved"))
        outcome.counts = {"ranks that were stopped": ranks, "ranks that saved": saved}
        if saved != ranks:
            outcome.wrong.append(f"{saved} of {ranks} ranks saved")
        if status != 128 + (signal.SIGTERM if how == "flag" else signal.SIGINT):
            outcome.wrong.append(f"exit status {status}")
        if killed := [
            event["rank"] for event in _events(run.folder / "run") if event["what"] == "killed"
        ]:
            outcome.wrong.append(f"ranks {killed} were killed")
    return outcome


# --- all of them


MODES: dict[str, tuple[Mode, int, int]] = {  # mode: (what, count, jobs at a time)
    "root-cause": (root_cause, 300, 2),
    "restarts": (restarts, 100, 2),
    "launches": (launches, 200, 20),
    "launch-many": (launch.often, 1, 1),  # 500 of them
    "ports": (port_soak.ports, 1, 1),  # 1,000 of them, by 20 processes
    "kills": (kills, 100, 2),
    "ctrl-c": (ctrl_c, 100, 2),
    "stop-saves": (stop_saves, 600, 2),  # fifty of each kind
    "nodes": (nodes_soak.nodes_soak, 54, 1),  # six of each kind
    "nodes-simulated": (cluster_soak.nodes_simulated, 10, 2),  # of a thousand each
    "logs-changed": (log_soak.logs_changed, 20, 2),  # of all logs, four changes each
    "store-adds": (store_soak.adds, 1, 1),  # 80,000 of them
    "store-histories": (store_soak.histories, 1000, 2),
    "store-reconnects": (store_soak.reconnects, 10, 1),  # of a hundred each
    "store-strangers": (store_soak.strangers, 1, 1),  # 10,000 of them
    "store-deadlines": (store_soak.deadlines, 200, 4),
    "store-leases": (lease_soak.leases, 8, 1),  # of 40 s: two of each fault
    "primitives-histories": (primitives_soak.histories, 100, 2),  # of a thousand each
    "primitives-kills": (
        primitives_soak.kills,
        320,
        1,
    ),  # one at a time: how soon something is passed on is measured
}


BESIDE_A_SQUATTER = ("launches", "ports")


@contextmanager
def _watched(
    outcome: Outcome,
    command: list[str],
    folder: Path,
    extra: Mapping[str, str] = MappingProxyType({}),
    *,
    survivors: bool = True,
) -> Iterator[Run]:
    """A run whose output is written down at the end, and that must leave nothing behind when it has
    ended (`survivors`).
    """
    with Run(command, folder=folder, **extra) as run:
        try:
            yield run
        finally:
            status = run.process.poll()
            if status is None:
                outcome.wrong.append(
                    f"the launcher had not ended {time.monotonic() - run.began:.1f} s after its start"
                )
                (folder / "processes").write_text(
                    "\n".join(_described(pid) for pid in run.living()) + "\n"
                )
            elif survivors and (left := run.living()):
                outcome.wrong.append("it left: " + "; ".join(_described(pid) for pid in left))
            said = [
                f"$ {' '.join(command)}",
                "; ".join([outcome.what, *outcome.notes]),
                f"environment {dict(extra)}",
                "",
                run.output(),
            ]
            said += [f"exit status {status}", *(f"WRONG: {wrong}" for wrong in outcome.wrong)]
            (folder / "output").write_text("\n".join(said) + "\n")


def _events(folder: Path) -> list[dict[str, Any]]:
    try:
        return [
            {"details": {}, **json.loads(line)}
            for line in (folder / "events.jsonl").read_text().splitlines()
        ]
    except FileNotFoundError:
        return []


def _reports(folder: Path) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = json.loads((folder / "report.json").read_text())
    except FileNotFoundError:
        return []
    return found


def soak(mode: str, count: int, jobs: int, seed: int, folder: Path) -> list[Outcome]:
    """Do it `count` times, `jobs` at a time. Repetition k with a seed chooses the same moments
    again.
    """
    act = MODES[mode][0]
    outcomes: list[Outcome] = []

    def one(number: int) -> Outcome:
        place = folder / f"{number:04}"
        outcome = act(random.Random(f"{seed}-{number}"), number, place)
        if not outcome.wrong:
            shutil.rmtree(place)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        for number, outcome in enumerate(pool.map(one, range(count))):
            outcomes.append(outcome)
            for wrong in outcome.wrong:
                say(
                    f"{mode} {number}: {outcome.what}: {wrong}; see {folder / f'{number:04}' / 'output'}"
                )
            if (number + 1) % 10 == 0:
                say(
                    f"{mode}: {number + 1} of {count}, {sum(bool(one.wrong) for one in outcomes)} wrong"
                )
    return outcomes


def summary(mode: str, outcomes: list[Outcome]) -> str:
    """The counts, the times, the kinds."""
    wrong = sum(bool(outcome.wrong) for outcome in outcomes)
    lines = [f"{mode}: {len(outcomes) - wrong} of {len(outcomes)} right"]
    for name in sorted({name for outcome in outcomes for name in outcome.times}):
        numbers = [outcome.times[name] for outcome in outcomes if name in outcome.times]
        lines.append(
            f"  {name}: median {statistics.median(numbers):.3f} s, most {max(numbers):.3f} s ({len(numbers)} times)"
        )
    for what, number in sorted(Counter(outcome.what for outcome in outcomes).items()):
        failed = sum(bool(outcome.wrong) for outcome in outcomes if outcome.what == what)
        lines.append(f"  {what}: {number}" + (f", {failed} wrong" if failed else ""))
    total: Counter[str] = Counter()
    for outcome in outcomes:
        total.update(outcome.counts)
    lines += (
        [f"  in all: {', '.join(f'{number} {name}' for name, number in sorted(total.items()))}"]
        if total
        else []
    )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="scripts/soak", description=__doc__, allow_abbrev=False)
    made.add_argument("mode", choices=[*MODES, "all"], help="what to do; all: one after the other")
    made.add_argument(
        "-n", type=int, metavar="COUNT", help="how often (default: what the design asks for)"
    )
    made.add_argument("--jobs", type=int, metavar="N", help="how many at a time")
    made.add_argument("--seed", type=int, default=1, help="another seed, other moments (default 1)")
    made.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="where the output of failures goes (default: a new folder)",
    )
    return made


def main(argv: list[str] | None = None) -> int:
    """0 when every repetition went well."""
    asked = parser().parse_args(argv)
    harness.take_signals_as_usual()
    failed = 0
    for mode in MODES if asked.mode == "all" else [asked.mode]:
        _, count, jobs = MODES[mode]
        folder = (
            Path(tempfile.mkdtemp(prefix=f"soak-{mode}-"))
            if asked.keep is None
            else asked.keep.resolve() / mode
        )
        folder.mkdir(parents=True, exist_ok=True)
        say(
            f"{mode}: {asked.n or count} times, {asked.jobs or jobs} at a time, seed {asked.seed}; failures are kept in {folder}"
        )
        began = time.monotonic()
        if mode in BESIDE_A_SQUATTER:
            with squatter(folder) as taken:
                outcomes = soak(mode, asked.n or count, asked.jobs or jobs, asked.seed, folder)
                stolen = taken()
        else:
            outcomes, stolen = (
                soak(mode, asked.n or count, asked.jobs or jobs, asked.seed, folder),
                None,
            )
        print(summary(mode, outcomes))
        if stolen is not None:
            print(f"  the squatter took {stolen} ports")
        print(f"  in {time.monotonic() - began:.0f} s", flush=True)
        failed += sum(bool(outcome.wrong) for outcome in outcomes)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
