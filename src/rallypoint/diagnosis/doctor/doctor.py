"""Run of the checks, each with a deadline.

A check runs in its own child: what hangs in the kernel (a dead network file system, a driver),
crashes, or leaves threads behind does so there, and becomes a line of the doctor. A child that does
not end when it is killed is left to the kernel.
"""

from __future__ import annotations

import os
import select
import signal
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from rallypoint.clock import Clock
from rallypoint.diagnosis import render
from rallypoint.diagnosis.doctor.finding import Finding, fault, note
from rallypoint.diagnosis.report import Help
from rallypoint.host import processes, system_calls

if TYPE_CHECKING:
    from rallypoint.diagnosis.doctor.trial_job import Trial

QUICK = 5.0
"""Seconds for a check that reads files of the kernel, or of Python: milliseconds, and a second or
two where a machine nearly stands still, or has its Python on a cold network file system."""

NETWORK = 8.0
"""Seconds for the checks that ask a resolver or a firewall's tool, which have deadlines of 3 s."""

STORAGE = 10.0
"""Seconds for writing to the folders: a network file system that wakes up takes one or two."""

DRIVER = 10.0
"""Seconds for the GPU's driver, whose own deadline is 5 s."""

JOB = 150.0
"""Seconds for the trial jobs: two, for gloo and NCCL, whose own deadlines are 60 s, and their
stop."""

KILLED = 1.0
"""Seconds in which a child that got SIGKILL has ended, unless the kernel holds it."""

LARGEST = 1 << 20
"""Bytes of a child's answer: a report with the last lines of two ranks has some ten thousand."""

_READ_BYTES = 1 << 16
_PLEASE_REPORT = ("please report it, with everything printed here", "")


class Check(NamedTuple):
    """One check: its names, its deadline in seconds, and the function that finds, which runs in a
    child."""

    names: tuple[str, ...]
    deadline: float
    find: Callable[[], Sequence[Finding]]
    needs: tuple[str, ...] = ()  # names of earlier checks without which it only waits


_TABLE: tuple[tuple[tuple[str, ...], float, str], ...] = (
    (("versions",), QUICK, "checks.versions"),
    (("processors",), QUICK, "checks.processors"),
    (("memory",), QUICK, "checks.memory"),
    (("shm",), QUICK, "storage_checks.shm"),
    (("limits",), QUICK, "checks.limits"),
    (("clock",), QUICK, "checks.clocks"),
    (("folders",), STORAGE, "storage_checks.folders"),
    (("loopback",), NETWORK, "network_checks.loopback"),
    (("ports",), QUICK, "network_checks.ports"),
    (("addresses", "names", "ipv6"), NETWORK, "network_checks.addresses"),
    (("firewall",), NETWORK, "network_checks.firewall"),
    (("devices",), DRIVER, "gpu_check.devices"),
    (("job",), JOB, "trial_job.job"),
)
"""Names, deadline and function of every check; those that need no deadline come first, the job
last."""

NAMES = tuple(name for names, _, _ in _TABLE for name in names)
"""Name of every line, in order."""


def standard(oldest_torch: tuple[int, int], trial: Trial) -> tuple[Check, ...]:
    """Return the checks of this machine. `oldest_torch`: what the launcher works with; `trial`:
    starts a job."""
    arguments = {"versions": (oldest_torch,), "job": (trial,)}
    needs = {"job": ("loopback",)}
    return tuple(
        Check(
            names,
            deadline,
            partial(_find, function, *arguments.get(names[0], ())),
            needs.get(names[0], ()),
        )
        for names, deadline, function in _TABLE
    )


def _find(path: str, *arguments: object) -> Sequence[Finding]:
    """Import the module of a check in the child: the first line must not wait for what the last one
    needs."""
    found: Sequence[Finding] = resolve_name(f"rallypoint.diagnosis.doctor.{path}")(*arguments)
    return found


def run(
    checks: Sequence[Check],
    wanted: Collection[str] = NAMES,
    starting: Callable[[str], None] = lambda name: None,
) -> Iterator[Finding]:
    """Yield the findings for the names that are `wanted`, as they come, each with its `check`; at
    least one for each.

    `starting` is called with the first name of a check before it runs. A check that does not answer
    within its deadline, crashes or raises is a finding, too; one that needs what an earlier one has
    found broken is left out, and says so. The caller must have one thread.
    """
    broken: dict[str, Finding] = {}
    for check in checks:
        names = [name for name in check.names if name in wanted]
        if not names:
            continue
        starting(names[0])
        cause = next((broken[name] for name in check.needs if name in broken), None)
        if cause is None:
            found = _carry_out(check)
        else:
            found = [note(cause.code, f"left out: it needs what {cause.check} has found broken")]
        for finding in found:
            if not finding.check:
                finding = msgspec.structs.replace(finding, check=names[0])
            if finding.mark == "fault":
                broken.setdefault(finding.check, finding)
            if finding.check in names:
                yield finding


def _carry_out(check: Check) -> list[Finding]:
    clock = Clock()
    reader, writer = os.pipe2(os.O_CLOEXEC)
    parent = os.getpid()
    try:
        pid = processes.in_child(lambda: _in_child(check, parent, writer))
    except OSError as error:
        os.close(reader)
        problem = f"no process can be started for this check: {os.strerror(error.errno or 0)}"
        return [fault("limit-low", problem, ("raise the limit", "ulimit -u unlimited"))]
    finally:
        os.close(writer)
    try:
        answer = _read_answer(reader, check.deadline, clock)
    finally:
        os.close(reader)
        status = _end(pid)
    if answer is not None:
        return msgspec.json.decode(answer, type=list[Finding])
    if clock.elapsed() >= check.deadline:
        held = "the process that looked cannot be killed: the kernel holds it, mostly for a disk, a file server or a driver"
        return [
            fault(
                "check-overrun",
                f"no answer within {check.deadline:g} s",
                ("do by hand what this check does: its page says what that is", ""),
                why=(held,) if status is None else (),
            )
        ]
    died = "an exit without an answer"
    if status is not None and status[1]:
        died = f"signal {status[1]}"
    return [fault("internal-error", f"the check was ended by {died}", _PLEASE_REPORT)]


def _in_child(check: Check, parent: int, writer: int) -> None:
    """Find, and write the findings as one line. The processes that the check starts are in the
    child's group, and end with it."""
    processes.die_with(parent)
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # if it hangs, it must not keep open what others read ours from
        os.dup2(null, number)
    try:
        found = check.find()
    except Exception as error:
        trace = tuple("".join(traceback.format_exception(error)).splitlines())
        problem = f"the check failed: {type(error).__name__}: {error}"
        found = [fault("internal-error", problem, _PLEASE_REPORT, why=trace)]
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(msgspec.json.encode([cleaned(finding) for finding in found]) + b"\n")


def _read_answer(reader: int, deadline: float, clock: Clock) -> bytes | None:
    """Read the child's line; None when it ended without one, or did not come in time."""
    data = b""
    while (left := deadline - clock.elapsed()) > 0 and len(data) <= LARGEST:
        if select.select([reader], [], [], left)[0]:
            chunk = os.read(reader, _READ_BYTES)
            data += chunk
            if data.endswith(b"\n"):
                return data
            if not chunk:
                return None
    return None


def _end(pid: int) -> tuple[int, int] | None:
    """Kill the child and its group, and reap it. Return its exit code and signal; None when the
    kernel does not let it go."""
    try:
        pidfd = system_calls.pidfd_open(pid)
        with suppress(PermissionError):
            processes.send_group(pid, signal.SIGKILL)
        return processes.reap(pid, pidfd, KILLED)
    except (ProcessLookupError, ChildProcessError):  # the kernel reaps where SIGCHLD is ignored
        return None


# --- for people
# --------------------------------------------------------------------------------------------------

_MARKS = {
    "ok": ("[ok]", "\x1b[32m"),
    "unknown": ("[?] ", "\x1b[36m"),
    "note": ("[!] ", "\x1b[33m"),
    "fault": ("[x] ", "\x1b[1;31m"),
}
_NAME = max(map(len, NAMES)) + 2  # columns
_BESIDE = len("[ok] ")
_INDENT = _BESIDE + _NAME


def cleaned(finding: Finding) -> Finding:
    """Return the finding with every text in it made safe to print, and to write as JSON."""
    return msgspec.structs.replace(
        finding,
        fact=render.plain(finding.fact),
        why=tuple(map(render.plain, finding.why)),
        help=tuple(
            Help(render.plain(one.sentence), render.plain(one.command)) for one in finding.help
        ),
        reports=tuple(map(render.cleaned, finding.reports)),
    )


def text(finding: Finding, *, width: int = 92, color: bool = False) -> str:
    """Return the finding as lines: mark, name and fact; below a note or fault what shows it, what
    to do, and which page explains it."""
    finding = cleaned(finding)  # it may quote another machine
    mark, paint = _MARKS[finding.mark]
    name = f"{paint}{mark}\x1b[0m " if color else f"{mark} "
    lines = _lines(finding.fact, width, _INDENT, name + f"{finding.check:<{_NAME}}")
    if finding.reports:  # they say it all
        block = render.text(finding.reports, width=max(width - _BESIDE, 40), color=color)
        return "\n".join([*lines, "", textwrap.indent(block, " " * _BESIDE), ""])
    blank = " " * _INDENT
    for line in finding.why:
        lines += _lines(line, width, _INDENT + 2, f"{blank}- ")
    for help in finding.help:
        colon = ":" if help.command else ""
        lines += _lines(f"{help.sentence}{colon}", width, _INDENT + 7, f"{blank}help   ")
        lines += [f"{blank}           {help.command}"] if help.command else []
    if finding.code:
        lines.append(f"{blank}more   rallypoint explain {finding.code}")
    return "\n".join(lines)


def _lines(words: str, width: int, indent: int, head: str) -> list[str]:
    """Wrap words behind a head, the further lines indented."""
    first, *rest = render.wrapped(words, max(width - indent, 40))
    return [head + first, *(" " * indent + line for line in rest)]


def json(finding: Finding) -> str:
    """Return the finding as one JSON object on one line."""
    return msgspec.json.encode(
        {"check": finding.check, **msgspec.structs.asdict(cleaned(finding))}
    ).decode()


def json_summary(findings: Sequence[Finding], status: int) -> str:
    """Return the last line: `exit_status`, and how many findings of each kind there were."""
    return msgspec.json.encode({"exit_status": status, "findings": _counts(findings)}).decode()


def summary(findings: Sequence[Finding]) -> str:
    """Count the findings of each kind: `2 faults, 1 note, 12 ok`."""
    found = _counts(findings)
    words = (
        ("fault", f"fault{'s' * (found['fault'] != 1)}"),
        ("note", f"note{'s' * (found['note'] != 1)}"),
        ("ok", "ok"),
        ("unknown", "not known"),
    )
    return ", ".join(f"{found[mark]} {word}" for mark, word in words if found[mark])


def _counts(findings: Sequence[Finding]) -> dict[str, int]:
    return {mark: sum(finding.mark == mark for finding in findings) for mark in _MARKS}
