"""One call of `launch` on the caller's side: what the ranks print is shown, and the outcome is a
list or an exception."""

from __future__ import annotations

import codecs
import contextlib
import math
import os
import select
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TextIO

from rallypoint.clock import Clock
from rallypoint.diagnosis import evidence
from rallypoint.diagnosis.report import Help, Report
from rallypoint.errors import (
    Advice,
    EnvironmentProblem,
    InternalError,
    LaunchTimeout,
    RallypointError,
    RankExited,
    RankKilled,
    RemoteError,
    UsageError,
    WorkerError,
)
from rallypoint.host import memory_files, signals
from rallypoint.host.fd_passing import OwnedFds
from rallypoint.launcher import protocol
from rallypoint.launcher.launch import agent_pool, notebook_cells
from rallypoint.launcher.launch.marshalling import payload
from rallypoint.launcher.protocol import Call, Finished, Interrupt, Outcome, Restarted, Verdict
from rallypoint.world import ranks_phrase

READ_BYTES = 1 << 16

ANSWER_PATIENCE = 20.0
"""Seconds after `timeout` in which the agent ends the call: 1 for ranks that heed no SIGTERM, 5 for
one that the kernel does not let end (state D), 5 for their output, and as much again for a busy
machine."""

STOPPED_INTERVAL = 2.0
"""Seconds without a message after which the agent is looked at: it may be stopped (SIGSTOP)."""

Outcomes = dict[int, tuple[Outcome, OwnedFds]]


class CallEnd(NamedTuple):
    """End of a call."""

    verdict: Verdict
    outcomes: Outcomes  # what each rank returned or raised
    interrupted: bool  # Ctrl-C came


class LaunchCall:
    """One call, from the request to the agent until its verdict."""

    def __init__(self, agent: agent_pool.PooledAgent) -> None:
        self._agent = agent
        self._outcomes: Outcomes = {}
        self._clock = Clock()
        self._verdict: Verdict | None = None
        self._readers: dict[int, _StreamCopy] = {}
        self._pipes: list[OwnedFds] = []
        self._received = OwnedFds()
        self._interrupts = 0
        self._receiving = False
        self._is_silent = False
        self._memory = evidence.memory_counters()

    def run(self, request: Call, payload_fds: Sequence[int]) -> CallEnd:
        """Have the agent carry the request out. The agent is released for the next call, or
        discarded."""
        done = False
        try:
            self._start(request, payload_fds)
            verdict = self._follow(
                math.inf if request.timeout is None else request.asked + request.timeout
            )
            done = verdict.usable
        except (BrokenPipeError, ConnectionResetError):
            if self._agent.usable:  # it was a stream of this program's own
                raise
            raise self._died(begun=self._interrupts > 0) from None
        finally:
            # Also after an exception of a signal handler or of a stream.
            for pipe in self._pipes:
                pipe.close()
            self._received.close()
            if done:
                agent_pool.release(self._agent)
            else:
                self._agent.discard(0.0 if self._is_silent else None)
        return CallEnd(verdict, self._outcomes, self._interrupts > 0)

    def _start(self, request: Call, payload_fds: Sequence[int]) -> None:
        theirs = OwnedFds()
        with theirs:
            for copy in (
                _StreamCopy(lambda: sys.stdout, str),
                _StreamCopy(lambda: sys.stderr, notebook_cells.named),
            ):
                pipe = OwnedFds(os.pipe2(os.O_CLOEXEC))
                self._readers[pipe.fds[0]] = copy
                theirs.add(pipe.fds.pop())
                self._pipes.append(pipe)
            protocol.send(self._agent.line, request, [*theirs.fds, *payload_fds])

    def _follow(self, deadline: float) -> Verdict:
        poll = select.poll()
        for fd in (self._agent.line.fileno(), *self._readers, *self._agent.ends):
            poll.register(fd, select.POLLIN)
        until = deadline + ANSWER_PATIENCE
        while True:
            try:
                while self._verdict is None:
                    self._wait(poll, until)
                # All output was written before the verdict. The pipes' end may not come: a child
                # that this program forked meanwhile has them, too.
                while any([self._read(fd, poll) for fd, _ in poll.poll(0) if fd in self._readers]):
                    continue
                for copy in self._readers.values():
                    copy.end()
                return self._verdict
            except KeyboardInterrupt:
                self._interrupts += 1
                # Interrupted in a message, which is lost: this call cannot go on.
                if self._interrupts > 2 or self._receiving:
                    raise
                with contextlib.suppress(OSError):  # it is about to tell how it ended
                    protocol.send(self._agent.line, Interrupt("SIGINT"))

    def _wait(self, poll: select.poll, until: float) -> None:
        waits = until - self._clock.monotonic()
        ready = poll.poll(max(0.0, min(waits, STOPPED_INTERVAL)) * 1000 + 1)
        if not ready:
            self._agent.continue_if_stopped()
        for fd, _ in ready:
            if fd == self._agent.line.fileno():
                self._receiving = True
                self._receive()
                self._receiving = False
            elif fd in self._readers:
                self._read(fd, poll)
            elif self._verdict is None and self._agent.line.fileno() not in {
                other for other, _ in poll.poll(0)
            }:
                # The agent has ended; what it said before comes first.
                raise self._died()
        if not ready and waits <= 0:
            self._verdict, self._is_silent = _silent(self._agent), True

    def _read(self, fd: int, poll: select.poll) -> bool:
        """Copy the output in a pipe; return False at its end."""
        if data := os.read(fd, READ_BYTES):
            self._readers[fd].write(data)
        else:
            poll.unregister(fd)
        return bool(data)

    def _receive(self) -> None:
        # ConnectionResetError when the agent has ended and not read what it was sent last
        self._agent.line.recv(1, socket.MSG_PEEK)
        message, self._received.fds = protocol.receive(self._agent.line)
        match message:
            case Outcome(rank=rank):
                self._outcomes[rank] = message, self._received
            case Restarted():
                self._outcomes.clear()
            case Finished():
                text = memory_files.taken(self._received.fds.pop())
                self._verdict = protocol.from_exact(
                    notebook_cells.named(text.decode()).encode(), Verdict
                )
            case None:
                raise self._died()
        self._received = OwnedFds()

    def _died(self, *, begun: bool = True) -> EnvironmentProblem:
        """Make the error for an agent that ended. `begun`: False when it has not read the call."""
        why = (
            "its ranks were stopped by its guard" if begun else "no rank was started",
            "what it said last, if anything, is on this program's own stderr",
        )
        start = f"{sys.executable} -c 'import rallypoint.launcher.launch.standby'"
        help: Advice = () if begun else (("try its start alone", start),)
        seen = evidence.difference(self._memory, evidence.memory_counters())
        if seen.oom_kills:
            from rallypoint.units import size

            killed = "a process" if seen.oom_kills == 1 else f"{seen.oom_kills} processes"
            limit = f", which may use {size(seen.limit)}" if seen.limit else ""
            why = (
                f"during the call the kernel killed {killed} of this control group{limit}, for lack of memory",
                why[0],
            )
            more = "give it more memory: a process that has imported torch holds a few hundred MiB"
            help = ((more, "docker run --memory=64g ..."),)
        return EnvironmentProblem(
            "launcher-died" if begun else "start-failed",
            f"rallypoint's agent (pid {self._agent.pid}) ended {'in the middle of' if begun else 'before it began'} the call",
            why=why,
            help=help,
        )


class _StreamCopy:
    """Copy of a pipe's output, as text, to a stream of this process. `sys.stdout` is looked up for
    each piece: a notebook and pytest put their own there."""

    def __init__(self, stream: Callable[[], TextIO | None], change: Callable[[str], str]) -> None:
        """`change`: applied to each piece of text."""
        self._change = change
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def write(self, data: bytes) -> None:
        """Copy bytes as they come."""
        self._write(self._change(self._decode(data)))

    def end(self) -> None:
        """Copy the rest of a character that was cut off."""
        self._write(self._decode(b"", True))

    def _write(self, text: str) -> None:
        stream = self._stream()
        if stream is not None and text:
            try:
                stream.write(text)
            except UnicodeEncodeError:
                # A rank's text may be beyond this program's encoding: no reason to fail.
                encoding = stream.encoding or "ascii"
                stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()


def _silent(agent: agent_pool.PooledAgent) -> Verdict:
    report = Report(
        code="launch-timeout",
        headline=f"the time for the call is over, and rallypoint's agent (pid {agent.pid}) does not answer",
        why="it was stopped, or this machine has no time for it; it was killed, and its ranks by its guard",
    )
    return Verdict(1, True, (report,), "", (), "", usable=False)


# --- the outcome ---


def results_of(end: CallEnd) -> list[Any] | BaseException:
    """Return the results, or the exception that `launch` itself raises, with no frame below."""
    verdict, outcomes, interrupted = end
    if interrupted:
        for _, held in outcomes.values():
            held.close()
        if verdict.text:
            print(verdict.text, file=sys.stderr, flush=True)
        return KeyboardInterrupt()
    values, errors, unread = _unpacked(outcomes)
    every = range(verdict.first, verdict.first + verdict.size)
    result: list[Any] | BaseException
    if verdict.overdue:
        report = next(report for report in verdict.reports if report.code == "launch-timeout")
        result = LaunchTimeout(
            report.code, report.headline, results=values, report=report, text=verdict.text.strip()
        )
    elif verdict.status:
        result = _failure(verdict, values, errors)
    elif unread:
        return next(iter(unread.values()))
    elif left := [rank for rank in every if rank not in values]:
        result = _failure(_left(verdict, left), values, errors)
    else:
        return [values[rank] for rank in every]
    for rank, problem in unread.items():
        result.add_note(f"  then   the result of rank {rank} is left out: {problem}")
    return result


def _unpacked(
    outcomes: Outcomes,
) -> tuple[dict[int, Any], dict[int, BaseException], dict[int, Exception]]:
    """Unpack results, exceptions, and why a result cannot be read here; each by rank. Empties
    `outcomes`."""
    values: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    unread: dict[int, Exception] = {}
    for rank in sorted(outcomes):
        outcome, held = outcomes.pop(rank)
        if outcome.problem:
            unread[rank] = UsageError(
                "result-unsupported",
                f"what rank {rank} {'returned' if outcome.kind == 'value' else 'raised'} stays on its node: {outcome.problem}",
                help=(("write it to a file on a shared disk, and return the path", ""),),
            )
            continue
        if outcome.kind == "error":
            errors[rank] = payload.unpack_error(held.give())
            continue
        try:
            values[rank] = payload.unpack_result(held.give())
        except Exception as problem:
            problem.add_note(f"rallypoint: it is what rank {rank} returned")
            unread[rank] = problem
    return values, errors, unread


def _left(verdict: Verdict, ranks: list[int]) -> Verdict:
    """Return the verdict on ranks that ended well and have neither returned nor raised."""
    from rallypoint.diagnosis import render

    its = "its" if len(ranks) == 1 else "their"
    report = Report(
        code="rank-exited",
        headline=f"{ranks_phrase(ranks)} exited with code 0 before {its} function returned",
        why="os._exit, exec or native code ended the process",
        help=(
            Help("return from the function, or leave it by sys.exit(0): the result is None", ""),
        ),
        ranks=tuple(ranks),
    )
    ends, first = verdict.ends, verdict.first
    return Verdict(1, False, (report,), render.text(report), ends, "", first=first)


def _failure(
    verdict: Verdict, values: dict[int, Any], errors: dict[int, BaseException]
) -> WorkerError | RallypointError:
    ranks = tuple(dict.fromkeys(rank for report in verdict.reports for rank in report.ranks))
    if not ranks:
        return _not_ranks(verdict)
    return WorkerError(
        verdict.reports[0].headline,
        [_member(rank, verdict, values, errors.get(rank)) for rank in ranks],
        ranks=ranks,
        results=values,
        report=verdict.reports[0],
        text=verdict.text.strip(),
    )


def _member(
    rank: int, verdict: Verdict, values: dict[int, Any], error: BaseException | None
) -> Exception:
    """Return a rank's own exception, or one of ours for a rank that had none."""
    if isinstance(error, Exception):
        return error
    if error is not None:  # a group of exceptions takes no KeyboardInterrupt
        other = RemoteError(type(error).__name__, str(error))
        other.__cause__ = error.__cause__
        return other
    report = next(report for report in verdict.reports if rank in report.ranks)
    place = rank - verdict.first
    ended = verdict.ends[place] if 0 <= place < len(verdict.ends) else None
    code, number = ended or (0, 0)
    # The headline of such a report says the same.
    plain = report.code in ("rank-killed", "rank-exited") and len(report.ranks) == 1
    why = tuple(line for line in (report.why if plain else report.headline,) if line)
    if number:
        return RankKilled(
            report.code,
            f"rank {rank} was ended by {signals.name(number)}",
            rank=rank,
            signal=number,
            why=why,
        )
    left = f"left with exit code {code}" if ended else "did not return"
    did = "returned" if rank in values else left
    return RankExited(report.code, f"rank {rank} {did}", rank=rank, exit_code=code, why=why)


def _not_ranks(verdict: Verdict) -> RallypointError:
    """Make the error for a call that failed with no rank at fault."""
    report: Report | None = verdict.reports[0] if verdict.reports else None
    if report is None:
        return InternalError(
            "internal-error", f"the call ended with status {verdict.status} and without a report"
        )
    kind = (
        UsageError
        if verdict.status == 2
        else InternalError
        if verdict.status == 70
        else EnvironmentProblem
    )
    # Lines of a preload module that failed.
    said = ("\n         | ".join((f"{one.who} said:", *one.lines)) for one in report.said)
    why = tuple(line for line in (report.why, *report.evidence, *said) if line)
    return kind(
        report.code,
        report.headline,
        why=why,
        help=tuple((help.sentence, help.command) for help in report.help),
    )
