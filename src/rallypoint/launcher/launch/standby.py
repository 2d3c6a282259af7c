"""Agent of a program that calls `launch`: a process of its own that keeps guard and template warm
from call to call.

The program has one child and one socket for it, and nothing else. The standby carries out one call
at a time, with the same loop as `rallypoint run` (`agent.py`). It ends when the program ends, in
whatever way: it watches the program's pidfd and its own end of the socket.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import select
import socket
import sys
from collections.abc import Iterable

import msgspec

from rallypoint.diagnosis import render
from rallypoint.diagnosis.report import Report
from rallypoint.errors import RallypointError
from rallypoint.host import devices, memory_files
from rallypoint.host.ports import HeldPort
from rallypoint.launcher import exception_capture, plan, preload_parts, protocol, torch_version
from rallypoint.launcher.agent import helper_processes
from rallypoint.launcher.agent.agent import Agent
from rallypoint.launcher.agent.helper_processes import HelperProcesses
from rallypoint.launcher.agent.launch_request import (
    CallerGone,
    LaunchRequest,
    StoppedWhileJoining,
)
from rallypoint.launcher.agent.reporter import LEARNT_TIMEOUT
from rallypoint.launcher.launch.standby_main import Terms
from rallypoint.launcher.plan import Machine, Options, Plan, SettledNodes
from rallypoint.launcher.program import Program
from rallypoint.launcher.protocol import Call, Finished, ImportParts, Packet, Ready, Verdict
from rallypoint.record import preload_history, run_folder
from rallypoint.record.disk_writer import DiskWriter
from rallypoint.record.preload_history import Learnt
from rallypoint.record.run_folder import default_root

DISCARD_TIMEOUT = 5.0
"""Seconds for the removal of a good call's folder: some small files; a busy disk needs tenths."""


def serve(terms: Terms) -> None:
    """Carry out calls until the caller or the guard ends."""
    helpers = HelperProcesses.start(terms.suffix)
    helpers.use(
        helper_processes.take_over(
            *terms.template, imports=True, files_limit=terms.files_limit, guard=helpers.guard
        )
    )
    standby = _Standby(terms, helpers)
    try:
        with contextlib.suppress(CallerGone):
            while standby.wait():
                pass
    finally:
        helpers.end()  # the ranks have ended before


class _Standby:
    def __init__(self, terms: Terms, helpers: HelperProcesses) -> None:
        self._terms = terms
        self._line = terms.line
        self._caller = terms.caller
        self._helpers = helpers
        self._calls = 0
        # Parts of torch that all ranks of a call have imported: the template does for the next.
        self._parts: tuple[str, ...] = ()
        self._spoilt: set[str] = set()  # those that it shall not (any more)

    def wait(self) -> bool:
        """Wait for a call and carry it out; False when the caller or the guard has ended."""
        guard, template = self._helpers.guard.pidfd, self._helpers.template
        of_template = (template.socket.fileno(), template.pidfd) if template is not None else ()
        poll = select.poll()
        for fd in (self._line.fileno(), self._caller, guard, *of_template):
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll()}
        if ready & {self._caller, guard}:
            return False
        if template is not None and ready.intersection(of_template):
            alive = template.socket.fileno() in ready
            self._between_calls(protocol.receive(template.socket)[0] if alive else None)
            return True
        message, fds = protocol.receive(self._line)
        if isinstance(message, Call):
            return self._carry_out(message, fds)
        return message is not None  # an Interrupt that came after the end

    def _between_calls(self, message: Packet | None) -> None:
        if isinstance(message, Ready) and message.unclean:
            self._forget({message.module})
        elif message is None and not self._helpers.ready:
            # The template crashed as it imported them, or did not come to an end.
            self._forget(self._parts)
        self._helpers.between_jobs(message)

    def _forget(self, names: Iterable[str]) -> None:
        self._spoilt.update(names)
        self._parts = tuple(name for name in self._parts if name not in self._spoilt)

    def _learn(self, agent: Agent) -> None:
        """Let the template import the parts of torch that all ranks have imported, for the next
        call.

        The caller has its results. A call that comes meanwhile waits, at most as long as its ranks
        would have taken each.
        """
        if not agent.parts.spoilt.keys().isdisjoint(agent.parts.early):  # the template has them
            self._helpers.dismiss_template()
        self._forget(agent.parts.spoilt)
        if agent.plan.memory:
            self._import_parts(agent.learnt)

    def _carry_out(self, call: Call, fds: list[int]) -> bool:
        with contextlib.suppress(OSError):  # removed just now: the ranks say so
            os.chdir(call.task.folder)  # where a new template begins
        changed = self._helpers.changed_file()
        if changed:
            with contextlib.suppress(OSError):  # the caller has just ended
                os.write(
                    fds[1],
                    f"rallypoint: {exception_capture.sayable(changed)} was changed since it was preloaded: it is imported anew\n".encode(),
                )
            self._helpers.dismiss_template()
        memory = ""
        if preload_parts.NONE not in call.preload:
            memory = preload_history.path_for(
                os.environ,
                "function",
                f"{call.task.name} of {call.task.argv[:1]}",
                call.task.folder,
                torch_version.torch_version(),
            )
        self._set_up_template(call, memory)
        settled = msgspec.msgpack.decode(call.nodes, type=SettledNodes) if call.nodes else None
        held = None
        if settled is not None and settled.listens:
            held = HeldPort(socket.socket(fileno=fds.pop()))
        request = LaunchRequest(
            call,
            fds,
            line=self._line,
            caller=self._caller,
            helpers=self._helpers,
            files_limit=self._terms.files_limit,
        )
        # The caller must see the end of the pipes before it hears that the call is over.
        with contextlib.closing(request):
            agent = None
            try:
                made = self._plan(call, settled, memory)
                secret = settled.secret if settled is not None else b""
                agent = Agent(made, request, held=held, secret=secret)
            except StoppedWhileJoining as stopped:
                verdict = Verdict(stopped.status, False, (), "", (), "")
            except RallypointError as problem:
                report = _for_python(render.report_of(problem))
                verdict = Verdict(report.exit_status, False, (report,), str(problem), (), "")
            else:
                try:
                    status = agent.run()
                finally:
                    agent.close()
                verdict = _verdict(agent, status)
                lost = agent.job.lost.name if agent.job.lost is not None else ""
                if agent.job.problem is not None or lost == "template":
                    # it may be about to end: the next call gets a new one
                    self._helpers.dismiss_template()
            finally:
                if held is not None:
                    held.release()
        if verdict.status == 0 and not call.run_dir:
            # The caller waits, and the disk may have died meanwhile.
            with contextlib.suppress(TimeoutError):
                DiskWriter().ask(lambda: run_folder.discard(verdict.run_dir), DISCARD_TIMEOUT)
        self._send(verdict)
        if agent is not None:
            self._learn(agent)
        return verdict.usable

    def _set_up_template(self, call: Call, memory: str) -> None:
        """Have the template import what the call preloads; the first call says what that is. Then
        the parts of torch that all ranks of this function imported in an earlier run.
        """
        known = Learnt()
        with contextlib.suppress(TimeoutError):
            known = DiskWriter().ask(
                lambda: preload_history.read(memory, self._terms.began), LEARNT_TIMEOUT
            )
        if not known.spoilt.keys().isdisjoint(self._parts):  # the template has them
            self._helpers.dismiss_template()
        self._forget(known.spoilt)
        self._import_parts(known.parts)
        template = self._helpers.template
        if template is not None and not template.is_set_up:
            template.set_up(
                helper_processes.setup(
                    Program("function", ""),
                    tuple(name for name in call.preload if name != preload_parts.NONE),
                    os.environ,
                    parts=self._parts,
                    imports=True,
                    hooks=True,
                    paths=call.task.paths,
                )
            )

    def _import_parts(self, names: Iterable[str]) -> None:
        """Let the template import those of these parts that it has not, when it begins or now;
        not while it is busy with others.
        """
        new = tuple(name for name in names if name not in (*self._parts, *self._spoilt))
        template = self._helpers.template
        if template is not None and template.is_set_up and new:
            if not self._helpers.ready:
                return
            template.order(ImportParts(new))
            self._helpers.ready = False
        self._parts += new

    def _plan(self, call: Call, settled: SettledNodes | None, memory: str) -> Plan:
        self._calls += 1
        environ = {**os.environ, **call.environment}
        for name in call.task.without:
            environ.pop(name, None)
        options = Options(
            program=Program("function", call.task.name),
            nproc=call.nproc,
            backend=call.task.backend,
            preload=call.preload,
            max_restarts=call.max_restarts,
            on_failure=call.on_failure,
            run_dir=call.run_dir,
            port_range=call.port_range,
            nodes=settled.nodes if settled is not None else None,
            cluster=settled.cluster if settled is not None else None,
            quiet=True,
        )
        if call.grace is not None:
            options = msgspec.structs.replace(options, grace=call.grace)
        facts = Machine(
            cpus=len(os.sched_getaffinity(0)),
            gpus=devices.look(),
            build=devices.torch_build() if call.task.backend else None,
            names=(),
            python=sys.executable,
            torch=torch_version.torch_version(),
            now=datetime.datetime.fromtimestamp(self._terms.began),
            suffix=self._terms.suffix,
            cwd=call.task.folder,
            runs=default_root(environ),
        )
        made = plan.make(options, environ, facts)
        run_dir = made.run_dir if call.run_dir else f"{made.run_dir}-{self._calls}"
        return msgspec.structs.replace(
            made,
            run_dir=run_dir,
            task=call.task,
            parts=self._parts,
            memory=memory,
            rank_environment=tuple({**call.environment, **own} for own in made.rank_environment),
        )

    def _send(self, verdict: Verdict) -> None:
        fd = memory_files.create("rallypoint-verdict", protocol.exact(verdict))
        try:
            protocol.send(self._line, Finished(), [fd])
        except OSError:
            raise CallerGone from None
        finally:
            os.close(fd)


def _for_python(report: Report) -> Report:
    """Rewrite a report's help as arguments of `launch`."""
    argument = {"--run-dir DIR": 'rallypoint.launch(..., run_dir="DIR")'}
    help = tuple(
        msgspec.structs.replace(one, command=argument.get(one.command, one.command))
        for one in report.help
    )
    return msgspec.structs.replace(report, help=help)


def _verdict(agent: Agent, status: int) -> Verdict:
    reports = tuple(agent.reports)
    overdue = any(report.code == "launch-timeout" for report in reports)
    ends = tuple(
        (rank.ended.code, rank.ended.signal) if rank.ended is not None else None
        for rank in agent.ranks
    )
    text = render.text(reports, color=False) if reports else ""
    usable = agent.job.lost is None or agent.job.lost.name != "guard"
    seat = agent.job.seat
    return Verdict(
        status,
        overdue,
        reports,
        text,
        ends,
        agent.plan.run_dir,
        usable,
        seat.ranks.start,
        seat.world.size if seat.node == 0 else len(seat.ranks),
    )
