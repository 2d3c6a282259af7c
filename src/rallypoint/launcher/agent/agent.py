"""Agent of a node: starts the parts of a job, runs the loop, and does what the supervisor
decides.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from rallypoint.clock import Clock
from rallypoint.host import process_status, processes, signals
from rallypoint.launcher.agent import helper_processes, supervisor
from rallypoint.launcher.agent.helper_processes import HelperProcesses
from rallypoint.launcher.agent.launch_request import (
    LaunchRequest,
    StoppedWhileJoining,
)
from rallypoint.launcher.agent.preloaded_parts import PreloadedParts
from rallypoint.launcher.agent.supervisor import Action, MakeReport
from rallypoint.launcher.plan import Plan, alone, at_node
from rallypoint.launcher.protocol import Finish

if TYPE_CHECKING:
    from rallypoint.diagnosis.report import Report
    from rallypoint.host.ports import HeldPort
    from rallypoint.launcher.agent.job import Job
    from rallypoint.launcher.agent.other_nodes import OtherNodes
    from rallypoint.launcher.agent.process_handles import RankHandle
    from rallypoint.launcher.rendezvous_file import RendezvousFile
    from rallypoint.world import Seat

# Seconds between SIGTERM and SIGKILL when the time of a call is over, and its caller has not said
# how much of it is the grace: enough for a handler that closes a file, and too short to be waited
# for.
OVERDUE_GRACE = 1.0
# Seconds after the workers' end in which what they wrote is read and shown. Only a terminal that
# takes nothing makes it longer.
DRAIN_TIMEOUT = 5.0
# Timers that are not an attempt's: of a call, a visitor, the helpers, and the other nodes.
LASTING = (
    "overdue",
    "standing",
    "all standings",
    "stopped guard",
    "stopped template",
    "lease",
    "views",
)
# Seconds in which the same notice from several nodes of a job is one.
NOTICE_ONCE = 5.0
# Seconds after which a helper that was stopped (SIGSTOP) is continued. A person who suspends a
# whole job stops one process after the other, and this one among them, before that.
HELPER_PATIENCE = 1.0


def run(plan: Plan) -> int:
    """Carry out a plan; return the exit status. Raises `EnvironmentProblem` or `UsageError` when
    nothing could be started.
    """
    processes.open_standard_descriptors()
    with contextlib.ExitStack() as stack:
        # Before anything is started: what is wrong here, and a port or place that another job has,
        # is told at once, not after the import of torch.
        secret, place = b"", None
        if plan.nodes is None:
            held, place = _held(plan), _taken(plan)
        else:
            from rallypoint.launcher.nodes import endpoint

            nodes, secret, held = endpoint.settled(plan.nodes, plan.cluster, plan.port_range)
            plan = msgspec.structs.replace(plan, nodes=nodes)
        if held is not None:
            stack.callback(held.release)
        if place is not None:
            stack.callback(place.give_back)
        try:
            agent = Agent(plan, held=held, place=place, secret=secret)
        except StoppedWhileJoining as stopped:
            return stopped.status
        stack.callback(agent.close)
        return agent.run()


def _held(plan: Plan) -> HeldPort | None:
    """Bind the first attempt's meeting point when it has to be a certain port or one of a few.

    Guard and template close what they inherit.
    """
    if not plan.master_port and plan.port_range is None:
        return None
    from rallypoint.host import ports

    return ports.hold_port(plan.master_port, plan.master_addr, plan.port_range)


def _taken(plan: Plan) -> RendezvousFile | None:
    if not plan.rendezvous:
        return None
    from rallypoint.launcher import rendezvous_file

    return rendezvous_file.take(plan.rendezvous, plan.job)


class Agent:
    """One node's share of a job: owns the signals, the screen, the run folder and the listening
    socket.

    With a `request` it carries out one call of `launch`: guard and template belong to that and
    stay, and so does the process.
    """

    job: Job

    def __init__(
        self,
        plan: Plan,
        request: LaunchRequest | None = None,
        *,
        held: HeldPort | None = None,
        place: RendezvousFile | None = None,
        secret: bytes = b"",
    ) -> None:
        """`held`: the first attempt's meeting point, if it was bound before, or of a job on several
        nodes the listener of the lead. `place`: where the job
        says on a shared file system where its ranks meet. `secret`: of a job on several nodes."""
        self.plan = plan
        self.others: OtherNodes | None = None
        self._secret = secret
        self.signalled_by = ""
        self.parts = PreloadedParts(plan)
        self.request = request
        self._noticed: dict[str, float] = {}  # notices of a job on several nodes, and when
        self._overdue = 0.0  # seconds that the job was given, when they are over
        self._status: int | None = None
        self._ignored = signals.ignored()
        # Children of this process from before it became the launcher (a shell's `monitor & exec
        # rallypoint run`) are not the job's, nor is what they leave behind; nor are orphans that
        # the first process of a container gets.
        adopts_strangers = request is None and (
            os.getpid() == 1 or bool(process_status.children(os.getpid()))
        )
        names = [*plan.signals, *plan.notices, "SIGINT", "SIGCHLD"]
        if request is None:
            self._files_limit = processes.prepare_to_supervise()
            self._signals = signals.SignalLog(
                {signal.Signals[name] for name in (*names, "SIGTSTP")}
            )
            self._helpers = HelperProcesses.start(os.urandom(8).hex())
        else:
            self._files_limit = request.files_limit
            self._signals = signals.SignalLog({signal.Signals[name] for name in names})
            self._helpers = request.helpers
        try:
            if self._helpers.template is None:
                self._helpers.use(
                    helper_processes.start_for(
                        plan,
                        plan.parts,
                        imports=plan.start == "template",
                        files_limit=self._files_limit,
                        helpers=self._helpers,
                    )
                )
            self._make_parts(adopts_strangers, held, place)
        except BaseException:
            # the run folder belongs to another job, or this machine refuses another process: the
            # user reads that, and nothing may stay behind
            if self.others is not None:
                self.others.close()
            if request is None:
                self._helpers.end()
            self._signals.close()
            raise

    def _join(self, clock: Clock, held: HeldPort | None) -> Seat:
        """Return this node's seat. On several nodes all must have come: the template imports
        meanwhile. `held`: where this node was announced as the lead.
        """
        template = self._helpers.template
        assert template is not None
        if not self._secret:
            return alone(self.plan)
        from rallypoint.launcher.agent.console import say_directly
        from rallypoint.launcher.agent.other_nodes import OtherNodes

        if not self.plan.quiet:  # now: the others may come in minutes
            for note in self.plan.notes:
                say_directly(f"rallypoint: {note}")
        self.others = OtherNodes(self.plan, self._secret, clock, held)
        seated = self.others.join(self._signals, template.pidfd, self.request)
        if seated is None:  # the template has ended: the loop tells why, without the others
            self.others.close()
            self.others = None
            return alone(self.plan)
        self.plan = at_node(self.plan, seated.seat, seated.job, seated.max_restarts)
        return seated.seat

    def _make_parts(
        self, adopts_strangers: bool, held: HeldPort | None, place: RendezvousFile | None
    ) -> None:
        """Import and make everything else, while the template imports torch."""
        from rallypoint.host import ports
        from rallypoint.launcher.agent.attempt import Attempt
        from rallypoint.launcher.agent.console import Console
        from rallypoint.launcher.agent.event_loop import Loop
        from rallypoint.launcher.agent.evidence_gatherer import EvidenceGatherer
        from rallypoint.launcher.agent.hang_monitor import HangMonitor
        from rallypoint.launcher.agent.job import Job
        from rallypoint.launcher.agent.rank_endings import RankEndings
        from rallypoint.launcher.agent.rank_starter import RankStarter
        from rallypoint.launcher.agent.rank_streams import RankStreams
        from rallypoint.launcher.agent.rendezvous_monitor import RendezvousMonitor
        from rallypoint.launcher.agent.reporter import Reporter, open_folder
        from rallypoint.launcher.agent.spawned_ranks import SpawnedRanks
        from rallypoint.launcher.agent.template_messages import TemplateMessages
        from rallypoint.launcher.agent.worker_messages import WorkerMessages
        from rallypoint.launcher.job_diagnosis import Diagnosis
        from rallypoint.record.disk_writer import LINGER, DiskWriter
        from rallypoint.record.torchrun_files import TorchrunFiles

        request, clock = self.request, Clock()
        if self.plan.torch:
            # torch would try for a minute, with a thousand lines
            ports.check_loopback(self.plan.master_addr)
        seat = self._join(clock, held)
        if self.plan.nodes is not None:
            held = self.others.held(seat.attempt) if self.others is not None else None
        plan = self.plan
        logs, files = plan.logs.log_dir, None
        if logs:  # before the run folder, in which a run that did not begin looks like one killed
            files = TorchrunFiles(logs, plan.run_id or plan.job, plan.slots)
        folder, writer = open_folder(plan), DiskWriter(LINGER)
        outputs = request.outputs if request is not None else (1, 2)
        console = Console(plan, seat, folder.path, outputs)
        streams = RankStreams(plan, folder, console, files)
        offset = self.others.offset if self.others is not None else 0.0
        reporter = Reporter(plan, seat, clock, folder, writer, console, offset=offset)
        self._loop, self._console, self._reporter = Loop(clock), console, reporter
        self._diagnosis = Diagnosis(plan)
        decider = supervisor.Supervisor(
            seat.ranks,
            alone=self.others is None,
            max_restarts=plan.max_restarts,
            grace=plan.grace,
            on_failure=plan.on_failure,
            roll_call=plan.roll_call,
        )
        self.job = job = Job(
            plan,
            self._loop,
            Attempt(plan, seat, began=clock.started, ignored=self._ignored),
            decider,
            self._do,
            helpers=self._helpers,
            parts=self.parts,
            console=console,
            reporter=reporter,
            evidence=EvidenceGatherer(plan, clock, folder.path, writer, console),
            request=request,
            others=self.others,
        )
        job.rendezvous = RendezvousMonitor(job)
        job.hang_monitor = HangMonitor(job, stop=self._on_stop)
        job.hang_monitor.open_door(self._helpers.guard)
        job.spawn_monitor = SpawnedRanks(job)
        job.messages = WorkerMessages(job)
        job.endings = RankEndings(job, adopts_strangers=adopts_strangers)
        job.starter = RankStarter(job, streams, self._ignored, held=held, place=place)
        self._loop.watch(self._signals.fileno(), self._on_signal)
        if self.others is not None:
            job.starter.take_seat(seat, held)
            self.others.begin(job, functools.partial(self._on_notice, elsewhere=True))
        self._template_messages = TemplateMessages(job, self._files_limit)
        if request is not None:
            self._watch_caller(request)

    # --- for the caller of this module

    @property
    def reports(self) -> tuple[Report, ...]:
        """Reports of all attempts."""
        return self._reporter.reports

    @property
    def learnt(self) -> tuple[str, ...]:
        """Parts of torch that every rank has imported after the fork, and that may be imported
        before it.
        """
        return self.parts.learnt(self.ranks)

    @property
    def ranks(self) -> list[RankHandle]:
        """Ranks of this attempt, in order; none before the first."""
        return self.job.ranks

    def run(self) -> int:
        """Run the loop until the supervisor says `Leave`; return the exit status."""
        self._console.start()
        if self.plan.start != "template":
            self._console.live(None)
        self._look_for_stopped()  # perhaps since the last call
        if not process_status.sees_processes():
            self._console.say(
                "rallypoint: /proc shows another pid namespace: what ranks leave running is found in their own groups alone"
            )
        if self._helpers.ready:
            self.job.feed(supervisor.Prepared())
        while self._status is None:
            self._loop.turn()
            self._console.show_phases(self.ranks, self.job.state)
        return self._status

    def close(self) -> None:
        """Leave nothing behind, whatever happened. May be called in any state."""
        job, endings = self.job, self.job.endings
        job.hang_monitor.close()
        self._console.say_children(self.ranks, self.reports)
        if self.request is not None:
            self._template_messages.await_forks()
            left = endings.kill_family()
            endings.reap_ranks()
            endings.reap_orphans()
        else:
            endings.kill_family()
            job.template.order(Finish())
            job.template.end()
            left = endings.kill_family(also_helpers=True)
            endings.reap_everything()
        job.starter.close_store("the job is over")
        if self.others is not None:
            self.others.close()
        if self.request is None:
            self._helpers.guard.farewell()
        kept = self._reporter.keep_learnt(self.learnt, self.parts.spoilt)
        if self._status == 0:
            lost = self.learnt if self.plan.memory and not kept else ()
            self._console.say_imports(self.ranks, lost)
        self._console.live(None)
        self._console.say_immortal(left)
        self._reporter.close(self._status, interrupted=self._must_leave)
        job.hang_monitor.end()
        job.starter.close_attempt()
        self._loop.close()
        self._signals.close()

    # --- what the supervisor decides

    def _do(self, action: Action) -> None:
        from rallypoint.launcher.agent import evidence_collection

        job = self.job
        match action:
            case supervisor.StartRanks():
                job.starter.start(action)
            case supervisor.AskEvidence(because):
                if self.others is not None:
                    self.others.failing(because)
                evidence_collection.collect_evidence(job, because)
            case MakeReport():
                self._make_report(action)
            case supervisor.CallRoll(because):
                evidence_collection.call_roll(job, because)
            case supervisor.SignalGroup():
                job.endings.signal_group(action)
            case supervisor.SayWaiting(ranks, seconds, hurry):
                self._console.say_waiting(ranks, seconds, hurry)
            case supervisor.SayHopeless(times):
                self._console.say_hopeless(times, job.supervisor.attempt)
            case supervisor.SayKilled(ranks, because, asked):
                self._console.say_killed(ranks, because, asked=asked)
            case supervisor.LookWhetherStuck(ranks, together):
                evidence_collection.look_for_stuck(job, ranks, together=together)
            case supervisor.CleanGroup():
                job.endings.clean_group(action)
            case supervisor.SetTimer(name, at):
                self._loop.at(name, at, lambda now: job.feed(supervisor.Timer(name)))
            case supervisor.CleanUp():
                self._clean_up(action)
            case supervisor.AttemptOver(well):
                assert self.others is not None
                self.others.over(well)
            case supervisor.Leave(status):
                self._status = status

    def _make_report(self, action: MakeReport) -> None:
        """Gather the evidence, judge it, show the reports. With other nodes the lead judges."""
        from rallypoint.diagnosis.evidence import NodeEvidence
        from rallypoint.launcher.job_diagnosis import FailedAttempt

        job, reporter, others, reason = self.job, self._reporter, self.others, action.reason
        if others is not None:
            others.failing(action.because)
            if reason == "isolated":
                others.show_loss()
                return
        misfit = job.rendezvous.cause_of_all() if reason == "failure" else None
        of_members = misfit is not None or reason == "interrupted"
        # The living ranks of a job that goes on when ranks fail were not asked for their stacks.
        asked = self.plan.on_failure != "continue" or reason in ("interrupted", "overdue")
        if reason == "start" and job.problem is not None:
            here = NodeEvidence(node=job.seat.node, host=os.uname().nodename, problem=job.problem)
        else:
            here = job.evidence.gather(
                job.members if of_members else job.ranks,
                asked=asked,
                told=reporter.told,
                helper=job.lost if reason == "helper" else None,
                reached=job.rendezvous.reached,
                node=job.seat.node,
            )
            reporter.has_gathered(here)
        if others is not None and reason != "overdue":
            others.judge(here)
            return
        failed = FailedAttempt(
            {here.node: here},
            misfit=misfit,
            because=action.because,
            signal=self.signalled_by if reason == "interrupted" else "",
            world_size=job.size if of_members else job.seat.world.size,
            attempt=job.supervisor.attempt,
            held_address=job.attempt.held,
            overdue=self._overdue if reason == "overdue" else 0.0,
        )
        found = self._diagnosis.judge(failed, all_again=asked)
        if others is not None:  # the lead does not know how long this node's caller waits
            others.judge(msgspec.structs.replace(here, problem=found.reports[0]))
            return
        reporter.show(found.reports, found.followed)
        job.feed(supervisor.Judged(found.status, found.same))

    def _clean_up(self, action: supervisor.CleanUp) -> None:
        """End what the ranks left running, and this attempt's host. Every rank has ended."""
        self.job.endings.end_leftovers(self._hurries() if action.gently else None)
        self.job.attempt.release()
        self._loop.forget_all_but(*LASTING)
        self.job.starter.began = self._loop.clock.wall()
        # Show all that the ranks said. A caller of `launch` that reads nothing just now (Ctrl-S,
        # Ctrl-Z) loses nothing.
        while (
            not self._console.settle(DRAIN_TIMEOUT)
            and self.request is not None
            and self.request.is_awaited()
        ):
            continue
        self._reporter.event(
            "attempt-ended", because=action.because, attempt=self.job.attempt.number
        )

    def _was_signalled(self) -> bool:
        return any(number != signal.SIGCHLD for number in self._signals.read())

    def _hurries(self) -> dict[int, Callable[[], bool]]:
        """Return what ends every grace at once: a signal to us, the caller's interrupt, its end."""
        hurries = {self._signals.fileno(): self._was_signalled}
        if self.request is not None:
            hurries |= dict.fromkeys(
                (self.request.line.fileno(), self.request.caller), lambda: True
            )
        return hurries

    def _must_leave(self) -> bool:
        """Return whether a job that is over must not wait for a reader that pauses: what ends the
        launcher from outside, and a second Ctrl-C, leave no time for it. `launch` has waited
        already, for as long as its caller wants."""
        by_system = self.signalled_by not in ("", "SIGINT")
        return self._was_signalled() or self.request is not None or by_system

    # --- the caller of launch

    def _watch_caller(self, request: LaunchRequest) -> None:
        for fd in request.filenos():
            self._loop.watch(fd, lambda: self._on_caller(request))
        if request.timeout is not None:
            gone = self._loop.clock.monotonic() - request.asked
            when = self._loop.now - gone + request.timeout - (request.grace or 0.0)
            self._loop.at("overdue", when, lambda now: self._on_overdue(request))

    def _on_caller(self, request: LaunchRequest) -> None:
        name = request.interrupt()
        self._reporter.event("signal-received", signal=name)
        self._end_by(name)

    def _on_overdue(self, request: LaunchRequest) -> None:
        self._overdue = request.timeout or 0.0
        self.job.feed(supervisor.Overdue(self._overdue, request.grace or OVERDUE_GRACE))

    # --- signals

    def _on_signal(self) -> None:
        for number in self._signals.read():
            if number == signal.SIGCHLD:
                self.job.endings.reap_orphans()
                self._look_for_stopped()
            elif number == signal.SIGTSTP:
                self._suspend()
            else:
                self._reporter.event("signal-received", signal=number.name)
                if number.name in self.plan.notices:
                    self._on_notice(number.name)
                else:
                    self._end_by(number.name)

    def _end_by(self, name: str) -> None:
        """End the job because of a signal."""
        if self.others is not None:
            self.others.failing(f"the launcher on {os.uname().nodename} got {name}", signal=name)
        self.signalled_by = self.signalled_by or name
        self.job.feed(supervisor.Signalled(name))

    def _on_stop(self) -> None:
        """End the job because `rallypoint stop` asks for it."""
        self._reporter.event("signal-received", signal="SIGTERM", because="rallypoint stop asks")
        self._console.say("rallypoint: rallypoint stop ends this job")
        self._end_by("SIGTERM")

    def _living(self) -> list[RankHandle]:
        return [handle for handle in self.ranks if handle.alive]

    def _on_notice(self, name: str, *, elsewhere: bool = False) -> None:
        """Hand on that a batch system will end the job soon. The job goes on. On several nodes one
        that came to each of them is one.
        """
        if self.others is not None:
            if self._loop.now < self._noticed.get(name, -math.inf) + NOTICE_ONCE:
                return
            self._noticed[name] = self._loop.now
            if not elsewhere:
                self.others.notice(name)
        self.job.starter.noticed = True
        handed = {handle.rank: handle.notice(name) for handle in self._living()}
        cluster = self.plan.cluster
        left = cluster.ends - self._loop.clock.wall() if cluster and cluster.ends else 0.0
        self._console.say_notice(
            name,
            [rank for rank, handles in handed.items() if handles],
            [rank for rank, handles in handed.items() if not handles],
            f"{cluster.name} ends it in {left:.0f} s" if cluster and left > 0.0 else "",
        )

    def _suspend(self) -> None:
        """Stop the ranks, whose sessions the terminal does not reach, and this process, for Ctrl-Z;
        `fg` continues all.
        """
        living = self._living()
        for handle in living:
            processes.send_group(handle.pid, signal.SIGSTOP)
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # it stands here until SIGCONT
        signal.signal(signal.SIGTSTP, handler)
        for handle in living:
            processes.send_group(handle.pid, signal.SIGCONT)

    def _look_for_stopped(self) -> None:
        """Have helpers that were stopped continued. The kernel tells a parent of that, and nobody
        has a reason to stop one alone.
        """
        for name, pid in (("guard", self._helpers.guard.pid), ("template", self.job.template.pid)):
            with contextlib.suppress(ChildProcessError):  # it is gone
                if os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG) is not None:
                    self._loop.by(
                        f"stopped {name}",
                        self._loop.now + HELPER_PATIENCE,
                        functools.partial(self._go_on, name, pid),
                    )

    def _go_on(self, name: str, pid: int, now: float) -> None:
        if process_status.is_stopped(pid):
            self._console.say(
                f"rallypoint: the {name} (pid {pid}), a helper of the launcher's, was stopped (SIGSTOP): it is continued"
            )
            # a child of ours that is not reaped: the number is still its own
            os.kill(pid, signal.SIGCONT)
