"""`rallypoint`: which command, and the one place where an exception becomes a message and an exit status."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from rallypoint import __version__
from rallypoint.errors import EnvironmentProblem, InternalError, RallypointError, UsageError
from rallypoint.launcher import exits, machine

if TYPE_CHECKING:
    from rallypoint.diagnosis.report import Report

WIDEST = 100  # columns

COMMANDS = {
    "run": "start a job on this node (torchrun's options work)",
    "show": "a run again: its timeline, logs, report",
    "serve": "the coordination store alone",
    "explain": "what an error means",
    "stacks": "where every rank of a running job is, grouped",
    "doctor": "check this machine, and the way to others, before a job does",
}

HELP = """\
usage: rallypoint run [options] script.py [arguments of the script]
{commands}
       rallypoint --version

{listed}

To begin: rallypoint run -n 4 train.py
The options of a command: rallypoint run --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status it ends with. Never raises, `SystemExit` aside."""
    words = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: dispatch(words))


def dispatch(words: list[str]) -> int:
    """Find the command and hand it the rest. Raises `UsageError` when there is no such command."""
    if not words:
        _write_err(help_text())
        return exits.USAGE
    name, rest = words[0], words[1:]
    if name in ("-h", "--help"):
        write_out(help_text())
        return 0
    if name in ("-V", "--version"):
        write_out(f"rallypoint {__version__}\n")
        return 0
    if name == "run":
        from rallypoint.cli import run

        return run.main(rest)
    if name == "show":
        from rallypoint.cli import show

        return show.main(rest)
    if name == "serve":
        from rallypoint.cli import serve

        return serve.main(rest)
    if name == "explain":
        from rallypoint.cli import explain

        return explain.main(rest)
    if name == "stacks":
        from rallypoint.cli import stacks

        return stacks.main(rest)
    if name == "doctor":
        from rallypoint.cli import doctor

        return doctor.main(rest)
    raise _no_command(name, words)


def help_text() -> str:
    width = max(map(len, COMMANDS)) + 3
    commands = "\n".join(f"       rallypoint {name} ..." for name in COMMANDS if name != "run")
    return HELP.format(commands=commands, listed="\n".join(f"  {name:<{width}}{sentence}" for name, sentence in COMMANDS.items()))


def _no_command(name: str, words: list[str]) -> UsageError:
    import difflib
    import shlex

    from rallypoint.cli import foreign

    if name.startswith("--") and (near := difflib.get_close_matches(name, ("--version", "--help"), n=1)):
        return UsageError(
            "option-unknown",
            f"rallypoint has no option {name}; the nearest is {near[0]}",
            help=((f"use {near[0]}", f"rallypoint {near[0]}"),),
        )
    if name.startswith("-") or name.endswith(".py") or os.sep in name:
        return UsageError(
            "usage", f"rallypoint {name}: no command is given", help=(("say what to do with it", f"rallypoint run {shlex.join(words)}"),)
        )
    if name in ("help", "version"):
        rest = words[1:2] if words[1:2] and words[1] in COMMANDS else []
        return UsageError(
            "usage", f"rallypoint has no command {name}", help=(("it is an option", f"rallypoint {shlex.join([*rest, f'--{name}'])}"),)
        )
    near = [foreign.COMMANDS[name]] if name in foreign.COMMANDS else difflib.get_close_matches(name, COMMANDS, n=1)
    if near:
        again = f"rallypoint {shlex.join([near[0], *words[1:]])}"
        if name in foreign.LAUNCHERS:
            from rallypoint.cli import options

            again = options.mended(foreign.after_launcher(words))
        help = ((f"use {near[0]}", again),)
    else:
        help = (("see the commands", "rallypoint --help"),)
    return UsageError("usage", f"rallypoint has no command {name}" + (f"; the nearest is {near[0]}" if near else ""), help=help)


class OutputLost(Exception):
    """Standard output takes nothing, as when a disk is full."""


def write_out(text: str) -> None:
    """Write to stdout now: whatever a command prints there. Nothing when it was closed at the start, as Python's own `print`.

    `OutputLost`; `BrokenPipeError` when the reader has gone.
    """
    if not sys.stdout:
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard_stdout()
        raise OutputLost(f"cannot write to stdout: {os.strerror(error.errno or 0)}") from error


def _write_err(text: str) -> None:
    """Write to stderr, if there is one and it takes anything: the exit status tells in any case."""
    if sys.stderr:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()


def _discard_stdout() -> None:
    """What could not be written is kept, and the interpreter tries it once more at its end: then it must work."""
    if sys.stdout:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def guarded(command: Callable[[], int], error_format: Callable[[], str] = lambda: "text") -> int:
    """Run `command`; turn whatever it raises into a message on stderr and an exit status. `error_format` is asked only then."""
    try:
        return command()
    except RallypointError as error:
        return _complain(error, error_format())
    except KeyboardInterrupt:
        return exits.of_signal(signal.SIGINT)
    except OutputLost as lost:
        _write_err(f"rallypoint: {lost}\n")
        return exits.RAISED
    except BrokenPipeError:
        _discard_stdout()
        return exits.of_signal(signal.SIGPIPE)
    except Exception as error:
        try:
            return _complain(_translated(error), error_format())
        except Exception:  # what shows errors is broken too: the bare traceback is better than nothing
            sys.excepthook(*sys.exc_info())
            return exits.INTERNAL


def _complain(error: RallypointError, error_format: str) -> int:
    """Show an error of ours; the status that goes with its kind."""
    import msgspec

    from rallypoint.diagnosis import render
    from rallypoint.diagnosis.report import Said

    report = render.report_of(error)
    if error.__cause__ is not None and isinstance(error, InternalError):
        import traceback

        lines = "".join(traceback.format_exception(error.__cause__)).splitlines()
        report = msgspec.structs.replace(report, said=(Said(who="Python", lines=tuple(lines)),))
    show(report, error_format)
    return report.exit_status


def _translated(error: Exception) -> RallypointError:
    """What an exception that nobody expected says of this machine, or else of a fault in us."""
    if not isinstance(error, OSError) or error.errno != errno.EMFILE:
        return _internal(error)
    import resource

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return EnvironmentProblem(
        "files-exhausted",
        f"rallypoint has as many files open as it may have: {error}",
        why=(f"ulimit -n is {most}; the launcher keeps about six descriptors for each rank",),
        help=(("raise the limit in the shell that starts the job", "ulimit -n 65536"),),
    )


def _internal(error: Exception) -> InternalError:
    """A fault of ours, with what we need to know to mend it."""
    import platform

    fault = InternalError(
        "internal-error",
        f"rallypoint itself failed: {type(error).__name__}: {error}",
        why=(
            "this is a fault in rallypoint, not in your program or in how you called it",
            f"rallypoint {__version__}, Python {platform.python_version()}, torch {machine.torch_version() or 'not installed'}",
            platform.platform(),
        ),
        help=(("please report it, with everything printed here and the command that you typed", ""),),
    )
    fault.__cause__ = error
    return fault


def show(report: Report, error_format: str) -> None:
    """Write a report to stderr, coloured and as wide as the terminal when there is one."""
    if not sys.stderr:  # closed at the start: the exit status still tells
        return
    from rallypoint.diagnosis import render

    text = render.json(report) if error_format == "json" else render.text(report, width=width(sys.stderr), color=wants_color(sys.stderr))
    _write_err(text + "\n")


def wants_color(stream: TextIO) -> bool:
    """https://no-color.org and https://force-color.org: set and not empty; otherwise colour is for terminals."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def help_width() -> int:
    """Columns of a help text."""
    return width(sys.stdout) if sys.stdout else WIDEST


def filled(text: str, columns: int) -> str:
    """A text for `--help`, its paragraphs filled to so many columns; what is indented, and the lines of use, stay as they are."""
    import textwrap

    def part(paragraph: str) -> str:
        if paragraph.startswith(("usage:", " ")):
            return paragraph
        return "\n".join(textwrap.wrap(" ".join(paragraph.split()), columns, break_long_words=False, break_on_hyphens=False))

    return "\n\n".join(map(part, text.strip("\n").split("\n\n"))) + "\n"


def width(stream: TextIO) -> int:
    """Columns to write in: COLUMNS, else the terminal's, else 92; prose wider than 100 is hard to read."""
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given) > 0:
        return min(int(given), WIDEST)
    try:
        return min(os.get_terminal_size(stream.fileno()).columns or 92, WIDEST)
    except (OSError, ValueError):  # no terminal; or a stderr without a descriptor
        return 92
