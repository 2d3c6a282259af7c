"""Many ranks' events in one order."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rallypoint.record.events import Event, What
from rallypoint.world import ranks_phrase

CAUSAL: tuple[What, ...] = ("handled-error", "raised", "ended", "signal-received", "template-unclean")
"""What may explain a failure; shown before anything else when lines are few."""

WORTH: tuple[What, ...] = (
    *CAUSAL, "stop-sent", "killed", "phase", "left-running", "attempt-started", "attempt-ended", "evidence-asked", "job-started",
)  # fmt: skip
"""What may stand in a report's timeline at all, most telling first."""


class Row(NamedTuple):
    """A line of a timeline: seconds since the job's start, who, what."""

    at: float
    who: str
    what: str


def ordered(events: Iterable[Event]) -> list[Event]:
    """By time; events of the same moment stay in the order in which they were written."""
    return sorted(events, key=lambda event: event.at)


def around(events: Iterable[Event], at: float, most: int = 7) -> list[Row]:
    """At most `most` lines around a moment, in order of time.

    The same thing happening to several ranks in a row is one line. When there are too many, what may be a cause stays
    before what followed from it, and near stays before far.
    """
    rows = _folded(event for event in ordered(events) if event.what in WORTH)
    if len(rows) > most:
        best = sorted(rows, key=lambda row: (row[0] not in CAUSAL, abs(row[1].at - at), WORTH.index(row[0])))[:most]
        rows = [row for row in rows if row in best]
    return [row for _, row in rows]


def startup(events: Sequence[Event]) -> str:
    """How the first attempt came up: `template ready 0.95 s · 4 workers started 1.02 s · all joined 1.20 s`.

    Only what happened: a step that did not is not in it.
    """
    first = list(_first_attempt(ordered(events)))
    started = [event for event in first if event.what == "worker-started"]
    joined = {event.rank: event.at for event in reversed(first) if event.what == "phase" and event.details.get("phase") == "running"}
    steps = [("template ready", event.at) for event in first if event.what == "template-ready"][:1]
    if started:
        steps.append((f"{len(started)} worker{'s' * (len(started) > 1)} started", started[-1].at))
        if all(event.rank in joined for event in started):
            steps.append(("all joined", max(joined[event.rank] for event in started)))
    return " · ".join(f"{step} {at:.2f} s" for step, at in steps)


def sentence(event: Event) -> str:
    """What happened, as the rest of a sentence that begins with `who(event)`."""
    return _SENTENCES[event.what](event.details, event.because)


def who(event: Event) -> str:
    """`rank 2`, or `launcher` for what it did itself: it is the launcher that stops and kills."""
    return "launcher" if event.rank is None or event.what in _DONE_TO_RANKS else f"rank {event.rank}"


_DONE_TO_RANKS: tuple[What, ...] = ("stop-sent", "killed", "evidence-asked", "worker-started", "reaped")


def _folded(events: Iterable[Event]) -> list[tuple[What, Row]]:
    rows: list[tuple[What, float, str, list[int]]] = []
    for event in events:
        text = sentence(event)
        ranks = [] if event.rank is None else [event.rank]
        if rows and ranks and rows[-1][3] and (rows[-1][0], rows[-1][2]) == (event.what, text):
            rows[-1][3].extend(ranks)
        else:
            rows.append((event.what, event.at, text, ranks))
    return [(what, _row(what, at, text, ranks)) for what, at, text, ranks in rows]


def _row(what: What, at: float, text: str, ranks: list[int]) -> Row:
    if not ranks:
        return Row(at, "launcher", text)
    if what in _DONE_TO_RANKS:
        return Row(at, "launcher", text.replace("{ranks}", ranks_phrase(ranks)))
    return Row(at, ranks_phrase(ranks), text)


def _first_attempt(events: Iterable[Event]) -> Iterable[Event]:
    for event in events:
        if event.what == "attempt-ended":
            return
        yield event


def _ended(details: dict[str, Any]) -> str:
    number = int(details.get("signal", 0))
    if not number:
        return f"exited with {details.get('code', 0)}"
    try:
        return f"died: {signal.Signals(number).name}"
    except ValueError:  # a real-time signal has no name here
        return f"died: signal {number}"


def _error(details: dict[str, Any]) -> str:
    first = str(details.get("message", "")).partition("\n")[0][:100]
    return f"{details.get('type', 'an error')}: {first}" if first else str(details.get("type", "an error"))


def _reason(because: str) -> str:
    return f": {because}" if because else ""


_SENTENCES: dict[What, Callable[[dict[str, Any], str], str]] = {
    "job-started": lambda d, because: f"started {d.get('program', 'the job')}",
    "template-started": lambda d, because: "started the template",
    "template-ready": lambda d, because: "template ready",
    "template-unclean": lambda d, because: f"template not clean{_reason(because)}",
    "port-held": lambda d, because: f"held {d.get('host', '')}:{d.get('port', '')}",
    "c10d-ready": lambda d, because: "c10d store ready",
    "attempt-started": lambda d, because: f"started attempt {d.get('attempt', 0)}",
    "store-serves": lambda d, because: "the job's store has its first client",
    "worker-started": lambda d, because: "started {ranks}",
    "phase": lambda d, because: str(d.get("phase", "phase unknown")),
    "handled-error": lambda d, because: f"caught {_error(d)}" + (f" from {d['call']}" if d.get("call") else ""),
    "raised": lambda d, because: f"raised {_error(d)}",
    "ended": lambda d, because: _ended(d),
    "evidence-asked": lambda d, because: "asked the ranks where they are" + _reason(because),
    "signal-received": lambda d, because: f"got {d.get('signal', 'a signal')}",
    "stop-sent": lambda d, because: f"sent {d.get('signal', 'a signal')} to {{ranks}}{_reason(because)}",
    "killed": lambda d, because: f"killed {{ranks}}{_reason(because)}",
    "reaped": lambda d, because: "reaped {ranks}",
    "left-running": lambda d, because: "left processes running: " + ", ".join(str(pid) for pid in d.get("pids", ())),
    "attempt-ended": lambda d, because: f"ended attempt {d.get('attempt', 0)}{_reason(because)}",
    "report": lambda d, because: f"reported {d.get('code', '')}",
    "job-ended": lambda d, because: f"ended with {d.get('status', 0)}",
}
