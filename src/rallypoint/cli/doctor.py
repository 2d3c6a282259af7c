"""`rallypoint doctor`: check this machine, and the way to others."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rallypoint.cli import args
from rallypoint.cli.args import CommandLine
from rallypoint.cli.commands import DOCTOR
from rallypoint.cli.output import wants_color, width, write_out
from rallypoint.errors import EnvironmentProblem, UsageError
from rallypoint.launcher import exits

if TYPE_CHECKING:
    from rallypoint.diagnosis.doctor.finding import Finding
    from rallypoint.diagnosis.doctor.trial_job import Backend, TrialOutcome

_CLEAR_LINE = "\r\x1b[K"


def main(argv: list[str]) -> int:
    """`rallypoint doctor` with its arguments; the exit status: 0, or 1 when there is a fault."""

    def act(line: CommandLine) -> int:
        values = args.values(line, DOCTOR)
        listen, peers, port_range = values["listen"], values["peer"], values["port_range"]
        if listen is not None or peers:
            _refuse_both(listen is not None and bool(peers), bool(values["only"] or values["skip"]))
        elif port_range is not None:
            raise UsageError(
                "usage",
                "--port-range is for --listen and --peer: the checks of this machine look at the kernel's range",
                help=(
                    (
                        "on this machine",
                        f"rallypoint doctor --listen 0 --port-range {port_range[0]}-{port_range[1]}",
                    ),
                ),
            )
        _prepare()
        screen = _DoctorScreen(values["error_format"])
        if listen is not None:
            return listen_for_peers(listen, port_range, screen)
        if peers:
            return check_peers(peers, port_range, screen)
        return examine(_names(values["only"], values["skip"]), screen)

    return args.invoke(DOCTOR, argv, act)


def examine(names: tuple[str, ...], screen: _DoctorScreen) -> int:
    """Check this machine; the exit status."""
    from rallypoint.diagnosis.doctor import doctor
    from rallypoint.launcher.plan import OLDEST_TORCH

    for finding in doctor.run(doctor.standard(OLDEST_TORCH, trial), names, screen.starting):
        screen.show(finding)
    return screen.end()


def check_peers(
    peers: Iterable[tuple[str, int]], port_range: tuple[int, int] | None, screen: _DoctorScreen
) -> int:
    """Check the way to each of these machines and back; the exit status."""
    from rallypoint.diagnosis.doctor import peer_check

    for host, port in peers:
        screen.starting(f"{host}:{port}")
        for finding in peer_check.run_client(host, port, port_range):
            screen.show(finding)
    return screen.end()


def listen_for_peers(port: int, port_range: tuple[int, int] | None, screen: _DoctorScreen) -> int:
    """Let other machines check the way to here and back, until none comes any more; the exit
    status.
    """
    from rallypoint.diagnosis.doctor import peer_check

    try:
        for finding in peer_check.run_server(port, port_range):
            screen.show(finding)
    except (
        UsageError,
        EnvironmentProblem,
    ) as refused:  # its help speaks of other commands' options
        help = (("take any free port", "rallypoint doctor --listen 0"),)
        if port_range is not None and refused.code != "ports-exhausted":
            help = (
                (
                    "take any free port of the range",
                    f"{help[0][1]} --port-range {port_range[0]}-{port_range[1]}",
                ),
            )
        raise type(refused)(refused.code, refused.headline, why=refused.why, help=help) from refused
    return screen.end()


def _prepare() -> None:
    """A descriptor that was closed when we started must not become a pipe of ours."""
    from rallypoint.host import processes

    processes.open_standard_descriptors()


def _refuse_both(roles: bool, selected: bool) -> None:
    """`UsageError` for what does not go together."""
    if roles:
        raise UsageError(
            "usage",
            "--listen and --peer exclude each other: one machine listens, and the other calls",
            help=(
                ("on this machine", "rallypoint doctor --listen 29500"),
                ("on the other", "rallypoint doctor --peer HOST:29500"),
            ),
        )
    if selected:
        raise UsageError(
            "usage",
            "--only and --skip choose among the checks of this machine, and --listen and --peer make none of these",
            help=(("leave them out", ""),),
        )


def _names(only: tuple[tuple[str, ...], ...], skip: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """The checks that were asked for, in their order. `UsageError` when none is left."""
    from rallypoint.diagnosis.doctor.doctor import NAMES

    chosen = {name for names in only for name in names} or set(NAMES)
    left = chosen - {name for names in skip for name in names}
    if not left:
        raise UsageError(
            "usage",
            "--only and --skip leave no check",
            help=(("see the checks", "rallypoint doctor --help"),),
        )
    return tuple(name for name in NAMES if name in left)


class _DoctorScreen:
    """Shows findings as they come, and counts them. On a terminal it says what is being
    waited for.
    """

    def __init__(self, error_format: str) -> None:
        self._json = error_format == "json"
        self._found: list[Finding] = []
        self._live = (
            not self._json and bool(sys.stdout) and sys.stdout.isatty() and wants_color(sys.stdout)
        )
        self._pending = False

    def starting(self, name: str) -> None:
        if self._live:
            write_out(f"{_CLEAR_LINE}     {name} ...")
            self._pending = True

    def show(self, finding: Finding) -> None:
        from rallypoint.diagnosis.doctor import doctor

        self._found.append(finding)
        if self._json:
            text = doctor.json(finding)
        else:
            text = (
                doctor.text(finding, width=width(sys.stdout), color=wants_color(sys.stdout))
                if sys.stdout
                else ""
            )
        write_out(f"{self._cleared()}{text}\n")

    def end(self) -> int:
        """The last line, and the exit status."""
        from rallypoint.diagnosis.doctor import doctor

        status = (
            exits.RAISED if any(finding.mark == "fault" for finding in self._found) else exits.OK
        )
        write_out(
            f"{self._cleared()}{doctor.json_summary(self._found, status) if self._json else doctor.summary(self._found)}\n"
        )
        return status

    def _cleared(self) -> str:
        pending, self._pending = self._pending, False
        return _CLEAR_LINE if pending else ""


def trial(backend: Backend, ranks: int, timeout: float) -> TrialOutcome:
    """Start the trial job as any user's `launch`, and say how it went."""
    from rallypoint.clock import Clock
    from rallypoint.diagnosis.doctor.trial_job import MEETING, TrialOutcome, measure
    from rallypoint.diagnosis.report import Report
    from rallypoint.errors import LaunchTimeout, RallypointError, WorkerError
    from rallypoint.launcher.launch.launch import launch

    clock = Clock()
    try:
        measured = launch(
            measure,
            nproc=ranks,
            backend=backend,
            timeout=timeout,
            backend_timeout=min(timeout, MEETING),
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
