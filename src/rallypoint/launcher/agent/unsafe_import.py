"""Notice that a preload module has made the template unsafe to fork, with the line that did so."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rallypoint.host import processes, system_calls
from rallypoint.launcher import spawn
from rallypoint.launcher.program import Program

if TYPE_CHECKING:
    from rallypoint.launcher.agent.job import Job
    from rallypoint.launcher.protocol import Ready

# Seconds for the repeated import. Most of it is torch's; a module that then takes this long is
# reported without its line.
DEADLINE = 30.0


class LineSearch:
    """Throw-away interpreter that repeats imports (`template/unsafe_line.py`); `fileno()` becomes
    readable when it has an answer or has ended."""

    def __init__(
        self, modules: Sequence[str], program: Program, environment: Mapping[str, str]
    ) -> None:
        """Start it. `modules`: those that the template imported after torch, in its order; the last
        one is suspected.
        """
        self._reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_inheritable(writer, True)
        self.pid = spawn.spawn(
            [
                "-c",
                spawn.UNSAFE_LINE,
                str(writer),
                str(os.getpid()),
                program.kind,
                program.target,
                *modules,
            ],
            dict(environment),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)
            ],
        )
        self._pidfd = system_calls.pidfd_open(self.pid)
        os.close(writer)

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._reader

    def answer(self) -> str:
        """Return the line, `pkg/ops.py:12`, or "" when it is not known (by now). Does not wait."""
        if not select.select([self._reader], [], [], 0)[0]:
            return ""
        return os.read(self._reader, 4096).decode("utf-8", "replace")

    def end(self) -> None:
        """Kill the interpreter and close every descriptor. It is reaped with the agent's other
        children.
        """
        processes.send(self._pidfd, signal.SIGKILL)
        os.close(self._pidfd)
        os.close(self._reader)


class UnsafeImport:
    """Notice about a preload module that made the template unsafe. The job starts all the same; the
    notice waits for the line, at most until the job is over."""

    def __init__(self, job: Job, ready: Ready) -> None:
        self._job = job
        self._ready: Ready | None = ready  # None: it has been said
        self._search: LineSearch | None = None
        plan = job.plan
        if ready.module not in plan.preload:  # torch itself
            self.tell()
            return
        modules = plan.preload[: plan.preload.index(ready.module) + 1]
        environment = {
            **os.environ,
            **plan.environment,
            "OPENBLAS_NUM_THREADS": "1",
        }  # the template's
        self._search = LineSearch(modules, plan.program, environment)
        job.loop.watch(self._search.fileno(), self.tell)
        job.loop.at("unsafe import", job.loop.now + DEADLINE, lambda now: self.tell())

    @property
    def pid(self) -> int:
        """Process id of the throw-away interpreter, 0 when there is none (any more)."""
        return self._search.pid if self._search is not None else 0

    def tell(self) -> None:
        """Say, once, what made the template unsafe, with the line if it is known by now."""
        ready, search, self._ready, self._search = self._ready, self._search, None, None
        self._job.loop.cancel("unsafe import")
        line = ""
        if search is not None:
            line = search.answer()
            self._job.loop.unwatch(search.fileno())
            search.end()
        if ready is not None:
            self._job.console.say_unclean(ready, line)
