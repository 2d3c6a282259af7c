"""Samples to tables: what was measured, what it must be (the design's targets), whether it is met,
and the command that reproduces it.

Pure: data in, text out.
"""

from __future__ import annotations

from collections.abc import Mapping

from bench import (
    launch_figures,
    log_corpus_figures,
    nodes_figures,
    primitives_figures,
    store_figures,
    verdict_figures,
)
from bench.samples import Case
from bench.tables import Bound, Row, Table, seconds, text, times

START_RANKS = (2, 4, 16, 64, 128, 256)
MIB = 2**20
MB = 10**6


def tables(cases: Mapping[str, Case]) -> list[Table]:
    """Every table for which there is something measured."""
    made = [
        _start(cases),
        _memory(cases),
        _slow_import(cases),
        _commands(cases),
        _restart(cases),
        _death(cases),
        _left(cases),
        _ctrl_c(cases),
        *launch_figures.tables(cases),
        *nodes_figures.tables(cases),
        *store_figures.tables(cases),
        *primitives_figures.tables(cases),
        *verdict_figures.tables(cases),
        *log_corpus_figures.tables(cases),
    ]
    return [table for table in made if table.rows]


def _start(cases: Mapping[str, Case]) -> Table:
    rows = []
    for ranks in START_RANKS:
        case = cases.get(f"start-{ranks}")
        if case is None:
            continue
        faster, imports = (
            case.ratio("torchrun", "rallypoint", "seconds"),
            case.ratio("rallypoint", "import torch", "seconds"),
        )
        bounds = {
            16: (
                Bound("<= 1.5 x one import", imports, 1.5),
                Bound(">= 8 x faster than torchrun", faster, 8, at_least=True),
            ),
            64: (Bound(">= 20 x faster than torchrun", faster, 20, at_least=True),),
            128: (Bound("<= 5 s", case.median("rallypoint", "seconds"), 5),),
        }
        peers = [
            seconds(case, who) for who in ("import torch", "torchrun", "mp.spawn", "forkserver")
        ]
        cells = (
            str(ranks),
            seconds(case, "rallypoint"),
            *peers,
            times(imports),
            times(faster),
            str(len(case.numbers("rallypoint", "seconds"))),
        )
        rows.append(Row(cells, bounds.get(ranks, ()), case))
    return Table(
        "From command to first all_reduce",
        "Seconds from the start of the command to the end of the last rank's first gloo all_reduce: the median of the turns, and least and "
        "most in brackets. In each turn everyone runs once, one after another, beside one interpreter that "
        "does nothing but `import torch`. "
        "The ratios are medians of the turns' ratios, not ratios of medians. forkserver is the standard library's, with torch preloaded; "
        "its processes leave by `os._exit`, and its rank 0 serves the store.",
        (
            "ranks",
            "rallypoint",
            "`import torch`",
            "torchrun",
            "mp.spawn",
            "forkserver",
            "rallypoint / import",
            "torchrun / rallypoint",
            "turns",
        ),
        tuple(rows),
    )


def _memory(cases: Mapping[str, Case]) -> Table:
    rows = []
    for name, case in cases.items():
        if not name.startswith("memory-"):
            continue
        for point, words in (
            ("imported", "has imported torch, idle"),
            ("met", "after init_process_group and one all_reduce"),
        ):
            pss = case.median("rallypoint", f"{point}_pss")
            bounds = (
                (Bound("<= 12 MB PSS at 16 ranks", pss / MB if pss is not None else None, 12),)
                if point == "imported" and name.endswith("-16")
                else ()
            )
            mine, theirs = (
                f"{_size(case, who, f'{point}_pss')}, {_size(case, who, f'{point}_private')}"
                for who in ("rallypoint", "torchrun")
            )
            ratio = case.ratio("torchrun", "rallypoint", f"{point}_pss")
            rows.append(
                Row((name.removeprefix("memory-"), words, mine, theirs, times(ratio)), bounds, case)
            )
    for ranks in (16, 64):
        found = cases.get(f"start-{ranks}")
        fork = found.median("rallypoint", "fork") if found else None
        if found and fork is not None:
            rows.append(
                Row(
                    (str(ranks), "time of one fork", f"{fork * 1000:.1f} ms", "-", "-"),
                    (Bound("<= 10 ms", fork * 1000, 10),),
                    found,
                )
            )
    return Table(
        "What a rank costs",
        "Memory of one rank, the median over a job's ranks: PSS (shared pages divided among those who share "
        "them), then private memory, both "
        "from `smaps_rollup`. The time of a fork is what the template measured itself, as `events.jsonl` has it.",
        ("ranks", "a rank that", "rallypoint", "torchrun", "torchrun / rallypoint"),
        tuple(rows),
    )


def _size(case: Case, who: str, name: str) -> str:
    middle = case.median(who, name)
    return f"{middle / MB:.1f} MB" if middle is not None else "not measured"


def _slow_import(cases: Mapping[str, Case]) -> Table:
    rows = []
    for name, case in cases.items():
        if name.startswith("slow-import-"):
            cells = (
                name.removeprefix("slow-import-"), *(seconds(case, who) for who in ("--preload", "rallypoint", "torchrun")),
                times(case.ratio("torchrun", "--preload", "seconds")),
            )  # fmt: skip
            rows.append(Row(cells, (), case))
    return Table(
        "A script with an import of 5 s",
        "The same as above, with a package that keeps a processor busy for 5 s when it is imported. With "
        "`--preload` the template imports it once.",
        ("ranks", "rallypoint --preload", "rallypoint", "torchrun", "torchrun / --preload"),
        tuple(rows),
    )


def _commands(cases: Mapping[str, Case]) -> Table:
    case = cases.get("commands")
    rows = []
    for who in case.who() if case else []:
        assert case is not None
        bounds = (
            (Bound("<= 0.12 s", case.median(who, "seconds"), 0.12),)
            if who.startswith("rallypoint")
            else ()
        )
        numbers = case.numbers(who, "seconds")
        shown = (
            f"{case.median(who, 'seconds'):.3f} s ({min(numbers):.3f}-{max(numbers):.3f})"
            if numbers
            else "; ".join(case.notes(who))
        )
        rows.append(Row((f"`{who}`", shown), bounds, case))
    return Table(
        "Commands that start nothing",
        "Seconds from command to exit.",
        ("command", "time"),
        tuple(rows),
    )


def _restart(cases: Mapping[str, Case]) -> Table:
    rows = []
    for name, case in cases.items():
        if not name.startswith("restart-"):
            continue
        for who in case.who():
            yes, asked = case.count(who, "recovered")
            bounds = (
                (
                    Bound("every run recovers", float(asked - yes), 0),
                    Bound("<= 1 s", case.median(who, "seconds"), 1),
                )
                if who == "rallypoint"
                else ()
            )
            rows.append(
                Row(
                    (
                        name.removeprefix("restart-"),
                        who,
                        f"{yes} of {asked}",
                        seconds(case, who),
                        "; ".join(case.notes(who)) or "-",
                    ),
                    bounds,
                    case,
                )
            )
    return Table(
        "A restart",
        "One rank leaves with exit code 3 after the first all_reduce, with `--max-restarts 1` (torchrun: and "
        "`--standalone`). Seconds from that "
        "to the end of the last rank's first all_reduce of the next attempt.",
        ("ranks", "launcher", "recovered", "all running again after", "remarks"),
        tuple(rows),
    )


def _death(cases: Mapping[str, Case]) -> Table:
    rows = []
    for name, words in (
        ("killed", "rank 2 of 4 is SIGKILLed"),
        ("raised", "rank 2 of 4 raises ValueError"),
    ):
        case = cases.get(name)
        for who in case.who() if case else []:
            assert case is not None
            yes, asked = case.count(who, "right")
            lines = case.numbers(who, "lines")
            bounds: tuple[Bound, ...] = ()
            if who == "rallypoint":
                bounds = (
                    Bound("report <= 0.3 s", case.median(who, "report_seconds"), 0.3),
                    Bound("the right cause, always", float(asked - yes), 0),
                    *((Bound("<= 25 lines", max(lines) if lines else None, 25),) if name == "raised" else ()),
                )  # fmt: skip
            shown = (
                f"{int(min(lines))}-{int(max(lines))}"
                if lines and min(lines) != max(lines)
                else f"{int(lines[0])}"
                if lines
                else "-"
            )
            cells = (
                words,
                who,
                seconds(case, who, "report_seconds"),
                seconds(case, who, "exit_seconds"),
                f"{yes} of {asked}",
                shown,
            )
            rows.append(Row(cells, bounds, case))
    return Table(
        "One rank dies",
        "Seconds from the death (the raise) until the report is on the screen, and until the launcher has "
        "ended. The cause is right when the "
        "first that is named is rank 2. Lines: all that was printed.",
        ("what", "launcher", "report after", "exit after", "right cause", "lines"),
        tuple(rows),
    )


def _left(cases: Mapping[str, Case]) -> Table:
    case = cases.get("launcher-killed")
    rows = []
    for who in case.who() if case else []:
        assert case is not None
        left, before = case.numbers(who, "left"), case.numbers(who, "before")
        bounds = (
            (Bound("none left", max(left) if left else None, 0),) if who == "rallypoint" else ()
        )
        cells = (
            who,
            str(int(max(before))) if before else "-",
            str(int(max(left))) if left else "-",
            seconds(case, who, "gone_seconds"),
        )
        rows.append(Row(cells, bounds, case))
    return Table(
        "The launcher is SIGKILLed",
        "Four ranks, each with two children (one in a session of its own) and a DataLoader worker. Processes "
        "before, and left 2 s later: the "
        "worst turn. Seconds until the last was gone.",
        ("launcher", "processes", "left after 2 s", "all gone after"),
        tuple(rows),
    )


def _ctrl_c(cases: Mapping[str, Case]) -> Table:
    case = cases.get("ctrl-c")
    rows = []
    for who in case.who() if case else []:
        assert case is not None
        bounds = (
            (Bound("report <= 0.5 s", case.median(who, "report_seconds"), 0.5),)
            if who == "rallypoint"
            else ()
        )
        rows.append(
            Row(
                (who, seconds(case, who, "report_seconds"), seconds(case, who, "exit_seconds")),
                bounds,
                case,
            )
        )
    return Table(
        "Ctrl-C while ranks are blocked in C",
        "Three of four ranks wait in `init_process_group` for the fourth, which never comes. Seconds from "
        "SIGINT to the report of where each rank "
        "was (torchrun has none), and to the launcher's end.",
        ("launcher", "report after", "exit after"),
        tuple(rows),
    )


# --- the page


def page(cases: Mapping[str, Case]) -> str:
    """docs/benchmarks.md."""
    parts = [
        "# Benchmarks\n",
        "Made by `scripts/bench docs` from the raw samples in `bench/results/`; do not edit. Absolute times "
        "differ from machine to machine: what "
        "counts is the ratio to the peer that was measured in the same run. A target that was not met is published as such.\n",
    ]
    for machine, those in _machines(cases):
        parts.append(f"{machine}: {', '.join(those)}\n")
    for table in tables(cases):
        parts += [f"## {table.title}\n", table.about + "\n", text(table)]
    parts += ["## When\n", _dates(cases)]
    return "\n".join(parts)


def _machines(cases: Mapping[str, Case]) -> list[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for case in cases.values():
        m = case.machine
        words = (
            f"{m['cores']} cores ({m['cpu']}), {m['memory_gib']} GiB, Linux {m['kernel']}, Python {m['python']}, torch {m['torch']}, "
            f"rallypoint {m['rallypoint']}"
        )
        found.setdefault(words, []).append(f"`{case.name}`")
    return list(found.items())


def _dates(cases: Mapping[str, Case]) -> str:
    lines = ["| case | taken | load average before, after |", "|---|---|---|"]
    lines += [
        f"| `{case.name}` | {case.taken} | {case.load[0]}, {case.load[1]} |"
        for case in cases.values()
    ]
    return "\n".join(lines) + "\n"
