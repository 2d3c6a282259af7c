"""The loop on each node: feeds the supervisor, does what it says."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rallypoint.clock import Clock
from rallypoint.diagnosis import rules
from rallypoint.diagnosis.evidence import Ended, HelperLost
from rallypoint.diagnosis.report import Report
from rallypoint.errors import EnvironmentProblem, RallypointError
from rallypoint.host import processes, signals
from rallypoint.launcher import channel, crew, guard, parts, supervisor, variables
from rallypoint.launcher.channel import (
    AtPhase,
    Caught,
    ChildrenFailed,
    ClosesGroup,
    Debugging,
    Exited,
    Finish,
    Forked,
    ForksCuda,
    Imported,
    ImportedPart,
    ImportFailed,
    Interrupt,
    Leaving,
    Meets,
    NotExecuted,
    NotForked,
    OfSpawned,
    Outcome,
    Ready,
    Reap,
    Reaped,
    Restarted,
    SetLate,
    Spawns,
    Uncatch,
    Uncaught,
)
from rallypoint.launcher.crew import Crew
from rallypoint.launcher.handles import RankHandle, TemplateHandle
from rallypoint.launcher.job import Job
from rallypoint.launcher.loop import Loop
from rallypoint.launcher.plan import Plan
from rallypoint.launcher.supervisor import (
    Action,
    AskEvidence,
    CallRoll,
    CleanGroup,
    CleanUp,
    Leave,
    LookWhetherStuck,
    MakeReport,
    SayHopeless,
    SayKilled,
    SayWaiting,
    SetTimer,
    SignalGroup,
    StartRanks,
    State,
    Supervisor,
)

if TYPE_CHECKING:
    from rallypoint.host.ports import HeldPort
    from rallypoint.launcher.attempt import Attempt, Order
    from rallypoint.launcher.culprit import Suspicion
    from rallypoint.launcher.rendezvous_file import Place
    from rallypoint.launcher.standby import Errand

# Seconds between SIGTERM and SIGKILL when the time of a call is over, and its caller has not said how much of it is the grace: enough
# for a handler that closes a file, and too short to be waited for.
OVERDUE_GRACE = 1.0
# Orders that the template may have waiting: enough to keep it busy, few enough that descriptors in flight stay far below limits.
ORDERS_AHEAD = 4
# Seconds after the workers' end in which what they wrote is read and shown. Only a terminal that takes nothing makes it longer.
DRAIN_TIMEOUT = 5.0
KILL_DEADLINE = 2.0  # seconds in which a SIGKILLed process must be gone; see guard.py
# Seconds after which a helper that was stopped (SIGSTOP) is continued. Who suspends a whole job stops one process after the other, and
# us among them, before that.
HELPER_PATIENCE = 1.0
# Seconds in which the template tells of a rank's end, which the kernel shows us at the same time as it. Its words come in the order of
# the ends, and tell more; without them we take what /proc says.
TOLD_PATIENCE = 2.0


def run(plan: Plan) -> int:
    """Carry out a plan; the exit status. Raises `EnvironmentProblem` or `UsageError` when nothing could be started."""
    processes.open_standard_descriptors()
    with contextlib.ExitStack() as stack:
        # Before anything is started: who asked for what somebody else has is told at once, not after the import of torch.
        held, place = _held(plan), _taken(plan)
        if held is not None:
            stack.callback(held.release)
        if place is not None:
            stack.callback(place.give_back)
        agent = Agent(plan)
        agent.held, agent.place = held, place
        try:
            return agent.run()
        finally:
            agent.close()


def _held(plan: Plan) -> HeldPort | None:
    """The first attempt's meeting point, when it has to be a certain one or one of a few. Guard and template close what they inherit."""
    if not plan.master_port and plan.port_range is None:
        return None
    from rallypoint.host import ports

    return ports.hold_port(plan.master_port, plan.master_addr, plan.port_range)


def _taken(plan: Plan) -> Place | None:
    if not plan.rendezvous:
        return None
    from rallypoint.launcher import rendezvous_file

    return rendezvous_file.take(plan.rendezvous, plan.job)


class CallerGone(Exception):
    """Whoever called `launch` has ended: nobody waits for this job."""


class Agent:
    """One node's share of a job: owns the signals, the screen, the run folder and the listening socket.

    With an `errand` it carries out one call of `launch`: guard and template belong to that and stay, and so does the process.
    """

    def __init__(self, plan: Plan, errand: Errand | None = None) -> None:
        self.plan = plan
        self.errand = errand
        self.clock = Clock()
        self._marker = f"RALLYPOINT_JOB={plan.job}".encode()
        self._ignored = signals.ignored()
        # Children of this process from before it became the launcher (a shell's `monitor & exec rallypoint run`) are not the job's, nor
        # is what they leave behind; nor are the orphans of others that the first process of a container gets.
        self._adopts_strangers = errand is None and (os.getpid() == 1 or bool(processes.children()))
        self._files_limit = processes.prepare_to_supervise() if errand is None else errand.files_limit
        wanted = {signal.SIGINT, signal.SIGCHLD, *(signal.Signals[name] for name in (*plan.signals, *plan.notices))}
        if errand is None:
            wanted.add(signal.SIGTSTP)
        self._signals = signals.SignalLog(wanted)
        self.crew = Crew(guard.start(self._marker)) if errand is None else errand.crew
        self._hooks = not plan.plain and plan.start != "exec"
        self.early = plan.parts  # of torch, that the template imports for the ranks
        self.spoilt: dict[str, str] = {}  # parts that are better left to the ranks, and why
        if self.crew.template is None:
            self.crew.use(self._start_template(imports=plan.start == "template"))
        # Everything below is done while the template imports.
        from rallypoint.host import ports
        from rallypoint.launcher.account import Account
        from rallypoint.launcher.hearing import Deafness, Hearing, RollCall
        from rallypoint.launcher.inquiry import Inquiry
        from rallypoint.launcher.leftovers import Leftovers
        from rallypoint.launcher.meetings import Meetings
        from rallypoint.launcher.spawned_ranks import SpawnedRanks

        try:
            if plan.torch:
                ports.check_loopback(plan.master_addr)  # torch would try for a minute, with a thousand lines
            self.account = Account(plan, self.clock, errand.outputs if errand is not None else (1, 2))
        except BaseException:  # or the run folder belongs to somebody else: the user reads that, and nothing may stay behind
            if errand is None:
                self.crew.end()
            self._signals.close()
            raise
        self.held: HeldPort | None = None  # the first attempt's meeting point, if it was bound before
        self.place: Place | None = None  # on a shared file system, where the job says where its ranks meet
        self.problem: RallypointError | Report | None = None  # why nothing could be started
        self.lost: HelperLost | None = None
        self.signalled_by = ""
        self._noticed = False  # a notice came (`--notice-signal`)
        self.overdue = 0.0  # seconds that the job was given, when they are over
        self._supervisor = Supervisor(
            world_size=plan.world.size,
            max_restarts=plan.max_restarts,
            grace=plan.grace,
            on_failure=plan.on_failure,
            roll_call=plan.roll_call,
        )
        self._orders: Iterator[Order] = iter(())
        self._ahead = 0
        self._order_of_ends = 0
        self._status: int | None = None
        self._spawns_told = False
        self._template_is_silent = False
        self._suspicion: Suspicion | None = None  # of what made the template unfit to be forked
        self._loop = Loop(self.clock)
        self._job = Job(plan, self._loop, self.account, self._new_attempt(0, started=False), self._supervisor, self._do)
        self._meetings = Meetings(self._job)
        self._hearing, self._roll_call = Hearing(self._job, self._meetings), RollCall(self._job, self._meetings)
        self._deafness = Deafness(self._job)
        self._leftovers = Leftovers(self._job, self._reap)
        self._inquiry = Inquiry(self._job, hooks=self._hooks, stop=self._on_stop)
        self._inquiry.open_door(self.guard)
        self._spawned = SpawnedRanks(self._job, self._meetings, self._roll_call, self._inquiry)
        self._loop.watch(self._signals.fileno(), self._on_signal)
        self._loop.watch(self.guard.pidfd, self._on_guard_end)
        self._watch_template()
        if errand is not None:
            self._loop.watch(errand.line.fileno(), self._on_caller)
            self._loop.watch(errand.caller, self._on_caller_end)
            if errand.timeout is not None:
                begins = errand.timeout - (errand.grace or 0.0)
                self._loop.at("overdue", self._loop.now + begins, lambda now: self._on_overdue())

    @property
    def guard(self) -> guard.Guard:
        """The crew's."""
        return self.crew.guard

    @property
    def template(self) -> TemplateHandle:
        """The crew's, which there is from the start."""
        assert self.crew.template is not None
        return self.crew.template

    @property
    def reports(self) -> tuple[Report, ...]:
        """Of all attempts."""
        return self.account.reports

    @property
    def learnt(self) -> tuple[str, ...]:
        """The parts of torch that every rank has imported after the fork, and that may be imported before it."""
        if not self.plan.learns:
            return ()
        return tuple(name for name in parts.of_all(handle.parts for handle in self.ranks) if name not in self.spoilt)

    @property
    def attempt(self) -> Attempt:
        """The present one; empty before the first."""
        return self._job.attempt

    @property
    def ranks(self) -> list[RankHandle]:
        """The ranks of this attempt, by rank; none before the first."""
        return self.attempt.ranks

    # --- the loop

    def run(self) -> int:
        """Until the supervisor says `Leave`."""
        self.account.start(self.plan)
        if self.plan.start != "template":
            self.account.live(None)
        self._look_for_stopped()  # perhaps since the last call
        if not processes.sees_processes():
            self.account.say("rallypoint: /proc shows another pid namespace: what ranks leave running is found in their own groups alone")
        if self.crew.ready:
            self._job.feed(supervisor.Prepared())
        while self._status is None:
            self._loop.turn()
            self.account.show_phases(self.ranks, self._supervisor.state)
        return self._status

    def close(self) -> None:
        """Leave nothing behind, whatever happened. May be called in any state."""
        if self._suspicion is not None:
            self._suspicion.tell()
        self._inquiry.close()
        self.account.say_children(self.ranks)
        if self.errand is not None:
            self._await_forks()
        living = [handle for handle in self.ranks if handle.pid and not handle.reaped]
        left = self._kill_family(living, self._our_own())
        if self.errand is None:
            self.template.order(Finish())
            self.template.end()
            left = self._kill_family(living, [self.guard.pid])
        if self.errand is None:
            self._reap_everything()
        else:
            for handle in living:
                self._reap(handle)
            self._reap_orphans()
        self._close_store("the job is over")
        if self.errand is None:
            self.guard.farewell()
        kept = self.account.keep_learnt(self.learnt, self.spoilt)
        if self._status == 0:
            self.account.say_imports(self.ranks, self.learnt if kept else ())
        self.account.close(self._status, left, interrupted=self._must_leave)
        self._inquiry.end()
        self._close_attempt()
        self._loop.close()
        self._signals.close()

    def _await_forks(self) -> None:
        """What the template was told to fork, and has not told of yet, must not come to light in the next job."""
        self._orders = iter(())
        for handle in self.ranks:
            handle.sent.append("SIGKILL")  # it does not run any more
        poll, until = select.poll(), self.clock.elapsed() + KILL_DEADLINE
        poll.register(self.template.socket, select.POLLIN)
        while self._ahead > 0 and self.lost is None and poll.poll(max(0.0, until - self.clock.elapsed()) * 1000):
            if not self._on_template():
                return

    def _our_own(self) -> list[int]:
        """Processes of ours that carry the job's mark and are none of its ranks', while a job is on."""
        host = self.attempt.host
        return [self.guard.pid, self.template.pid, *([host.pid] if host and host.pid else [])]

    def _kill_family(self, handles: list[RankHandle], spare: list[int]) -> list[processes.Status]:
        """SIGKILL for all that these ranks, which are not reaped yet, started, and for whatever else of the job is our descendant."""
        sessions = [handle.pid for handle in handles]
        if self._suspicion is not None and self._suspicion.pid:
            spare = [*spare, self._suspicion.pid]
        ancestor = self.template.pid
        if self.template.pidfd < 0:  # it has ended, and left us what was beneath it
            ancestor = 0 if self._adopts_strangers else os.getpid()
        return processes.kill_family(self._marker, sessions, deadline=KILL_DEADLINE, ancestor=ancestor, spare=spare)

    def _do(self, action: Action) -> None:
        match action:
            case StartRanks():
                self._start_ranks(action)
            case AskEvidence():
                self._hearing.begin(action)
            case MakeReport():
                self._make_report(action)
            case CallRoll():
                self._roll_call.begin(action)
            case SignalGroup():
                self._signal_group(action)
            case SayWaiting(ranks, seconds, hurry):
                self.account.say_waiting(ranks, seconds, hurry)
            case SayHopeless(times):
                self.account.say(
                    f"rallypoint: the same failure {times} times, soon after each start: not started again "
                    f"(attempt {self._supervisor.attempt} of {self.plan.max_restarts})"
                )
            case SayKilled(ranks, because, asked):
                self.account.say_killed(ranks, because, asked=asked)
            case LookWhetherStuck():
                self._deafness.begin(action)
            case CleanGroup():
                self._clean_group(action)
            case SetTimer():
                self._job.remind(action.name, action.at)
            case CleanUp():
                self._clean_up(action)
            case Leave():
                self._status = action.status

    # --- the template

    def _start_template(self, *, imports: bool) -> TemplateHandle:
        plan = self.plan
        return crew.start_template(
            plan.program,
            plan.preload,
            {**os.environ, **(plan.environment if self.errand is None else {"RALLYPOINT_JOB": plan.job})},
            parts=self.early,
            imports=imports,
            hooks=self._hooks,
            paths=plan.task.paths if plan.task is not None else None,
            files_limit=self._files_limit,
            guard=self.guard,
        )

    def _watch_template(self) -> None:
        self.account.event("template-started", pid=self.template.pid)
        self._loop.watch(self.template.socket.fileno(), self._on_template)
        self._loop.watch(self.template.pidfd, self._on_template_end)

    def _on_template(self, *, waits: bool = True) -> bool:
        """Act on one packet; False when there is none (any more)."""
        try:
            message, _ = channel.receive(self.template.socket, flags=0 if waits else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        match message:
            case None:
                self._loop.unwatch(self.template.socket.fileno())
                return False
            case Ready():
                self._on_ready(message)
            case ImportFailed():
                self.problem = self.account.import_failed(message)
                self._job.feed(supervisor.Impossible(f"{message.module} cannot be imported"))
            case Forked():
                self._on_forked(message)
            case NotForked():
                self._on_not_forked(message)
            case Exited():
                self._on_exited(message)
            case Reaped():
                self._on_reaped(message)
        return True

    def _on_ready(self, message: Ready) -> None:
        if not message.unclean:
            self.crew.is_ready(message.files)
            if self.template.imports:
                self.account.event("template-ready", seconds=round(message.seconds, 3), torch=message.torch)
            self._job.feed(supervisor.Prepared())
            return
        if message.module in self.early:
            self._do_without([message.module], message.unclean)
            return
        from rallypoint.launcher.culprit import Suspicion

        because = f"after importing {message.module} {message.unclean}"
        self.account.event("template-unclean", because=because, module=message.module)
        self._use_fresh_interpreters()
        self._suspicion = Suspicion(self._job, message)

    def _use_fresh_interpreters(self) -> None:
        self._loop.unwatch(self.template.socket.fileno())
        self._loop.unwatch(self.template.pidfd)
        self.template.end()
        self.crew.use(self._start_template(imports=False))
        self._watch_template()

    def _do_without(self, names: Sequence[str], because: str) -> None:
        """Parts of torch, which nobody has asked for, have spoilt the template: another one leaves them to the ranks, now and in later
        runs."""
        self.spoilt.update(dict.fromkeys(names, f"imported early, it spoils the template: {because}"))
        self.account.event("template-renewed", because=because, parts=list(names))
        self.early = tuple(name for name in self.early if name not in self.spoilt)
        self._loop.unwatch(self.template.socket.fileno())
        self._loop.unwatch(self.template.pidfd)
        self.template.end()
        self.crew.use(self._start_template(imports=True))
        self._watch_template()

    def _on_template_end(self) -> None:
        """The template has ended though nobody told it to: its children are ours now, and die with it."""
        ended = self.template
        self._loop.unwatch(ended.pidfd)
        while self._on_template(waits=False):  # what it had said before
            if self.template is not ended:  # that it is unfit, and another one stands in its place
                return
        code, number = ended.reap()
        if self.early and not self.crew.ready and number != signal.SIGKILL:  # its deadline's SIGALRM, or a crash, in one of them
            self._do_without(self.early, f"the template was ended by {signals.name(number)}" if number else "the template ended")
            return
        for handle in self.ranks:
            handle.ordered = False  # what it had not forked by now, it never will
        if self.problem is None:
            self._helper_lost("template", self.template.pid, code, number)
        self._reap_orphans()

    def _on_guard_end(self) -> None:
        self._loop.unwatch(self.guard.pidfd)
        code, number = self.guard.reap()
        self._reap_orphans()
        self._helper_lost("guard", self.guard.pid, code, number)

    def _helper_lost(self, name: str, pid: int, code: int, number: int) -> None:
        self.lost = HelperLost(name, pid, Ended(code, number, self.clock.elapsed()))
        self.account.event("ended", because=f"the {name} ended by itself", pid=pid, code=code, signal=number)
        self._job.feed(supervisor.HelperLost(name))

    # --- starting

    def _start_ranks(self, action: StartRanks) -> None:
        self._close_store("the job was started again, with a new store")
        self._close_attempt()
        try:
            self._job.attempt = self._new_attempt(action.attempt)
            self._meetings.begin()
            self.account.begin_attempt(action.attempt, action.because)
            if self.errand is not None and action.attempt:
                self._tell_caller(Restarted(action.attempt))
            port = self.attempt.hold(self.held)
            self.held = None
            if self.place is not None:
                self.place.publish(action.attempt, self.attempt.held)
            self._open_store()
        except EnvironmentProblem as problem:
            self._cannot_start(problem)
            return
        except OSError as error:
            self._exhausted(error)
            return
        self.account.event("port-held", host=self.plan.master_addr, port=port)
        self._inquiry.begin()
        self._orders = self.attempt.orders(self.account)
        self._ahead = 0
        self._send_orders()

    def _open_store(self) -> None:
        self.attempt.open_store()
        if self.attempt.store is not None:
            self.guard.inherit(self.attempt.store.path)
            self._loop.watch(self.attempt.store.fileno(), self._on_store_client)

    def _on_store_client(self) -> None:
        """The first one has come: from here on a thread serves the store. A job whose ranks never ask for it has none."""
        store = self.attempt.store
        if store is None:
            return
        self._loop.unwatch(store.fileno())
        try:
            store.serve(self.ranks, self.clock.elapsed)
        except (OSError, RuntimeError) as error:  # no descriptor, no memory, no thread: the clients read that nobody answers
            self.account.say(f"rallypoint: the job's store cannot be served: {error}")
            self.attempt.close_store("it could not be started")
            return
        self.account.event("store-serves", address=store.address)

    def _close_store(self, reason: str) -> None:
        if self.attempt.store is not None:
            self._loop.unwatch(self.attempt.store.fileno())
            self.attempt.close_store(reason)

    def _new_attempt(self, number: int, *, started: bool = True) -> Attempt:
        from rallypoint.launcher.attempt import Attempt

        parcel = self.errand.parcel if self.errand is not None else ()
        return Attempt(
            self.plan, number, began=self.clock.wall(), ignored=self._ignored, hooks=self._hooks, started=started, parcel=parcel
        )  # fmt: skip

    def _send_orders(self) -> None:
        while self._ahead < ORDERS_AHEAD:
            try:
                order = next(self._orders, None)
            except OSError as error:
                self._exhausted(error)
                return
            if order is None:
                return
            self._ahead += 1
            if order.handle is not None:
                order.handle.ordered = True
            else:
                self._loop.watch(self.attempt.host_ready, self._on_host_ready)
            self.template.order(order.message, order.fds)
            for fd in order.ours:
                os.close(fd)

    def _cannot_start(self, problem: EnvironmentProblem) -> None:
        self.problem = problem
        self._orders = iter(())
        self._job.feed(supervisor.Impossible(str(problem)))

    def _exhausted(self, error: OSError) -> None:
        from rallypoint.launcher.attempt import exhausted

        for handle in self.ranks:
            if not handle.ordered and not handle.pid:  # it never will be; cleaning up takes descriptors, too
                handle.close()
        self._cannot_start(exhausted(error, self.plan.world.local_size))

    def _on_host_ready(self) -> None:
        self._loop.unwatch(self.attempt.host_ready)
        if self.attempt.hear_host():
            self.account.event("c10d-ready", address=self.attempt.held)

    def _close_attempt(self) -> None:
        self._spawned.close()
        self._loop.unwatch(self.attempt.host_ready)  # a function that returns at once is done before the host serves
        for handle in self.ranks:  # one that would not die
            self._loop.unwatch(handle.pidfd)
        self.attempt.close()

    def _on_forked(self, message: Forked) -> None:
        self._ahead -= 1
        self._send_orders()
        try:
            self._take_in(message)
        except OSError as error:  # no descriptor is left for it, and nothing runs unwatched
            os.kill(message.pid, signal.SIGKILL)  # its own number still: the template reaps it when we say so
            if self.problem is None:
                self._exhausted(error)
            if message.rank >= 0:
                self._not_started(self.ranks[message.rank])

    def _take_in(self, message: Forked) -> None:
        """`OSError` when no descriptor is left for it."""
        if message.rank < 0:
            if self.attempt.host is not None:
                self.attempt.host.started(message.pid)
                self.guard.register(message.pid, self.attempt.host.pidfd)
            return
        handle = self.ranks[message.rank]
        handle.forked(message.pid)
        self.guard.register(message.pid, handle.pidfd)  # before the program can start anything
        if handle.sent:  # the job was stopped while it was being forked
            processes.send(handle.pidfd, signal.SIGKILL)
        else:
            handle.go()
            if self._noticed:
                handle.noticed()
        if not self._hooks:
            handle.phase = "started"  # it will tell nothing more
        self.account.event("worker-started", rank=message.rank, pid=message.pid, fork=round(message.seconds, 4))
        self._loop.watch(handle.control.fileno(), lambda: self._on_worker(handle))
        self._loop.watch(handle.pidfd, lambda: self._on_untold_end(handle))

    def _on_not_forked(self, message: NotForked) -> None:
        self._ahead -= 1
        if message.unclean:
            self.account.say_unclean(Ready(0.0, unclean=message.unclean), "")
        self.problem = self.account.not_forked(message)
        if message.rank >= 0 and self._not_started(self.ranks[message.rank]):
            return
        self._job.feed(supervisor.Impossible("a process could not be started"))

    def _not_started(self, handle: RankHandle) -> bool:
        """It never will be. Whether the job is being stopped, and the supervisor waited for this one's end."""
        handle.ordered = False
        if handle.sent:
            self._never_started(handle)
        return bool(handle.sent)

    def _never_started(self, handle: RankHandle) -> None:
        handle.ended = Ended(signal=signal.SIGTERM, at=self.clock.elapsed(), order=self._order_of_ends)
        self._job.feed(supervisor.RankEnded(handle.rank, 0, signal.SIGTERM, False, "it was never started"))

    # --- what workers say

    def _on_worker(self, handle: RankHandle, *, waits: bool = True) -> bool:
        """Act on one packet; False when there is none (any more)."""
        try:
            message, fds = channel.receive(handle.control, flags=0 if waits else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        now = self.clock.elapsed()
        match message:
            case None:
                self._loop.unwatch(handle.control.fileno())
                return False
            case AtPhase(phase):
                handle.phase, handle.phase_at, handle.failed_to_join = phase, now, False
                if phase == "running" and handle.joined_at is None and handle.meeting is not None:
                    handle.joined_at = now
                self.account.event("phase", rank=handle.rank, phase=phase)
                self._job.feed(supervisor.AtPhase(handle.rank, phase, self.account.needs_all(handle)))
                if phase == "joining":
                    self._meetings.joining()
            case Caught(serial, raised):
                handle.caught[serial] = self.account.stamped(raised)
                handle.failed_to_join = handle.failed_to_join or raised.call == "init_process_group"
                leaving: dict[str, Any] = {"on_its_way": True} if raised.on_its_way else {}
                self.account.event(
                    "handled-error", rank=handle.rank, type=raised.type, message=raised.message[:500], call=raised.call, **leaving
                )
                self._job.feed(supervisor.Erred(handle.rank, raised.call))
            case Uncatch(serial):
                handle.caught.pop(serial, None)
            case Uncaught():
                self._on_uncaught(handle, message)
            case Leaving():
                handle.left_at, handle.left_saying, handle.left_when = message.line, message.words, now
            case Debugging(waits):
                handle.debugging = waits
                self._job.feed(supervisor.Debugged(handle.rank, waits))
            case ClosesGroup(line):
                handle.closed_at, handle.closed_line = now, line
                self.account.event("group-closed", rank=handle.rank, line=line)
            case Meets():
                handle.closed_at, handle.closed_line = 0.0, ""
                self._meetings.meets(handle, message)
            case Spawns(line):
                self._on_spawns(handle, line)
            case OfSpawned():
                self._spawned.tells(handle, message, fds)
            case ForksCuda(line, first):
                handle.cuda_forks.append((line, first))
            case ChildrenFailed():
                handle.children = message
                self.account.event("children-failed", rank=handle.rank, pids=[one.pid for one in message.children])
            case Imported(name, seconds):
                handle.imports[name] = seconds
            case ImportedPart(name):
                handle.parts.append(name)
            case SetLate(name, line):
                self.account.say_late(name, line)
                if variables.is_of_parts(name):
                    self.spoilt.update(dict.fromkeys(self.early, f"the program sets {name}, which it reads"))
            case NotExecuted(number):
                handle.not_executed = number
            case Outcome():
                self._tell_caller(message, fds)
                for fd in fds:
                    os.close(fd)
        return True

    def _on_uncaught(self, handle: RankHandle, message: Uncaught) -> None:
        handle.raised, handle.traceback_printed = self.account.stamped(message.raised), message.printed
        raised = message.raised
        self.account.event("raised", rank=handle.rank, type=raised.type, message=raised.message[:500])
        handle.log_line = self.account.log_line(handle.rank)
        if not message.printed:
            self.account.note(handle.rank, raised.traceback)
        if message.keyboard and handle.sent:  # our own SIGINT
            return
        if self._supervisor.is_stopping_from_outside:
            self.account.say_raised_while_stopped(handle.rank, handle.raised)
        self._job.feed(supervisor.Raised(handle.rank, self.account.is_consequence(raised), f"rank {handle.rank} raised {raised.type}"))

    def _on_spawns(self, handle: RankHandle, line: str) -> None:
        if self.plan.world.size == 1:
            if handle.joined_at is None:
                self.attempt.release()
            handle.released()
        elif not self._spawns_told:
            self._spawns_told = True
            self.account.say_spawns(line)

    # --- the caller of launch

    def _tell_caller(self, message: Restarted | Outcome, fds: Sequence[int] = ()) -> None:
        assert self.errand is not None
        try:
            channel.send(self.errand.line, message, fds)
        except OSError:
            return  # it has ended, which its pidfd says, too

    def _on_caller(self) -> None:
        assert self.errand is not None
        message, _ = channel.receive(self.errand.line)
        if not isinstance(message, Interrupt):
            raise CallerGone
        self.account.event("signal-received", signal=message.signal)
        self.signalled_by = self.signalled_by or message.signal
        self._job.feed(supervisor.Signalled(message.signal, signal.Signals[message.signal]))

    def _on_caller_end(self) -> None:
        raise CallerGone

    def _on_overdue(self) -> None:
        assert self.errand is not None
        assert self.errand.timeout is not None
        self.overdue = self.errand.timeout
        self._job.feed(supervisor.Overdue(self.overdue, self.errand.grace or OVERDUE_GRACE))

    # --- ends

    def _on_exited(self, message: Exited) -> None:
        handle = next((h for h in self.ranks if h.pid == message.pid), None)
        if handle is not None:
            if handle.ended is None:  # else the template was late: see `_take_end`
                self._on_rank_end(handle, message.code, message.signal)
            return
        self.guard.forget(message.pid)
        self.template.order(Reap(message.pid))  # a c10d host: this attempt's, or an earlier one's that was ended
        host = self.attempt.host
        if host is not None and host.pid == message.pid and host.pidfd >= 0 and any(h.alive for h in self.ranks):
            host.end()
            self._helper_lost("c10d host", message.pid, message.code, message.signal)

    def _on_untold_end(self, handle: RankHandle) -> None:
        """A rank has ended. The template is about to say how; not when it was stopped."""
        self._loop.unwatch(handle.pidfd)
        self._loop.at(f"end of rank {handle.rank}", self._loop.now + TOLD_PATIENCE, lambda now: self._take_end(handle))

    def _take_end(self, handle: RankHandle) -> None:
        if handle.ended is None and (end := processes.end_of_unreaped(handle.pid)) is not None:
            if not self._template_is_silent:
                self._template_is_silent = True
                self.account.say(f"rallypoint: the template (pid {self.template.pid}) does not tell that ranks have ended: {self._state()}")
            self._on_rank_end(handle, *end)

    def _state(self) -> str:
        found = processes.status(self.template.pid)
        return f"state {found.state}" if found is not None else "it is gone"

    def _on_rank_end(self, handle: RankHandle, code: int, number: int) -> None:
        while self._on_worker(handle, waits=False):  # its last words come before its end
            pass
        self._loop.unwatch(handle.control.fileno())
        self._loop.unwatch(handle.pidfd)
        self._loop.cancel(f"end of rank {handle.rank}")
        if self._supervisor.state is State.RUNNING:  # it was asked for `rallypoint stacks`, a stall or a roll call, perhaps hours ago
            handle.disregard()
        handle.ended = Ended(code, number, self.clock.elapsed(), self._order_of_ends)
        self._order_of_ends += 1
        self.account.event("ended", rank=handle.rank, **({"signal": signals.name(number)} if number else {"code": code}))
        lost_peer = self.account.has_lost_a_peer(handle)
        # An abort and a plain exit code may be a program's answer to a lost peer; other signals and recorded exceptions are not.
        sure = bool(number and number != signal.SIGABRT) or (handle.raised is not None and not lost_peer)
        because = f"rank {handle.rank} ended with {signals.name(number) if number else f'exit code {code}'}"
        self._job.feed(supervisor.RankEnded(handle.rank, code, number, sure and not handle.sent, because))

    def _clean_group(self, action: CleanGroup) -> None:
        handle = self.ranks[action.rank] if action.rank < len(self.ranks) else None
        if handle is None or not handle.pid:  # it was never started
            return
        members = processes.group_members(handle.pid)
        if members and not action.kill:
            self._leftovers.found(handle)
            return
        if members:
            processes.send_group(handle.pid, signal.SIGKILL)
        self._reap(handle)

    def _reap(self, handle: RankHandle) -> None:
        """Give its number back: only after its group was signalled, since that frees the group's number, too."""
        if handle.reaped or not handle.pid:
            return
        handle.reaped = True
        self.guard.forget(handle.pid)  # from here on the number may be a stranger's
        if self.lost is None or self.lost.name != "template":
            self.template.order(Reap(handle.pid))

    def _on_reaped(self, message: Reaped) -> None:
        handle = next((h for h in self.ranks if h.pid == message.pid), None)
        if handle is not None:
            self.account.event(
                "reaped",
                rank=handle.rank,
                user=round(message.user_time, 3),
                system=round(message.system_time, 3),
                resident=message.resident_max,
            )

    def _reap_orphans(self) -> None:
        """We are the subreaper of the job: what lost its parent is ours to reap. The template and the guard are looked after apart."""
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            except ChildProcessError:
                return
            if info is None or info.si_pid in (self.template.pid, self.guard.pid):
                return  # the pidfd's event follows, and calls this again
            handle = next((h for h in self.ranks if h.pid == info.si_pid), None)
            if handle is not None and handle.ended is None:
                self._on_rank_end(handle, *processes.ended(info))
            if handle is not None:
                processes.send_group(handle.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # a look's own child, which its thread waits for, too
                os.waitid(os.P_PID, info.si_pid, os.WEXITED)

    def _reap_everything(self) -> None:
        """At the very end: nobody asks how they ended any more."""
        with contextlib.suppress(ChildProcessError):
            while (info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is not None and info.si_pid != self.guard.pid:
                os.waitid(os.P_PID, info.si_pid, os.WEXITED)

    # --- reports

    def _make_report(self, action: MakeReport) -> None:
        if self.problem is not None and action.reason == "start":
            reports = self.account.report_problem(self.problem)
        else:
            misfit = self._meetings.cause_of_all() if action.reason == "failure" else None
            seen = self._job.members if misfit is not None or action.reason == "interrupted" else self.ranks
            reports = self.account.report(
                seen,
                world_size=self._job.size if seen is self._job.members else self.plan.world.size,
                attempt=self._supervisor.attempt,
                held=self.attempt.held,
                interrupted_by=self.signalled_by if action.reason == "interrupted" else "",
                overdue=self.overdue if action.reason == "overdue" else 0.0,
                helper=self.lost if action.reason == "helper" else None,
                because=action.because,
                reached=self._meetings.reached,
                misfit=misfit,
            )
        self._job.feed(supervisor.Judged(reports[0].exit_status, rules.same_again(reports[0])))

    # --- stopping

    def _signal_group(self, action: SignalGroup) -> None:
        if action.rank >= len(self.ranks):  # not even its handle could be made
            self._job.feed(supervisor.RankEnded(action.rank, 0, signal.SIGTERM, False, "it was never started"))
            return
        handle = self.ranks[action.rank]
        if not handle.pid:
            handle.sent.append(action.signal)
            self._orders = iter(())  # nothing more is started
            if not handle.ordered:  # else it is killed when the template tells its pid
                self._never_started(handle)
            return
        if not handle.alive:
            return
        what: Literal["killed", "stop-sent"] = "killed" if action.signal == "SIGKILL" else "stop-sent"
        self.account.event(what, rank=action.rank, because=action.because, signal=action.signal)
        handle.signal_group(action.signal, self.clock.elapsed())

    def _clean_up(self, action: CleanUp) -> None:
        """Every rank has ended: end what they left running, and this attempt's host."""
        leftovers = [handle for handle in self.ranks if handle.pid and not handle.reaped]
        if action.gently:
            self._leftovers.end(leftovers, self._hurries())
        self.account.say_immortal(self._kill_family(leftovers, self._our_own()))
        for handle in leftovers:
            self._reap(handle)
        self.attempt.release()
        # The call's, a visitor's and those of template and guard are not the attempt's.
        self._loop.forget_all_but("overdue", "standing", "culprit", "stopped guard", "stopped template")
        self._drain()
        self.account.event("attempt-ended", because=action.because, attempt=self.attempt.number)

    def _hurries(self) -> dict[int, Callable[[], bool]]:
        """What ends every grace at once: a signal to us, the caller's interrupt, its end."""
        signalled = {self._signals.fileno(): lambda: any(number != signal.SIGCHLD for number in self._signals.read())}
        if self.errand is None:
            return signalled
        return {**signalled, self.errand.line.fileno(): lambda: True, self.errand.caller: lambda: True}

    def _must_leave(self) -> bool:
        """Whether a job that is over must not wait any longer for a reader that pauses: what ends the launcher from outside, and a second
        Ctrl-C, leave no time for it. `launch` has waited already, for as long as its caller wants."""
        signalled = any(number != signal.SIGCHLD for number in self._signals.read())
        return signalled or self.errand is not None or self.signalled_by not in (None, "", "SIGINT")

    def _drain(self) -> None:
        """Show all that the ranks said. A caller of `launch` that reads nothing just now (Ctrl-S, Ctrl-Z) loses nothing of it."""
        while not self.account.settle(DRAIN_TIMEOUT) and self.errand is not None and self.errand.is_awaited():
            continue

    def _look_for_stopped(self) -> None:
        """The kernel tells a parent when a child was stopped, too. Nobody has a reason to stop one of our helpers and not the job."""
        for name, pid in (("guard", self.guard.pid), ("template", self.template.pid)):
            with contextlib.suppress(ChildProcessError):  # it is gone
                if os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG) is not None:
                    self._loop.by(f"stopped {name}", self._loop.now + HELPER_PATIENCE, functools.partial(self._go_on, name, pid))

    def _go_on(self, name: str, pid: int, now: float) -> None:
        if processes.is_stopped(pid):
            self.account.say(f"rallypoint: the {name} (pid {pid}), a helper of the launcher's, was stopped (SIGSTOP): it is continued")
            os.kill(pid, signal.SIGCONT)  # a child of ours that is not reaped: the number is still its own

    def _on_notice(self, name: str) -> None:
        """A batch system says that it will end the job soon: the ranks hear of it, and the job goes on."""
        self._noticed = True
        living = [handle for handle in self.ranks if handle.alive]
        handed = [handle.rank for handle in living if handle.notice(name)]
        if not self.plan.quiet:
            self.account.say_notice(name, handed, [handle.rank for handle in living if handle.rank not in handed])

    def _on_stop(self) -> None:
        """A visitor wants the job to end (`rallypoint stop`)."""
        self.account.event("signal-received", signal="SIGTERM", because="rallypoint stop asks")
        self.account.say("rallypoint: rallypoint stop ends this job")
        self.signalled_by = self.signalled_by or "SIGTERM"
        self._job.feed(supervisor.Signalled("SIGTERM", int(signal.SIGTERM)))

    def _suspend(self) -> None:
        """Ctrl-Z: stop the ranks, whose sessions the terminal does not reach, and this process; `fg` continues all."""
        living = [handle for handle in self.ranks if handle.alive]
        for handle in living:
            processes.send_group(handle.pid, signal.SIGSTOP)
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # it stands here until SIGCONT
        signal.signal(signal.SIGTSTP, handler)
        for handle in living:
            processes.send_group(handle.pid, signal.SIGCONT)

    def _on_signal(self) -> None:
        for number in self._signals.read():
            if number == signal.SIGCHLD:
                self._reap_orphans()
                self._look_for_stopped()
                continue
            if number == signal.SIGTSTP:
                self._suspend()
                continue
            self.account.event("signal-received", signal=number.name)
            if number.name in self.plan.notices:
                self._on_notice(number.name)
                continue
            self.signalled_by = self.signalled_by or number.name
            self._job.feed(supervisor.Signalled(number.name, int(number)))
