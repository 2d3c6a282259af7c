"""The loop on each node: feeds the supervisor, does what it says."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from rallypoint.clock import Clock
from rallypoint.diagnosis.evidence import Ended, HelperLost
from rallypoint.diagnosis.report import Report
from rallypoint.errors import EnvironmentProblem, RallypointError
from rallypoint.host import processes, signals, system_calls
from rallypoint.launcher import channel, crew, guard, supervisor
from rallypoint.launcher.channel import (
    AtPhase,
    Caught,
    Debugging,
    Exited,
    Finish,
    Forked,
    ForksCuda,
    Imported,
    ImportFailed,
    Interrupt,
    Leaving,
    Meets,
    NotExecuted,
    NotForked,
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
from rallypoint.launcher.plan import Plan
from rallypoint.launcher.supervisor import (
    Action,
    AskEvidence,
    CallRoll,
    CleanGroup,
    CleanUp,
    EvidenceIn,
    Leave,
    LookWhetherStuck,
    MakeReport,
    SetTimer,
    SignalGroup,
    StartRanks,
    State,
    Stuck,
    Supervisor,
    Timer,
)

if TYPE_CHECKING:
    from rallypoint.diagnosis.rollcall import Misfit
    from rallypoint.host.ports import HeldPort
    from rallypoint.host.reach import Looking
    from rallypoint.launcher.attempt import Attempt, Order
    from rallypoint.launcher.culprit import Search
    from rallypoint.launcher.inquiry import Inquiry
    from rallypoint.launcher.rendezvous_file import Place
    from rallypoint.launcher.standby import Errand

# Seconds for all ranks to write their stacks. A dump takes a millisecond; a rank that holds the interpreter's memory lock, or is
# stopped, never answers, and the report must come within 0.3 s.
EVIDENCE_DEADLINE = 0.2
# Seconds between looks whether a dump is whole. The handler has no way to say so; its blocked signal in /proc does.
EVIDENCE_LOOK = 0.004
# Seconds after a rank's own deadline for meeting the others before the launcher looks there: torch, when it keeps it, is heard first.
TORCH_OVERRUN = 0.05
# Seconds for a look at a meeting point. It has a deadline of its own, of less than half as much: this is for a machine so busy that a
# thread does not get to run.
LOOK_PATIENCE = 0.8
# Seconds that ranks which cannot meet must be seen to wait. A call that torch refuses (a backend that is not there, a port that is taken)
# raises in less, most of the time spent on starting CUDA, and the program may have something else to try.
MISFIT_SETTLE = 2.0
# Seconds for the ranks that are missing at a roll call to write their stacks. Nobody waits for it, so a busy machine gets more time.
ROLL_CALL_DEADLINE = 2.0
# Orders that the template may have waiting: enough to keep it busy, few enough that descriptors in flight stay far below limits.
ORDERS_AHEAD = 4
# Seconds after the workers' end in which what they wrote is read and shown. Only a terminal that takes nothing makes it longer.
DRAIN_TIMEOUT = 5.0
# Seconds that a successful rank's children may take to notice its end (multiprocessing's resource tracker, a closing pipe) before they
# count as left running.
LEFTOVER_PATIENCE = 0.5
KILL_DEADLINE = 2.0  # seconds in which a SIGKILLed process must be gone; see guard.py


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
        self._files_limit = processes.prepare_to_supervise() if errand is None else errand.files_limit
        wanted = {signal.SIGINT, signal.SIGCHLD, *(signal.Signals[name] for name in plan.signals)}
        self._signals = signals.SignalLog(wanted)
        self.crew = Crew(guard.start(self._marker)) if errand is None else errand.crew
        self._hooks = not plan.plain and plan.start != "exec"
        if self.crew.template is None:
            self.crew.use(self._start_template(imports=plan.start == "template"))
        # Everything below is done while the template imports.
        from rallypoint.host import ports
        from rallypoint.launcher.account import Account

        try:
            if plan.torch:
                ports.check_loopback(plan.master_addr)  # torch would try for a minute, with a thousand lines
            self.account = Account(plan, self.clock, errand.outputs if errand is not None else (1, 2))
        except BaseException:  # or the run folder belongs to somebody else: the user reads that, and nothing may stay behind
            if errand is None:
                self.crew.end()
            self._signals.close()
            raise
        self._inquiry = self._open_door()
        self.attempt = self._new_attempt(0, started=False)
        self.held: HeldPort | None = None  # the first attempt's meeting point, if it was bound before
        self.place: Place | None = None  # on a shared file system, where the job says where its ranks meet
        self.problem: RallypointError | Report | None = None  # why nothing could be started
        self.lost: HelperLost | None = None
        self.signalled_by = ""
        self.overdue = 0.0  # seconds that the job was given, when they are over
        self.reports: list[Report] = []
        self._supervisor = Supervisor(
            world_size=plan.world.size,
            max_restarts=plan.max_restarts,
            grace=plan.grace,
            on_failure=plan.on_failure,
            roll_call=plan.roll_call,
        )
        self._orders: Iterator[Order] = iter(())
        self._ahead = 0
        self._timers: dict[str, float] = {}
        self._order_of_ends = 0
        self._status: int | None = None
        self._asked_until = 0.0
        self._looking: Looking | None = None  # at the meeting point that ranks do not reach
        self._looks_until = 0.0
        self._roll_look: Looking | None = None  # at the meeting point where all ranks wait, for the roll call
        self._meets_until: dict[int, float] = {}  # when the time is up that a rank gives torch to meet the others
        self._roll_called: list[RankHandle] = []  # who was asked for the roll call that is being prepared
        self._roll_because, self._roll_until = "", 0.0
        self._misfit: Misfit | None = None  # what keeps this attempt's ranks from meeting, as it looks
        self._misfit_settled = False  # and it has lasted
        self._misfit_gone: Misfit | None = None  # one that did not last: its ranks may just have given up waiting
        self._differing_told = False
        self._spawns_told = False
        self._unclean: Ready | None = None  # why there is no template, until it has been said
        self._search: Search | None = None
        self._epoll = select.epoll()
        self._sources: dict[int, Callable[[], object]] = {}
        self._watch(self._signals.fileno(), self._on_signal)
        self._watch(self.guard.pidfd, self._on_guard_end)
        self._watch_template()
        if self._inquiry.door is not None:
            self._watch(self._inquiry.door.fileno(), self._on_visitor)
        if errand is not None:
            self._watch(errand.line.fileno(), self._on_caller)
            self._watch(errand.caller, self._on_caller_end)
            if errand.timeout is not None:
                self._timers["overdue"] = self.clock.elapsed() + errand.timeout

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
    def ranks(self) -> list[RankHandle]:
        """The ranks of this attempt, by rank; none before the first."""
        return self.attempt.ranks

    # --- the loop

    def run(self) -> int:
        """Until the supervisor says `Leave`."""
        self.account.start(self.plan)
        if self.plan.start != "template":
            self.account.live(None)
        if self.crew.ready:
            self._feed(supervisor.Prepared())
        while self._status is None:
            ready = [(fd, self._sources.get(fd)) for fd, _ in self._epoll.poll(self._timeout())]
            for fd, source in ready:
                # An earlier one of the round may have closed it, and even given its number to somebody else.
                if source is not None and self._sources.get(fd) is source:
                    source()
            self._ring()
            self.account.show_phases(self.ranks, self._supervisor.state)
        return self._status

    def close(self) -> None:
        """Leave nothing behind, whatever happened. May be called in any state."""
        self._on_culprit()
        self._inquiry.close()
        if self.errand is not None:
            self._await_forks()
        living = [handle for handle in self.ranks if handle.pid and not handle.reaped]
        if self.errand is None:
            self.template.order(Finish())
            self.template.end()
        left = self._kill_family(living, self._our_own())
        if self.errand is None:
            self._reap_everything()
        else:
            for handle in living:
                self._reap(handle)
            self._reap_orphans()
        self._close_store("the job is over")
        if self.errand is None:
            self.guard.farewell()
        if self._status == 0:
            self.account.say_imports(self.ranks)
        self.account.close(self._status, left)
        self.attempt.close()
        self._epoll.close()
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
        """Processes of ours that carry the job's mark and are none of its ranks'."""
        if self.errand is None:
            return [self.guard.pid]
        host = self.attempt.host
        return [self.guard.pid, self.template.pid, *([host.pid] if host and host.pid else [])]

    def _kill_family(self, handles: list[RankHandle], spare: list[int]) -> list[processes.Status]:
        """SIGKILL for all that these ranks, which are not reaped yet, started, and for whatever else of the job is our descendant."""
        sessions = [handle.pid for handle in handles]
        if self._search is not None:
            spare = [*spare, self._search.pid]
        return processes.kill_family(self._marker, sessions, deadline=KILL_DEADLINE, ancestor=os.getpid(), spare=spare)

    def _watch(self, fd: int, act: Callable[[], object]) -> None:
        self._sources[fd] = act
        self._epoll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._sources.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _timeout(self) -> float | None:
        if not self._timers:
            return None
        return max(0.0, min(self._timers.values()) - self.clock.elapsed())

    def _ring(self) -> None:
        now = self.clock.elapsed()
        for name in [name for name, at in self._timers.items() if at <= now]:
            if self._timers.pop(name, None) is None:  # an earlier one of this round ended the attempt, and all its timers
                continue
            if name == "evidence":
                self._look_for_evidence(now)
            elif name == "misfit":
                self._on_misfit()
            elif name == "roll answers":
                self._look_for_roll_answers(now)
            elif name == "culprit":
                self._on_culprit()
            elif name == "answers":
                self._look_for_answers(now)
            elif name == "looks":
                self._look_at_ranks(now)
            elif name == "leftovers":
                self._tell_leftovers()
            elif name == "meeting":
                self._on_unmet(now)
            elif name == "overdue":
                self._on_overdue()
            else:
                self._feed(Timer(name))

    def _feed(self, event: supervisor.Event) -> None:
        for action in self._supervisor.handle(event, self.clock.elapsed()):
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case StartRanks():
                self._start_ranks(action)
            case AskEvidence():
                self._ask_evidence(action)
            case MakeReport():
                self._make_report(action)
            case CallRoll():
                self._call_roll(action)
            case SignalGroup():
                self._signal_group(action)
            case LookWhetherStuck():
                stuck = tuple(number for number in action.ranks if self.ranks[number].alive and self.ranks[number].is_stuck())
                self._feed(Stuck(stuck))
            case CleanGroup():
                self._clean_group(action)
            case SetTimer():
                self._timers[action.name] = action.at
            case CleanUp():
                self._clean_up(action)
            case Leave():
                self._status = action.status

    # --- the template

    def _start_template(self, *, imports: bool) -> TemplateHandle:
        plan = self.plan
        return crew.start_template(
            plan.program,
            (*plan.parts, *plan.preload),
            {**os.environ, **(plan.environment if self.errand is None else {"RALLYPOINT_JOB": plan.job})},
            imports=imports,
            hooks=self._hooks,
            paths=plan.task.paths if plan.task is not None else None,
            files_limit=self._files_limit,
            guard=self.guard,
        )

    def _watch_template(self) -> None:
        self.account.event("template-started", pid=self.template.pid)
        self._watch(self.template.socket.fileno(), self._on_template)
        self._watch(self.template.pidfd, self._on_template_end)

    def _on_template(self, *, waits: bool = True) -> bool:
        """Act on one packet; False when there is none (any more)."""
        try:
            message, _ = channel.receive(self.template.socket, flags=0 if waits else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        match message:
            case None:
                self._unwatch(self.template.socket.fileno())
                return False
            case Ready():
                self._on_ready(message)
            case ImportFailed():
                self.problem = self.account.import_failed(message)
                self._feed(supervisor.Impossible(f"{message.module} cannot be imported"))
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
            self._feed(supervisor.Prepared())
            return
        because = f"after importing {message.module} {message.unclean}"
        self.account.event("template-unclean", because=because, module=message.module)
        self._use_fresh_interpreters()
        self._look_for_culprit(message)

    def _look_for_culprit(self, message: Ready) -> None:
        """Find the line while the job starts all the same; the notice waits for it, at most until the job is over."""
        from rallypoint.launcher import culprit, program

        self._unclean = message
        if message.module in self.plan.preload:
            modules = self.plan.preload[: self.plan.preload.index(message.module) + 1]
            environment = {**os.environ, **self.plan.environment, "OPENBLAS_NUM_THREADS": "1"}  # the template's
            self._search = culprit.Search(modules, program.folder(self.plan.program), environment)
            self._watch(self._search.fileno(), self._on_culprit)
            self._timers["culprit"] = self.clock.elapsed() + culprit.DEADLINE
        else:
            self._on_culprit()

    def _on_culprit(self) -> None:
        """Say what spoilt the template, with the line if it is known by now. Only once."""
        message, search, self._unclean, self._search = self._unclean, self._search, None, None
        self._timers.pop("culprit", None)
        line = ""
        if search is not None:
            line = search.answer()
            self._unwatch(search.fileno())
            search.end()
        if message is not None:
            self.account.say_unclean(message, line)

    def _use_fresh_interpreters(self) -> None:
        self._unwatch(self.template.socket.fileno())
        self._unwatch(self.template.pidfd)
        self.template.end()
        self.crew.use(self._start_template(imports=False))
        self._watch_template()

    def _on_template_end(self) -> None:
        """The template has ended though nobody told it to: its children are ours now, and die with it."""
        self._unwatch(self.template.pidfd)
        while self._on_template(waits=False):  # what it had said before
            pass
        code, number = self.template.reap()
        for handle in self.ranks:
            handle.ordered = False  # what it had not forked by now, it never will
        if self.problem is None:
            self._helper_lost("template", self.template.pid, code, number)
        self._reap_orphans()

    def _on_guard_end(self) -> None:
        self._unwatch(self.guard.pidfd)
        code, number = self.guard.reap()
        self._reap_orphans()
        self._helper_lost("guard", self.guard.pid, code, number)

    def _helper_lost(self, name: str, pid: int, code: int, number: int) -> None:
        self.lost = HelperLost(name, pid, Ended(code, number, self.clock.elapsed()))
        self.account.event("ended", because=f"the {name} ended by itself", pid=pid, code=code, signal=number)
        self._feed(supervisor.HelperLost(name))

    # --- starting

    def _start_ranks(self, action: StartRanks) -> None:
        self._misfit = self._looking = None
        self._misfit_settled, self._misfit_gone = False, None
        self._meets_until = {}
        self._close_store("the job was started again, with a new store")
        self.attempt.close()
        try:
            self.attempt = self._new_attempt(action.attempt)
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
            self._cannot_start(_exhausted(error, self.plan.world.local_size))
            return
        self.account.event("port-held", host=self.plan.master_addr, port=port)
        now = self.clock.elapsed()
        self._inquiry.begin_attempt(now)
        self._timers["looks"] = self._inquiry.next_look(now)
        if self._inquiry.is_awaited:  # its round was about ranks that are gone
            self._ask_where()
        self._orders = self.attempt.orders(self.account)
        self._ahead = 0
        self._send_orders()

    def _open_store(self) -> None:
        self.attempt.open_store()
        if self.attempt.store is not None:
            self.guard.inherit(self.attempt.store.path)
            self._watch(self.attempt.store.fileno(), self._on_store_client)

    def _on_store_client(self) -> None:
        """The first one has come: from here on a thread serves the store. A job whose ranks never ask for it has none."""
        store = self.attempt.store
        if store is None:
            return
        self._unwatch(store.fileno())
        try:
            store.serve(self.ranks, self.clock.elapsed)
        except (OSError, RuntimeError) as error:  # no descriptor, no memory, no thread: the clients read that nobody answers
            self.account.say(f"rallypoint: the job's store cannot be served: {error}")
            self.attempt.close_store("it could not be started")
            return
        self.account.event("store-serves", address=store.address)

    def _close_store(self, reason: str) -> None:
        if self.attempt.store is not None:
            self._unwatch(self.attempt.store.fileno())
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
                self._cannot_start(_exhausted(error, self.plan.world.local_size))
                return
            if order is None:
                return
            self._ahead += 1
            if order.handle is not None:
                order.handle.ordered = True
            else:
                ready = self.attempt.host_ready
                self._watch(ready, lambda ready=ready: self._on_host_ready(ready))  # type: ignore[misc]
            self.template.order(order.message, order.fds)
            for fd in order.ours:
                os.close(fd)

    def _cannot_start(self, problem: EnvironmentProblem) -> None:
        self.problem = problem
        self._orders = iter(())
        self._feed(supervisor.Impossible(str(problem)))

    def _on_host_ready(self, ready: int) -> None:
        if os.read(ready, 1):
            self.account.event("c10d-ready", address=self.attempt.held)
        self._unwatch(ready)
        os.close(ready)

    def _on_forked(self, message: Forked) -> None:
        self._ahead -= 1
        self._send_orders()
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
        if not self._hooks:
            handle.phase = "started"  # it will tell nothing more
        self.account.event("worker-started", rank=message.rank, pid=message.pid, fork=round(message.seconds, 4))
        self._watch(handle.control.fileno(), lambda: self._on_worker(handle))

    def _on_not_forked(self, message: NotForked) -> None:
        self._ahead -= 1
        if message.unclean:
            self.account.say_unclean(Ready(0.0, unclean=message.unclean), "")
        self.problem = self.account.not_forked(message)
        if message.rank >= 0:
            handle = self.ranks[message.rank]
            handle.ordered = False
            if handle.sent:  # the job is being stopped, and the supervisor waits for this one's end
                self._never_started(handle)
                return
        self._feed(supervisor.Impossible("a process could not be started"))

    def _never_started(self, handle: RankHandle) -> None:
        handle.ended = Ended(signal=signal.SIGTERM, at=self.clock.elapsed(), order=self._order_of_ends)
        self._feed(supervisor.RankEnded(handle.rank, 0, signal.SIGTERM, False, "it was never started"))

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
                self._unwatch(handle.control.fileno())
                return False
            case AtPhase(phase):
                handle.phase, handle.phase_at, handle.failed_to_join = phase, now, False
                if phase == "running" and handle.joined_at is None and handle.meeting is not None:
                    handle.joined_at = now
                self.account.event("phase", rank=handle.rank, phase=phase)
                self._feed(supervisor.AtPhase(handle.rank, phase, self.account.needs_all(handle)))
                if phase == "joining":
                    self._look_for_misfit()
            case Caught(serial, raised):
                handle.caught[serial] = self.account.stamped(raised)
                handle.failed_to_join = handle.failed_to_join or raised.call == "init_process_group"
                self.account.event("handled-error", rank=handle.rank, type=raised.type, message=raised.message[:500], call=raised.call)
                self._feed(supervisor.Erred(handle.rank, raised.call))
            case Uncatch(serial):
                handle.caught.pop(serial, None)
            case Uncaught():
                self._on_uncaught(handle, message)
            case Leaving():
                handle.left_at = message.line
            case Debugging(waits):
                handle.debugging = waits
                self._feed(supervisor.Debugged(handle.rank, waits))
            case Meets():
                self._on_meets(handle, message)
            case Spawns(line):
                self._on_spawns(handle, line)
            case ForksCuda(line, first):
                handle.cuda_forks.append((line, first))
            case Imported(name, seconds):
                handle.imports[name] = seconds
            case SetLate(name, line):
                self.account.say_late(name, line)
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
        self._feed(supervisor.Raised(handle.rank, self.account.is_consequence(raised), f"rank {handle.rank} raised {raised.type}"))

    def _on_meets(self, handle: RankHandle, message: Meets) -> None:
        handle.meeting, handle.at_held = message.meeting, bool(self.attempt.held) and not message.differs
        if message.differs and not self._differing_told:
            self._differing_told = True
            self.account.say_differs(message.meeting, self.attempt.held)
        if self.account.share_a_device(self.ranks):
            self._feed(supervisor.Misfit("ranks of one group of NCCL's have the same GPU"))
        if message.meeting.timeout:
            until = self.clock.elapsed() + message.meeting.timeout + TORCH_OVERRUN
            self._meets_until[handle.rank] = until
            self._timers["meeting"] = min(until, self._timers.get("meeting", until))

    def _on_unmet(self, now: float) -> None:
        """Ranks still wait though their own time is up. torch does not keep it when it is refused, which costs up to as much again, nor
        ever when somebody accepts the connection and says nothing. So the launcher looks; what keeps them from meeting ends the job.

        A program that catches torch's error may have another place to try, and gets it as late as torch is. From a silent one no error
        ever comes.
        """
        waiting = {number: until for number, until in self._meets_until.items() if self.ranks[number].waiting}
        if self._supervisor.state is not State.RUNNING or not waiting:
            return
        if (soonest := min(waiting.values())) > now:
            self._timers["meeting"] = soonest
            return
        from rallypoint.diagnosis import meeting_point  # here, as the account: the agent must start its template first

        late = [self.ranks[number] for number, until in waiting.items() if until <= now]
        looking = self._look_there(meeting_point.place(late[0].meeting) if late[0].meeting is not None else None)
        if self._is_looking(now):
            self._timers["meeting"] = now + EVIDENCE_LOOK
            return
        for handle in late:
            del self._meets_until[handle.rank]
        self._timers["meeting"] = now
        if looking is None or looking.result is None or not meeting_point.explains(looking.result):
            return
        hangs = looking.result.outcome in ("answered", "silent", "closed")
        if hangs or not any(handle.meeting is not None and handle.meeting.guarded for handle in late):
            self._feed(supervisor.Misfit(f"ranks cannot meet at {looking.result.address}"))

    def _look_there(self, place: tuple[str, int] | None) -> Looking | None:
        """Look at a meeting point, in a thread of its own; once for each."""
        if place is not None and (self._looking is None or self._looking.address != place):
            from rallypoint.diagnosis import meeting_point
            from rallypoint.host.reach import Looking

            self._looking = Looking(*place, meeting_point.GREETING, meeting_point.LOOK_TIMEOUT)
            self._looks_until = self.clock.elapsed() + LOOK_PATIENCE
        return self._looking

    def _is_looking(self, now: float) -> bool:
        return self._looking is not None and self._looking.result is None and now < self._looks_until

    def _look_for_misfit(self) -> None:
        """A rank has come: whether those who wait now can meet at all. A failure that is being judged by then is what went wrong first."""
        if self._supervisor.state is State.RUNNING and self._misfit is None:
            self._misfit = self.account.misfit(self.ranks)
            if self._misfit is not None:
                self._timers["misfit"] = self.clock.elapsed() + MISFIT_SETTLE

    def _on_misfit(self) -> None:
        """Those who could not meet a moment ago have had time to raise, and to try something else."""
        if self._supervisor.state is not State.RUNNING:
            return
        before, self._misfit = self._misfit, None
        self._misfit_gone = before
        self._look_for_misfit()
        if self._misfit is not None and before is not None and self._misfit.code == before.code and self._misfit.ranks == before.ranks:
            self._misfit_settled = True
            self._feed(supervisor.Misfit(self._misfit.because))

    def _cause_of_all(self) -> Misfit | None:
        """The misfit, when that is what the job failed of: it has lasted, or ranks gave up waiting, or could not have one seat twice."""
        found = self._misfit or self._misfit_gone
        if found is None or self._misfit_settled:
            return found
        raised = [handle.raised for handle in self.ranks if handle.raised is not None]
        told = all(
            one.call == "init_process_group" and (found.code == "rank-duplicate" or self.account.is_consequence(one)) for one in raised
        )
        # A seat that is taken twice, or one too few, leaves another one empty: whoever waits for that gives up as well.
        of_all = found.code in ("rank-duplicate", "world-size-differs")
        theirs = of_all or all(handle.rank in found.ranks for handle in self.ranks if handle.raised is not None)
        return found if raised and told and theirs else None

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
        self._feed(supervisor.Signalled(message.signal, signal.Signals[message.signal]))

    def _on_caller_end(self) -> None:
        raise CallerGone

    def _on_overdue(self) -> None:
        assert self.errand is not None
        assert self.errand.timeout is not None
        self.overdue = self.errand.timeout
        self._feed(supervisor.Overdue(self.overdue))

    # --- ends

    def _on_exited(self, message: Exited) -> None:
        handle = next((h for h in self.ranks if h.pid == message.pid), None)
        if handle is not None:
            self._on_rank_end(handle, message.code, message.signal)
            return
        self.guard.forget(message.pid)
        self.template.order(Reap(message.pid))  # a c10d host: this attempt's, or an earlier one's that was ended
        host = self.attempt.host
        if host is not None and host.pid == message.pid and host.pidfd >= 0 and any(h.alive for h in self.ranks):
            host.end()
            self._helper_lost("c10d host", message.pid, message.code, message.signal)

    def _on_rank_end(self, handle: RankHandle, code: int, number: int) -> None:
        while self._on_worker(handle, waits=False):  # its last words come before its end
            pass
        self._unwatch(handle.control.fileno())
        if self._supervisor.state is State.RUNNING:  # it was asked for `rallypoint stacks`, a stall or a roll call, perhaps hours ago
            handle.disregard()
        handle.ended = Ended(code, number, self.clock.elapsed(), self._order_of_ends)
        self._order_of_ends += 1
        self.account.event("ended", rank=handle.rank, **({"signal": signals.name(number)} if number else {"code": code}))
        lost_peer = self._has_lost_a_peer(handle)
        # An abort and a plain exit code may be a program's answer to a lost peer; other signals and recorded exceptions are not.
        sure = bool(number and number != signal.SIGABRT) or (handle.raised is not None and not lost_peer)
        because = f"rank {handle.rank} ended with {signals.name(number) if number else f'exit code {code}'}"
        self._feed(supervisor.RankEnded(handle.rank, code, number, sure and not handle.sent, because))

    def _has_lost_a_peer(self, handle: RankHandle) -> bool:
        seen = [*handle.caught.values(), *([handle.raised] if handle.raised else [])]
        return any(self.account.is_consequence(one) for one in seen)

    def _clean_group(self, action: CleanGroup) -> None:
        handle = self.ranks[action.rank] if action.rank < len(self.ranks) else None
        if handle is None or not handle.pid:  # it was never started
            return
        members = processes.group_members(handle.pid)
        if members and not action.kill:
            handle.left_at_exit = self.clock.elapsed()
            self._timers.setdefault("leftovers", handle.left_at_exit + LEFTOVER_PATIENCE)
            return
        if members:
            processes.send_group(handle.pid, signal.SIGKILL)
        self._reap(handle)

    def _tell_leftovers(self) -> None:
        """Name what successful ranks have left running for a while now, once each; reap those whose helpers have gone by themselves."""
        now = self.clock.elapsed()
        for handle in self.ranks:
            if handle.left_at_exit is None or handle.reaped:
                continue
            if now < handle.left_at_exit + LEFTOVER_PATIENCE and self._supervisor.state is State.RUNNING:
                self._timers.setdefault("leftovers", handle.left_at_exit + LEFTOVER_PATIENCE)
                continue
            handle.left_at_exit = None
            members = processes.group_members(handle.pid)
            if members:
                self.account.say_leftovers(handle.rank, members)
                self.account.event("left-running", rank=handle.rank, pids=[one.pid for one in members])
            else:
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

    # --- where the ranks stand

    def _open_door(self) -> Inquiry:
        """Whoever of this user asks where the ranks are is let in. Where no folder takes a socket the job goes on without."""
        from rallypoint.launcher.inquiry import Door, Inquiry

        inquiry = Inquiry(self.plan, hooks=self._hooks)
        if self.account.run_dir:  # else nobody could find it
            try:
                inquiry.door = Door()
            except EnvironmentProblem as problem:
                self.account.event("door-missing", because="; ".join((problem.headline, *problem.why)))
                return inquiry
            self.account.announce(inquiry.door.path)
            self.guard.inherit(inquiry.door.path)
        return inquiry

    def _on_visitor(self) -> None:
        door = self._inquiry.door
        assert door is not None
        try:
            visitor = door.come_in()
        except OSError:  # no descriptor is left for it
            self._unwatch(door.fileno())
            return
        while (oldest := door.surplus()) is not None:
            self._unwatch(oldest.fileno())
            door.see_off(oldest)
        if visitor is not None:
            self._watch(visitor.fileno(), lambda: self._on_question(visitor))

    def _on_question(self, visitor: socket.socket) -> None:
        door = self._inquiry.door
        assert door is not None
        asks = door.listen(visitor)
        if asks is None:
            return
        self._unwatch(visitor.fileno())
        if asks:
            self.account.event("evidence-asked", because="rallypoint stacks asks")
            self._ask_where(visitor)
        else:
            door.see_off(visitor)

    def _ask_where(self, visitor: socket.socket | None = None) -> None:
        now = self.clock.elapsed()
        if visitor is not None:
            self._inquiry.expect(visitor)
        # While a failure is judged the report waits for the answers to its own question: another one now could cost it those.
        if self._supervisor.state is not State.JUDGING:
            self._inquiry.ask(self.ranks, now)
        self._timers.setdefault("answers", now)

    def _look_for_answers(self, now: float) -> None:
        from rallypoint.launcher.inquiry import ANSWERS_LOOK

        standing = self._inquiry.finish(now, self._supervisor.attempt, self.account.run_dir)
        if standing is None:
            if not self._inquiry.is_asking and self._inquiry.is_awaited and self._supervisor.state is not State.JUDGING:
                self._inquiry.ask(self.ranks, now)
            if self._inquiry.is_asking or self._inquiry.is_awaited:
                self._timers["answers"] = now + ANSWERS_LOOK
            return
        if self._supervisor.state is not State.RUNNING:  # it is being stopped, which is no stall
            return
        stall = self._inquiry.judge(standing, now, debugging=any(handle.debugging for handle in self.ranks))
        if stall is not None:
            from rallypoint.diagnosis.standing import stalled

            self.account.say_stalled(stalled(standing, stall.seconds, seen=stall.looks))
        self._tell_moved()

    def _look_at_ranks(self, now: float) -> None:
        self._timers["looks"] = self._inquiry.next_look(now)
        if self._supervisor.state is State.RUNNING and self._inquiry.look(self.ranks, now):
            self._ask_where()
        self._tell_moved()

    def _tell_moved(self) -> None:
        moved = self._inquiry.moved()
        if moved and self._supervisor.state is State.RUNNING:
            self.account.say_moved(moved)

    # --- the roll call

    def _call_roll(self, action: CallRoll) -> None:
        """Ask those who are missing where they are, then say it.

        The evidence signal makes a system call return early, which Python's own code and most other code does over again; a healthy rank
        is spared it all the same. One that all others have waited for is not healthy until somebody has looked, and /proc shows no line
        of its program. Who waits is not asked, nor who was stopped or is before a person: that is seen from here.
        """
        absent = (self.ranks[number] for number in self.account.absent(self.ranks))
        self._roll_called = [handle for handle in absent if handle.alive and not handle.halted() and handle.ask()]
        self._roll_look = self._look_where_all_wait()
        now = self.clock.elapsed()
        self._roll_because, self._roll_until = action.because, now + ROLL_CALL_DEADLINE
        self._timers["roll answers"] = now

    def _look_where_all_wait(self) -> Looking | None:
        """Nobody is missing, and still they wait: what is at a meeting point of the program's own. (At the held one there is a store.)"""
        meetings = [handle.meeting for handle in self.ranks if handle.waiting and handle.meeting is not None]
        if self.account.absent(self.ranks) or not meetings or meetings[0].address == self.attempt.held:
            return None
        from rallypoint.diagnosis import meeting_point
        from rallypoint.host.reach import Looking

        place = meeting_point.place(meetings[0])
        return Looking(*place, meeting_point.GREETING, meeting_point.LOOK_TIMEOUT) if place is not None else None

    def _look_for_roll_answers(self, now: float) -> None:
        answered = all(handle.answered() for handle in self._roll_called if handle.alive)
        if now < self._roll_until and not (answered and (self._roll_look is None or self._roll_look.result is not None)):
            self._timers["roll answers"] = now + EVIDENCE_LOOK
        elif self._supervisor.state is State.RUNNING:
            seen = self._roll_look.result if self._roll_look is not None else None
            self.account.say_roll_call(self.ranks, self._roll_called, self._roll_because, seen)

    # --- evidence, reports

    def _ask_evidence(self, action: AskEvidence) -> None:
        now = self.clock.elapsed()
        asked = [handle.rank for handle in self.ranks if handle.alive and handle.ask()]
        self.account.event("evidence-asked", because=action.because, ranks=asked)
        self._asked_until = now + EVIDENCE_DEADLINE
        self._look_there(self.account.unmet(self.ranks))
        self._timers["evidence"] = now

    def _look_for_evidence(self, now: float) -> None:
        if self._looking is None:  # torch's own log may have the address, and is read by now
            self._look_there(self.account.unmet(self.ranks))
        asking = now < self._asked_until and not all(handle.answered() for handle in self.ranks if handle.alive)
        if asking or self._is_looking(now):
            self._timers["evidence"] = now + EVIDENCE_LOOK
            return
        self._feed(EvidenceIn())

    def _make_report(self, action: MakeReport) -> None:
        if self.problem is not None and action.reason == "start":
            reports = self.account.report_problem(self.problem)
        else:
            reports = self.account.report(
                self.ranks,
                attempt=self._supervisor.attempt,
                held=self.attempt.held,
                interrupted_by=self.signalled_by if action.reason == "interrupted" else "",
                overdue=self.overdue if action.reason == "overdue" else 0.0,
                helper=self.lost if action.reason == "helper" else None,
                because=action.because,
                reached=self._looking.result if self._looking is not None else None,
                misfit=self._cause_of_all() if action.reason == "failure" else None,
            )
        self.reports += reports
        self._feed(supervisor.Judged(reports[0].exit_status))

    # --- stopping

    def _signal_group(self, action: SignalGroup) -> None:
        if action.rank >= len(self.ranks):  # not even its handle could be made
            self._feed(supervisor.RankEnded(action.rank, 0, signal.SIGTERM, False, "it was never started"))
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
        handle.signal_group(action.signal)

    def _clean_up(self, action: CleanUp) -> None:
        """Every rank has ended: end what they left running, and this attempt's host."""
        leftovers = [handle for handle in self.ranks if handle.pid and not handle.reaped]
        if action.gently:
            self._end_leftovers(leftovers)
        host = self.attempt.host
        spare = [self.guard.pid, self.template.pid, *([host.pid] if host and host.pid else [])]
        left = self._kill_family(leftovers, spare)
        self.account.say_immortal(left)
        for handle in leftovers:
            self._reap(handle)
        self.attempt.release()
        # The call's, and a visitor's, are not the attempt's.
        self._timers = {name: at for name, at in self._timers.items() if name in ("overdue", "answers")}
        self._drain()
        self.account.event("attempt-ended", because=action.because, attempt=self.attempt.number)

    def _drain(self) -> None:
        """Show all that the ranks said. A caller of `launch` that reads nothing just now (Ctrl-S, Ctrl-Z) loses nothing of it."""
        while not self.account.settle(DRAIN_TIMEOUT) and self.errand is not None and self.errand.is_awaited():
            continue

    def _end_leftovers(self, handles: list[RankHandle]) -> None:
        """What successful ranks left running: SIGTERM, the grace, and SIGKILL by the caller. A signal to us cuts the grace short."""
        for handle in handles:
            if handle.left_at_exit is not None:  # not named yet
                self._await_members(handle)
        self._tell_leftovers()
        members = [one for handle in handles if not handle.reaped for one in processes.group_members(handle.pid)]
        if not members:
            return
        pidfds = []
        for one in members:
            try:
                pidfds.append(system_calls.pidfd_open(one.pid))
            except ProcessLookupError:
                continue
        for handle in handles:
            processes.send_group(handle.pid, signal.SIGTERM)
        poll, waiting = select.poll(), set(pidfds)
        callers = (self.errand.line.fileno(), self.errand.caller) if self.errand is not None else ()
        for fd in (*pidfds, self._signals.fileno(), *callers):
            poll.register(fd, select.POLLIN)
        until = min(self.clock.elapsed() + self.plan.grace, self._timers.get("overdue", math.inf))
        while waiting and (remaining := until - self.clock.elapsed()) > 0:
            for fd, _ in poll.poll(remaining * 1000 + 1):
                if fd == self._signals.fileno():
                    if any(number != signal.SIGCHLD for number in self._signals.read()):
                        until = 0.0
                elif fd in callers:  # an interrupt, or its end: neither waits
                    until = 0.0
                else:
                    poll.unregister(fd)
                    waiting.discard(fd)
        for fd in pidfds:
            os.close(fd)

    def _await_members(self, handle: RankHandle) -> None:
        """Give what a rank left the rest of its patience to end by itself."""
        until = (handle.left_at_exit or 0.0) + LEFTOVER_PATIENCE
        pidfds = []
        for one in processes.group_members(handle.pid):
            with contextlib.suppress(ProcessLookupError):
                pidfds.append(system_calls.pidfd_open(one.pid))
        processes.wait_for_ends(pidfds, max(0.0, until - self.clock.elapsed()))
        for fd in pidfds:
            os.close(fd)

    def _on_signal(self) -> None:
        for number in self._signals.read():
            if number == signal.SIGCHLD:
                self._reap_orphans()
                continue
            self.account.event("signal-received", signal=number.name)
            self.signalled_by = self.signalled_by or number.name
            self._feed(supervisor.Signalled(number.name, int(number)))


def _exhausted(error: OSError, ranks: int) -> EnvironmentProblem:
    """The operating system refuses what starting ranks needs: descriptors, mostly."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return EnvironmentProblem(
        "start-failed",
        f"{ranks} ranks cannot be started: {os.strerror(error.errno or 0)}",
        why=(f"the launcher keeps about six descriptors for each rank; its limit is {soft} (hard limit {hard})",),
        help=(("raise the limit in the shell that starts the job", "ulimit -n 4096"),),
    )
