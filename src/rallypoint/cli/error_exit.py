"""The one place where an exception becomes a message and an exit status."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Callable

from rallypoint import __version__
from rallypoint.cli.output import OutputLost, discard, rendered, write_err
from rallypoint.errors import EnvironmentProblem, InternalError, RallypointError
from rallypoint.host import processes
from rallypoint.launcher import exits, torch_version


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
        if sys.stdout:
            discard(sys.stdout)
        return exits.of_signal(signal.SIGPIPE)
    except Exception as error:
        try:
            return _complain(_translated(error), error_format())
        except Exception:  # what shows errors is broken too: the bare traceback is shown
            if isinstance(error, ImportError):  # msgspec, which it needs as well
                write_err(f"rallypoint: a package that it needs cannot be imported: {error}\n")
                return exits.RAISED
            sys.excepthook(*sys.exc_info())
            return exits.INTERNAL


def _complain(error: RallypointError, error_format: str) -> int:
    """Show an error of ours; return the status that goes with its kind."""
    import msgspec

    from rallypoint.diagnosis import render
    from rallypoint.diagnosis.report import Said

    report = render.report_of(error)
    if error.__cause__ is not None and isinstance(error, InternalError):
        import traceback

        lines = "".join(traceback.format_exception(error.__cause__)).splitlines()
        report = msgspec.structs.replace(report, said=(Said(who="Python", lines=tuple(lines)),))
    write_err(rendered(report, error_format, sys.stderr))
    return report.exit_status


def _translated(error: Exception) -> RallypointError:
    """Return the error that an unexpected exception stands for: of this machine, or a fault in
    us.
    """
    number = getattr(error, "errno", 0)
    # fork(2), clone(2), posix_spawn(3)
    refused = number in (errno.EAGAIN, errno.ENOMEM) or "can't start new thread" in str(error)
    if refused or getattr(error, "filename", "") == sys.executable:
        return EnvironmentProblem(
            "start-failed",
            f"this machine refuses another process or thread: {error}",
            why=(
                "a limit on processes (ulimit -u, pids.max of the cgroup) or memory is reached"
                if refused
                else "it, or its sandbox, does not let the interpreter be executed",
            ),
            help=(("see the limits", "ulimit -u; cat /sys/fs/cgroup/pids.max"),) if refused else (),
        )
    return processes.files_exhausted(error) if number == errno.EMFILE else _internal(error)


def _internal(error: Exception) -> InternalError:
    """Return a fault of ours, with what we need to know to mend it."""
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
