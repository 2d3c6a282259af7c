"""Messages of the template, and its end: what it has forked goes to the starter, a template that
cannot be forked is replaced.
"""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rallypoint.host import signals
from rallypoint.launcher import protocol
from rallypoint.launcher.agent import supervisor
from rallypoint.launcher.agent.job import Job
from rallypoint.launcher.agent.preloaded_parts import PreloadedParts
from rallypoint.launcher.agent.process_handles import TemplateHandle
from rallypoint.launcher.agent.rank_endings import KILL_DEADLINE, RankEndings
from rallypoint.launcher.agent.rank_starter import RankStarter
from rallypoint.launcher.protocol import Exited, Forked, ImportFailed, NotForked, Ready, Reaped

if TYPE_CHECKING:
    from rallypoint.launcher.agent.unsafe_import import UnsafeImport


class TemplateMessages:
    """Reader of the template's channel, watcher of template and guard."""

    def __init__(
        self,
        job: Job,
        starter: RankStarter,
        endings: RankEndings,
        parts: PreloadedParts,
        start_template: Callable[[bool], TemplateHandle],
    ) -> None:
        """`start_template` starts another one; its argument: whether it imports torch."""
        self._job = job
        self._starter = starter
        self._endings = endings
        self._parts = parts
        self._start_template = start_template
        self.unsafe_import: UnsafeImport | None = None
        job.loop.watch(job.helpers.guard.pidfd, self._on_guard_end)
        self._watch()

    def _watch(self) -> None:
        template = self._job.template
        self._job.reporter.event("template-started", pid=template.pid)
        self._job.loop.watch(template.socket.fileno(), self._receive)
        self._job.loop.watch(template.pidfd, self._on_template_end)

    def _replace(self, *, imports: bool) -> None:
        """End the template, and go on with another one."""
        template = self._job.template
        self._job.loop.unwatch(template.socket.fileno())
        self._job.loop.unwatch(template.pidfd)
        template.end()
        self._job.helpers.use(self._start_template(imports))
        self._watch()

    def _receive(self, *, waits: bool = True) -> bool:
        """Act on one packet; False when there is none (any more)."""
        job = self._job
        try:
            message, _ = protocol.receive(
                job.template.socket, flags=0 if waits else socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return False
        match message:
            case None:
                job.loop.unwatch(job.template.socket.fileno())
                return False
            case Ready():
                self._on_ready(message)
            case ImportFailed():
                job.impossible(
                    job.reporter.import_failed(message), f"{message.module} cannot be imported"
                )
            case Forked():
                self._starter.on_forked(message)
            case NotForked():
                self._starter.on_not_forked(message)
            case Exited():
                self._endings.on_exited(message)
            case Reaped():
                self._endings.on_reaped(message)
        return True

    def _on_ready(self, message: Ready) -> None:
        job = self._job
        if not message.unclean:
            job.helpers.is_ready(message.files)
            if job.template.imports:
                job.reporter.event(
                    "template-ready", seconds=round(message.seconds, 3), torch=message.torch
                )
            job.feed(supervisor.Prepared())
            return
        if message.module in self._parts.early:
            self._do_without([message.module], message.unclean)
            return
        from rallypoint.launcher.agent.unsafe_import import UnsafeImport

        because = f"after importing {message.module} {message.unclean}"
        job.reporter.event("template-unclean", because=because, module=message.module)
        self._replace(imports=False)
        self.unsafe_import = UnsafeImport(job, message)

    def _do_without(self, names: Sequence[str], because: str) -> None:
        """Replace a template that parts of torch, which nobody has asked for, have made unsafe: the
        ranks import them themselves.
        """
        self._parts.leave_out(names, f"imported early, it spoils the template: {because}")
        self._job.reporter.event("template-renewed", because=because, parts=list(names))
        self._parts.import_fewer()
        self._replace(imports=True)

    def _on_template_end(self) -> None:
        """Handle a template that ended though nobody told it to: its children are ours now, and die
        with it.
        """
        job, ended = self._job, self._job.template
        job.loop.unwatch(ended.pidfd)
        while self._receive(waits=False):  # what it had said before
            if job.template is not ended:  # that it is unsafe, and another one stands in its place
                return
        code, number = ended.reap()
        if (
            self._parts.early and not job.helpers.ready and number != signal.SIGKILL
        ):  # its deadline's SIGALRM, or a crash, in one of them
            self._do_without(
                self._parts.early,
                f"the template was ended by {signals.name(number)}"
                if number
                else "the template ended",
            )
            return
        self._starter.give_up_orders()
        if job.problem is None:
            job.helper_lost("template", ended.pid, code, number)
        self._endings.reap_orphans()

    def _on_guard_end(self) -> None:
        guard = self._job.helpers.guard
        self._job.loop.unwatch(guard.pidfd)
        code, number = guard.reap()
        self._endings.reap_orphans()
        self._job.helper_lost("guard", guard.pid, code, number)

    def await_forks(self) -> None:
        """Wait for forks that were ordered and not told yet: they must not come to light in the
        next job.
        """
        job = self._job
        self._starter.abandon(job.ranks)
        poll, until = select.poll(), job.loop.now + KILL_DEADLINE
        poll.register(job.template.socket, select.POLLIN)
        while (
            self._starter.ahead > 0
            and job.lost is None
            and poll.poll(max(0.0, until - job.loop.now) * 1000)
        ):
            if not self._receive():
                return
