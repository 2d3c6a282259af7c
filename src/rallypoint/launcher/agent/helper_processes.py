"""What outlives a job: the guard and the template, which `launch` keeps warm from call to call."""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Mapping

from rallypoint.launcher import spawn
from rallypoint.launcher.agent.guard import Guard
from rallypoint.launcher.agent.process_handles import TemplateHandle
from rallypoint.launcher.program import Program
from rallypoint.launcher.protocol import (
    Exited,
    ImportFailed,
    ImportParts,
    Packet,
    Ready,
    Reap,
    Setup,
)


class HelperProcesses:
    """Both of an agent. There is no template before `template` is set."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.template: TemplateHandle | None = None
        self.ready = False  # the template has imported everything
        self._files: tuple[tuple[str, int, int], ...] = ()

    def is_ready(self, files: tuple[tuple[str, int, int], ...]) -> None:
        """The template may be forked. `files`: what a person may change that it has imported: path,
        time in ns, size; none when it has imported parts of torch since it was ready the first
        time."""
        self.ready, self._files = True, files or self._files

    def import_parts(self, parts: tuple[str, ...]) -> None:
        """Between two jobs: let the template import these parts of torch. It is not ready until it
        has.
        """
        if self.template is not None and self.ready:
            self.template.order(ImportParts(parts))
            self.ready = False

    def use(self, template: TemplateHandle) -> None:
        """From now on this template is forked, as soon as it is ready."""
        self.template, self.ready, self._files = template, False, ()

    def dismiss_template(self) -> None:
        """The next job gets a new one."""
        if self.template is not None:
            self.template.end()
        self.template, self.ready, self._files = None, False, ()

    def changed_file(self) -> str:
        """The first file that the template has imported and that is another one by now, "" when
        there is none.
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
        """The template says something while there is no job: a c10d host of the last one has ended,
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
        """The template is ended, the guard released."""
        if self.template is not None:
            self.template.end()
        self.guard.farewell()


def start_template(
    program: Program,
    preload: tuple[str, ...],
    environment: Mapping[str, str],
    *,
    parts: tuple[str, ...],
    imports: bool,
    hooks: bool,
    paths: tuple[str, ...] | None,
    files_limit: tuple[int, int],
    guard: Guard,
) -> TemplateHandle:
    """Start a template with this environment. `imports=False`: a starter of fresh interpreters,
    which imports nothing. `parts`, `paths`: see `Setup`."""
    pid, line = spawn.start_template(environment, imports=imports)
    handle = take_over(pid, line, imports=imports, files_limit=files_limit, guard=guard)
    if not imports:
        preload = parts = ()
    handle.set_up(
        setup(program, preload, environment, parts=parts, imports=imports, hooks=hooks, paths=paths)
    )
    return handle


def take_over(
    pid: int, line: socket.socket, *, imports: bool, files_limit: tuple[int, int], guard: Guard
) -> TemplateHandle:
    """A template that was just started is this process's, and the guard's to look after. It is to
    be set up.
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
    """What a template is there for that was started with this environment."""
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
