"""`rallypoint doctor`: check this machine, and the way to others."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rallypoint.cli.args import CommandLine
from rallypoint.cli.output import wants_color, width, write_out
from rallypoint.errors import Advice, EnvironmentProblem, UsageError
from rallypoint.launcher import exits

if TYPE_CHECKING:
    from rallypoint.diagnosis.doctor.finding import Finding
    from rallypoint.diagnosis.doctor.trial_job import Backend, TrialOutcome

_CLEAR_LINE = "\r\x1b[K"


def main(line: CommandLine) -> int:
    """Check; return the exit status: 0, or 1 when there is a fault."""
    from rallypoint.host import processes

    values = line.values()
    listen, peers, port_range = values["listen"], values["peer"], values["port_range"]
    path = values["secret_file"]
    _refuse(values)
    # one that was closed when we started must not become a pipe of ours
    processes.open_standard_descriptors()
    screen = _DoctorScreen(values["error_format"])
    if listen is not None:
        return screen.show(listen_for_peers(listen, path, port_range))
    if peers:
        return screen.show(
            check_peers(peers, _secret(path, "--peer HOST:PORT"), port_range, screen)
        )
    return examine(_names(values["only"], values["skip"]), screen)


def examine(names: tuple[str, ...], screen: _DoctorScreen) -> int:
    """Check this machine; return the exit status."""
    from rallypoint.diagnosis.doctor import doctor
    from rallypoint.launcher.plan import OLDEST_TORCH

    return screen.show(doctor.run(doctor.standard(OLDEST_TORCH, trial), names, screen.starting))


def check_peers(
    peers: Iterable[tuple[str, int]],
    secret: bytes,
    port_range: tuple[int, int] | None,
    screen: _DoctorScreen,
) -> Iterator[Finding]:
    """Check the way to each of these machines and back."""
    from rallypoint.diagnosis.doctor import peer_check

    for host, port in peers:
        screen.starting(f"{host}:{port}")
        yield from peer_check.run_client(host, port, secret, port_range)


def listen_for_peers(port: int, path: str, port_range: tuple[int, int] | None) -> Iterator[Finding]:
    """Let other machines check the way to here and back, until none comes any more."""
    from rallypoint.diagnosis.doctor import peer_check

    secret = _secret(path, f"--listen {port}")
    given = f" --secret-file {shlex.quote(path)}"
    try:
        yield from peer_check.run_server(port, secret, port_range, to_type=given)
    except (UsageError, EnvironmentProblem) as refused:  # its help is of other commands' options
        sentence, command = "take any free port", f"rallypoint doctor --listen 0{given}"
        if port_range is not None and refused.code != "ports-exhausted":
            sentence += " of the range"
            command += " --port-range {}-{}".format(*port_range)
        help = ((sentence, command),)
        raise type(refused)(refused.code, refused.headline, why=refused.why, help=help) from refused


def _secret(path: str, options: str) -> bytes:
    """Read the secret of both machines. Raises UsageError `secret-missing` without a file."""
    from rallypoint.store.discovery import needed_secret

    return needed_secret(
        path,
        "a check between two machines needs a secret that both have, and none was named",
        "both prove that they know it before they say anything, as the nodes of a job do",
        f"rallypoint doctor {options}",
    )


def _refuse(values: dict[str, Any]) -> None:
    """Raise `UsageError` for options that do not go together."""
    is_listening, range_ = values["listen"] is not None, values["port_range"]
    headline = ""
    help: Advice = (("leave them out", ""),)
    if is_listening and values["peer"]:
        headline = (
            "--listen and --peer exclude each other: one machine listens, and the other calls"
        )
        help = (
            ("on this machine", "rallypoint doctor --listen 29500 --secret-file F"),
            ("on the other", "rallypoint doctor --peer HOST:29500 --secret-file F"),
        )
    elif (is_listening or values["peer"]) and (values["only"] or values["skip"]):
        headline = "--only and --skip choose among the checks of this machine, and --listen and --peer make none of these"
    elif range_ and not is_listening and not values["peer"]:
        headline = "--port-range is for --listen and --peer: the checks of this machine look at the kernel's range"
        command = "rallypoint doctor --listen 0 --secret-file F --port-range {}-{}".format(*range_)
        help = (("on this machine", command),)
    if headline:
        raise UsageError("usage", headline, help=help)


def _names(only: tuple[str, ...], skip: tuple[str, ...]) -> tuple[str, ...]:
    """Return the checks that were asked for, in their order. `UsageError` when none is left."""
    from rallypoint.diagnosis.doctor.doctor import NAMES

    left = tuple(name for name in NAMES if name in (only or NAMES) and name not in skip)
    if not left:
        help = (("see the checks", "rallypoint doctor --help"),)
        raise UsageError("usage", "--only and --skip leave no check", help=help)
    return left


class _DoctorScreen:
    """Findings as they come, and their count. On a terminal it says what is being waited for."""

    def __init__(self, error_format: str) -> None:
        self._json = error_format == "json"
        self._clear = ""

    def starting(self, name: str) -> None:
        is_terminal = bool(sys.stdout) and sys.stdout.isatty() and wants_color(sys.stdout)
        if is_terminal and not self._json:
            write_out(f"{_CLEAR_LINE}     {name} ...")
            self._clear = _CLEAR_LINE

    def show(self, findings: Iterable[Finding]) -> int:
        """Show them all, and a last line; return the exit status."""
        from rallypoint.diagnosis.doctor import doctor

        found = []
        for finding in findings:
            found.append(finding)
            wide, color = width(sys.stdout), wants_color(sys.stdout)
            self._write(
                doctor.json(finding)
                if self._json
                else doctor.text(finding, width=wide, color=color)
            )
        status = exits.RAISED if any(one.mark == "fault" for one in found) else exits.OK
        self._write(doctor.json_summary(found, status) if self._json else doctor.summary(found))
        return status

    def _write(self, text: str) -> None:
        write_out(f"{self._clear}{text}\n")
        self._clear = ""


def trial(backend: Backend, ranks: int, timeout: float) -> TrialOutcome:
    """Start the trial job as any user's `launch`, and say how it went."""
    from rallypoint.clock import Clock
    from rallypoint.diagnosis.doctor.trial_job import MEETING, TrialOutcome, measure
    from rallypoint.diagnosis.report import Report
    from rallypoint.errors import LaunchTimeout, RallypointError, WorkerError
    from rallypoint.launcher.launch.launch import launch

    clock = Clock()
    patience = min(timeout, MEETING)
    try:
        measured = launch(
            measure, nproc=ranks, backend=backend, timeout=timeout, backend_timeout=patience
        )
    except (WorkerError, LaunchTimeout) as failed:
        if isinstance(failed.report, Report):
            return TrialOutcome(clock.elapsed(), reports=(failed.report,))
        return TrialOutcome(clock.elapsed(), problem=str(failed), code="cause-unknown")
    except RallypointError as problem:
        return TrialOutcome(
            clock.elapsed(),
            problem=problem.headline,
            code=problem.code,
            why=problem.why,
            help=problem.help,
        )
    return TrialOutcome(clock.elapsed(), tuple(measured))
