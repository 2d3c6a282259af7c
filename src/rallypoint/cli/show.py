"""`rallypoint show`: a run again, from what its run folder holds; or the list of the runs that are
kept.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from rallypoint.cli.args import CommandLine
from rallypoint.cli.output import beside, columns, rendered, write_out
from rallypoint.diagnosis import render
from rallypoint.diagnosis.report import Report
from rallypoint.errors import UsageError
from rallypoint.record import job_of_nodes, kept_plan, past_run, timeline
from rallypoint.record.past_run import KeptRun
from rallypoint.record.run_folder import default_root
from rallypoint.record.run_list import past_runs
from rallypoint.record.timeline import Row
from rallypoint.units import duration, size
from rallypoint.world import ranks_phrase

MOST_ROWS = 60
"""Lines of a timeline: two screens. A run with many restarts has its beginning and its end, and the
number of the lines between.
"""

MOST_RANKS_QUOTED = 3
"""Ranks at fault whose last lines are shown; what more of them said is mostly the same."""

MOST_LINES_QUOTED = 10
"""Last lines of each, as in a report."""

LOGS_LISTED = 8
"""Log files that are named one by one."""


def main(line: CommandLine) -> int:
    """Show a run, or the list; return the exit status: 0 when something was shown."""
    values, words = line.values(), line.words
    root, now = default_root(os.environ), datetime.datetime.now().timestamp()
    as_json = values["error_format"] == "json"
    if values["list"]:
        if words:
            help = (("see one run", f"rallypoint show {words[0]}"),)
            raise UsageError("usage", f"--list names no run, and got {words[0]}", help=help)
        runs = list(_kept(root))
        write_out(
            _json([_summary(run, now) for run in runs])
            if as_json
            else listed(runs, root, now, columns(sys.stdout))
        )
        return 0
    if len(words) > 1:
        help = (("see what is kept", "rallypoint show --list"),)
        raise UsageError("usage", f"show takes one run, and got {len(words)}", help=help)
    run = job_of_nodes.read(job_of_nodes.find(root, *words))
    write_out(_json(document(run, now)) if as_json else text(run, now))
    return 0


def _kept(root: str) -> Iterator[KeptRun]:
    """Yield all runs of a folder of runs, newest first, without those that a launcher has removed
    since they were listed.
    """
    for past in past_runs(root):
        with contextlib.suppress(UsageError):
            yield past_run.read(past.path)


def reports_of(run: KeptRun) -> tuple[tuple[Report, ...], str]:
    """Return the reports, first cause first, and what is wrong with their file ("" if nothing)."""
    try:
        return msgspec.json.decode(run.report or b"[]", type=tuple[Report, ...]), ""
    except msgspec.DecodeError as error:
        return (), f"report.json cannot be read: {error}"


# --- text


def text(run: KeptRun, now: float) -> str:
    """Return all of it, as a person reads it on stdout."""
    reports, damage = reports_of(run)
    blocks = [
        _labelled(_header(run, reports, now)),
        "\n".join(_timeline(timeline.whole(run.events))),
        rendered(reports, "text", sys.stdout).rstrip("\n") if reports else "",
        *_last_words(run, reports),
        _labelled(_logs(run, reports)),
        "\n".join(f"  {line}" for line in (*run.damage, damage) if line),
    ]
    return "\n\n".join(filter(None, blocks)) + "\n"


def _header(run: KeptRun, reports: Sequence[Report], now: float) -> list[tuple[str, str]]:
    command = render.plain(kept_plan.command(run.plan))
    torch = f", torch {run.plan.torch}" if run.plan.torch else ""
    ranks = [("ranks", f"{run.ranks}{torch}")]
    folder = [("in", render.plain(run.plan.cwd))] if run.plan.cwd else []
    return [
        ("run", run.name),
        ("command", command or "not known: plan.json does not tell"),
        *((*folder, *ranks) if command else ()),
        *_nodes(run),
        ("began", _date(run.began)),
        ("ended", how(run, reports, now)),
    ]


def _nodes(run: KeptRun) -> Iterator[tuple[str, str]]:
    """Yield the nodes of a job that are on this disk, and which ranks each had."""
    for node in run.nodes:
        ranks = ranks_phrase(range(node.first, node.first + node.plan.slots))
        yield os.path.basename(node.path), f"{render.plain(job_of_nodes.host_of(node))}: {ranks}"


def how(run: KeptRun, reports: Sequence[Report], now: float) -> str:
    """Say how the run ended, or that it has not."""
    if run.running:
        inside = os.path.dirname(run.path) == default_root(os.environ)
        word = shlex.quote(run.name if inside else run.path)
        return f"not yet: it has been running for {_took(run, now)}; where its ranks are: rallypoint stacks {word}"
    if run.status is None:
        last = f"; last heard of {duration(run.took)} after the start" if run.events else ""
        if run.events_cut:
            return f"not known: events.jsonl ends early{last}"
        return f"the launcher was killed, or the machine went down{last}"
    headline = reports[0].headline if reports else run.reported
    joint = ": " if run.status else "; before that, "  # it was started again
    because = f"{joint}{render.plain(headline)}" if headline else ""
    return f"after {duration(run.took)} with exit status {run.status}{because}"


def _timeline(rows: Sequence[Row]) -> list[str]:
    half = MOST_ROWS // 2
    left_out = len(rows) - 2 * half
    shown = list(rows) if left_out <= 1 else [*rows[:half], *rows[-half:]]
    times = [f"+{row.at:.3f}s" for row in shown]
    far, who = max(map(len, times), default=0), max((len(row.who) for row in shown), default=0)
    lines = [
        f"  {time.rjust(far)}  {row.who.ljust(who)}  {render.plain(row.what)}"
        for time, row in zip(times, shown, strict=True)
    ]
    if left_out > 1:
        lines.insert(half, f"  ... {left_out} lines in between are in events.jsonl")
    return lines


def _last_words(run: KeptRun, reports: Sequence[Report]) -> list[str]:
    """Return the last lines of the ranks at fault, where the report has not shown them already."""
    quoted = {line for report in reports for said in report.said for line in said.lines}
    paths = {log.rank: log.path for log in run.logs}
    blocks = []
    for rank in dict.fromkeys(rank for report in reports for rank in report.ranks):
        kept = past_run.tail(paths[rank], MOST_LINES_QUOTED) if rank in paths else ()
        lines = [render.plain(line) for line in kept]
        if any(line and line not in quoted for line in lines):
            told = (f"    | {line}".rstrip() for line in lines)
            blocks.append("\n".join([f"  rank {rank}'s log ends:", *told]))
    return blocks[:MOST_RANKS_QUOTED]


def _logs(run: KeptRun, reports: Sequence[Report]) -> list[tuple[str, str]]:
    """Return where the logs are, and how large: of the ranks at fault, then those that were cut,
    then the largest. Empty ones are only counted.
    """
    at_fault = {rank for report in reports for rank in report.ranks}
    full = sorted(
        (log for log in run.logs if log.size or log.cut),
        key=lambda log: (log.rank not in at_fault, not log.cut, -log.size, log.rank),
    )
    lines = [
        f"{os.path.relpath(log.path, run.path)}  {size(log.size)}{f', cut: {past_run.UNWRITABLE}' * log.cut}"
        for log in sorted(full[:LOGS_LISTED])
    ]
    more, empty = len(full) - LOGS_LISTED, len(run.logs) - len(full)
    lines += [f"and {more} more"] if more > 0 else []
    lines += [f"{empty} rank{'s' * (empty > 1)} printed nothing"] if empty else []
    if not run.logs:
        alone = ": a single rank has the terminal for itself" * (run.plan.slots == 1)
        lines = [f"none{alone}"]
    return [("folder", run.path), ("logs", lines[0]), *(("", line) for line in lines[1:])]


def _labelled(lines: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"  {name:<9}{words}" for name, words in lines)


# --- the list


def listed(runs: Sequence[KeptRun], root: str, now: float, columns: int | None = None) -> str:
    """Return a line for each run: its name, when, how long, how many ranks, how it ended, the
    command.

    On so many columns a long command is filled beside the rest, or below it.
    """
    if not runs:
        return f"no run is kept in {root}\n"
    rows = [("run", "began", "took", "ranks", "ended", "command")]
    for run in runs:
        command = render.plain(kept_plan.command(run.plan).removeprefix("rallypoint run "))
        ranks = str(run.plan.slots) if command else "-"
        row = (run.name, _date(run.began), _took(run, now), ranks, _end(run), command)
        rows.append(row)
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    heads = ["".join(f"{cell:<{w}}  " for cell, w in zip(row, wide, strict=False)) for row in rows]
    return "".join(beside(head, row[-1], columns) for head, row in zip(heads, rows, strict=True))


def _end(run: KeptRun) -> str:
    if run.running:
        return "still running"
    if run.status is None:
        return "not known" if run.events_cut else "launcher killed"
    reports, _ = reports_of(run)
    return " ".join([str(run.status), *(report.code for report in reports[:1])])


# --- for a program


def _summary(run: KeptRun, now: float) -> dict[str, Any]:
    reports, _ = reports_of(run)
    began = datetime.datetime.fromtimestamp(run.began).astimezone()
    state = "killed"
    if run.running:
        state = "running"
    elif run.status is not None:
        state = "ended"
    elif run.events_cut:
        state = "unknown"
    return {
        "run": run.name,
        "path": run.path,
        "command": kept_plan.command(run.plan),
        "folder": run.plan.cwd,
        "ranks": run.ranks,
        "began": began.isoformat(timespec="seconds"),
        "seconds": _seconds(run, now),
        "state": state,
        "exit_status": run.status,
        "code": reports[0].code if reports else None,
    }


def document(run: KeptRun, now: float) -> dict[str, Any]:
    """Return what `--error-format json` prints: the summary that --list has, the timeline, the
    reports as they stand in report.json, the logs.
    """
    reports, damage = reports_of(run)
    return {
        **_summary(run, now),
        "timeline": [row._asdict() for row in timeline.whole(run.events)],
        "reports": [render.cleaned(report) for report in reports],
        "logs": [log._asdict() for log in run.logs],
        "damage": [line for line in (*run.damage, damage) if line],
    }


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode() + "\n"


# --- words


def _date(at: float) -> str:
    return datetime.datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")


def _seconds(run: KeptRun, now: float) -> float:
    return max(now - run.began, run.took) if run.running else run.took


def _took(run: KeptRun, now: float) -> str:
    return duration(_seconds(run, now))
