"""Run the checks, each with a deadline.

A check runs in a child of its own: what hangs in the kernel (a dead network file system, a driver), crashes, or leaves threads behind
does so there, and becomes a line of the doctor's. A child that does not end when it is killed is left to the kernel.
"""

from __future__ import annotations

import os
import select
import signal
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from rallypoint.clock import Clock
from rallypoint.diagnosis import render
from rallypoint.diagnosis.checks.finding import Finding, fault, note, size
from rallypoint.diagnosis.report import Help
from rallypoint.host import processes, system_calls

if TYPE_CHECKING:
    from rallypoint.diagnosis.checks.trial import Trial

QUICK = 5.0
"""Seconds for a check that reads files of the kernel's, or of Python's: milliseconds, and a second or two where a machine nearly stands
still, or has its Python on a network file system that nobody has read yet."""

NETWORK = 8.0
"""Seconds for the checks that ask a resolver or a firewall's tool: these have deadlines of 3 s of their own, which say more than ours."""

STORAGE = 10.0
"""Seconds for writing to the folders: a network file system that wakes up takes one or two, a dead one for ever."""

DRIVER = 10.0
"""Seconds for the GPU's driver: its own deadline is 5 s, and says more than ours."""

JOB = 150.0
"""Seconds for the trial jobs: two, for gloo and NCCL, whose own deadlines are 60 s each, and the time to stop them."""

KILLED = 1.0
"""Seconds in which a child that got SIGKILL is gone, unless the kernel holds it."""

LARGEST = 1 << 20
"""Bytes of a child's answer: a report with the last words of two ranks has some ten thousand."""

_READ_BYTES = 1 << 16


class Check(NamedTuple):
    """One check: the lines that it has, its deadline in seconds, and what finds them, which runs in a child."""

    names: tuple[str, ...]
    deadline: float
    find: Callable[[], Sequence[Finding]]
    needs: tuple[str, ...] = ()  # names of earlier checks without which this one only waits for its deadline


NAMES = (
    "versions", "processors", "memory", "shm", "limits", "clock", "folders", "loopback", "ports", "addresses", "names", "ipv6", "firewall",
    "devices", "job",
)  # fmt: skip
"""Every line, in the order in which they come: what needs no deadline first, the job last."""


def standard(oldest_torch: tuple[int, int], trial: Trial) -> tuple[Check, ...]:
    """The checks of this machine. `oldest_torch`: what the launcher works with; `trial`: starts a job."""
    return (
        Check(("versions",), QUICK, lambda: _module("versions").check(oldest_torch)),
        Check(("processors",), QUICK, lambda: _module("processors").check()),
        Check(("memory",), QUICK, lambda: _module("memory").check()),
        Check(("shm",), QUICK, lambda: _module("shm").check()),
        Check(("limits",), QUICK, lambda: _module("limits").check()),
        Check(("clock",), QUICK, lambda: _module("clock").check()),
        Check(("folders",), STORAGE, lambda: _module("folders").check()),
        Check(("loopback",), NETWORK, lambda: _module("loopback").check()),
        Check(("ports",), QUICK, lambda: _module("ports").check()),
        Check(("addresses", "names", "ipv6"), NETWORK, lambda: _module("addresses").check()),
        Check(("firewall",), NETWORK, lambda: _module("firewall").check()),
        Check(("devices",), DRIVER, lambda: _module("devices").check()),
        Check(("job",), JOB, lambda: _job(trial), needs=("loopback",)),
    )


def _module(name: str) -> ModuleType:
    """Imported in the child: the first line must not wait for what the last one needs."""
    return import_module(f"rallypoint.diagnosis.checks.{name}")


def _job(trial: Trial) -> tuple[Finding, ...]:
    from rallypoint.diagnosis.checks import trial as job
    from rallypoint.host import devices

    def gpus() -> int:
        found = devices.find(os.environ, devices.look_closely())
        return 0 if devices.missing(found) else len(found.visible)

    return job.check(trial, devices.torch_build() is not None, gpus)


def run(checks: Sequence[Check], wanted: Collection[str] = NAMES, starting: Callable[[str], None] = lambda name: None) -> Iterator[Finding]:
    """The findings for the names that are `wanted`, as they come, each with its `check`; at least one for each.

    `starting` is called with the first name of a check before it runs. A check that does not answer within its deadline, crashes or raises
    is a finding, too; one that needs what an earlier one has found broken is left out, and says so. The caller must have one thread.
    """
    broken: dict[str, Finding] = {}
    for check in checks:
        names = [name for name in check.names if name in wanted]
        if not names:
            continue
        starting(names[0])
        without = next((broken[name] for name in check.needs if name in broken), None)
        for finding in _carry_out(check) if without is None else [_left_out(without)]:
            if not finding.check:
                finding = msgspec.structs.replace(finding, check=names[0])
            if finding.mark == "fault":
                broken.setdefault(finding.check, finding)
            if finding.check in names:
                yield finding


def _carry_out(check: Check) -> list[Finding]:
    from rallypoint.diagnosis import evidence  # here: whoever only prints findings needs none of it

    clock, memory = Clock(), evidence.memory_counters()
    reader, writer = os.pipe2(os.O_CLOEXEC)
    parent = os.getpid()
    try:
        pid = processes.in_child(lambda: _in_child(check, parent, writer))
    except OSError as error:
        os.close(reader)
        return [
            fault(
                "limit-low",
                f"no process can be started for this check: {os.strerror(error.errno or 0)}",
                ("raise the limit", "ulimit -u unlimited"),
            )
        ]
    finally:
        os.close(writer)
    try:
        answer = _answer(reader, check.deadline, clock)
    finally:
        os.close(reader)
        status = _end(pid)
    if answer is not None:
        return msgspec.json.decode(answer, type=list[Finding])
    if clock.elapsed() >= check.deadline:
        return [_overrun(check.deadline, status)]
    if status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        seen = evidence.difference(memory, evidence.memory_counters())
        if seen.oom_kills:
            return [_without_memory(seen.limit)]
    died = f"signal {os.WTERMSIG(status)}" if status is not None and os.WIFSIGNALED(status) else "an exit without an answer"
    return [fault("internal-error", f"the check was ended by {died}", ("please report it, with everything printed here", ""))]


def _in_child(check: Check, parent: int, writer: int) -> None:
    """Find, and write the findings as one line. What the check starts is in the child's group, and ends with it."""
    processes.die_with(parent)
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # if it hangs for ever, it must not keep open what others read the doctor's words from
        os.dup2(null, number)
    try:
        found = list(check.find())
    except Exception as error:
        found = [_raised(error)]
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(msgspec.json.encode([cleaned(finding) for finding in found]) + b"\n")


def _answer(reader: int, deadline: float, clock: Clock) -> bytes | None:
    """What the child wrote, None when it ended without, or not in time."""
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


def _end(pid: int) -> int | None:
    """Kill what is left of a child and its group, and reap it. Its status; None when the kernel does not let it go."""
    try:
        pidfd = system_calls.pidfd_open(pid)
    except ProcessLookupError:  # reaped by somebody else
        return None
    try:
        for kill in (os.killpg, os.kill):  # the group is there when the child has come that far
            try:
                kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        if not processes.wait_for_ends([pidfd], KILLED):
            return None
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return None
    finally:
        os.close(pidfd)


def _left_out(cause: Finding) -> Finding:
    return note(cause.code, f"left out: it needs what {cause.check} has found broken")


def _overrun(deadline: float, status: int | None) -> Finding:
    held = (
        ("the process that looked cannot be killed: the kernel holds it, mostly for a disk, a file server or a driver",)
        if status is None
        else ()
    )
    return fault(
        "check-overrun", f"no answer within {deadline:g} s", ("do by hand what this check does: its page says what that is", ""), why=held
    )


def _without_memory(limit: int) -> Finding:
    of = f", which may use {size(limit)}" if limit else ""
    return fault(
        "rank-out-of-memory",
        f"memory ran out: what looked was killed, and the kernel has killed in this control group{of}",
        ("give it more", "docker run --memory=64g ..."),
        why=("its oom_kill count went up meanwhile",),
    )


def _raised(error: Exception) -> Finding:
    import traceback

    return fault(
        "internal-error",
        f"the check failed: {type(error).__name__}: {error}",
        ("please report it, with everything printed here", ""),
        why=tuple("".join(traceback.format_exception(error)).splitlines()),
    )


# --- for people ------------------------------------------------------------------------------------------------------

_MARKS = {"ok": ("[ok]", "\x1b[32m"), "unknown": ("[?] ", "\x1b[36m"), "note": ("[!] ", "\x1b[33m"), "fault": ("[x] ", "\x1b[1;31m")}
_OFF = "\x1b[0m"
_NAME = max(map(len, NAMES)) + 2  # columns
_BESIDE = len("[ok] ")
_INDENT = _BESIDE + _NAME


def cleaned(finding: Finding) -> Finding:
    """The finding with every text in it made safe to print, and to write as JSON."""
    return msgspec.structs.replace(
        finding,
        fact=render.plain(finding.fact),
        why=tuple(render.plain(line) for line in finding.why),
        help=tuple(Help(render.plain(help.sentence), render.plain(help.command)) for help in finding.help),
        reports=tuple(render.cleaned(report) for report in finding.reports),
    )


def text(finding: Finding, *, width: int = 92, color: bool = False) -> str:
    """The finding as lines: mark, name and fact; below a note or fault what shows it, what to do, and which page explains it."""
    finding = cleaned(finding)  # it may quote another machine
    mark, paint = _MARKS[finding.mark]
    head = f"{paint}{mark}{_OFF}" if color else mark
    first, *rest = _wrapped(finding.fact, width, _INDENT)
    lines = [f"{head} {finding.check:<{_NAME}}{first}", *(" " * _INDENT + line for line in rest)]
    if finding.reports:  # they say it all
        block = render.text(finding.reports, width=max(width - _BESIDE, 40), color=color)
        return "\n".join([*lines, "", textwrap.indent(block, " " * _BESIDE), ""])
    for line in finding.why:
        begin, *others = _wrapped(line, width, _INDENT + 2)
        lines += [f"{'':{_INDENT}}- {begin}", *(" " * (_INDENT + 2) + other for other in others)]
    for help in finding.help:
        begin, *others = _wrapped(f"{help.sentence}:" if help.command else help.sentence, width, _INDENT + 7)
        lines += [f"{'':{_INDENT}}help   {begin}", *(" " * (_INDENT + 7) + other for other in others)]
        if help.command:
            lines.append(" " * (_INDENT + 11) + help.command)
    if finding.code:
        lines.append(f"{'':{_INDENT}}more   rallypoint explain {finding.code}")
    return "\n".join(lines)


def _wrapped(words: str, width: int, indent: int) -> list[str]:
    return render.wrapped(words, max(width - indent, 40))


def json(finding: Finding) -> str:
    """The finding as one JSON object on one line."""
    return msgspec.json.encode({"check": finding.check, **msgspec.structs.asdict(cleaned(finding))}).decode()


def json_summary(findings: Sequence[Finding], status: int) -> str:
    """The last line: `exit_status`, and how many findings of each kind there were."""
    counts = {mark: sum(finding.mark == mark for finding in findings) for mark in _MARKS}
    return msgspec.json.encode({"exit_status": status, "findings": counts}).decode()


def summary(findings: Sequence[Finding]) -> str:
    """`2 faults, 1 note, 12 ok`: what there is of each."""
    counts = {mark: sum(finding.mark == mark for finding in findings) for mark in _MARKS}
    words = {
        "fault": "fault" + "s" * (counts["fault"] != 1),
        "note": "note" + "s" * (counts["note"] != 1),
        "ok": "ok",
        "unknown": "not known",
    }
    return ", ".join(f"{counts[mark]} {word}" for mark, word in words.items() if counts[mark])
