"""`rallypoint explain`: the page of a code, or what a log or a message says of why a job failed."""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import stat
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING

from rallypoint.cli.args import CommandLine
from rallypoint.cli.output import (
    beside,
    columns,
    rendered,
    wants_color,
    width,
    write_err,
    write_out,
)
from rallypoint.cli.progress import Progress
from rallypoint.diagnosis.catalogue import CATALOGUE, QUESTIONS, nearest, page, question
from rallypoint.errors import UsageError

if TYPE_CHECKING:
    from rallypoint.diagnosis.report import Report
    from rallypoint.host.signals import SignalLog

QUIET = 2.0
"""Seconds without a byte on stdin until it is said that stdin is read: a job that is piped in may
take longer, and nothing is lost.
"""

LAST_WORDS = 2.0
"""Seconds after Ctrl-C in which a pipe is still read: its writer got the same SIGINT, and may have
last words.
"""

MOST_READ = 1 << 16  # characters of a message that are read, as many as of a line of a log

_CODE = re.compile(r"\b(?:error|warning|stopped)\[([a-z]+(?:-[a-z0-9]+)*)\]")

_LOG_NAMES = (".log", ".txt", ".out", ".err", ".gz", ".bz2", ".xz")


def main(line: CommandLine) -> int:
    """Print what was asked for on stdout; return the exit status: 0 when a cause is named, 1 when
    there is none, 2 for what cannot be read.
    """
    error_format = line.values()["error_format"]
    if line.words == ("-",) or (not line.words and _is_stdin_sent()):
        return _tell(_of_stdin(), error_format)
    if not line.words:
        write_out(_list(columns(sys.stdout)))
        return 0
    return _explain(line.words, error_format)


def _explain(words: Sequence[str], error_format: str) -> int:
    message = " ".join(words)[:MOST_READ]
    word = message if len(words) == 1 else ""
    there = list(map(os.path.exists, words))
    name = word.lower().replace("_", "-")
    if name in QUESTIONS and not there[0]:
        return _show_pages([question(name)])
    codes = [_code(message)] if _code(message) else [_code(one) for one in words]
    if all(codes):
        return _show_pages(map(page, codes))
    if not message.strip():
        help = (("see the codes", "rallypoint explain"),)
        raise UsageError("usage", "the message is empty", help=help)
    if all(map(_is_path, words)):
        return _tell(_of_files(words), error_format)
    reports = _of_message(message)
    is_name = " " not in word and ":" not in word and not word.endswith(("Error", "Exception"))
    if word and is_name and reports[0].code == "cause-unknown":
        if (ended := _end_of_a_process(word)) is not None:
            said, code = ended
            return _show_pages([page(code)], f"{word}: {said}\n\n")
        if not reports[0].evidence:
            raise _no_code(word)
    return _tell(reports, error_format)


def _show_pages(texts: Iterable[str], before: str = "") -> int:
    from rallypoint.diagnosis import pages

    wide, bold = width(sys.stdout), wants_color(sys.stdout)
    write_out(before + "\n".join(pages.shown(text, wide, bold=bold) for text in texts))
    return 0


def _code(text: str) -> str:
    """Return the code that was meant by `rank-killed`, `rank_killed`, `rank killed`, `RANK-KILLED`,
    or a copied headline; "" if none was.
    """
    copied = _CODE.search(text, 0, MOST_READ) if "\n" not in text else None
    code = copied[1] if copied else "-".join(text.lower().replace("_", " ").split())
    return code if code in CATALOGUE else ""


def _is_stdin_sent() -> bool:
    """Tell whether something was sent to stdin: a pipe or a file; no terminal, and not /dev/null,
    which schedulers give.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode if sys.stdin else 0
    except (OSError, ValueError):  # closed, or replaced by something without a descriptor
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _is_path(word: str) -> bool:
    named = " " not in word and (os.sep in word or word.endswith(_LOG_NAMES))
    return named or os.path.exists(word)


def _no_code(word: str) -> UsageError:
    helps = tuple(
        ("or" if i else "the nearest is", f"rallypoint explain {name}")
        for i, name in enumerate(nearest(word))
    )
    headline = f"there is no code and no file {word}"
    return UsageError("usage", headline, help=helps or (("see the codes", "rallypoint explain"),))


def _end_of_a_process(word: str) -> tuple[str, str] | None:
    """Return what a signal's name or an exit status says, and the code with the page about it; None
    when it is neither.
    """
    from rallypoint.diagnosis.causes.wording import CRASHES
    from rallypoint.diagnosis.report import TEMPORARY

    by_name = signal.Signals.__members__.get("SIG" + word.upper().removeprefix("SIG"))
    number = int(word) if re.fullmatch(r"-?[0-9]{1,3}", word) else 0
    by_number = {one.value: one for one in signal.Signals}
    found = by_name or by_number.get(-number if number < 0 else number - 128)
    if number == TEMPORARY:
        return "a node was lost or did not come, unless the program chose it", "node-lost"
    if found is None:
        is_status = 0 < number < 256
        return ("an exit status that the program chose", "rank-exited") if is_status else None
    said = (
        "a signal that ends a process"
        if by_name
        else f"the exit status of a process that was ended by {found.name}"
    )
    return said, "rank-crashed" if found in CRASHES else "rank-killed"


# --- logs


def _run_folder(path: str) -> str:
    """Return the run folder that `path` is, or that has `path` as its report.json, events.jsonl or
    plan.json; "" for any other path. A folder without a report.json is read as logs.
    """
    folder, name = os.path.split(path)
    if os.path.exists(os.path.join(path, "report.json")):
        folder = path
    elif name not in ("report.json", "events.jsonl", "plan.json"):
        return ""
    is_run = all(os.path.exists(os.path.join(folder, one)) for one in ("plan.json", "events.jsonl"))
    return (folder or os.curdir) if is_run else ""


def _of_files(paths: Sequence[str]) -> Sequence[Report]:
    from rallypoint.diagnosis.logs import log_files, prefixes, reader, to_evidence

    if folder := _run_folder(paths[0]):
        raise UsageError(
            "usage",
            f"{paths[0]} is a record of a run by rallypoint, not a log",
            help=(("show the run", f"rallypoint show {shlex.quote(folder)}"),),
        )
    with Progress() as progress:
        found = []
        for path in paths:
            one = reader.Reader(path, *([prefixes.of_file(path)] if len(paths) > 1 else []))
            found.append(one.read(log_files.chunks(path, partial(progress.at, path))))
    findings = reader.together(found)
    if findings.empty:
        raise log_files.empty(paths[0])
    return to_evidence.diagnose(findings)


def _of_stdin() -> Sequence[Report]:
    from rallypoint.diagnosis.logs import log_files, reader, to_evidence
    from rallypoint.host.signals import SignalLog

    if not sys.stdin:
        help = (("give the log as a file", "rallypoint explain train.log"),)
        raise UsageError("usage", "stdin is closed: there is nothing to read", help=help)
    signals = SignalLog((signal.SIGINT,))
    try:
        if sys.stdin.isatty():
            write_err("paste the message or the log, and end it with Ctrl-D\n")
        elif not select.select([sys.stdin], [], [], QUIET)[0]:
            write_err(
                "rallypoint: reading a log from stdin; for the codes: rallypoint explain < /dev/null\n"
            )
        stream = _UntilInterrupted(sys.stdin.buffer, signals)
        findings = reader.Reader("stdin").read(log_files.of_stream(stream.read1))
    finally:
        signals.close()
    if stream.interrupted and findings.empty:
        raise KeyboardInterrupt
    if findings.empty:
        help = (("send both streams of the job", "torchrun train.py 2>&1 | rallypoint explain"),)
        raise UsageError("usage", "nothing came from stdin", help=help)
    return to_evidence.diagnose(findings)


class _UntilInterrupted:
    """Pipe that ends soon after Ctrl-C, so that what came by then is told. A second Ctrl-C ends the
    command.
    """

    def __init__(self, stream: IO[bytes], signals: SignalLog) -> None:
        self._stream = stream
        self._signals = signals
        self.interrupted = False

    def read1(self, size: int) -> bytes:
        """Return what has come; b"" at the end, or `LAST_WORDS` after Ctrl-C."""
        timeout = LAST_WORDS if self.interrupted else None
        waited_for: list[IO[bytes] | SignalLog] = [self._stream, self._signals]
        ready = select.select(waited_for, [], [], timeout)[0]
        if self._signals in ready:
            if self.interrupted:
                raise KeyboardInterrupt
            self._signals.read()
            self.interrupted = True
            return self.read1(size)
        return self._stream.read1(size) if ready else b""  # type: ignore[attr-defined]


_TYPELESS = "RuntimeError: "
"""Type of exception that says least: torch raises it for whatever goes wrong."""


def _of_message(message: str) -> Sequence[Report]:
    """Return what a message tells of itself.

    One that was copied without its beginning is read once more, as the words of some exception. A
    line that names no cause may be a classic one, which a few causes leave.
    """
    from rallypoint.diagnosis.causes.stops import in_unknown_words
    from rallypoint.diagnosis.error_patterns import pasted_lines

    reports = _read_message(message)
    first = reports[0]
    known = first.code != "cause-unknown" or (bool(first.said) and not in_unknown_words(first))
    if not known and "\n" not in message:
        as_exception = _read_message(_TYPELESS + message)
        if as_exception[0].code != "rank-raised":  # the words alone tell something
            reports = tuple(map(_without_type, as_exception))
            first = reports[0]
    named = first.code != "cause-unknown" and (first.code != "rank-raised" or bool(first.help))
    classic = None if named or "\n" in message.strip() else pasted_lines.report(message.strip())
    return reports if classic is None else (classic,)


def _without_type(report: Report) -> Report:
    """Return the report without the type that was put before the message."""
    import msgspec

    text = msgspec.json.encode(report).replace(_TYPELESS.encode(), b"")
    return msgspec.json.decode(text, type=type(report))


def _read_message(message: str) -> Sequence[Report]:
    from rallypoint.diagnosis.logs import reader, to_evidence

    text = message.encode("utf-8", "surrogateescape")
    return to_evidence.diagnose(reader.Reader("").read([text]))


def _tell(reports: Sequence[Report], error_format: str) -> int:
    """Write what was found to stdout: it is what the command was called for."""
    write_out(rendered(reports, error_format, sys.stdout))
    return reports[0].exit_status


def _list(columns: int | None) -> str:
    """Return every code with its meaning: on one line, or fitted to so many columns."""
    wide = max(map(len, CATALOGUE)) + 2
    rows = (*((cause.code, cause.meaning) for cause in CATALOGUE.values()), *QUESTIONS.items())
    return "".join(beside(f"{name:<{wide}}", meaning, columns) for name, meaning in rows)
