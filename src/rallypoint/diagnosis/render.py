"""The same report for a terminal, a log, a program."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

import msgspec

from rallypoint.diagnosis.catalogue import CATALOGUE
from rallypoint.diagnosis.pattern import Pattern
from rallypoint.diagnosis.report import TEMPORARY, Help, Moment, Report, Said
from rallypoint.errors import InternalError, RallypointError, UsageError
from rallypoint.world import ranks_phrase

_Value = TypeVar("_Value")

_LABEL = 7  # columns of "where  ", "why    ", ...: the longest label and two blanks
ESCAPES = Pattern(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movement
    # OSC, DCS, SOS, PM, APC: titles, links, up to their end
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|\x9c|$)"
    r"|\x9b[0-?]*[ -/]*[@-~]"  # CSI as one byte
    r"|\x1b[ -/]*[0-~]",  # the two- and three-byte ones
    re.DOTALL,
)
# Controls but tab, and the marks that turn the direction of writing: a report must show what is
# there.
_CONTROLS = Pattern(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)

_NUMBERED = Pattern(r"\b(errno|line|node|pid|port|rank|signal|status|uid) (?=\d)")

_RED, _CYAN, _OFF = "\x1b[1;31m", "\x1b[36m", "\x1b[0m"


def plain(words: str) -> str:
    """Return one line of somebody's words without control sequences; of a line that redrew itself
    (`\\r`) only the last state.
    """
    line = ESCAPES.sub("", words)
    if "\r" in line:
        line = next((part for part in reversed(line.split("\r")) if part.strip()), "")
    return _CONTROLS.sub(" ", line).rstrip()


def printable(text: str) -> str:
    """Return lines that hold somebody's words, a file's name or a command line, without control
    sequences.
    """
    return "\n".join(map(plain, text.split("\n")))


def cleaned(value: _Value) -> _Value:
    """Return a report, or a part of one, with every text in it made safe to print."""
    clean: Any = value
    if isinstance(value, str):
        clean = plain(value)
    elif isinstance(value, Help):
        clean = Help(plain(value.sentence), printable(value.command))
    elif isinstance(value, tuple):
        clean = tuple(map(cleaned, value))
    elif isinstance(value, msgspec.Struct):
        clean = type(value)(*map(cleaned, msgspec.structs.astuple(value)))
    return cast(_Value, clean)


def wrapped(words: str, width: int) -> list[str]:
    """Return the words in lines of this width, never empty. A number stays on the line of its noun:
    `pid 4711` is what people look for.
    """
    glued = _NUMBERED.sub(r"\1" + "\0", words)
    lines = textwrap.wrap(glued, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines] or [""]


def text(reports: Report | Sequence[Report], *, width: int = 92, color: bool = False) -> str:
    """Return the reports as people read them, without a newline at the end. Whether colour is
    wanted is the caller's to know.
    """
    listed, width = (reports,) if isinstance(reports, Report) else reports, max(width, 40)
    blocks = [f"{len(listed)} causes"] if len(listed) > 1 else []
    for report in map(cleaned, listed):
        parts = [
            [_headline(report, color)],
            _account(report, width, color),
            _timeline(report.timeline),
            *map(_said, report.said),
            [line for help in report.help for line in _help(help, width, color)],
            _ends(report, color),
        ]
        blocks += ["\n".join(part) for part in parts if part]
    return "\n\n".join(blocks)


def json(reports: Report | Sequence[Report]) -> str:
    """Return the reports as one JSON object on one line: `exit_status` of the first cause, and
    `reports` with the fields of `Report`.
    """
    listed = [cleaned(one) for one in ((reports,) if isinstance(reports, Report) else reports)]
    status = listed[0].exit_status if listed else 0
    return msgspec.json.encode({"exit_status": status, "reports": listed}).decode()


def first_line(report: Report) -> str:
    """Return the line that stands for a whole report where there is room for one."""
    return _headline(cleaned(report), color=False)


def own_part(
    report: Report, node: int, host: str, ranks: Iterable[int], after: float | None = None
) -> str:
    """Return the line about a node's own part in a cause, for `Report.here`. `after`: seconds
    between the cause and now, when the node stops its ranks; None when that is not known.
    """
    own = sorted(ranks)
    at_fault = [rank for rank in own if rank in report.ranks]
    part = f"node {node} ({host}): {ranks_phrase(own)}"
    if at_fault:
        return f"{part}; it began here, in {ranks_phrase(at_fault)}"
    return part if after is None else f"{part}, stopped {max(after, 0.0):.1f} s after it"


def in_one_line(report: Report, node: int, host: str) -> str:
    """Return what a node says that shares the screen of node 0, which shows the whole report."""
    return f"node {node} ({host}) stops: {report.headline}"


def report_of(error: RallypointError) -> Report:
    """Return the report that an exception of ours stands for."""
    return Report(
        code=error.code,
        headline=error.headline,
        why="".join(error.why[:1]),
        evidence=error.why[1:],
        help=tuple(Help(*one) for one in error.help),
        exit_status=_status_of(error),
    )


_GOES_AWAY = ("join-timeout", "lead-lost", "job-complete")


def _status_of(error: RallypointError) -> int:
    if isinstance(error, UsageError):
        return 2
    if isinstance(error, InternalError):
        return 70
    return TEMPORARY if error.code in _GOES_AWAY else 1


def _headline(report: Report, color: bool) -> str:
    label = CATALOGUE[report.code].label if report.code in CATALOGUE else "error"
    head = f"{label}[{report.code}]:"
    return f"{_RED}{head}{_OFF} {report.headline}" if color else f"{head} {report.headline}"


def _label(name: str, color: bool) -> str:
    padded = name.ljust(_LABEL)
    return f"  {_CYAN}{padded}{_OFF}" if color else f"  {padded}"


def _labelled(name: str, words: str, width: int, color: bool) -> list[str]:
    return _hung(_label(name, color), words, width, 2 + _LABEL)


def _hung(first: str, words: str, width: int, indent: int) -> list[str]:
    """Return words in lines, the first one behind `first`, the others below it."""
    head, *rest = wrapped(words, max(width - indent, 20))
    return [first + head, *(" " * indent + line for line in rest)]


def _account(report: Report, width: int, color: bool) -> list[str]:
    why, evidence = report.why, report.evidence
    if not why and evidence:
        why, evidence = evidence[0], evidence[1:]
    if report.confidence != "certain":
        why = f"{why or 'this is where it began'} ({report.confidence})"
    lines = _labelled("where", report.where, width, color) if report.where else []
    lines += _labelled("why", why, width, color) if why else []
    for item in evidence:
        lines += _hung(" " * (2 + _LABEL) + "- ", item, width, 4 + _LABEL)
    return lines + (_labelled("then", report.then, width, color) if report.then else [])


def _timeline(moments: Sequence[Moment]) -> list[str]:
    times = [f"+{moment.at:.3f}s" for moment in moments]
    far = max((len(time) for time in times), default=0)
    who = max((len(moment.who) for moment in moments), default=0)
    return [
        f"  {time.rjust(far)}  {m.who.ljust(who)}  {m.what}"
        for time, m in zip(times, moments, strict=True)
    ]


def _said(said: Said) -> list[str]:
    lines = [f"    | {line}".rstrip() for line in said.lines]
    return [f"  {said.who} said:", *lines] if lines else []


def _help(help: Help, width: int, color: bool) -> list[str]:
    sentence = f"{help.sentence}:" if help.command else help.sentence
    lines = _labelled("help", sentence, width, color)
    return lines + [" " * (6 + _LABEL) + line for line in help.command.splitlines()]


def _ends(report: Report, color: bool) -> list[str]:
    logs = [" " * (2 + _LABEL) + log for log in report.logs[1:]]
    first = [_label("logs", color) + log for log in report.logs[:1]]
    if report.here:
        first.insert(0, _label("here", color) + report.here)
    return [*first, *logs, f"{_label('more', color)}rallypoint explain {report.code}"]
