"""A run that was kept, read back: what was planned, what happened, and what there is of it.

The folder may be one that is being written, one left by a launcher that was killed, one that was
damaged or written by another version. What cannot be read is said in `damage`, and the rest is
there.
"""

from __future__ import annotations

import datetime
import os
import re
import stat
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from rallypoint.errors import Advice, UsageError
from rallypoint.record.events import Event
from rallypoint.record.kept_file import CUT, at_once, reason_of
from rallypoint.record.kept_plan import KeptPlan
from rallypoint.record.run_list import PastRun, is_running, name_of, past_runs
from rallypoint.world import ranks_phrase

TAIL_BYTES = 65536
"""Bytes of the end of a log that are read for its last lines: hundreds of them, and nothing beside
a log of gigabytes."""

UNWRITABLE = "it could not be written any more, as when a disk is full"

_STAMP = re.compile(r"(\d{8}-\d{6})(?:-|$)")
_LIST = (("see what is kept", "rallypoint show --list"),)
_LOG = re.compile(r"rank(\d+)\.log")


class Log(NamedTuple):
    """Log of one rank."""

    rank: int
    path: str
    size: int  # bytes
    cut: bool = False  # its last words could not be written


class KeptRun(msgspec.Struct, frozen=True):
    """One run. `status` None: it has not ended, or its launcher was killed before it could say
    how."""

    path: str
    plan: KeptPlan
    began: float  # seconds since 1970
    running: bool
    events: tuple[Event, ...] = ()
    report: bytes = b""  # report.json as it stands there; the layers above know what is in it
    logs: tuple[Log, ...] = ()
    damage: tuple[str, ...] = ()
    events_cut: bool = False  # the last of them could not be written
    nodes: tuple[KeptRun, ...] = ()  # of a job on several nodes: those that this is made of

    @property
    def started(self) -> dict[str, Any]:
        """What is known of the job's start: of one of several nodes `host`, `first` and `offset`."""
        return next((event.details for event in self.events if event.what == "job-started"), {})

    @property
    def first(self) -> int:
        """The first rank of this node."""
        first = self.started.get("first", 0)
        return first if isinstance(first, int) else 0

    @property
    def ranks(self) -> int:
        """Number of ranks: of one of several nodes, those of that node."""
        size = self.nodes[0].started.get("world_size") if self.nodes else None
        return size if isinstance(size, int) else self.plan.slots

    @property
    def name(self) -> str:
        return name_of(self.path)

    @property
    def status(self) -> int | None:
        """Return the exit status that the launcher left with."""
        if self.nodes:
            return next((one.status for one in self.nodes if one.status is not None), None)
        ends = [event.details.get("status") for event in self.events if event.what == "job-ended"]
        return ends[-1] if ends and isinstance(ends[-1], int) else None

    @property
    def reported(self) -> str:
        """Return the headline of the first cause, as the events have it; "" when they have none."""
        told = (event.details.get("headline") for event in self.events if event.what == "report")
        return next((headline for headline in told if isinstance(headline, str)), "")

    @property
    def took(self) -> float:
        """Return seconds from the start to the last thing that was written down."""
        return max((event.at for event in self.events), default=0.0)


def find(root: str, word: str = "", command: str = "show") -> str:
    """Return the folder of the run that `word` names: a path, a run's name or a part of it that
    only one has; "" and "latest" are the newest.

    Raises `UsageError` when there is none, or more than one; its help is for `rallypoint COMMAND`.
    """
    kept = os.path.join(root, word)
    if word and (os.sep in word or os.path.isdir(word)):
        path = os.path.abspath(word)
        if os.path.isdir(path):
            return path
        if not os.path.isdir(kept):  # that of one of several nodes
            raise UsageError("usage", f"{path} is no folder", help=_LIST)
        return kept
    runs = past_runs(root)
    nodes = [run for run in runs if run.job.startswith(os.path.join(word, "node"))]
    named = word not in ("", ".", "..", "latest") and not nodes
    if named and os.path.isdir(kept):
        return kept
    if not runs:
        helps = (
            ("start one", "rallypoint run -n 4 train.py"),
            ("or name the folder that --run-dir named", f"rallypoint {command} DIR"),
        )
        raise UsageError("usage", f"no run is kept in {root}", help=helps)
    if word in ("", "latest"):
        return runs[0].path
    fitting = [run for run in runs if word in run.job]
    if len(fitting) == 1:
        return fitting[0].path
    if fitting:
        raise UsageError(
            "usage",
            f"{len(fitting)} runs have {word} in their names",
            help=_choices(fitting, command),
        )
    raise UsageError("usage", f"no run is called {word}, nor has it in its name", help=_LIST)


def _choices(runs: Sequence[PastRun], command: str) -> Advice:
    return tuple(
        ("the newest is" if i == 0 else "or", f"rallypoint {command} {run.job}")
        for i, run in enumerate(runs[:3])
    )


def read(path: str) -> KeptRun:
    """Return all that is kept in a run folder. Raises `UsageError` for one that no run of ours has
    written, or that may not be read."""
    damage: list[str] = []
    planned = os.path.join(path, "plan.json")
    try:
        written = os.stat(planned).st_mtime
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            "usage", f"{path} is no run folder: there is no plan.json in it", help=_LIST
        ) from None
    except OSError as error:
        raise UsageError(
            "usage", f"{path} cannot be read: {reason_of(error)}", help=_LIST
        ) from error
    plan = KeptPlan()
    try:
        plan = msgspec.json.decode(_content(planned), type=KeptPlan)
    except (OSError, msgspec.DecodeError) as error:
        damage.append(f"plan.json cannot be read: {_reason(error)}")
    log = os.path.join(path, "events.jsonl")
    run = KeptRun(
        path=path,
        plan=plan,
        began=_began(plan, written),
        running=is_running(path),
        events=_events(log, damage),
        report=_report(os.path.join(path, "report.json"), damage),
        logs=_logs(path, damage),
        events_cut=_is_cut(log),
    )
    return msgspec.structs.replace(run, damage=(*damage, *_missing(run)))


def _missing(run: KeptRun) -> Iterator[str]:
    """Yield what belongs to a run like this one, and is not there: its disk was full, or somebody
    removed it."""
    if run.events_cut:
        yield f"events.jsonl ends early: {UNWRITABLE}"
    if run.running:
        return
    reported = os.path.exists(os.path.join(run.path, "report.json"))
    if not reported and (run.status or run.reported):
        yield "there is no report.json: it could not be written (a full disk?), or was removed; it was shown when the job ended"
    missing = set(range(run.first, run.first + run.plan.slots)) - {log.rank for log in run.logs}
    if run.logs and missing:
        yield f"there is no log of {ranks_phrase(sorted(missing))}: it could not be written (a full disk?), or was removed"


def _is_cut(path: str) -> bool:
    """Tell whether it was given up by its writer; see `kept_file.CUT`."""
    try:
        return stat.S_IMODE(os.stat(path).st_mode) == CUT
    except OSError:
        return False


def _content(path: str) -> bytes:
    with open(path, "rb", opener=at_once) as file:
        return file.read() or b""  # None: a pipe that nobody writes to


def _reason(error: OSError | msgspec.DecodeError) -> str:
    return reason_of(error) if isinstance(error, OSError) else str(error)


def _began(plan: KeptPlan, written: float) -> float:
    """Return the moment that stands in the job's name, which is older than any file of it; else,
    and for a call of launch(), when the plan was written: the name is that of the first call."""
    stamp = None if plan.task else _STAMP.match(plan.job)
    if stamp:
        try:
            return datetime.datetime.strptime(stamp.group(1), "%Y%m%d-%H%M%S").timestamp()
        except ValueError:  # digits that are no date: a name that somebody gave
            pass
    return written


def _events(path: str, damage: list[str]) -> tuple[Event, ...]:
    """Return what can be read of them. A last line without an end is being written, or was cut off
    by a kill: no damage worth a word."""
    decoder, found, lost = msgspec.json.Decoder(Event), [], 0
    try:
        with open(path, "rb", opener=at_once) as file:
            for line in file:
                try:
                    found.append(decoder.decode(line))
                except msgspec.DecodeError:
                    lost += line.endswith(b"\n")
    except FileNotFoundError:
        damage.append("there is no events.jsonl: nothing that happened was written down")
    except OSError as error:
        damage.append(f"events.jsonl cannot be read: {reason_of(error)}")
    if lost:
        damage.append(
            f"{lost} line{'s' * (lost > 1)} of events.jsonl cannot be read: damaged, or written by another version"
        )
    return tuple(found)


def _report(path: str, damage: list[str]) -> bytes:
    try:
        return _content(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        damage.append(f"report.json cannot be read: {reason_of(error)}")
        return b""


def _logs(path: str, damage: list[str]) -> tuple[Log, ...]:
    try:
        return tuple(
            sorted(
                Log(int(found[1]), entry.path, entry.stat().st_size, _is_cut(entry.path))
                for entry in os.scandir(path)
                if (found := _LOG.fullmatch(entry.name))
            )
        )
    except OSError as error:
        damage.append(f"the logs cannot be listed: {reason_of(error)}")
        return ()


def tail(path: str, most: int) -> tuple[str, ...]:
    """Return the last lines of a log, at most so many; () when it cannot be read."""
    try:
        with open(path, "rb", opener=at_once) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ()
    lines = text.split("\n")[1 if size > TAIL_BYTES else 0 :]
    return tuple(lines[:-1] if lines and not lines[-1] else lines)[-most:]
