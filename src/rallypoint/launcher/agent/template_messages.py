"""Messages of the template, and its end: what it has forked goes to the starter, a template that
cannot be forked is replaced.
"""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Sequence

from rallypoint.diagnosis.causes.wording import crash_words
from rallypoint.host import signals
from rallypoint.host.processes import KILL_DEADLINE
from rallypoint.launcher import protocol
from rallypoint.launcher.agent import helper_processes, supervisor
from rallypoint.launcher.agent.job import Job
from rallypoint.launcher.protocol import (
    Exited,
    Forked,
    ImportFailed,
    Importing,
    NotForked,
    Ready,
    Reaped,
)

# Seconds after which a module that the template imports is named: torch takes one, on a cold disk
# some; one that waits for a lock or the network takes for ever.
IMPORT_PATIENCE = 10.0


class TemplateMessages:
    """Reader of the template's channel, watcher of template and guard."""

    def __init__(self, job: Job, files_limit: tuple[int, int]) -> None:
        """`files_limit`: of the ranks, for a template that replaces the first."""
        self._job = job
        self._importing = ""  # the module that the template imports now
        self._files_limit = files_limit
        job.loop.watch(job.helpers.guard.pidfd, self._on_guard_end)
        self._watch()

    def _watch(self) -> None:
        template, helpers = self._job.template, self._job.helpers
        self._job.reporter.event("template-started", pid=template.pid)
        self._job.loop.watch(template.socket.fileno(), self._receive)
        self._job.loop.watch(template.pidfd, self._on_template_end)
        if not helpers.ready:  # a starter imports this package alone
            self._await_import("torch" if template.imports else "rallypoint")

    def _replace(self, *, imports: bool) -> None:
        """End the template, and go on with another one."""
        job, template = self._job, self._job.template
        job.loop.unwatch(template.socket.fileno())
        job.loop.unwatch(template.pidfd)
        template.end()
        job.helpers.use(
            helper_processes.start_for(
                job.plan,
                job.parts.early,
                imports=imports,
                files_limit=self._files_limit,
                helpers=job.helpers,
            )
        )
        self._watch()

    def _receive(self, *, waits: bool = True) -> bool:
        """Act on one packet; return False when there is none (any more)."""
        job, flags = self._job, 0 if waits else socket.MSG_DONTWAIT
        try:
            message, _ = protocol.receive(job.template.socket, flags=flags)
        except BlockingIOError:
            return False
        match message:
            case None:
                job.loop.unwatch(job.template.socket.fileno())
                return False
            case Importing(module):
                self._await_import(module)
            case Ready():
                self._on_ready(message)
            case ImportFailed(module, raised):
                job.loop.cancel("import")
                because = f"{raised.type}: {raised.message}"
                self._cannot_import(module, because, raised.traceback)
            case Forked():
                job.starter.on_forked(message)
            case NotForked():
                job.starter.on_not_forked(message)
            case Exited():
                job.endings.on_exited(message)
            case Reaped():
                job.endings.on_reaped(message)
        return True

    def _cannot_import(self, module: str, because: str, traceback: str = "") -> None:
        report = self._job.reporter.import_failed(module, because, traceback)
        self._job.impossible(report, report.headline)

    def _await_import(self, module: str) -> None:
        """Name the module that is imported now, when that takes long, or ends the process."""
        self._importing = module
        line = f"rallypoint: the template has been importing {module} for {IMPORT_PATIENCE:g} s; no rank starts before it is done"
        self._job.loop.at(
            "import",
            self._job.loop.now + IMPORT_PATIENCE,
            lambda now: self._job.console.remark(line),
        )

    def _on_ready(self, message: Ready) -> None:
        job, self._importing = self._job, ""
        job.loop.cancel("import")
        if not message.unclean:
            job.helpers.is_ready(message.files)
            if job.template.imports:
                job.reporter.event(
                    "template-ready", seconds=round(message.seconds, 3), torch=message.torch
                )
            job.feed(supervisor.Prepared())
            return
        if message.module in job.parts.early:
            self._do_without([message.module], message.unclean)
            return
        because = f"after importing {message.module} {message.unclean}"
        job.reporter.event("template-unclean", because=because, module=message.module)
        self._replace(imports=False)
        job.console.say_unclean(message.module, message.unclean)

    def _do_without(self, names: Sequence[str], because: str) -> None:
        """Replace a template that parts of torch, which nobody has asked for, have made unsafe: the
        ranks import them themselves.
        """
        self._job.parts.leave_out(names, f"imported early, it spoils the template: {because}")
        self._job.reporter.event("template-renewed", because=because, parts=list(names))
        self._job.parts.import_fewer()
        self._replace(imports=True)

    def _on_template_end(self) -> None:
        """Handle a template that ended though nobody told it to: its children are ours now, and die
        with it.
        """
        job, ended = self._job, self._job.template
        job.loop.unwatch(ended.pidfd)
        job.loop.cancel("import")
        while self._receive(waits=False):  # what it had said before
            if job.template is not ended:  # that it is unsafe, and another one stands in its place
                return
        code, number = ended.reap()
        if job.parts.early and not job.helpers.ready and number != signal.SIGKILL:
            # by its deadline's SIGALRM, or by a crash, in one of them
            how = f"was ended by {signals.name(number)}" if number else "ended"
            self._do_without(job.parts.early, f"the template {how}")
            return
        job.starter.give_up_orders()
        crash = crash_words(number)
        if job.problem is None and self._importing and (crash or not number):
            how = f"by {signals.name(number)}: {crash}" if number else f"with exit code {code}"
            self._cannot_import(self._importing, f"its import ended the process {how}")
        elif job.problem is None:
            job.helper_lost("template", ended.pid, code, number)
        job.endings.reap_orphans()

    def _on_guard_end(self) -> None:
        guard = self._job.helpers.guard
        self._job.loop.unwatch(guard.pidfd)
        code, number = guard.reap()
        self._job.endings.reap_orphans()
        self._job.helper_lost("guard", guard.pid, code, number)

    def await_forks(self) -> None:
        """Wait for forks that were ordered and not told yet: they must not come to light in the
        next job.
        """
        job = self._job
        job.starter.abandon()
        poll, until = select.poll(), job.loop.now + KILL_DEADLINE
        poll.register(job.template.socket, select.POLLIN)
        while job.starter.ahead > 0 and job.lost is None:
            if not poll.poll(max(0.0, until - job.loop.now) * 1000) or not self._receive():
                return
