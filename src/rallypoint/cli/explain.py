"""`rallypoint explain`: the page of a code, or what a log or a message says of why a job failed."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import IO, TYPE_CHECKING

from rallypoint.cli import hints, option_values
from rallypoint.cli.error_exit import guarded
from rallypoint.cli.output import beside, columns, filled, help_width, wants_color, width, write_out
from rallypoint.cli.progress import Progress
from rallypoint.diagnosis.catalogue import CATALOGUE, QUESTIONS, nearest, page, question
from rallypoint.errors import UsageError

if TYPE_CHECKING:
    from rallypoint.diagnosis.report import Report

HELP = """\
usage: rallypoint explain [CODE]
       rallypoint explain QUESTION
       rallypoint explain FILE ...
       rallypoint explain MESSAGE
       ... 2>&1 | rallypoint explain

Without anything: every code with what it means. With a code (the word in brackets of a report: error[rank-killed]): what
you see, why it happens, how to make sure, how to fix it. The last ones of the list are questions, which have a page each.

With logs, of whatever launcher: the cause, found among its consequences, with its line. torchrun, accelerate, DeepSpeed,
Lightning, mpirun, srun, Slurm, Kubernetes, docker, a traceback, one message; .gz, .bz2, .xz; several files are the logs of
one job. `-` is stdin.

  --error-format text|json    how the report is written

The exit status is 0 when a cause is named (or a page was shown), 1 when the log does not tell it, 2 for what cannot be read.
"""

QUIET = 2.0
"""Seconds without a byte on stdin until it is said that stdin is read: a job that is piped in may
take longer, and nothing is lost.
"""

LAST_WORDS = 2.0
"""Seconds after Ctrl-C in which a pipe is still read. Whoever writes to it got the same SIGINT, and
says last words.
"""

_CODE = re.compile(r"\b(?:error|warning|stopped)\[([a-z]+(?:-[a-z0-9]+)*)\]")


def main(argv: Sequence[str]) -> int:
    """Print what was asked for on stdout; the exit status: 0 when a cause is named, 1 when there is
    none, 2 for what cannot be read.
    """
    asked = "text"

    def command() -> int:
        nonlocal asked
        words, asked, wants_help = _taken_apart(argv)
        if wants_help:
            write_out(filled(HELP, help_width()))
            return 0
        return _explain(words, asked)

    return guarded(command, lambda: asked)


def _taken_apart(argv: Sequence[str]) -> tuple[list[str], str, bool]:
    """The words, the format, whether help is wanted. By hand: a message may begin with dashes, and
    a code is to be answered at once.
    """
    words: list[str] = []
    chosen, wants_help, rest = "text", False, list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.replace("_", "-").partition("=")
        if word == "--":
            words += rest
            break
        if word in ("-h", "--help"):
            wants_help = True
        elif name == "--error-format":
            chosen = value if equals else rest.pop(0) if rest else ""
            if chosen not in ("text", "json"):
                raise UsageError(
                    "usage",
                    f"--error-format is text or json, and got {chosen or 'nothing'}",
                    help=(("for a program", "--error-format json"),),
                )
        elif _is_option(word, not words):
            from rallypoint.cli import commands

            raise hints.unknown(word, argv, commands.EXPLAIN)
        else:
            words.append(word)
    return words, chosen, wants_help


def _is_option(word: str, first: bool) -> bool:
    """Whether somebody means an option by it, and no word of a message: one that begins the line,
    or is near one that there is.
    """
    if not re.fullmatch(r"--?[a-z][\w-]*(=\S*)?", word):
        return False
    name = word.lstrip("-").partition("=")[0].replace("_", "-")
    return first or word == "--json" or bool(option_values.nearest(name, ("error-format", "help")))


def _explain(words: list[str], error_format: str) -> int:
    if not words:
        if _piped():
            return _of_stdin(error_format)
        write_out(_list(columns(sys.stdout) if sys.stdout else None))
        return 0
    if words == ["-"]:
        return _of_stdin(error_format)
    if (
        len(words) == 1
        and (name := words[0].lower().replace("_", "-")) in QUESTIONS
        and not os.path.exists(words[0])
    ):
        if sys.stdout:
            from rallypoint.diagnosis import pages

            write_out(pages.shown(question(name), width(sys.stdout), bold=wants_color(sys.stdout)))
        return 0
    codes = [_code(words)] if _code(words) else [_code([word]) for word in words]
    if all(codes):
        if sys.stdout:
            from rallypoint.diagnosis import pages

            wide, bold = width(sys.stdout), wants_color(sys.stdout)
            write_out("\n".join(pages.shown(page(code), wide, bold=bold) for code in codes))
        return 0
    if not "".join(words).strip():
        raise UsageError(
            "usage", "the message is empty", help=(("see the codes", "rallypoint explain"),)
        )
    there = [os.path.exists(word) for word in words]
    if all(there):
        return _of_files(words, error_format)
    if any(there) and all(ok or _like_a_path(word) for ok, word in zip(there, words, strict=True)):
        raise _no_file(words[there.index(False)])
    if len(words) == 1 and " " not in words[0]:
        if _like_a_path(words[0]):
            raise _no_file(words[0])
        if not words[0].endswith(("Error", "Exception")) and ":" not in words[0]:
            reports = _reports_of(words[0])  # EADDRINUSE, Killed
            if (
                reports[0].code == "cause-unknown"
                and (kind := _end_of_a_process(words[0])) is not None
            ):
                return _tell_of_an_end(words[0], *kind)
            if reports[0].code == "cause-unknown" and not reports[0].evidence:
                raise _no_code(words[0])
            return _tell(reports, error_format)
    return _of_message(" ".join(words), error_format)


def _code(words: Sequence[str]) -> str:
    """The code that was meant by `rank-killed`, `rank_killed`, `rank killed`, `RANK-KILLED`, or a
    copied headline; "" if none was.
    """
    text = " ".join(words)
    found = _CODE.search(text)
    code = (
        found.group(1)
        if found is not None and "\n" not in text
        else "-".join(text.lower().replace("_", " ").split())
    )
    return code if code in CATALOGUE else ""


def _piped() -> bool:
    """Whether something was sent to stdin: a pipe or a file; no terminal, and not /dev/null, which
    schedulers give.
    """
    import stat

    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode if sys.stdin else 0
    except (OSError, ValueError):  # closed, or replaced by something without a descriptor
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _like_a_path(word: str) -> bool:
    return os.sep in word or word.endswith((".log", ".txt", ".out", ".err", ".gz", ".bz2", ".xz"))


def _no_file(word: str) -> UsageError:
    return UsageError(
        "usage",
        f"there is no file {word}",
        help=(("see what is there", f"ls -l {os.path.dirname(word) or '.'}"),),
    )


def _no_code(word: str) -> UsageError:
    if word.startswith("-"):
        return UsageError(
            "option-unknown",
            f"rallypoint explain has no option {word}",
            help=(("see the options", "rallypoint explain --help"),),
        )
    near = nearest(word)
    helps = tuple(
        ("the nearest is" if i == 0 else "or", f"rallypoint explain {name}")
        for i, name in enumerate(near)
    )
    return UsageError(
        "usage",
        f"there is no code and no file {word}",
        help=helps or (("see the codes", "rallypoint explain"),),
    )


def _tell_of_an_end(word: str, said: str, code: str) -> int:
    """The page about an exit status or a signal, with a line above it that says which one it is."""
    if sys.stdout:
        from rallypoint.diagnosis import pages

        write_out(
            f"{word}: {said}\n\n"
            + pages.shown(page(code), width(sys.stdout), bold=wants_color(sys.stdout))
        )
    return 0


def _end_of_a_process(word: str) -> tuple[str, str] | None:
    """What a signal's name or an exit status says, and the code with the page about it; None when
    it is neither.
    """
    import signal

    name = word.upper() if word.upper().startswith("SIG") else f"SIG{word.upper()}"
    number = int(word) if re.fullmatch(r"-?[0-9]{1,3}", word) else 0
    if number:
        number = -number if number < 0 else number - 128
        found = {one.value: one for one in signal.Signals}.get(number)
        if found is None:
            return (
                ("an exit status that the program itself chose", "rank-exited")
                if 0 < int(word) < 128
                else None
            )
        said = f"the exit status of a process that was ended by {found.name}"
    elif name in signal.Signals.__members__:
        found = signal.Signals[name]
        said = "a signal that ends a process"
    else:
        return None
    crashes = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
    return said, "rank-crashed" if found in crashes else "rank-killed"


# --- logs


def _of_files(paths: Sequence[str], error_format: str) -> int:
    from rallypoint.diagnosis.logs import log_files, prefixes, reader, to_evidence

    with Progress() as progress:
        found = []
        for path in paths:
            one = reader.Reader(path, *([prefixes.of_file(path)] if len(paths) > 1 else []))
            found.append(one.read(log_files.chunks(path, partial(progress.at, path))))
    return _tell(to_evidence.diagnose(reader.together(found)), error_format)


def _of_stdin(error_format: str) -> int:
    from rallypoint.diagnosis.logs import log_files, reader, to_evidence

    if not sys.stdin:
        raise UsageError(
            "usage",
            "stdin is closed: there is nothing to read",
            help=(("give the log as a file", "rallypoint explain train.log"),),
        )
    with Progress() as progress, _UntilInterrupted(sys.stdin.buffer) as stream:
        if sys.stdin.isatty():
            sys.stderr.write("paste the message or the log, and end it with Ctrl-D\n")
            sys.stderr.flush()
        else:
            _say_that_it_waits()
        chunks = _counted(log_files.of_stream(stream), lambda done: progress.at("stdin", done, 0))  # type: ignore[arg-type]
        findings = reader.Reader("stdin").read(chunks)
    if stream.interrupted and findings.empty:
        raise KeyboardInterrupt
    if not findings.empty:
        return _tell(to_evidence.diagnose(findings), error_format)
    raise UsageError(
        "usage",
        "nothing came from stdin",
        help=(("send both streams of the job", "torchrun train.py 2>&1 | rallypoint explain"),),
    )


class _UntilInterrupted:
    """A pipe that ends soon after Ctrl-C, so that what came by then is told. A second Ctrl-C ends
    the command.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._waiting = False
        self._before: signal.Handlers | Callable[[int, FrameType | None], object] | int | None = (
            None
        )
        self.interrupted = False

    def __enter__(self) -> _UntilInterrupted:
        if signal.getsignal(signal.SIGINT) in (
            signal.SIG_DFL,
            signal.default_int_handler,
        ):  # not ignored
            self._before = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def read1(self, size: int) -> bytes:
        """What has come; b"" at the end, or `LAST_WORDS` after Ctrl-C."""
        try:
            self._wait(None)
        except KeyboardInterrupt:
            if not self.interrupted:
                raise
        if self.interrupted and not self._wait(LAST_WORDS):
            return b""
        return self._stream.read1(size)  # type: ignore[attr-defined, no-any-return]

    read = read1

    def _wait(self, timeout: float | None) -> bool:
        import select

        self._waiting = timeout is None and not self.interrupted
        try:
            return bool(
                select.select(
                    [self._stream], [], [], 0 if self.interrupted and timeout is None else timeout
                )[0]
            )
        finally:
            self._waiting = False

    def _on_interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        if self._waiting:
            raise KeyboardInterrupt


def _say_that_it_waits() -> None:
    """Whoever called this without a word gets the codes, unless stdin is a pipe: then it may be one
    that nobody writes to.
    """
    import select

    if not select.select([sys.stdin], [], [], QUIET)[0] and sys.stderr:
        sys.stderr.write(
            "rallypoint: reading a log from stdin; for the codes: rallypoint explain < /dev/null\n"
        )
        sys.stderr.flush()


def _of_message(message: str, error_format: str) -> int:
    return _tell(_reports_of(message), error_format)


_TYPELESS = "RuntimeError: "
"""The type of exception that says least: torch raises it for whatever goes wrong."""


def _reports_of(message: str) -> tuple[Report, ...]:
    """What a message tells of itself. A line that names no cause may be a classic one, which a few
    causes leave.
    """
    reports = _reports_of_words(message)
    if "\n" in message.strip() or not (
        reports[0].code == "cause-unknown"
        or (reports[0].code == "rank-raised" and not reports[0].help)
    ):
        return reports
    from rallypoint.diagnosis.error_patterns import pasted_lines

    classic = pasted_lines.report(message.strip())
    return (classic,) if classic is not None else reports


def _reports_of_words(message: str) -> tuple[Report, ...]:
    """What a message tells of itself. One that was copied without its beginning is read once more,
    as the words of some exception.
    """
    reports = _read_message(message)
    from rallypoint.diagnosis.causes.stops import in_unknown_words

    known = reports[0].code != "cause-unknown" or (
        bool(reports[0].said) and not in_unknown_words(reports[0])
    )
    if known or "\n" in message:
        return reports
    as_exception = _read_message(_TYPELESS + message)
    if as_exception[0].code == "rank-raised":  # the words alone tell nothing
        return reports
    return tuple(_without_type(report) for report in as_exception)


def _without_type(report: Report) -> Report:
    """The report without the type that nobody has said."""
    import msgspec

    def plain(text: str) -> str:
        return text.replace(_TYPELESS, "")

    said = tuple(
        msgspec.structs.replace(one, lines=tuple(map(plain, one.lines))) for one in report.said
    )
    return msgspec.structs.replace(
        report,
        headline=plain(report.headline),
        evidence=tuple(map(plain, report.evidence)),
        said=said,
    )


def _read_message(message: str) -> tuple[Report, ...]:
    from rallypoint.diagnosis.logs import reader, to_evidence

    return to_evidence.diagnose(
        reader.Reader("").read([message.encode("utf-8", "surrogateescape")])
    )


def _counted(chunks: Iterator[bytes], count: Callable[[int], None]) -> Iterator[bytes]:
    done = 0
    for chunk in chunks:
        yield chunk
        done += len(chunk)
        count(done)


def _tell(reports: Sequence[Report], error_format: str) -> int:
    """What was found, on stdout: it is what the command was called for."""
    from rallypoint.diagnosis import render

    if error_format == "json":
        write_out(render.json(reports) + "\n")
    elif sys.stdout:
        write_out(
            render.text(reports, width=width(sys.stdout), color=wants_color(sys.stdout)) + "\n"
        )
    return reports[0].exit_status


# --- pages


def _list(columns: int | None) -> str:
    """Every code with its meaning: on one line, or fitted to so many columns."""
    wide = max(map(len, CATALOGUE)) + 2
    rows = (*((cause.code, cause.meaning) for cause in CATALOGUE.values()), *QUESTIONS.items())
    return "".join(beside(f"{name:<{wide}}", meaning, columns) for name, meaning in rows)
