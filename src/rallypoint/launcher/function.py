"""launch(fn, ...): the same from Python; results by rank.

The caller's half: what crosses is checked and packed (`crossing.py`, `parcel.py`), a warm agent starts the ranks (`warm.py`,
`standby.py`), and this waits, shows what the ranks say, and turns the outcome into a list or an exception.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import linecache
import math
import os
import select
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any, Literal, NamedTuple, TextIO

from rallypoint.clock import Clock
from rallypoint.diagnosis.report import Report
from rallypoint.errors import (
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
from rallypoint.host import signals
from rallypoint.host.held import Held
from rallypoint.launcher import channel, warm, words
from rallypoint.launcher.channel import Call, Finished, Interrupt, Outcome, Restarted, Verdict
from rallypoint.launcher.crossing import inspection, parcel
from rallypoint.launcher.plan import LARGEST_LOCAL_SIZE, Task, threads_of_a_rank
from rallypoint.store.arguments import positive

BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl", "hccl", "fake", "auto")
"""What torch knows, and `auto`. A wrong name is said before anything starts; a pair such as "cpu:gloo,cuda:nccl" is taken as it is."""

READ_BYTES = 1 << 16

SOURCES_BYTES = 32 * 1024
"""Of cells that are sent along: a notebook's worth, and a part of what fits the packet."""

ANSWER_PATIENCE = 60.0
"""Seconds after `timeout` in which the agent has ended the call: 30 of them are the grace for ranks that do not heed the first signal."""


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nproc: int = 1,
    backend: str | None = None,
    pass_rank: bool = False,
    preload: Sequence[str] = (),
    timeout: float | timedelta | None = None,
    backend_timeout: float | timedelta | None = None,
    max_restarts: int = 0,
    on_failure: Literal["stop", "continue"] = "stop",
    env: Mapping[str, str | None] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` in `nproc` processes of this machine, and return what it returned in each, by rank.

    Every rank is forked from a process that has imported torch (and `preload`, module names) and nothing of the caller's: it works in
    a notebook, with threads, an event loop or CUDA in the caller, and without `if __name__ == "__main__"`. The function, its arguments
    and what it closes over are copied into each rank (cloudpickle); tensors in shared memory arrive as the same memory. In the ranks
    the environment is torchrun's (RANK, WORLD_SIZE, MASTER_ADDR, ...). With `backend` ("gloo", "nccl", "auto") the process group is
    open when the function starts, with this rank's device, and closed after it. `pass_rank=True` puts the rank in front of `args`.

    What the ranks print appears on `sys.stdout` and `sys.stderr`, with the rank in front when there are several. Results may be of any
    size; tensors come through shared memory, to the CPU.

    `timeout`: seconds for the whole call, None: none. `backend_timeout`: of the process group's operations. `max_restarts`: how often
    all ranks are started again after a failure; `on_failure="continue"`: let the other ranks finish when one fails. `env`: variables
    for the ranks, None removes one. `run_dir`: a folder for logs and report, kept; without it that of a failed call is kept among the
    user's runs.

    Raises WorkerError when ranks fail, LaunchTimeout after `timeout`, KeyboardInterrupt after Ctrl-C (the ranks were stopped, and
    where they were is on stderr); before anything starts UsageError for what cannot be called or cannot cross (`launch-argument`,
    `lock-in-wrong-scope`, `mp-object-in-launch`), and EnvironmentProblem when this machine cannot start it. After each of them no
    process of the call is left. May be called from any thread, and in a rank.
    """
    try:
        _refuse_recursion()
        wanted = _checked(nproc, backend, timeout, backend_timeout, max_restarts, on_failure, preload)
        called = inspection.bind(fn, args, kwargs, pass_rank=pass_rank)
        environment = _environment(env, nproc)
        packed = parcel.pack_call(fn, called.args, called.kwargs)
    except UsageError as problem:  # where it was noticed says nothing: the traceback ends here
        raise problem.with_traceback(None) from problem.__cause__
    with packed:
        folder, sources = _folder(), _sources(fn)
        run_dir = os.path.abspath(run_dir) if run_dir is not None else ""
        agent = warm.hire(tuple(preload), environment)
        call = Call(
            task=Task(
                name=called.name,
                line=words.line_of(words.user_frame(sys._getframe(1))),
                argv=tuple(sys.argv),
                parcel=len(packed.fds),
                folder=folder,
                paths=tuple(path for path in sys.path if isinstance(path, str)),
                without=tuple(name for name in agent.environment if name not in environment),
                pass_rank=pass_rank,
                backend=backend or "",
                backend_timeout=wanted.backend_timeout,
                sources=sources,
            ),
            nproc=nproc,
            environment={name: value for name, value in environment.items() if agent.environment.get(name) != value},
            max_restarts=max_restarts,
            on_failure=on_failure,
            timeout=wanted.timeout,
            run_dir=os.fspath(run_dir),
            columns=0,
            color=False,
        )
        verdict, outcomes, interrupted = _Conversation(agent).carry_out(call, packed.fds)
    results = _results(nproc, verdict, outcomes, interrupted)
    if isinstance(results, BaseException):
        try:
            raise results
        finally:
            del results  # it, and this frame in its traceback, would keep each other
    return results


def _sources(fn: Any) -> tuple[tuple[str, str], ...]:
    """The text of a notebook's cells and the like, which a rank's traceback quotes and cannot read: of the one that `fn` stands in,
    and of those of the functions beside it."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if not isinstance(fn, FunctionType):
        return ()
    found: dict[str, str] = {}
    room = SOURCES_BYTES
    for one in (fn, *list(fn.__globals__.values())):
        name = one.__code__.co_filename if isinstance(one, FunctionType) else ""
        if not name or name in found or name not in linecache.cache or os.path.exists(name):
            continue
        text = "".join(linecache.getlines(name))
        room -= len(text.encode("utf-8", "replace"))
        if text and room >= 0:
            found[name] = text
    return tuple(found.items())


def _folder() -> str:
    """Where this program stands, though somebody may have removed it."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return os.readlink("/proc/self/cwd")


def _refuse_recursion() -> None:
    """UsageError in a module that is imported by what this very call would start: multiprocessing's "bootstrapping phase"."""
    if warm.importing:
        raise UsageError(
            "usage",
            f"launch was called by an import of {warm.importing}: it would start itself again and again",
            help=(("let the program itself do it, and no import", 'if __name__ == "__main__":\n    rallypoint.launch(...)'),),
        )


class _Wanted(NamedTuple):
    timeout: float | None
    backend_timeout: float | None


def _checked(
    nproc: object, backend: object, timeout: Any, backend_timeout: Any, max_restarts: object, on_failure: object, preload: object
) -> _Wanted:
    """Raises UsageError, or TypeError, for what can be said without looking at the function."""
    for name, number, least in (("nproc", nproc, 1), ("max_restarts", max_restarts, 0)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name}={number!r}: a number of {'ranks' if least else 'restarts'} is an int")
        if number < least:
            help = (("start one or more", "rallypoint.launch(train, nproc=2)"),) if least else ()
            raise UsageError("usage", f"{name}={number}: at least {least}", help=help)
    if isinstance(nproc, int) and nproc > LARGEST_LOCAL_SIZE:
        raise UsageError("usage", f"nproc={nproc} is more than one machine can hold: at most {LARGEST_LOCAL_SIZE}")
    if backend is not None and (not isinstance(backend, str) or (":" not in backend and backend not in BACKENDS)):
        raise UsageError(
            "usage",
            f"backend={backend!r} is no backend of torch.distributed",
            help=(("take one of these, or leave it out", f"backend={' | '.join(map(repr, BACKENDS[:2]))} | 'auto'"),),
        )
    if on_failure not in ("stop", "continue"):
        raise UsageError("usage", f"on_failure={on_failure!r}: it is 'stop' or 'continue'")
    if isinstance(preload, str) or not all(isinstance(module, str) for module in preload):  # type: ignore[attr-defined]
        raise TypeError(f"preload={preload!r}: a list of module names")
    return _Wanted(_seconds("timeout", timeout), _seconds("backend_timeout", backend_timeout))


def _seconds(name: str, given: Any) -> float | None:
    return None if given is None else positive(name, given)


def _environment(env: Mapping[str, str | None] | None, nproc: int) -> dict[str, str]:
    """What the ranks have, beside what is each one's own."""
    environment = dict(os.environ)
    for name, value in (env or {}).items():
        if value is None:
            environment.pop(name, None)
        elif isinstance(value, str):
            environment[name] = value
        else:
            raise TypeError(f"env[{name!r}]={value!r}: a variable is text; None removes it")
    if nproc > 1:
        environment.setdefault("OMP_NUM_THREADS", str(threads_of_a_rank(len(os.sched_getaffinity(0)), nproc)))
    return environment


Outcomes = dict[int, tuple[Outcome, Held]]


class _Conversation:
    """One call, from when the agent gets it until it has told how it ended."""

    def __init__(self, agent: warm.Agent) -> None:
        self._agent = agent
        self._outcomes: Outcomes = {}
        self._clock = Clock()
        self._verdict: Verdict | None = None
        self._readers: dict[int, _Show] = {}
        self._pipes: list[Held] = []
        self._heard = Held()
        self._interrupts = 0
        self._hearing = False

    def carry_out(self, call: Call, parcel_fds: Sequence[int]) -> tuple[Verdict, Outcomes, bool]:
        """How it ended, what each rank returned or raised, and whether Ctrl-C came."""
        done = False
        try:
            self._start(call, parcel_fds)
            verdict = self._follow(call.timeout)
            done = verdict.usable
        except (BrokenPipeError, ConnectionResetError):
            if self._agent.usable:  # it was a stream of this program's own
                raise
            raise _agent_died(self._agent) from None
        finally:  # also after an exception of a signal handler's, or of a stream's: nobody waits any more
            for pipe in self._pipes:
                pipe.close()
            self._heard.close()
            if done:
                warm.keep(self._agent)
            else:
                self._agent.dismiss()
        return verdict, self._outcomes, self._interrupts > 0

    def _start(self, call: Call, parcel_fds: Sequence[int]) -> None:
        theirs = Held()
        with theirs:
            for show in (_Show(lambda: sys.stdout), _Show(lambda: sys.stderr)):
                pipe = Held(os.pipe2(os.O_CLOEXEC))
                self._readers[pipe.fds[0]] = show
                theirs.add(pipe.fds.pop())
                self._pipes.append(pipe)
            channel.send(self._agent.line, call, [*theirs.fds, *parcel_fds])

    def _follow(self, timeout: float | None) -> Verdict:
        poll = select.poll()
        for fd in (self._agent.line.fileno(), *self._readers):
            poll.register(fd, select.POLLIN)
        until = self._clock.monotonic() + timeout + ANSWER_PATIENCE if timeout is not None else math.inf
        while True:
            try:
                while self._verdict is None:
                    self._listen(poll, until)
                # The agent wrote all of it before. The pipes' end may not come: a child that was forked meanwhile has them, too.
                while any([self._read(fd, poll) for fd, _ in poll.poll(0) if fd in self._readers]):
                    continue
                for show in self._readers.values():
                    show.end()
                return self._verdict
            except KeyboardInterrupt:
                self._interrupts += 1
                if self._interrupts > 2 or self._hearing:  # what was being heard is lost: this conversation cannot go on
                    raise
                with contextlib.suppress(OSError):  # it is about to tell how it ended
                    channel.send(self._agent.line, Interrupt("SIGINT"))

    def _listen(self, poll: select.poll, until: float) -> None:
        waits = until - self._clock.monotonic()
        ready = poll.poll(None if waits == math.inf else max(0.0, waits) * 1000 + 1)
        for fd, _ in ready:
            if fd == self._agent.line.fileno():
                self._hearing = True
                self._hear()
                self._hearing = False
            else:
                self._read(fd, poll)
        if not ready and waits <= 0:
            self._verdict = _silent(self._agent)

    def _read(self, fd: int, poll: select.poll) -> bool:
        """Show what is there; False at the end."""
        if data := os.read(fd, READ_BYTES):
            self._readers[fd].show(data)
        else:
            poll.unregister(fd)
        return bool(data)

    def _hear(self) -> None:
        message, self._heard.fds = channel.receive(self._agent.line)
        match message:
            case Outcome(rank=rank):
                self._outcomes[rank] = message, self._heard
            case Restarted():
                self._outcomes.clear()
            case Finished():
                with os.fdopen(self._heard.fds.pop(), "rb") as file:
                    text = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
                self._verdict = channel.from_exact(text, Verdict)
            case None:
                raise _agent_died(self._agent)
        self._heard = Held()


class _Show:
    """What comes through a pipe, as text on one of this process's own streams: a notebook's cell, what pytest captures."""

    def __init__(self, stream: Callable[[], TextIO | None]) -> None:
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def show(self, data: bytes) -> None:
        self._write(self._decode(data))

    def end(self) -> None:
        self._write(self._decode(b"", True))

    def _write(self, text: str) -> None:
        stream = self._stream()
        if stream is not None and text:
            try:
                stream.write(text)
            except UnicodeEncodeError:  # what a rank says may be beyond this program's encoding, and is nothing to fail for
                encoding = stream.encoding or "ascii"
                stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()


def _agent_died(agent: warm.Agent) -> EnvironmentProblem:
    return EnvironmentProblem(
        "launcher-died",
        f"rallypoint's agent (pid {agent.pid}) ended in the middle of the call",
        why=("its ranks were stopped by its guard", "what it said last, if anything, is on this program's own stderr"),
    )


def _silent(agent: warm.Agent) -> Verdict:
    report = Report(
        code="launch-timeout",
        headline=f"the time for the call is over, and rallypoint's agent (pid {agent.pid}) does not answer",
        why="it was stopped, or this machine has no time for it; it was killed, and its ranks by its guard",
    )
    return Verdict(1, False, True, (report,), "", (), "", usable=False)


# --- the outcome ---


def _results(nproc: int, verdict: Verdict, outcomes: Outcomes, interrupted: bool) -> list[Any] | BaseException:
    """What is to be returned; or raised, by `launch` itself: a traceback of ours below it would say nothing."""
    if interrupted:
        for _, held in outcomes.values():
            held.close()
        if verdict.text:
            print(verdict.text, file=sys.stderr, flush=True)
        return KeyboardInterrupt()
    values, errors, unread = _unpacked(outcomes)
    result: list[Any] | BaseException
    if verdict.overdue:
        report = next(report for report in verdict.reports if report.code == "launch-timeout")
        result = LaunchTimeout(report.code, report.headline, results=values, report=report, text=verdict.text.strip())
    elif verdict.status:
        result = _failure(verdict, values, errors)
    elif unread:
        return next(iter(unread.values()))
    else:
        return [values.get(rank) for rank in range(nproc)]
    for rank, problem in unread.items():
        result.add_note(f"  then   the result of rank {rank} is left out: {problem}")
    return result


def _unpacked(outcomes: Outcomes) -> tuple[dict[int, Any], dict[int, BaseException], dict[int, Exception]]:
    """What ranks returned, what they raised, and why what they returned cannot be had here; each by rank. Empties `outcomes`."""
    values: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    unread: dict[int, Exception] = {}
    for rank in sorted(outcomes):
        outcome, held = outcomes.pop(rank)
        if outcome.kind == "error":
            errors[rank] = parcel.unpack_error(held.give())
            continue
        try:
            values[rank] = parcel.unpack_result(held.give())
        except Exception as problem:
            problem.add_note(f"rallypoint: it is what rank {rank} returned")
            unread[rank] = problem
    return values, errors, unread


def _failure(verdict: Verdict, values: dict[int, Any], errors: dict[int, BaseException]) -> WorkerError | RallypointError:
    ranks = tuple(dict.fromkeys(rank for report in verdict.reports for rank in report.ranks))
    members = [(rank, _member(rank, verdict, errors.get(rank))) for rank in ranks]
    if not members:
        return _not_ranks(verdict)
    return WorkerError(
        verdict.reports[0].headline,
        [member for _, member in members],
        ranks=tuple(rank for rank, _ in members),
        results=values,
        report=verdict.reports[0],
        text=verdict.text.strip(),
    )


def _member(rank: int, verdict: Verdict, error: BaseException | None) -> Exception:
    """A rank's own exception, or ours for one that had none."""
    if isinstance(error, Exception):
        return error
    if error is not None:  # a group of exceptions takes no KeyboardInterrupt
        other = RemoteError(type(error).__name__, str(error))
        other.__cause__ = error.__cause__
        return other
    report = next(report for report in verdict.reports if rank in report.ranks)
    code, number = (verdict.ends[rank] if rank < len(verdict.ends) else None) or (0, 0)
    plain = report.code in ("rank-killed", "rank-exited") and len(report.ranks) == 1  # whose headline says the same
    why = tuple(line for line in (report.why if plain else report.headline,) if line)
    if number:
        return RankKilled(report.code, f"rank {rank} was ended by {signals.name(number)}", rank=rank, signal=number, why=why)
    return RankExited(report.code, f"rank {rank} left with exit code {code}", rank=rank, exit_code=code, why=why)


def _not_ranks(verdict: Verdict) -> RallypointError:
    """No rank is at fault: nothing could be started, or something of ours was lost."""
    report: Report | None = verdict.reports[0] if verdict.reports else None
    if report is None:
        return InternalError("internal-error", f"the call ended with status {verdict.status} and without a report")
    kind = UsageError if verdict.status == 2 else InternalError if verdict.status == 70 else EnvironmentProblem
    why = tuple(line for line in (report.why, *report.evidence) if line)
    return kind(report.code, report.headline, why=why, help=tuple((help.sentence, help.command) for help in report.help))
