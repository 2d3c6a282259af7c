"""Rest of a job that runs on several nodes: this agent joins it, hears of it, and tells it what
happens here.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import secrets
import select
import signal
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Concatenate, ParamSpec

import msgspec

from rallypoint import __version__
from rallypoint.clock import Clock
from rallypoint.diagnosis import render
from rallypoint.diagnosis.evidence import How, LostNode, NodeEvidence
from rallypoint.diagnosis.node_evidence import cut
from rallypoint.diagnosis.rank_snapshot import RankStanding, stalled
from rallypoint.errors import EnvironmentProblem, RallypointError, UsageError
from rallypoint.host.probe import Looking
from rallypoint.host.signals import SignalLog
from rallypoint.launcher import exits
from rallypoint.launcher.agent import evidence_collection, supervisor
from rallypoint.launcher.agent.console import say_directly, shares_screen
from rallypoint.launcher.agent.job_store import JobStore, StoreElsewhere
from rallypoint.launcher.agent.launch_request import LaunchRequest, StoppedWhileJoining
from rallypoint.launcher.agent.results_elsewhere import ResultsElsewhere, pieces
from rallypoint.launcher.job_diagnosis import FailedAttempt
from rallypoint.launcher.nodes.judgement import judge
from rallypoint.launcher.nodes.lead_runner import LOOK_TIMEOUT, StoodStill, looked
from rallypoint.launcher.nodes.membership import LeadLost, Membership, NotReached
from rallypoint.launcher.nodes.messages import (
    AllWait,
    Applicant,
    Ask,
    AskAll,
    Dismissed,
    EvidenceOf,
    Failing,
    GoesOn,
    Judge,
    Missing,
    NodeAnswer,
    NodeMessage,
    Notice,
    Over,
    RankView,
    Refused,
    ResultOf,
    RollCall,
    Seated,
    Sentence,
    StallOver,
    Standings,
    StandingsOf,
    StandsStill,
    Versions,
    Views,
    WaitInVain,
)
from rallypoint.launcher.plan import Nodes, Plan
from rallypoint.store.discovery import derived

if TYPE_CHECKING:
    from rallypoint.diagnosis.hang_detector import Stall
    from rallypoint.diagnosis.report import Report
    from rallypoint.host.ports import HeldPort
    from rallypoint.launcher.agent.job import Job
    from rallypoint.launcher.agent.process_handles import RankHandle
    from rallypoint.launcher.protocol import Outcome
    from rallypoint.world import Seat

_Rest = ParamSpec("_Rest")

ROLL_CALL_OF_NODES = 10.0
"""Seconds without the lead after which a person is told what is waited for, then twice as many."""

VIEWS_EVERY = 0.05
"""Seconds in which changes of the ranks are collected into one message to the lead."""

SENTENCE_PATIENCE = 3.0
"""Seconds that this node waits for the lead's report: the lead gives the others one second for their
evidence. Then this node reports what it knows.
"""

LEASE_LOOK = 0.2
"""Seconds between looks at this node's own lease, which ends early when the lead's process does."""

STOOD_STILL = 0.8
"""Seconds by which a look at the lease must be late to show that this process was stopped: a busy
machine delays it by less.
"""

LEAVE_TIMEOUT = 5.0
"""Seconds that the lead waits at the end for the other nodes to leave."""


class OtherNodes:
    """The agent's link to the lead, and through it to the other nodes."""

    _job: Job  # from `begin` on

    def __init__(
        self, plan: Plan, secret: bytes, clock: Clock, held: HeldPort | None = None
    ) -> None:
        """Begin to look for the lead. Threads start here: every helper process must run by now.
        `held`: the listener of this node, which leads then.
        """
        nodes = plan.nodes
        assert nodes is not None
        self._plan = plan
        self._timeout = nodes.timeout
        self._secret = secret
        self._clock = clock
        self._store_listener: HeldPort | None = None  # of the next attempt, on node 0
        self._changed: set[int] = set()  # ranks about which the lead is to be told
        self._is_told = False  # the lead knows that this attempt has failed
        self._stopped_by = ("", "")  # because, and the signal, when it is stopped from outside
        self._all_wait = False  # it has been told that all ranks here wait
        self._evidence = NodeEvidence()
        self._sentence: Sentence | None = None  # that came before this node was ready for it
        self._waits_for_sentence = False
        self._status = 0  # of the last report
        self._results = ResultsElsewhere()
        self._lead_host = ""
        self._lease_due = 0.0  # when this node is to look at its lease
        self._stood_still = 0.0  # seconds for which this launcher stood still, and was lost by it
        self._is_lost = False  # the conversation with the lead has ended
        self._how_lost: How = "connection ended"
        self._membership = Membership(
            plan,
            derived(secret, "coordination"),
            _applicant(plan, nodes),
            functools.partial(judge, plan),
            clock,
            held,
        )

    # --- joining

    def join(
        self, signals: SignalLog, template: int, request: LaunchRequest | None
    ) -> Seated | None:
        """Wait for this node's seat. None when the template (`template` is its pidfd) has ended:
        there is nothing to join with. A notice is left for the job's loop.

        Raises `StoppedWhileJoining`, `CallerGone` of a `request`, or the error that says why this node has no place.
        """
        poll = select.poll()
        asking = request.filenos() if request is not None else ()
        for fd in (self._membership.fileno(), signals.fileno(), template, *asking):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        told, notices = ROLL_CALL_OF_NODES, []
        while True:
            ready = {fd for fd, _ in poll.poll()}
            for one in signals.read():
                if one.name in self._plan.notices:
                    notices.append(one)
                elif one == signal.SIGTSTP:
                    os.kill(os.getpid(), signal.SIGSTOP)  # it stands here until SIGCONT
                elif one != signal.SIGCHLD:
                    raise StoppedWhileJoining(one.name)
            if request is not None and ready.intersection(asking):
                raise StoppedWhileJoining(request.interrupt())
            if template in ready:
                return None
            for heard in self._membership.read():
                match heard:
                    case Seated():
                        self._lead_host = heard.host
                        for one in notices:
                            signal.raise_signal(one)
                        return heard
                    case Missing(lines):
                        say_directly("\n  ".join((f"rallypoint: {lines[0]}", *lines[1:])))
                    case NotReached(because) if self._clock.elapsed() >= told:
                        told = 2 * self._clock.elapsed()
                        why = render.plain(because)  # a stranger may have answered there
                        say_directly(f"rallypoint: the lead of the job is not reached: {why}")
                    case Refused() | LeadLost():
                        raise _error(heard)
                    case Exception():
                        raise heard

    @property
    def offset(self) -> float:
        """Seconds to add to a time of this agent's clock for that of node 0."""
        return self._membership.offset

    def held(self, attempt: int) -> HeldPort | None:
        """Return the listener where the ranks of an attempt meet, when this is node 0."""
        lead = self._membership.lead
        if lead is None:
            return None
        if self._store_listener is not None:  # nobody wanted it
            self._store_listener.release()
        held, self._store_listener = lead.take(attempt)
        return held

    def open_store(self, job: str, seat: Seat) -> JobStore | StoreElsewhere:
        """Return the job's store of an attempt: node 0 serves it. Raises as `JobStore`."""
        secret = derived(self._secret, f"store {seat.attempt}")
        if self._store_listener is None:
            return StoreElsewhere(seat.store, secret)
        listener, self._store_listener = self._store_listener, None
        lead = self._membership.lead
        identity = lead.identity if lead is not None else None
        return JobStore(job, secret, socket.socket(fileno=listener.detach()), identity)

    def close(self) -> None:
        """Leave the job."""
        self._results.close()
        self._membership.close(LEAVE_TIMEOUT)

    # --- hearing

    def begin(self, job: Job, notice: Callable[[str], None]) -> None:
        """Hear from the lead in the job's loop from now on. `notice` hands one to this node's
        ranks.
        """
        self._job, self._notice = job, notice
        self._lease_due = job.loop.now
        job.loop.watch(self._membership.fileno(), self._on_heard)
        self._look_at_lease(job.loop.now)

    def _on_heard(self) -> None:
        for heard in self._membership.read():
            self._hear(heard)

    def _hear(self, heard: object) -> None:
        job = self._job
        match heard:
            case Seated(seat):
                self._begin_attempt()
                job.starter.take_seat(seat, self.held(seat.attempt))
                job.feed(supervisor.Next(seat.attempt, seat.ranks))
            case Judge(because, name):
                self._is_told = True
                self._note_signal(because, name)
                job.feed(supervisor.Elsewhere(because, name))
            case Sentence():
                self._sentence = heard
                if self._waits_for_sentence:
                    self._pass_sentence(job.loop.now)
            case Dismissed(status, because, times):
                if times:
                    job.console.say_hopeless(times, job.seat.attempt)
                elif status not in (0, self._status):
                    job.console.say(f"rallypoint: not started again: {because}")
                job.feed(supervisor.JobEnded(status))
            case Notice(_, name):
                self._notice(name)
            case WaitInVain():
                job.feed(supervisor.InVain())
            case RollCall(lines, because):
                if not self._shares_screen():
                    job.reporter.report_roll_call(lines, because)
            case Ask("stacks", number):
                job.hang_monitor.answer_lead(number)
            case Ask():
                self._answer(heard)
            case Standings():
                self._hear_standings(heard)
            case ResultOf() if job.request is not None:
                self._results.take(heard, job.request)
            case StallOver(ranks):
                if job.is_running and not self._shares_screen():
                    job.reporter.report_moved(ranks)
            case LeadLost(because):
                self._on_lost(because)
            case StoodStill():  # this node leads
                self._on_lost(str(heard), heard.seconds)
            case ConnectionError():  # the lead's own session: this launcher stood still
                self._on_lost(str(heard))
            case Exception():
                raise heard

    def _hear_standings(self, heard: Standings) -> None:
        """Answer visitors with it, and report the stall that it tells of, if any."""
        job = self._job
        standing = job.hang_monitor.answer_of_all(heard.ranks)
        if heard.stall and job.is_running and not self._shares_screen():
            job.reporter.report_stall(stalled(standing, heard.stall, seen=heard.looks))

    def _look_at_lease(self, now: float) -> None:
        """End this node's ranks when the others may take it for lost: two halves of a job must
        never both write a checkpoint.
        """
        left = self._membership.left
        if left > 0.0:
            self._lease_due = now + min(left, LEASE_LOOK)
            self._job.loop.at("lease", self._lease_due, self._look_at_lease)
        else:
            self._on_lost("nothing is heard of the lead any more")

    def _on_lost(self, because: str, still: float = 0.0) -> None:
        """End the ranks: the conversation with the lead is over. `still`: seconds for which this
        launcher stood still, if they are known.
        """
        if not self._is_lost:
            self._is_lost = True
            # Now: a network that works again brings the connections back.
            self._how_lost = self._membership.how_lost
            late = self._job.loop.now - self._lease_due
            # The lead's thread has measured `still`. This loop may have planned its next look since
            # it went on, and then it does not seem late.
            self._stood_still = still or (late if late > STOOD_STILL else 0.0)
            self._job.feed(supervisor.Isolated(because))

    def _begin_attempt(self) -> None:
        self._is_told = self._all_wait = False
        self._stopped_by = ("", "")
        self._sentence = None

    def _shares_screen(self) -> bool:
        """Return whether node 0 shows everything on the screen that this node has, too."""
        cluster = self._plan.cluster
        one_screen = cluster is not None and cluster.one_screen
        return one_screen and self._job.seat.node > 0 and shares_screen()

    # --- telling

    def note(self, event: supervisor.JobEvent) -> None:
        """Have the lead told of a rank about which something has changed, soon."""
        if isinstance(event, supervisor.Stuck):
            waits = self._job.supervisor.all_wait
            if waits or self._all_wait:  # again at every look: the lead forgets it at each end
                self._tell(AllWait, waits)
            self._all_wait = waits
        elif isinstance(event, _OF_A_RANK):
            if not self._changed:
                loop = self._job.loop
                loop.at("views", loop.now + VIEWS_EVERY, self._send_views)
            self._changed.add(event.rank)

    def _send_views(self, now: float) -> None:
        job = self._job
        handles = [handle for handle in job.ranks if handle.rank in self._changed]
        self._changed.clear()
        if not handles:
            return
        views = tuple(_view(handle, job.supervisor.ranks[handle.rank], now) for handle in handles)
        self._tell(Views, views)

    def failing(self, because: str, *, signal: str = "") -> None:
        """Tell the lead that this node judges, unless the lead has said so itself; and of every
        signal.
        """
        self._note_signal(because, signal)
        if signal or not self._is_told:
            self._is_told = True
            self._tell(Failing, because, signal)

    def _note_signal(self, because: str, name: str) -> None:
        if name and not self._stopped_by[1]:
            self._stopped_by = because, name

    def _tell(
        self,
        kind: Callable[Concatenate[int, _Rest], NodeMessage],
        *rest: _Rest.args,
        **named: _Rest.kwargs,
    ) -> None:
        """Send the lead a message of this kind, whose first field is this node's number."""
        self._membership.send(kind(self._job.seat.node, *rest, **named))

    def over(self, well: bool) -> None:
        """Tell the lead that every rank of the attempt has ended here. It is the last word of this
        attempt.
        """
        self._job.loop.cancel("views")
        self._send_views(self._job.loop.now)
        self._tell(Over, well)

    def notice(self, name: str) -> None:
        """Have the other nodes hand a notice to their ranks, too."""
        self._tell(Notice, name)

    def ask_where_all_stand(self) -> None:
        """Ask the lead where the ranks of all nodes stand."""
        self._tell(AskAll)

    def stand_there(self, number: int, ranks: tuple[RankStanding, ...]) -> None:
        """Answer the lead's question with this number."""
        self._tell(StandingsOf, number, ranks)

    def stand_still(self, stall: Stall) -> None:
        """Tell the lead that no rank of this node moves."""
        self._tell(StandsStill, stall.seconds, stall.looks)

    def go_on(self, ranks: tuple[int, ...]) -> None:
        """Tell the lead that these ranks have moved since."""
        self._tell(GoesOn, ranks)

    def pass_result(self, outcome: Outcome, fds: Sequence[int]) -> None:
        """Send what a rank of `launch` has returned or raised to the caller on node 0."""
        if self._job.seat.node > 0:
            for piece in pieces(outcome, fds):
                self._membership.send(piece)

    # --- the report

    def judge(self, evidence: NodeEvidence) -> None:
        """Send this node's evidence; the lead's report is shown when it comes."""
        self._evidence = msgspec.structs.replace(
            evidence, offset=self._membership.offset, error=self._membership.error
        )
        self._waits_for_sentence = True
        self._tell(EvidenceOf, cut(self._evidence))
        loop = self._job.loop
        loop.at("sentence", loop.now + SENTENCE_PATIENCE, self._pass_sentence)
        if self._sentence is not None:
            self._pass_sentence(loop.now)

    def _pass_sentence(self, now: float) -> None:
        """Show the lead's report, or this node's own when the lead's does not come."""
        job = self._job
        job.loop.cancel("sentence")
        sentence, self._sentence, self._waits_for_sentence = self._sentence, None, False
        if sentence is None:
            sentence = self._judge_alone()
        self._status = sentence.status
        self._show(sentence)
        job.feed(supervisor.Judged(sentence.status, sentence.same))

    def _judge_alone(self) -> Sentence:
        seat, (because, name) = self._job.seat, self._stopped_by
        alone = FailedAttempt({seat.node: self._evidence}, world_size=seat.world.size)
        return judge(self._plan, alone._replace(because=because, signal=name))

    def _show(self, sentence: Sentence) -> None:
        """Show the reports: whole on every screen, one line where node 0 shares the screen."""
        seat, host, first = self._job.seat, os.uname().nodename, sentence.reports[0]
        now = self._clock.elapsed() + self._membership.offset
        after = now - sentence.at if sentence.at else None
        self._job.reporter.show(
            sentence.reports,
            sentence.followed,
            here=render.own_part(first, seat.node, host, seat.ranks, after),
            brief=render.in_one_line(first, seat.node, host) if self._shares_screen() else "",
        )

    def show_loss(self) -> None:
        """Show the report on the end of the conversation with the lead, and the causes that this
        node had sent, and that the lead has not judged.
        """
        own = self._judge_alone().reports if self._waits_for_sentence else ()
        self._job.loop.cancel("sentence")  # none comes any more
        own = tuple(one for one in own if one.code not in ("cause-unknown", "interrupted"))
        job, report = self._job, self._report_of_loss()
        host, folder, seat = os.uname().nodename, job.reporter.run_dir, job.seat
        report = msgspec.structs.replace(report, logs=(f"{host}:{folder}",) if folder else ())
        here = render.own_part(report, seat.node, host, seat.ranks, None)
        job.reporter.show((report, *own), here=here)
        job.feed(supervisor.Judged(report.exit_status))

    def _report_of_loss(self) -> Report:
        """Return that report, with what a look at the lead's host and at other nodes shows."""
        from rallypoint.diagnosis.causes import nodes

        here, lead_host = os.uname().nodename, self._lead_host
        if self._stood_still:
            still = self._stood_still
            return nodes.node_isolated(here, lead_host, silent=still, still=still)
        (address, port), buddies = self._membership.lead_address, self._job.seat.buddies
        looks = [Looking(one, port, b"", LOOK_TIMEOUT) for one in (address, *buddies)]
        lead, *others = [(look.address[0], looked(look, 2 * LOOK_TIMEOUT)) for look in looks]
        answering = next((ip for ip, seen in others if seen in ("refused", "listening")), "")
        if lead[1] in ("refused", "listening", "silent") or answering:
            seen = (self._how_lost, 0.0, self._timeout, lead[1], address)
            return nodes.lead_lost(LostNode(0, lead_host, (), *seen), answering)
        tried = tuple(f"{ip}: {seen}" for ip, seen in (lead, *others))
        return nodes.node_isolated(here, lead_host, silent=self._timeout, tried=tried)

    def _answer(self, question: Ask) -> None:
        """Answer the lead's question where ranks of this node are."""
        evidence_collection.locate(
            self._job,
            question.ranks,
            lambda ranks, states: self._tell(NodeAnswer, question.number, ranks, states),
        )


_OF_A_RANK = (
    supervisor.PhaseEntered,
    supervisor.Erred,
    supervisor.RankRaised,
    supervisor.Debugged,
    supervisor.RankEnded,
)


def _view(handle: RankHandle, known: supervisor.RankState, now: float) -> RankView:
    """Return what the lead needs to know of a rank."""
    ended = handle.ended
    return RankView(
        handle.rank,
        handle.phase,
        max(0.0, now - handle.phase_at),
        handle.meeting,
        handle.at_held,
        (ended.code, ended.signal) if ended is not None else None,
        known.failed,
        known.erred,
        known.joined,
        known.debugged,
    )


def _applicant(plan: Plan, nodes: Nodes) -> Applicant:
    """Return this node as it applies for a place."""
    program = (plan.program.kind, plan.program.target, *plan.program.args)
    return Applicant(
        id=secrets.token_hex(8),
        host=os.uname().nodename,
        pid=os.getpid(),
        slots=plan.slots,
        nnodes=nodes.count,
        versions=Versions(__version__, plan.torch, platform.python_version()),
        digest=hashlib.sha256("\0".join(program).encode()).hexdigest(),
        node_rank=nodes.rank,
    )


def _error(heard: Refused | LeadLost) -> RallypointError:
    """Return the error that says why this node has no place."""
    if isinstance(heard, Refused):
        kind = UsageError if heard.status == exits.USAGE else EnvironmentProblem
        return kind(heard.code, heard.headline, why=heard.why, help=heard.help)
    return heard.problem or EnvironmentProblem(
        "lead-lost", f"the lead of the job was lost before all nodes had come: {heard.because}"
    )
