"""Processes that outlive a job: the guard and the template, which `launch` keeps warm from call to
call.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Mapping

from rallypoint.launcher import spawn
from rallypoint.launcher.agent import guard
from rallypoint.launcher.agent.guard import Guard
from rallypoint.launcher.agent.helper_handles import TemplateHandle
from rallypoint.launcher.plan import Plan
from rallypoint.launcher.program import Program
from rallypoint.launcher.protocol import (
    Exited,
    ImportFailed,
    Packet,
    Ready,
    Reap,
    Setup,
)


class HelperProcesses:
    """Guard and template of an agent, and what marks all processes beneath it. There is no template
    before `use`.
    """

    def __init__(self, guard: Guard, family: str) -> None:
        """`family` is the value of RALLYPOINT_FAMILY in all these processes."""
        self.guard = guard
        self.family = family
        self.template: TemplateHandle | None = None
        self.ready = False  # the template has imported everything
        self._files: tuple[tuple[str, int, int], ...] = ()

    @classmethod
    def start(cls, family: str) -> HelperProcesses:
        """Fork the guard. The caller must have one thread."""
        return cls(guard.start(_marker(family)), family)

    @property
    def marker(self) -> bytes:
        """Entry that all of them have in their environments."""
        return _marker(self.family)

    def is_ready(self, files: tuple[tuple[str, int, int], ...]) -> None:
        """Note that the template may be forked. `files`: what a person may change that it has imported: path,
        time in ns, size; none when it has imported parts of torch since it was ready the first
        time."""
        self.ready, self._files = True, files or self._files

    def use(self, template: TemplateHandle) -> None:
        """Have this template forked from now on, as soon as it is ready."""
        self.template, self.ready, self._files = template, False, ()

    def dismiss_template(self) -> None:
        """End the template: the next job gets a new one."""
        if self.template is not None:
            self.template.end()
        self.template, self.ready, self._files = None, False, ()

    def changed_file(self) -> str:
        """Return the first file that the template has imported and that is another one by now, ""
        when there is none.
        """
        for path, time, size in self._files:
            try:
                status = os.stat(path)
            except OSError:
                return path
            if (status.st_mtime_ns, status.st_size) != (time, size):
                return path
        return ""

    def between_jobs(self, message: Packet | None) -> None:
        """Act on a message that comes while there is no job: a c10d host of the last one has ended,
        mostly; or that it is ready, when the last job was over before that. None: it has ended. One
        that cannot be used goes, and the next job hears why from its own."""
        match message:
            case Exited(pid=pid) if self.template is not None:
                self.guard.forget(pid)
                self.template.order(Reap(pid))
            case Ready(unclean="", files=files):
                self.is_ready(files)
            case Ready() | ImportFailed() | None:
                self.dismiss_template()

    def end(self) -> None:
        """End the template, release the guard."""
        if self.template is not None:
            self.template.end()
        self.guard.farewell()


def _marker(family: str) -> bytes:
    return f"RALLYPOINT_FAMILY={family}".encode()


def start_for(
    plan: Plan,
    parts: tuple[str, ...],
    *,
    imports: bool,
    files_limit: tuple[int, int],
    helpers: HelperProcesses,
) -> TemplateHandle:
    """Start a template for a job. `imports=False`: a starter of fresh interpreters, which imports
    nothing. `parts`: of torch, that it imports early.
    """
    # A template of `launch` serves more than one job.
    given = plan.environment if plan.task is None else {}
    environment = {
        **os.environ,
        **given,
        "RALLYPOINT_FAMILY": helpers.family,
        # for a look at what holds a port
        "RALLYPOINT_JOB": plan.job,
    }
    pid, line = spawn.start_template(environment, imports=imports)
    handle = take_over(pid, line, imports=imports, files_limit=files_limit, guard=helpers.guard)
    handle.set_up(
        setup(
            plan.program,
            plan.preload if imports else (),
            environment,
            parts=parts if imports else (),
            imports=imports,
            hooks=plan.hooks,
            paths=plan.task.paths if plan.task is not None else None,
        )
    )
    return handle


def take_over(
    pid: int, line: socket.socket, *, imports: bool, files_limit: tuple[int, int], guard: Guard
) -> TemplateHandle:
    """Take over a template that was just started, and give it to the guard to look after. It is
    still to be set up.
    """
    handle = TemplateHandle(pid, line, imports=imports)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, files_limit)
    guard.register(pid, handle.pidfd, is_template=True)
    return handle


def setup(
    program: Program,
    preload: tuple[str, ...],
    environment: Mapping[str, str],
    *,
    parts: tuple[str, ...] = (),
    imports: bool,
    hooks: bool,
    paths: tuple[str, ...] | None,
) -> Setup:
    """Make the first packet for a template that was started with this environment."""
    return Setup(
        program=program,
        parts=parts,
        preload=preload,
        imports=imports,
        hooks=hooks,
        signal_mask=tuple(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        openblas_threads=environment.get("OPENBLAS_NUM_THREADS"),
        paths=paths,
    )
