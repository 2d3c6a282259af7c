"""The one place where an exception becomes a message and an exit status."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from rallypoint import __version__
from rallypoint.cli.output import OutputLost, discard_stdout, wants_color, width, write_err
from rallypoint.errors import EnvironmentProblem, InternalError, RallypointError
from rallypoint.launcher import exits, torch_version

if TYPE_CHECKING:
    from rallypoint.diagnosis.report import Report


def guarded(command: Callable[[], int], error_format: Callable[[], str] = lambda: "text") -> int:
    """Run `command`; turn whatever it raises into a message on stderr and an exit status.
    `error_format` is asked only then.
    """
    try:
        return command()
    except RallypointError as error:
        return _complain(error, error_format())
    except KeyboardInterrupt:
        return exits.of_signal(signal.SIGINT)
    except OutputLost as lost:
        write_err(f"rallypoint: {lost}\n")
        return exits.RAISED
    except BrokenPipeError:
        discard_stdout()
        return exits.of_signal(signal.SIGPIPE)
    except Exception as error:
        try:
            return _complain(_translated(error), error_format())
        except (
            Exception
        ):  # what shows errors is broken too: the bare traceback is better than nothing
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
    if (
        isinstance(error, OSError)
        and error.errno in (errno.EAGAIN, errno.ENOMEM)
        and not error.filename
    ):  # of fork(2)
        return EnvironmentProblem(
            "start-failed",
            f"this machine refuses another process: {error.strerror}",
            why=("a limit on processes (ulimit -u, pids.max of the cgroup) or memory is reached",),
            help=(("see the limits", "ulimit -u; cat /sys/fs/cgroup/pids.max"),),
        )
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
            f"rallypoint {__version__}, Python {platform.python_version()}, torch {torch_version.torch_version() or 'not installed'}",
            platform.platform(),
        ),
        help=(
            ("please report it, with everything printed here and the command that you typed", ""),
        ),
    )
    fault.__cause__ = error
    return fault


def show(report: Report, error_format: str) -> None:
    """Write a report to stderr, coloured and as wide as the terminal when there is one."""
    if not sys.stderr:  # closed at the start: the exit status still tells
        return
    from rallypoint.diagnosis import render

    text = (
        render.json(report)
        if error_format == "json"
        else render.text(report, width=width(sys.stderr), color=wants_color(sys.stderr))
    )
    write_err(text + "\n")
