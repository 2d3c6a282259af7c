"""Events in, actions out: start, stop, restart, report (a table).

Pure: no socket, clock, thread or process. The agent feeds `handle` with what happened and does what
comes back; every action carries its reason, so the event log answers "why did you kill rank 3?".
"""

from __future__ import annotations

import enum
import math
import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, dataclass_transform

import msgspec

from rallypoint.launcher.plan import ROLL_CALL
from rallypoint.launcher.restarts import Restarts
from rallypoint.world import ranks_phrase

# Seconds after a failure that looks like a cause in which a better one may still arrive: two ranks
# that fail together are two causes.
SETTLE = 0.05
# The same while a rank that lives has not joined the others: all ranks that make one mistake (a
# module that is not there, a wrong option) come to it as far apart as they were started, which on a
# busy machine is tens of milliseconds for each.
SETTLE_APART = 0.25
# The same for a failure that is perhaps a consequence ("connection closed by peer"). When a process
# is killed its sockets close before its parent is told, so peers often complain first; the kernel
# needs a few milliseconds, a loaded machine some tens.
SETTLE_FOR_CAUSE = 0.25
# Seconds after a signal in which a main thread that stands where it stood cannot have seen it, and
# between two looks at that.
STUCK_AFTER = 0.2
# Seconds between looks when the ranks have had some time: what ends a wait then, the end of a rank,
# is told without a look.
STUCK_LATER = 1.0
# Seconds after which looks are that rare.
STUCK_SOON = 3.0
# Looks in a row in which every rank waits until the wait counts as one in vain. /proc is not read
# in one moment: one look may find each of two ranks asleep while a message is on its way from one
# to the other.
VAIN_LOOKS = 2
# Seconds in which several signals are one. Ctrl-C in `timeout --foreground 3600 rallypoint run ...`
# comes from the terminal and from timeout; nobody who has seen that the first one does not help is
# quicker than that.
ONE_SIGNAL = 0.5
# Seconds that a person who waits for the end of a job is told nothing: most ranks end at once, and
# a prompt that does not come back is wondered about after some two.
SILENT = 1.5
# Seconds of the grace that must be left for a line about it: shorter ones are over before the line
# is read.
WORTH_A_LINE = 2.0
# Seconds that a rank which takes no signal at all gets after SIGKILL before it is given up.
KILL_PATIENCE = 5.0


Reason = Literal["failure", "interrupted", "overdue", "start", "helper", "elsewhere", "isolated"]
"""Subject of a report."""


class State(enum.Enum):
    """States of one node's share of a job."""

    PREPARING = "preparing"  # the template imports
    RUNNING = "running"
    JUDGING = "judging"  # something failed or a person asked: evidence is being gathered
    STOPPING = "stopping"  # a report was asked for; then the ranks are ended
    WAITING = "waiting"  # every rank here has ended, and the lead says what follows
    ENDED = "ended"


@dataclass_transform(frozen_default=True)
class JobEvent(msgspec.Struct, frozen=True):
    """Something that has happened."""


class Prepared(JobEvent):
    """The template is ready."""


class Impossible(JobEvent):
    """The job cannot be started; the agent holds the reason."""

    because: str


class PhaseEntered(JobEvent):
    """A rank has come to a phase. `whole`: the group that it joins needs every rank of the job."""

    rank: int
    phase: str
    whole: bool = True


class Erred(JobEvent):
    """An error left a call of torch's in a rank; the program may have caught it."""

    rank: int
    call: str


class RankRaised(JobEvent):
    """An exception leaves a rank's program. `consequence`: its text speaks of a lost peer."""

    rank: int
    consequence: bool
    because: str


class CannotMeet(JobEvent):
    """The ranks cannot meet (they would do so at different addresses, say)."""

    because: str


class Debugged(JobEvent):
    """A rank's debugger waits for a person, or (`waits` False) the program goes on."""

    rank: int
    waits: bool


class RankEnded(JobEvent):
    """A rank's process has ended. `sure`: the consequence of another rank's end never looks so."""

    rank: int
    code: int
    signal: int
    sure: bool
    because: str


class EvidenceIn(JobEvent):
    """Every rank that can has said where it is, or the deadline for it has passed."""


class Judged(JobEvent):
    """The report is made; `status` is the exit status that it asks for, `same` what two equal
    failures have in common: "" when the next one may be another."""

    status: int
    same: str = ""


class Signalled(JobEvent):
    """The launcher itself got a signal."""

    name: str


class Overdue(JobEvent):
    """The time that the whole job was given is over."""

    seconds: float
    grace: float  # seconds from now after which whatever lives is killed


class HelperEnded(JobEvent):
    """The template, the guard or the c10d host ended by itself."""

    name: str


class Stuck(JobEvent):
    """`ranks` stand where they stood when they were signalled: they cannot have seen it. `waiting`
    have seen it, and wait for others in a call of torch's now. All that were looked at and are in
    neither go on, as far as is seen."""

    ranks: tuple[int, ...]
    waiting: tuple[int, ...] = ()


class Elsewhere(JobEvent):
    """The job has failed on another node, or (`signal`) was stopped from outside there."""

    because: str
    signal: str = ""


class InVain(JobEvent):
    """All ranks of the job wait for one another: those that wait here will not go on."""


class Next(JobEvent):
    """The lead starts another attempt, in which this node has these ranks."""

    attempt: int
    ranks: Sequence[int]


class JobEnded(JobEvent):
    """The lead has ended the job, with this exit status."""

    status: int


class Isolated(JobEvent):
    """This node has lost the lead."""

    because: str


class Timer(JobEvent):
    """A time that `SetTimer` asked for has come."""

    name: str


@dataclass_transform(frozen_default=True)
class Action(msgspec.Struct, frozen=True):
    """Something that the agent is to do."""


Actions = list[Action]


class StartRanks(Action):
    """Bind the attempt's socket, start its c10d host, then all ranks."""

    attempt: int
    because: str


class AskEvidence(Action):
    """Have every living rank say where it is; answer with `EvidenceIn`."""

    because: str


class MakeReport(Action):
    """Diagnose and print; answer with `Judged`."""

    reason: Reason
    because: str


class CallRoll(Action):
    """Say which ranks wait in init_process_group, and where the others are. It stops nothing and
    has no answer.
    """

    because: str


class SignalGroup(Action):
    """Signal a rank's whole group."""

    rank: int
    signal: str
    because: str


class SayWaiting(Action):
    """Say that these ranks have not ended yet, how long they may take, and what kills them now:
    "Ctrl-C again".
    """

    ranks: tuple[int, ...]
    seconds: float
    hurry: str


class SayHopeless(Action):
    """Say that this failure has come so many times, soon after each start, and that the ranks are
    not started again.
    """

    times: int


class SayKilled(Action):
    """Say that these ranks are killed, and why now. `asked`: they were asked to end before, and
    have not.
    """

    ranks: tuple[int, ...]
    because: str
    asked: bool = True


class LookWhetherStuck(Action):
    """Compare where these ranks stand with where they stood when signalled; answer with `Stuck`.
    `together`: it matters only that none of them goes on, so the look is over with the first that
    does."""

    ranks: tuple[int, ...]
    together: bool = False


class CleanGroup(Action):
    """A rank has ended: end what is left of its group at once (`kill`), or name it and leave it
    until the job's end; then reap.
    """

    rank: int
    kill: bool


class SetTimer(Action):
    """Answer with `Timer(name)` at this time; a later one of the same name replaces it."""

    name: str
    at: float


class CleanUp(Action):
    """Every rank has ended: end what the job left running, close the attempt. `gently`: the job
    went well, so TERM and grace first.
    """

    gently: bool
    because: str


class AttemptOver(Action):
    """Tell the lead that every rank here has ended; `Next` or `JobEnded` answers. `well`: each of
    them with exit code 0. Once for each attempt.
    """

    well: bool


class Leave(Action):
    """End the launcher itself."""

    status: int


@dataclass
class RankState:
    """The supervisor's knowledge of one rank."""

    ended: bool = False
    failed: bool = False
    waits: bool = False  # it is in init_process_group
    since: float = 0.0  # when it came there
    whole: bool = False  # the group that it joins there needs every rank
    joined: int = 0  # groups of all ranks that it has joined
    # an error left init_process_group or set_device, and it has not joined since
    erred: bool = False
    debugged: bool = False  # a person is at its debugger
    asked: str = ""  # the last signal that was sent


class Supervisor:
    """Decision maker of one node. `handle` returns what to do now; nothing else changes it.

    On the only node (`alone`) it decides the whole job. Else the lead decides what needs every
    node: the report, whether the job is started again, and who is missing in init_process_group.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        alone: bool = True,
        max_restarts: int,
        grace: float,
        on_failure: Literal["stop", "continue"],
        roll_call: float = ROLL_CALL,
    ) -> None:
        """`ranks` are this node's ranks in the first attempt."""
        self.state = State.PREPARING
        self.attempt = 0
        self._numbers = ranks
        self._alone = alone
        self._restarts = Restarts(max_restarts)
        self._is_ready = False  # the template
        self._is_judged = True  # the report that was asked for is made
        self._is_isolated = False
        self._is_over = False  # `AttemptOver` was said
        self._dismissed: int | None = None  # the exit status that the lead has sent
        self._in_vain = False  # all ranks of all nodes wait
        self._grace = grace
        self._kill_at = math.inf  # the end of every grace, when the whole job has a time limit
        self._continue = on_failure == "continue"
        self._roll_call = roll_call
        self._roll_after = roll_call  # seconds of waiting at which the next one is due
        self.ranks: dict[int, RankState] = {}  # by number; empty before the first attempt
        self._status: int | None = None  # of the first failure reported
        self._reason: Reason = "failure"
        self._because = ""
        self._sure = False  # a failure has been seen that is no consequence
        self._evidence_in = False
        # of a job that goes on when ranks fail: a failure that is told after a moment, in which its
        # cause may show
        self._untold = ""
        self._settle_until = 0.0
        self._attempt_began = 0.0
        self._at_once = False  # the ranks get no grace
        self._asked_by: Signalled | None = None
        self._asked_at = 0.0
        self._grace_over = math.inf  # when the ranks that were asked to stop are killed
        self._last_end = 0.0  # when the ranks were asked to end, or one of them ended since
        self._vain = 0  # looks in a row in which every living rank waited

    def __repr__(self) -> str:
        return f"<Supervisor {self.state.value}, attempt {self.attempt}, {len(self._living())} of {len(self._numbers)} ranks alive>"

    def handle(self, event: JobEvent, now: float) -> Actions:
        """Return what to do about `event` at `now` (seconds, any origin, never going back)."""
        if (
            isinstance(event, Signalled)
            and self._asked_by is not None
            and self._reason == "interrupted"
            and now < self._asked_at + ONE_SIGNAL
        ):
            return []  # this signal and the one before are one wish of one person
        row = self._TABLE[self.state].get(type(event))
        return row(self, event, now) if row else []

    # --- preparing and running

    def _start(self, event: Prepared, now: float) -> Actions:
        return self._start_attempt("the template is ready", now)

    def _prepared(self, event: Prepared, now: float) -> Actions:
        """Note that the ranks can be started, which is not done now."""
        self._is_ready = True
        return []

    def _start_attempt(self, because: str, now: float) -> Actions:
        self.state, self._is_ready = State.RUNNING, True
        self._attempt_began = now
        self.ranks = {rank: RankState() for rank in self._numbers}
        self._status, self._sure, self._untold = None, False, ""
        self._reason, self._in_vain, self._is_over = "failure", False, False
        return [StartRanks(self.attempt, because)]

    def _impossible(self, event: Impossible, now: float) -> Actions:
        self._reason = "start"
        return self._conclude(event.because, now)

    def _phase(self, event: PhaseEntered, now: float) -> Actions:
        rank = self.ranks[event.rank]
        if rank.waits and event.phase == "running":
            rank.joined += rank.whole
            rank.erred = False
        waited = bool(self._waiting())
        rank.waits = event.phase == "joining"
        if rank.waits:
            rank.since, rank.whole = now, event.whole
        judging = self._look_for_absent(now)
        if judging or waited or not rank.waits or not self._alone:
            return judging
        self._roll_after = self._roll_call
        return [SetTimer("roll call", now + self._roll_after)]

    def _waiting(self) -> list[int]:
        """Return the ranks that are in init_process_group."""
        return [number for number in self._living() if self.ranks[number].waits]

    def _erred(self, event: Erred, now: float) -> Actions:
        rank = self.ranks[event.rank]
        rank.erred = rank.erred or event.call in ("init_process_group", "set_device")
        rank.waits = rank.waits and event.call != "init_process_group"
        return []

    def _debugged(self, event: Debugged, now: float) -> Actions:
        """Count the time of every rank that waits anew: it waits for a person at a debugger."""
        self.ranks[event.rank].debugged = event.waits
        for rank in self.ranks.values():
            rank.since = max(rank.since, now)
        return []

    def _timer_while_running(self, event: Timer, now: float) -> Actions:
        if event.name == "settle" and self._untold:
            return self._tell(self._untold)
        waiting = self._waiting()
        if event.name != "roll call" or not waiting:
            return []
        since = min(self.ranks[number].since for number in waiting)
        if any(self.ranks[number].debugged for number in self._living()):
            return [SetTimer("roll call", now + self._roll_call)]
        if now < since + self._roll_after:
            return [SetTimer("roll call", since + self._roll_after)]
        because = f"{_wait_in_init(waiting)} for {now - since:.0f} s"
        self._roll_after *= 2
        return [CallRoll(because), SetTimer("roll call", since + self._roll_after)]

    def _look_for_absent(self, now: float) -> Actions:
        """Judge when ranks wait in init_process_group for one that has left with exit code 0:
        nothing else will end that.

        A group of all ranks is certain to need it; a rank that has joined as many of them as one
        that waits was there, and may leave."""
        waiting = [number for number in self._waiting() if self.ranks[number].whole]
        if self._continue or not waiting or not self._alone:
            return []
        groups = max(self.ranks[number].joined for number in waiting)
        gone = {
            number: rank
            for number, rank in self.ranks.items()
            if rank.ended and not rank.failed and (rank.erred or rank.joined <= groups)
        }
        if not gone:
            return []
        named = [number for number, rank in gone.items() if rank.erred] or [*gone]
        self._sure = True
        return self._judge(f"{ranks_phrase(named)} left while {_wait_in_init(waiting)}", now)

    def _failure(self, event: RankRaised | CannotMeet, now: float) -> Actions:
        if isinstance(event, RankRaised) and self._continue:  # said when it has ended
            return []
        self._note(event)
        return self._judge(event.because, now)

    def _note(self, event: RankRaised | CannotMeet | RankEnded) -> Actions:
        """Note a failure or an end; return what follows for the rank's group at once."""
        if isinstance(event, CannotMeet):
            self._sure = True
            return []
        rank = self.ranks[event.rank]
        if isinstance(event, RankRaised):
            rank.failed = True
            self._sure = self._sure or not event.consequence
            return []
        rank.ended, well = True, _ended_well(event)
        rank.failed = rank.failed or not well
        self._sure = self._sure or (event.sure and not well)
        return [CleanGroup(event.rank, not well)]

    def _rank_ended(self, event: RankEnded, now: float) -> Actions:
        actions = self._note(event)
        if not _ended_well(event):
            follows = self._perhaps_tell if self._continue else self._judge
            return actions + follows(event.because, now)
        if self._living():
            return actions + self._look_for_absent(now)
        return actions + (self._tell(self._untold) if self._untold else self._all_ended(now))

    def _perhaps_tell(self, because: str, now: float) -> Actions:
        """Report a failure while the others go on: one that is perhaps a consequence after a
        moment, in which its cause may show.
        """
        if self._sure or not self._living():
            return self._tell(because)
        if self._untold:
            return []
        self._untold = because
        return [SetTimer("settle", now + SETTLE_FOR_CAUSE)]

    def _tell(self, because: str) -> Actions:
        self._untold, self._sure, self._is_judged = "", False, False
        return [MakeReport("failure", because)]

    def _helper_ended(self, event: HelperEnded, now: float) -> Actions:
        self._reason = "helper"
        # Without its guard or its template a job has lost the promise that nothing outlives it:
        # there is no time for a grace.
        self._at_once = event.name in ("guard", "template")
        return self._conclude(f"the {event.name} has ended", now)

    def _signalled(self, event: Signalled, now: float) -> Actions:
        # asked a second time, while the evidence of the first comes in: kill
        self._at_once = self._asked_by is not None
        self._asked_by, self._asked_at = event, now
        self._reason = "interrupted"
        again = " a second time" if self._at_once else ""
        return self._end_from_outside(f"the launcher got {event.name}{again}", now)

    def _overdue(self, event: Overdue, now: float) -> Actions:
        self._asked_by = Signalled("SIGTERM")
        self._reason, self._kill_at = "overdue", now + event.grace
        return self._end_from_outside(f"the time that was given, {event.seconds:g} s, is over", now)

    def _end_from_outside(self, because: str, now: float) -> Actions:
        self._sure = True
        if self._at_once or not self._living():
            return self._conclude(because, now)
        return self._judge(because, now)

    def _overdue_too_late(self, event: Overdue, now: float) -> Actions:
        """Let the job end by what has failed by then, in this time; nothing is started again."""
        self._restarts.most, self._kill_at = self.attempt, now + event.grace
        if self.state is not State.STOPPING:
            return []
        return [SetTimer("grace", min(self._grace_over, self._kill_at))]

    # --- judging

    def _judge(self, because: str, now: float) -> Actions:
        """Ask every rank where it is, before anything is stopped."""
        self.state, self._because, self._evidence_in = State.JUDGING, because, False
        self._settle_until = now + self._settle()
        return [AskEvidence(because), SetTimer("settle", self._settle_until)]

    def _settle(self) -> float:
        if not self._sure:
            return SETTLE_FOR_CAUSE
        apart = any(
            not (rank.ended or rank.failed or rank.joined or rank.waits)
            for rank in self.ranks.values()
        )
        return SETTLE_APART if apart else SETTLE

    def _another(self, event: RankRaised | RankEnded | CannotMeet, now: float) -> Actions:
        was_sure = self._sure
        actions = self._note(event)
        if self._sure and not was_sure and now + self._settle() < self._settle_until:
            self._settle_until = now + self._settle()
            actions.append(SetTimer("settle", self._settle_until))
        return actions + self._perhaps_conclude(event, now)

    def _perhaps_conclude(self, event: JobEvent, now: float) -> Actions:
        self._evidence_in = self._evidence_in or isinstance(event, EvidenceIn)
        settled = now >= self._settle_until or self._is_from_outside() or not self._living()
        return self._conclude(self._because, now) if self._evidence_in and settled else []

    def _conclude(self, because: str, now: float) -> Actions:
        """Report; what follows waits for `Judged`, which carries the exit status."""
        self.state, self._because, self._is_judged = State.STOPPING, because, False
        # With other nodes the answer may take seconds.
        killing = self._kill(because, now) if self._at_once and not self._alone else []
        return [*killing, MakeReport(self._reason, because)]

    def _judged_while_running(self, event: Judged, now: float) -> Actions:
        """Go on: each report of such a job is one of all that has failed by now."""
        self._status, self._is_judged = event.status, True
        return [] if self._living() else self._all_ended(now)

    def _judged(self, event: Judged, now: float) -> Actions:
        self._status = event.status if self._status is None else self._status
        self._is_judged = True
        self._restarts.failed(event.same, now - self._attempt_began)
        living = self._living()
        if not living:
            return self._all_ended(now)
        if self._at_once:
            return self._kill(self._because, now)
        # a rank that has raised leaves by itself: its atexit handlers may save something yet
        living = tuple(n for n in living if self._asked_by or not self.ranks[n].failed)
        return self._stop(living, self._asked_by.name if self._asked_by else "SIGTERM", now)

    # --- stopping

    def _stop(self, living: Collection[int], name: str, now: float) -> Actions:
        self._last_end, self._vain = now, 0
        self._grace_over = min(now + self._grace, self._kill_at)
        actions = [self._signal(number, name, self._because) for number in living]
        if self._grace_over - now >= SILENT + WORTH_A_LINE:
            actions.append(SetTimer("silent", now + SILENT))
        return [*actions, SetTimer("stuck", now + STUCK_AFTER), SetTimer("grace", self._grace_over)]

    def _signal(self, number: int, name: str, because: str) -> Action:
        self.ranks[number].asked = name
        return SignalGroup(number, name, because)

    def _ended_while_stopping(self, event: RankEnded, now: float) -> Actions:
        self.ranks[event.rank].ended = True
        actions: Actions = [CleanGroup(event.rank, kill=True)]
        if not self._living():
            return actions + self._all_ended(now)
        if not self._is_from_outside() or not self._is_judged:
            return actions
        # a rank that waited for it has lost its connection, and may run its handler now
        self._last_end, self._vain = now, 0
        return [*actions, SetTimer("stuck", now + STUCK_AFTER)]

    def _timer_while_stopping(self, event: Timer, now: float) -> Actions:
        living = self._living()
        if not living:
            return []
        if event.name == "stuck":
            return [LookWhetherStuck(living, together=self._is_from_outside())]
        asked = tuple(number for number in living if self.ranks[number].asked != "SIGKILL")
        if event.name == "silent" and asked:
            return [SayWaiting(asked, self._grace, self._hurry())]
        if event.name == "grace":
            grace = f"the grace of {self._grace:g} s is over"
            return self._kill(grace if now < self._kill_at else "the time that was given is over", now)  # fmt: skip
        if event.name == "patience":
            return self._leave(f"{ranks_phrase(living)} would not die")
        return []

    def _hurry(self) -> str:
        """Return what a person does who will not wait for the grace."""
        if self._reason != "interrupted" or self._asked_by is None:
            return "Ctrl-C"
        name = self._asked_by.name
        return "Ctrl-C again" if name == "SIGINT" else f"a second {name}"

    @property
    def is_stopping_from_outside(self) -> bool:
        """Whether the ranks were asked to end, and none of them is the reason."""
        return self.state is State.STOPPING and self._is_from_outside()

    def _is_from_outside(self) -> bool:
        """Return whether a person, a batch system or the caller of `launch` ends the job, and no
        rank has failed.
        """
        return self._reason in ("interrupted", "overdue")

    def _stuck(self, event: Stuck, now: float) -> Actions:
        """Send ranks that cannot have seen a signal the next stronger one, if waiting longer is in
        vain.

        After a failure it is: the rank that the others wait for does not come. When the job is
        ended from outside, a wait ends as soon as the peer comes, and then the handler runs. So
        each keeps its grace while any living rank does anything but wait: it computes, sleeps,
        saves, or leaves, which ends its connections and so their waits. A rank that saw the signal
        is left alone for its whole grace.
        """
        outside = self._is_from_outside()
        all_wait = bool(event.ranks) and {*self._living()} <= {*event.ranks, *event.waiting}
        self._vain = self._vain + 1 if all_wait else 0
        rarely = now > self._last_end + STUCK_SOON and not self._vain
        again = SetTimer("stuck", now + (STUCK_LATER if rarely else STUCK_AFTER))
        if outside and not self._is_in_vain():
            return [again]
        actions: Actions = []
        killed: list[int] = []
        for number in event.ranks:
            rank = self.ranks[number]
            if rank.ended or rank.asked == "SIGKILL":
                continue
            why = f"{rank.asked} did not reach it: its main thread stands in a call"
            if rank.asked == "SIGTERM":
                killed.append(number)
            actions.append(
                self._signal(number, "SIGKILL" if rank.asked == "SIGTERM" else "SIGTERM", why)
            )
        if killed:
            who = "it waits" if len(killed) == 1 else "they wait"
            in_vain = f"{who} in a call that no signal ends"
            in_vain += ", and no living rank can end it" if outside else ""
            actions.append(SayKilled(tuple(killed), in_vain))
        return [*actions, again]  # also of one that had no turn yet to see it

    def _is_in_vain(self) -> bool:
        """Return whether no living rank can end the wait of the others."""
        return self.all_wait if self._alone else self._in_vain

    @property
    def all_wait(self) -> bool:
        """Whether every living rank here was seen to wait, in look after look."""
        return self._vain >= VAIN_LOOKS

    def _note_in_vain(self, event: InVain, now: float) -> Actions:
        self._in_vain = True
        return []

    def _helper_ended_while_stopping(self, event: HelperEnded, now: float) -> Actions:
        if event.name not in ("guard", "template"):
            return []  # the c10d host: nobody needs a meeting point any more
        return self._kill(f"the {event.name} has ended", now)

    def _signal_while_stopping(self, event: Signalled, now: float) -> Actions:
        self._asked_by = self._asked_by or event
        which = f"a second signal ({event.name})" if self._reason == "interrupted" else event.name
        return self._kill(f"{which} has come", now)

    def _kill(self, because: str, now: float) -> Actions:
        """SIGKILL the living ranks that have not got it yet."""
        killed = tuple(one for one in self._living() if self.ranks[one].asked != "SIGKILL")
        if not killed:
            return []
        asked = any(self.ranks[number].asked or self.ranks[number].failed for number in killed)
        return [
            *(self._signal(number, "SIGKILL", because) for number in killed),
            SetTimer("patience", now + KILL_PATIENCE),
            SayKilled(killed, because, asked),
        ]

    # --- ends

    def _all_ended(self, now: float) -> Actions:
        if not self._is_judged:  # it follows then
            return []
        if not self._alone and not self._is_isolated:
            return self._attempt_over()
        if self.state is State.RUNNING:
            return self._leave("every rank has ended", gently=self._status is None, status=0)
        restarts = self._restarts
        if self._reason != "failure" or self._asked_by is not None or not restarts.is_left:
            return self._leave(self._because)
        if restarts.is_hopeless:
            *before, leaving = self._leave(self._because)
            return [*before, SayHopeless(restarts.times), leaving]
        cleaning = CleanUp(gently=False, because=self._because)
        restarts.made += 1
        self.attempt = restarts.made
        why = f"attempt {self.attempt} of {restarts.most}: {self._because}"
        return [cleaning, *self._start_attempt(why, now)]

    # --- with other nodes

    def _elsewhere(self, event: Elsewhere, now: float) -> Actions:
        self._reason = "elsewhere"
        self._heed_signal(event, now)
        self._sure = True
        return self._judge(event.because, now)

    def _elsewhere_too(self, event: Elsewhere, now: float) -> Actions:
        self._heed_signal(event, now)
        return []

    def _elsewhere_while_stopping(self, event: Elsewhere, now: float) -> Actions:
        """Take a signal on another node for a second one of our own: it kills."""
        if not event.signal or (self._asked_by is None and not self._is_judged):
            return []
        return self.handle(Signalled(event.signal), now)

    def _elsewhere_after_the_end(self, event: Elsewhere, now: float) -> Actions:
        """Report of ranks that have ended before: the lead wants the part of every node."""
        if self._asked_by is not None:  # that is told
            return []
        self._reason = "elsewhere"
        self._heed_signal(event, now)
        return [MakeReport(self._reason, event.because)]

    def _heed_signal(self, event: Elsewhere, now: float) -> None:
        """Take a signal on another node for one of our own: the terminal may send it to each."""
        if event.signal and self._asked_by is None:
            self._asked_by = Signalled(event.signal)
            self._asked_at, self._reason = now, "interrupted"

    def _signalled_after_the_end(self, event: Signalled, now: float) -> Actions:
        if self._asked_by is not None:
            self.state = State.ENDED
            by_signal = 128 + signal.Signals[event.name]
            status = by_signal if self._status is None else self._status
            return [Leave(status)]
        self._asked_by, self._asked_at, self._reason = event, now, "interrupted"
        self._because = f"the launcher got {event.name}"
        return [MakeReport("interrupted", self._because)]

    def _judged_after_the_end(self, event: Judged, now: float) -> Actions:
        self._status = event.status
        return []

    def _helper_ended_after_the_end(self, event: HelperEnded, now: float) -> Actions:
        if event.name not in ("guard", "template"):
            return []
        self._reason, self._because = "helper", f"the {event.name} has ended"
        return [MakeReport("helper", self._because)]

    def _isolated(self, event: Isolated, now: float) -> Actions:
        """End the ranks at once: the others have gone on without them, or have ended as well."""
        if self._is_isolated:
            return []
        if self._asked_by is None and self.attempt < self._restarts.most:
            self._status = None  # this ends the job, not the failure before
        self._reason, self._at_once, self._is_isolated = "isolated", True, True
        return self._conclude(event.because, now)

    def _attempt_over(self) -> Actions:
        well = self.state is State.RUNNING and self._status is None
        because = "every rank has ended" if self.state is State.RUNNING else self._because
        if self._dismissed is not None:
            self.state = State.ENDED
            return [CleanUp(well, because), Leave(self._dismissed)]
        self.state, self._is_over = State.WAITING, True
        return [CleanUp(well, because), AttemptOver(well)]

    def _next(self, event: Next, now: float) -> Actions:
        self.attempt, self._numbers = event.attempt, event.ranks
        # The lead did not know of it yet.
        if self._asked_by is not None or self._reason == "helper":
            return [AttemptOver(False)]
        self.ranks = {}
        if not self._is_ready:
            self.state = State.PREPARING
            return []
        return self._start_attempt(f"attempt {event.attempt}: {self._because}", now)

    def _dismissed_now(self, event: JobEnded, now: float) -> Actions:
        self.state = State.ENDED
        return [Leave(event.status)]

    def _dismissed_early(self, event: JobEnded, now: float) -> Actions:
        """Leave when every rank has ended."""
        self._dismissed = event.status
        return []

    # --- the end

    def _leave(self, because: str, *, gently: bool = False, status: int = 1) -> Actions:
        """End the job, with `status` unless a report has said another one."""
        self.state = State.ENDED
        status = status if self._status is None else self._status
        return [*([] if self._is_over else [CleanUp(gently, because)]), Leave(status)]

    def _living(self) -> tuple[int, ...]:
        return tuple(number for number, rank in self.ranks.items() if not rank.ended)

    _TABLE: ClassVar[
        dict[State, dict[type[JobEvent], Callable[[Supervisor, Any, float], Actions]]]
    ] = {
        State.PREPARING: {
            Prepared: _start,
            Impossible: _impossible,
            Elsewhere: _elsewhere,
            Isolated: _isolated,
            HelperEnded: _helper_ended,
            Signalled: _signalled,
            Overdue: _overdue,
        },
        State.RUNNING: {
            PhaseEntered: _phase,
            Erred: _erred,
            Debugged: _debugged,
            Timer: _timer_while_running,
            RankRaised: _failure,
            CannotMeet: _failure,
            RankEnded: _rank_ended,
            Impossible: _impossible,
            HelperEnded: _helper_ended,
            Signalled: _signalled,
            Overdue: _overdue,
            Judged: _judged_while_running,
            Elsewhere: _elsewhere,
            Isolated: _isolated,
        },
        State.JUDGING: {
            RankRaised: _another,
            CannotMeet: _another,
            RankEnded: _another,
            EvidenceIn: _perhaps_conclude,
            Timer: _perhaps_conclude,
            HelperEnded: _helper_ended,
            Signalled: _signalled,
            Overdue: _overdue_too_late,
            Prepared: _prepared,
            Elsewhere: _elsewhere_too,
            JobEnded: _dismissed_early,
            Isolated: _isolated,
        },
        State.STOPPING: {
            Judged: _judged,
            Elsewhere: _elsewhere_while_stopping,
            RankEnded: _ended_while_stopping,
            Timer: _timer_while_stopping,
            Stuck: _stuck,
            Signalled: _signal_while_stopping,
            HelperEnded: _helper_ended_while_stopping,
            Overdue: _overdue_too_late,
            Prepared: _prepared,
            InVain: _note_in_vain,
            JobEnded: _dismissed_early,
            Isolated: _isolated,
        },
        State.WAITING: {
            Prepared: _prepared,
            Elsewhere: _elsewhere_after_the_end,
            Signalled: _signalled_after_the_end,
            HelperEnded: _helper_ended_after_the_end,
            Judged: _judged_after_the_end,
            Next: _next,
            JobEnded: _dismissed_now,
            Isolated: _isolated,
        },
        State.ENDED: {},
    }
    """The whole state machine: what an event does in each state. An event without a row does nothing."""


def _ended_well(event: RankEnded) -> bool:
    return event.code == 0 and event.signal == 0


def _wait_in_init(ranks: list[int]) -> str:
    return f"{ranks_phrase(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in init_process_group"
