"""Many ranks' events in one order."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from rallypoint.record.events import Event, What
from rallypoint.world import ranks_phrase

CAUSAL: tuple[What, ...] = (
    "handled-error",
    "raised",
    "ended",
    "signal-received",
    "template-unclean",
)
"""Events that may explain a failure: what came before it and what came after are told apart."""


class Row(NamedTuple):
    """A line of a timeline: seconds since the job's start, subject, event."""

    at: float
    who: str
    what: str


def ordered(events: Iterable[Event]) -> list[Event]:
    """By time; events of the same moment stay in the order in which they were written."""
    return sorted(events, key=lambda event: event.at)


def whole(events: Iterable[Event]) -> list[Row]:
    """Return all that happened, in order of time, for whoever reads a run again.

    The same thing happening to several ranks is one line, at the time of the first, also when other
    lines of that stage stand between; not across anything that may be a cause, or a new attempt:
    what came before it and what came after must be told apart.
    """
    rows: list[_Stage] = []
    open_: dict[tuple[What, str, str], _Stage] = {}
    for event in ordered(events):
        if event.what in _LEFT_OUT:
            continue
        text = sentence(event)
        host = str(event.details.get("launcher_host", "")) if is_launchers(event) else ""
        stage = open_.get((event.what, text, host))
        if event.what in _CLOSES and stage is None:
            open_.clear()
        if event.rank is not None and stage is not None:
            stage.ranks.append(event.rank)
            stage.last = event.at
            continue
        rows.append(
            _Stage(
                event.what,
                text,
                event.at,
                event.at,
                [] if event.rank is None else [event.rank],
                host,
            )
        )
        if event.rank is not None:
            open_[event.what, text, host] = rows[-1]
    return [stage.row() for stage in rows]


def sentence(event: Event) -> str:
    """Return what happened, as the rest of a sentence that begins with `who(event)`."""
    return _SENTENCES[event.what](event.details, event.because)


def who(event: Event) -> str:
    """`rank 2`, or `launcher` for what it did itself: it is the launcher that stops and kills."""
    return "launcher" if is_launchers(event) else f"rank {event.rank}"


def is_launchers(event: Event) -> bool:
    """Tell whether it is a launcher that did it."""
    return event.rank is None or event.what in _DONE_TO_RANKS


_LEFT_OUT: tuple[What, ...] = ("reaped",)  # said of every rank that ended, and tells no more
_CLOSES: tuple[What, ...] = (*CAUSAL, "attempt-started", "attempt-ended", "report")
# seconds between the first and the last rank from which on a line says when the last one came
_APART = 0.1


@dataclass
class _Stage:
    """A line that is still being made: more ranks may do the same."""

    what: What
    text: str
    first: float
    last: float
    ranks: list[int]
    host: str

    def row(self) -> Row:
        row = _row(self.what, self.first, self.text, self.ranks, self.host)
        return (
            row
            if self.last - self.first < _APART
            else row._replace(what=f"{row.what} (the last one at +{self.last:.3f}s)")
        )


_DONE_TO_RANKS: tuple[What, ...] = (
    "stop-sent",
    "killed",
    "evidence-asked",
    "worker-started",
    "reaped",
)


def _row(what: What, at: float, text: str, ranks: list[int], host: str) -> Row:
    launcher = f"launcher on {host}" if host else "launcher"
    if not ranks:
        return Row(at, launcher, text)
    if what in _DONE_TO_RANKS:
        return Row(at, launcher, text.replace("{ranks}", ranks_phrase(ranks)))
    return Row(at, ranks_phrase(ranks), text)


def _ended(details: dict[str, Any]) -> str:
    number = details.get("signal", 0)
    if not number:
        return f"exited with {details.get('code', 0)}"
    try:
        return f"died: {signal.Signals(number).name}"
    except ValueError:  # it is a name already; or a real-time signal, which has none here
        return f"died: {number}" if isinstance(number, str) else f"died: signal {number}"


def _error(details: dict[str, Any]) -> str:
    first = str(details.get("message", "")).partition("\n")[0][:100]
    return (
        f"{details.get('type', 'an error')}: {first}"
        if first
        else str(details.get("type", "an error"))
    )


def _reason(because: str) -> str:
    return f": {because}" if because else ""


_SENTENCES: dict[What, Callable[[dict[str, Any], str], str]] = {
    "job-started": lambda d, because: f"started {d.get('program', 'the job')}",
    "template-started": lambda d, because: "started the template",
    "template-ready": lambda d, because: "template ready",
    "template-renewed": lambda d, because: (
        f"template started again without {', '.join(d.get('parts', ()))}{_reason(because)}"
    ),
    "template-unclean": lambda d, because: f"template not clean{_reason(because)}",
    "port-held": lambda d, because: f"held {d.get('host', '')}:{d.get('port', '')}",
    "c10d-ready": lambda d, because: "c10d store ready",
    "attempt-started": lambda d, because: f"started attempt {d.get('attempt', 0)}",
    "door-missing": lambda d, because: f"cannot be asked by rallypoint stacks{_reason(because)}",
    "stalled": lambda d, because: f"reported {d.get('code', 'a stall')}: {d.get('headline', '')}",
    "stall-over": lambda d, because: "saw the stall end",
    "store-serves": lambda d, because: "the job's store has its first client",
    "worker-started": lambda d, because: "started {ranks}",
    "phase": lambda d, because: str(d.get("phase", "phase unknown")),
    "group-closed": lambda d, because: (
        "closed its process group" + (f" at {d['line']}" if d.get("line") else "")
    ),
    "handled-error": lambda d, because: (
        f"closed its group with {_error(d)} on its way"
        if d.get("on_its_way")
        else f"caught {_error(d)}" + (f" from {d['call']}" if d.get("call") else "")
    ),
    "raised": lambda d, because: f"raised {_error(d)}",
    "ended": lambda d, because: f"{because}: {_ended(d)}" if because else _ended(d),
    "evidence-asked": lambda d, because: "asked the ranks where they are" + _reason(because),
    "roll-call": lambda d, because: "called the roll" + _reason(because),
    "signal-received": lambda d, because: f"got {d.get('signal', 'a signal')}",
    "stop-sent": lambda d, because: (
        f"sent {d.get('signal', 'a signal')} to {{ranks}}{_reason(because)}"
    ),
    "killed": lambda d, because: f"killed {{ranks}}{_reason(because)}",
    "reaped": lambda d, because: "reaped {ranks}",
    "children-failed": lambda d, because: (
        "processes that it had started failed: " + ", ".join(str(pid) for pid in d.get("pids", ()))
    ),
    "left-running": lambda d, because: (
        "left processes running: " + ", ".join(str(pid) for pid in d.get("pids", ()))
    ),
    "attempt-ended": lambda d, because: f"ended attempt {d.get('attempt', 0)}{_reason(because)}",
    "report": lambda d, because: f"reported {d.get('code', '')}",
    "job-ended": lambda d, because: f"ended with {d.get('status', 0)}",
}
