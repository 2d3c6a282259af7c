"""`scripts/bench`: measure, and make the page of what was measured."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench import (
    average,
    clusters,
    death,
    figures,
    harness,
    launch,
    log_corpus,
    nodes,
    primitives,
    samples,
    start,
    store,
    tables,
    verdict,
    verdict_faults,
)
from bench.harness import ROOT, say
from bench.samples import Case, Sample

RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"


@dataclass(frozen=True)
class Plan:
    """How often a case is measured: `turns`, and with --quick `quick` of them (0: not at all)."""

    measure: Callable[[int, bool], Iterator[Sample]]
    turns: int
    quick: int = 1
    large: bool = False  # only with --large, or asked for by name


def _short(quick: bool, seconds: float) -> float:
    return seconds / 4 if quick else seconds


def _start(ranks: int, **peers: int) -> Callable[[int, bool], Iterator[Sample]]:
    """`peers`: in how many turns the slow ones take part; the forkserver is quick and is in all of
    them.
    """

    def measure(turns: int, quick: bool) -> Iterator[Sample]:
        named = {
            "torchrun": peers.get("torchrun", turns),
            "mp.spawn": peers.get("spawn", turns),
            "forkserver": peers.get("forkserver", turns),
        }
        if quick and ranks > 4:
            named["mp.spawn"] = 0  # it takes longer than all the others together
        return start.first_all_reduce(ranks, turns, named)

    return measure


def _barrier(members: int, count: int) -> Callable[[int, bool], Iterator[Sample]]:
    return lambda turns, quick: primitives.barrier(
        members, turns, count=count // 5 if quick else count
    )


def _average(megabytes: int, ranks: int) -> Callable[[int, bool], Iterator[Sample]]:
    return lambda turns, quick: average.measure(megabytes, ranks, turns)


def _nodes(count: int, ranks: int) -> Callable[[int, bool], Iterator[Sample]]:
    peers = (nodes.C10D, nodes.STATIC)
    return lambda turns, quick: nodes.first_all_reduce(count, ranks, turns, peers)


def _engine(name: str) -> Callable[[int, bool], Iterator[Sample]]:
    return lambda turns, quick: clusters.start(name, turns)


def _fault(name: str) -> Callable[[int, bool], Iterator[Sample]]:
    return lambda turns, quick: nodes.fault(name, 4, 2, turns, () if quick else (nodes.C10D,))


def _verdict(
    faults: Sequence[verdict_faults.Fault],
    jobs: int = verdict.JOBS_AT_ONCE,
    keep: Path | None = None,
) -> Plan:
    def measure(turns: int, quick: bool) -> Iterator[Sample]:
        return verdict.measure(
            faults, turns, jobs=jobs, keep=keep or Path(tempfile.mkdtemp(prefix="verdict-"))
        )

    return Plan(measure, verdict.SEEDS)


CASES: dict[str, dict[str, Plan]] = {
    "start": {
        "start-2": Plan(_start(2), 5),
        "start-4": Plan(_start(4), 5),
        "start-16": Plan(_start(16), 3),
        "start-64": Plan(
            _start(64, spawn=1), 3, quick=0
        ),  # torchrun and mp.spawn take a minute and more each, on two cores
        "start-128": Plan(_start(128, torchrun=0, spawn=0, forkserver=0), 3, quick=0, large=True),
        "start-256": Plan(_start(256, torchrun=0, spawn=0, forkserver=0), 3, quick=0, large=True),
        "memory-16": Plan(lambda turns, quick: start.memory(16, turns), 2),
        "slow-import-4": Plan(lambda turns, quick: start.slow_import(4, turns), 2),
        "commands": Plan(lambda turns, quick: start.commands(turns), 7, quick=3),
        "restart-4": Plan(
            lambda turns, quick: start.restart(
                4, turns, *((1, 15.0) if quick else (2, start.RESTART_TIMEOUT))
            ),
            10,
        ),
    },
    "death": {
        "killed": Plan(lambda turns, quick: death.killed(turns), 5),
        "raised": Plan(lambda turns, quick: death.raised(turns), 5),
        "launcher-killed": Plan(lambda turns, quick: death.launcher_killed(turns), 3),
        "ctrl-c": Plan(lambda turns, quick: death.interrupted(turns), 3),
    },
    "launch": {
        "launch-2": Plan(lambda turns, quick: launch.measure(2, turns), 3),
        "launch-8": Plan(lambda turns, quick: launch.measure(8, turns), 3),
    },
    "nodes": {
        "nodes-2x2": Plan(_nodes(2, 2), 3),
        "nodes-2x8": Plan(_nodes(2, 8), 3, quick=0),
        **{name: Plan(_fault(name), 2) for name in nodes.CASES},
        **{f"engine-{engine}": Plan(_engine(engine), 3, quick=0) for engine in clusters.ENGINES},
        "tls-joining-512": Plan(lambda turns, quick: nodes.joining(512, turns), 3, quick=0),
        "tls-values": Plan(lambda turns, quick: nodes.values(turns, seconds=_short(quick, 1.0)), 3),
    },
    "store": {
        "latency": Plan(
            lambda turns, quick: store.latency(turns, count=1000 if quick else 10_000), 7
        ),
        "throughput-8": Plan(
            lambda turns, quick: store.throughput(8, turns, seconds=_short(quick, 2.0)), 7
        ),
        "throughput-64": Plan(
            lambda turns, quick: store.throughput(64, turns, seconds=_short(quick, 2.0)), 3
        ),
        "values": Plan(
            lambda turns, quick: store.values(
                turns, sizes=store.SIZES[: 6 if quick else 7], seconds=_short(quick, 0.5)
            ),
            3,
        ),
        "mixed": Plan(lambda turns, quick: store.mixed(turns, seconds=_short(quick, 3.0)), 3),
        "connect-512": Plan(
            lambda turns, quick: store.connect(512, turns, 1), 3, quick=0
        ),  # the peer waits minutes for a name server
        "sessions-10000": Plan(lambda turns, quick: store.sessions(10_000, turns), 3, quick=0),
        "storm-512": Plan(lambda turns, quick: store.storm(512, turns), 3, quick=0),
    },
    "primitives": {
        "barrier-2": Plan(_barrier(2, 1000), 5),
        "barrier-8": Plan(_barrier(8, 400), 5),
        "barrier-64": Plan(_barrier(64, 100), 5),
        "barrier-512": Plan(_barrier(512, 20), 3),
        "lock-2": Plan(
            lambda turns, quick: primitives.lock(2, turns, seconds=_short(quick, 2.0)), 5
        ),
        "lock-64": Plan(
            lambda turns, quick: primitives.lock(64, turns, seconds=_short(quick, 4.0)), 3
        ),
        **{
            f"average-{ranks}x{size}": Plan(_average(size, ranks), 5)
            for ranks in (2, 4, 8)
            for size in (1, 25, 100)
        },
        "shared-2": Plan(
            lambda turns, quick: primitives.shared(2, turns, seconds=_short(quick, 2.0)), 5
        ),
        "shared-8": Plan(
            lambda turns, quick: primitives.shared(8, turns, seconds=_short(quick, 2.0)), 3
        ),
    },
    "logs": {
        "log-corpus": Plan(lambda turns, quick: log_corpus.corpus(turns), 1),
        "log-speed": Plan(lambda turns, quick: log_corpus.speed(turns), 3),
    },
    "verdict": {name: _verdict(faults) for name, faults in verdict_faults.FAULTS.items()},
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measure rallypoint beside its peers, in the same run.",
        allow_abbrev=False,
    )
    commands = made.add_subparsers(dest="command", required=True)
    for group, cases in CASES.items():
        faults = (
            f"a fault alone, by its name: {', '.join(verdict_faults.NAMES)}"
            if group == "verdict"
            else None
        )
        one = commands.add_parser(
            group, allow_abbrev=False, help=f"cases: {', '.join(cases)}", epilog=faults
        )
        one.add_argument("--only", metavar="CASE,...", help="these cases, by name")
        one.add_argument("--turns", type=int, metavar="N", help="how often each is measured")
        one.add_argument(
            "--quick",
            action="store_true",
            help="one turn of what is quick; kept apart, not published",
        )
        if group == "start":
            one.add_argument(
                "--large", action="store_true", help="128 and 256 ranks too, rallypoint alone"
            )
        if group == "verdict":
            one.add_argument(
                "--seeds",
                type=int,
                dest="turns",
                metavar="N",
                help="the same as --turns: each chooses other ranks and moments",
            )
            one.add_argument(
                "--jobs",
                type=int,
                default=verdict.JOBS_AT_ONCE,
                metavar="J",
                help="cells at a time",
            )
            one.add_argument(
                "--keep",
                type=Path,
                metavar="DIR",
                help="where the output of what was not right goes (default: a new folder)",
            )
        one.add_argument(
            "--output",
            type=Path,
            metavar="FILE",
            help="the file of results (default: bench/results/)",
        )
    commands.add_parser(
        "docs", allow_abbrev=False, help="write docs/benchmarks.md from bench/results/"
    )
    return made


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0 whatever the figures are, since a target that is missed is a result."""
    asked = parser().parse_args(argv)
    harness.take_signals_as_usual()
    if asked.command == "docs":
        return docs()
    plans = (
        CASES[asked.command]
        if asked.command != "verdict"
        else verdict_plans(asked.jobs, asked.keep)
    )
    large = asked.command == "start" and asked.large
    names = asked.only.split(",") if asked.only else usual(plans, quick=asked.quick, large=large)
    unknown = [name for name in names if name not in plans]
    if unknown:
        parser().error(f"no such case: {', '.join(unknown)}; there are {', '.join(plans)}")
    output = asked.output or RESULTS / f"{asked.command}{'-quick' if asked.quick else ''}.json"
    measured: dict[str, Case] = {}
    for name in names:
        measured[name] = _measure(asked.command, name, plans[name], asked.turns, asked.quick)
        if name in CASES[asked.command]:
            samples.write(
                output, [measured[name]]
            )  # at once: the next may take minutes, and be interrupted
    for table in figures.tables(measured):
        print(f"\n{table.title}\n\n{tables.text(table)}", end="")
    return 0


def verdict_plans(jobs: int, keep: Path | None) -> dict[str, Plan]:
    """The cases of the matrix; and each fault by its own name, for whoever mends what it shows:
    such a run is not published.
    """
    cases = {
        name: _verdict(faults, jobs, keep and keep.resolve())
        for name, faults in verdict_faults.FAULTS.items()
    }
    alone = {
        name: _verdict([verdict_faults.named(name)], jobs, keep and keep.resolve())
        for name in verdict_faults.NAMES
    }
    return {**cases, **{name: replace(plan, large=True) for name, plan in alone.items()}}


def usual(plans: dict[str, Plan], *, quick: bool, large: bool) -> list[str]:
    """The cases that are measured when none is named."""
    return [
        name
        for name, plan in plans.items()
        if (plan.quick or not quick) and (large or not plan.large)
    ]


def _measure(group: str, name: str, plan: Plan, turns: int | None, quick: bool) -> Case:
    count = turns or (max(plan.quick, 1) if quick else plan.turns)
    before, began = harness.load(), time.monotonic()
    say(f"{name}: {count} turn{'s' * (count > 1)}, load average {before}")
    taken = harness.now()
    found = list(plan.measure(count, quick))
    say(f"{name}: done in {time.monotonic() - began:.0f} s")
    command = f"scripts/bench {group} --only {name}"
    return Case(name, command, taken, harness.machine(), (before, harness.load()), found)


def docs() -> int:
    """Write the page from what is kept."""
    cases: dict[str, Case] = {}
    for group in CASES:
        kept = samples.read(RESULTS / f"{group}.json")
        cases |= {name: kept[name] for name in CASES[group] if name in kept}
    if not cases:
        say(f"nothing was measured yet: scripts/bench {', '.join(CASES)}")
        return 1
    PAGE.write_text(figures.page(cases))
    say(f"{PAGE.relative_to(ROOT)} was written from {len(cases)} cases")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("interrupted; the cases that were finished are kept")
        sys.exit(130)
