"""Events in, actions out: start, stop, restart, report (a table).

Pure: no socket, clock, thread or process. The agent feeds `handle` with what happened and does what
comes back; every action carries its reason, so the event log answers "why did you kill rank 3?".
"""

from __future__ import annotations

import enum
import math
import signal
from typing import Literal

import msgspec

from rallypoint.launcher.plan import ROLL_CALL
from rallypoint.world import ranks_phrase

SOON_AFTER_START = 10.0
"""Seconds since its start in which an attempt must fail to count among equal ones: one that has
trained for longer may get further.
"""

ENOUGH_TIMES = 3
"""Equal failures in a row, each soon after a start, after which no other attempt is made: two may
be chance.
"""

# Seconds after a failure that looks like a cause in which a better one may still arrive: two ranks
# that fail together are two causes.
SETTLE = 0.05
# Seconds for one while a rank that lives has not joined the others: all that make the same mistake
# (a module that is not there, a wrong option) come to it as far apart as they were started, which
# on a busy machine is tens of milliseconds for each.
SETTLE_APART = 0.25
# Seconds for one that is perhaps a consequence ("connection closed by peer"). When a process is
# killed its sockets close before its parent is told, so peers often complain first; the kernel
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
# Looks in a row in which every rank has to wait until they are taken to wait in vain. /proc is not
# read in one moment: one look may find each of two ranks asleep while a message is on its way from
# one to the other.
VAIN_LOOKS = 2
# Seconds in which several signals are one. Ctrl-C in `timeout --foreground 3600 rallypoint run ...`
# comes from the terminal and from timeout; nobody who has seen that the first one does not help is
# quicker than that.
ONE_SIGNAL = 0.5
# Seconds that a person who waits for the end of a job is told nothing: most ranks end at once, and
# a prompt that does not come back is wondered about after some two.
SILENT = 1.5
# Seconds of the grace that must be left for a line about it: shorter ones are over before it is
# read.
WORTH_A_LINE = 2.0
# Seconds that a rank which takes no signal at all gets after SIGKILL before we say that it would
# not die.
KILL_PATIENCE = 5.0


Reason = Literal["failure", "interrupted", "overdue", "start", "helper"]
"""What a report is about."""


class State(enum.Enum):
    """Where the job is."""

    PREPARING = "preparing"  # the template imports
    RUNNING = "running"
    JUDGING = "judging"  # something failed or a person asked: evidence is being gathered
    STOPPING = "stopping"
    ENDED = "ended"


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """The template is ready."""


class Impossible(msgspec.Struct, frozen=True, tag=True):
    """The job cannot be started; the agent holds the reason."""

    because: str


class AtPhase(msgspec.Struct, frozen=True, tag=True):
    """A rank has come to a phase. `whole`: the group that it joins needs every rank of the job."""

    rank: int
    phase: str
    whole: bool = True


class Erred(msgspec.Struct, frozen=True, tag=True):
    """An error left a call of torch's in a rank; the program may have caught it."""

    rank: int
    call: str


class Raised(msgspec.Struct, frozen=True, tag=True):
    """An exception leaves a rank's program. `consequence`: its text speaks of a lost peer."""

    rank: int
    consequence: bool
    because: str


class Misfit(msgspec.Struct, frozen=True, tag=True):
    """The ranks do not fit together (they would meet at different addresses)."""

    because: str


class Debugged(msgspec.Struct, frozen=True, tag=True):
    """A rank's debugger waits for a person, or (`waits` False) the program goes on."""

    rank: int
    waits: bool


class RankEnded(msgspec.Struct, frozen=True, tag=True):
    """A rank's process has ended. `sure`: such an end is never the consequence of another
    rank's.
    """

    rank: int
    code: int
    signal: int
    sure: bool
    because: str


class EvidenceIn(msgspec.Struct, frozen=True, tag=True):
    """Every rank that can has said where it is, or the deadline for it has passed."""


class Judged(msgspec.Struct, frozen=True, tag=True):
    """The report is made; `status` is what the launcher would leave with, `same` what two equal
    failures have in common: "" when it may be another one next time."""

    status: int
    same: str = ""


class Signalled(msgspec.Struct, frozen=True, tag=True):
    """The launcher itself got a signal."""

    name: str
    number: int


class Overdue(msgspec.Struct, frozen=True, tag=True):
    """The time that the whole job was given is over."""

    seconds: float
    grace: float  # seconds from now after which whatever lives is killed


class HelperLost(msgspec.Struct, frozen=True, tag=True):
    """The template, the guard or the c10d host ended by itself."""

    name: str


class Stuck(msgspec.Struct, frozen=True, tag=True):
    """`ranks` stand where they stood when they were signalled: they cannot have seen it. `waiting`
    have seen it, and wait for others in a call of torch's now. All that were looked at and are in
    neither go on, as far as is seen."""

    ranks: tuple[int, ...]
    waiting: tuple[int, ...] = ()


class Timer(msgspec.Struct, frozen=True, tag=True):
    """A time that `SetTimer` asked for has come."""

    name: str


Event = (
    Prepared | Impossible | AtPhase | Erred | Debugged | Raised | Misfit | RankEnded | EvidenceIn | Judged | Signalled | Overdue
    | HelperLost | Stuck | Timer
)  # fmt: skip


class StartRanks(msgspec.Struct, frozen=True, tag=True):
    """Bind the attempt's socket, start its c10d host, then all ranks."""

    attempt: int
    because: str


class AskEvidence(msgspec.Struct, frozen=True, tag=True):
    """Have every living rank say where it is; answer with `EvidenceIn`."""

    because: str


class MakeReport(msgspec.Struct, frozen=True, tag=True):
    """Diagnose and print; answer with `Judged`. `reason` is what to report on."""

    reason: Reason
    because: str


class CallRoll(msgspec.Struct, frozen=True, tag=True):
    """Say who waits in init_process_group, and where the others are; nothing is stopped, and
    nothing is answered.
    """

    because: str


class SignalGroup(msgspec.Struct, frozen=True, tag=True):
    """Signal a rank's whole group."""

    rank: int
    signal: str
    because: str


class SayWaiting(msgspec.Struct, frozen=True, tag=True):
    """Say that these ranks have not ended yet, how long they may take, and what kills them now:
    "Ctrl-C again".
    """

    ranks: tuple[int, ...]
    seconds: float
    hurry: str


class SayHopeless(msgspec.Struct, frozen=True, tag=True):
    """Say that this failure has come so many times, soon after each start, and that the ranks are
    not started again.
    """

    times: int


class SayKilled(msgspec.Struct, frozen=True, tag=True):
    """Say that these ranks are killed, and why now. `asked`: whether they were asked to end before,
    and have not.
    """

    ranks: tuple[int, ...]
    because: str
    asked: bool = True


class LookWhetherStuck(msgspec.Struct, frozen=True, tag=True):
    """Compare where these ranks stand with where they stood when signalled; answer with `Stuck`.
    `together`: whether only that matters that none of them goes on, so that the look is over with
    the first that does."""

    ranks: tuple[int, ...]
    together: bool = False


class CleanGroup(msgspec.Struct, frozen=True, tag=True):
    """A rank has ended: end what is left of its group at once (`kill`), or name it and leave it
    until the job's end; then reap.
    """

    rank: int
    kill: bool
    because: str


class SetTimer(msgspec.Struct, frozen=True, tag=True):
    """Answer with `Timer(name)` at this time; a later one of the same name replaces it."""

    name: str
    at: float


class CleanUp(msgspec.Struct, frozen=True, tag=True):
    """Every rank has ended: end what the job left running, close the attempt. `gently`: the job
    went well, so TERM and grace first.
    """

    gently: bool
    because: str


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The launcher's own end."""

    status: int
    because: str


Action = (
    StartRanks | AskEvidence | MakeReport | CallRoll | SignalGroup | SayWaiting | SayHopeless | SayKilled
    | LookWhetherStuck | CleanGroup | SetTimer
    | CleanUp | Leave
)  # fmt: skip


class _Rank:
    __slots__ = (
        "asked",
        "debugged",
        "ended",
        "erred",
        "failed",
        "joined",
        "phase",
        "since",
        "waits",
        "whole",
    )

    def __init__(self, *, started: bool) -> None:
        self.phase = "started"
        self.ended = not started
        self.failed = False
        self.waits = False  # it is in init_process_group
        self.since = 0.0  # when it came there
        self.whole = False  # the group that it joins there needs every rank
        self.joined = 0  # groups of all ranks that it has joined
        self.erred = (
            False  # an error left init_process_group or set_device, and it has not joined since
        )
        self.debugged = False  # a person is at its debugger
        self.asked = ""  # the last signal that we sent


class Supervisor:
    """The job's one decision maker. `handle` returns what to do now; nothing else changes it."""

    def __init__(
        self,
        *,
        world_size: int,
        max_restarts: int,
        grace: float,
        on_failure: Literal["stop", "continue"],
        roll_call: float = ROLL_CALL,
    ) -> None:
        self.state = State.PREPARING
        self.attempt = 0
        self._size = world_size
        self._max_restarts = max_restarts
        self._grace = grace
        self._kill_at = (
            math.inf
        )  # when nothing has a grace any more, since the time of the whole job is over
        self._continue = on_failure == "continue"
        self._roll_call = roll_call
        self._roll_after = roll_call  # seconds of waiting at which the next one is due
        self._ranks = [_Rank(started=False) for _ in range(world_size)]
        self._status: int | None = None  # of the first failure reported
        self._reason: Reason = "failure"
        self._because = ""
        self._sure = False  # a failure that is nobody's consequence has been seen
        self._evidence_in = False
        # of a job that goes on when ranks fail: a failure that is told after a moment, in which its
        # cause may show
        self._untold = ""
        self._settle_until = 0.0
        self._attempt_began = 0.0
        self._same, self._times = (
            "",
            0,
        )  # the last failure, and how often it has come in a row, soon after each start
        self._at_once = False
        self._asked_by: Signalled | None = None
        self._grace_over = math.inf  # when the ranks that were asked to stop are killed
        self._asked_at = 0.0
        self._news_at = 0.0  # when the ranks were asked to end, or one of them ended since
        self._vain = 0  # looks in a row in which every living rank waited

    def __repr__(self) -> str:
        alive = [number for number, rank in enumerate(self._ranks) if not rank.ended]
        return f"<Supervisor {self.state.value}, attempt {self.attempt}, {len(alive)} of {self._size} ranks alive>"

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do about `event` at `now` (seconds, any origin, never going back)."""
        row = TABLE.get((self.state, type(event)))
        return row(self, event, now) if row else []

    # --- preparing and running

    def _start(self, event: Event, now: float) -> list[Action]:
        return self._start_attempt("the template is ready", now)

    def _start_attempt(self, because: str, now: float) -> list[Action]:
        self.state = State.RUNNING
        self._attempt_began = now
        self._ranks = [_Rank(started=True) for _ in range(self._size)]
        self._status, self._sure, self._evidence_in, self._untold = None, False, False, ""
        return [StartRanks(self.attempt, because)]

    def _impossible(self, event: Event, now: float) -> list[Action]:
        assert isinstance(event, Impossible)
        self._reason, self._because = "start", event.because
        return self._conclude(now)

    def _phase(self, event: Event, now: float) -> list[Action]:
        assert isinstance(event, AtPhase)
        rank = self._ranks[event.rank]
        if rank.waits and event.phase == "running":
            rank.joined += rank.whole
            rank.erred = False
        waited = bool(self._waiting())
        rank.phase, rank.waits = event.phase, event.phase == "joining"
        if not rank.waits:
            return self._look_for_absent(now)
        rank.since, rank.whole = now, event.whole
        judging = self._look_for_absent(now)
        if judging or waited:
            return judging
        self._roll_after = self._roll_call
        return [SetTimer("roll call", now + self._roll_after)]

    def _waiting(self) -> list[int]:
        """The ranks that are in init_process_group."""
        return [number for number, rank in enumerate(self._ranks) if rank.waits and not rank.ended]

    def _erred(self, event: Event, now: float) -> list[Action]:
        assert isinstance(event, Erred)
        if event.call in ("init_process_group", "set_device"):
            self._ranks[event.rank].erred = True
        if event.call == "init_process_group":
            self._ranks[event.rank].waits = False
        return []

    def _debugged(self, event: Event, now: float) -> list[Action]:
        """Ranks that wait for one that a person is looking at wait for that person: their time
        counts from the end of it.
        """
        assert isinstance(event, Debugged)
        self._ranks[event.rank].debugged = event.waits
        for rank in self._ranks:
            rank.since = max(rank.since, now)
        return []

    def _timer_while_running(self, event: Event, now: float) -> list[Action]:
        assert isinstance(event, Timer)
        if event.name == "settle" and self._untold:
            return self._tell(self._untold)
        waiting = self._waiting()
        if event.name != "roll call" or not waiting:
            return []
        since = min(self._ranks[number].since for number in waiting)
        if any(rank.debugged and not rank.ended for rank in self._ranks):
            return [SetTimer("roll call", now + self._roll_call)]
        if now < since + self._roll_after:
            return [SetTimer("roll call", since + self._roll_after)]
        because = f"{_wait_in_init(waiting)} for {now - since:.0f} s"
        self._roll_after *= 2
        return [CallRoll(because), SetTimer("roll call", since + self._roll_after)]

    def _look_for_absent(self, now: float) -> list[Action]:
        """Some wait in init_process_group for a rank that has left with exit code 0: nobody else
        will end that.

        A group of all ranks is certain to need it; who has joined as many of them as one that waits
        was there, and may leave."""
        waiting = [number for number in self._waiting() if self._ranks[number].whole]
        if self._continue or not waiting:
            return []
        groups = max(self._ranks[number].joined for number in waiting)
        left = [
            (number, rank)
            for number, rank in enumerate(self._ranks)
            if rank.ended and not rank.failed
        ]
        gone = [number for number, rank in left if rank.erred or rank.joined <= groups]
        swallowed = [number for number in gone if self._ranks[number].erred]
        if not gone:
            return []
        named = swallowed or gone
        self._sure = True
        return self._judge(f"{ranks_phrase(named)} left while {_wait_in_init(waiting)}", now)

    def _failure(self, event: Event, now: float) -> list[Action]:
        assert isinstance(event, Raised | Misfit)
        if isinstance(event, Raised):
            if self._continue:  # said when it has ended
                return []
            self._ranks[event.rank].failed = True
        self._sure = self._sure or isinstance(event, Misfit) or not event.consequence
        return self._judge(event.because, now)

    def _rank_ended(self, event: Event, now: float) -> list[Action]:
        assert isinstance(event, RankEnded)
        rank = self._ranks[event.rank]
        rank.ended = True
        if event.code == 0 and event.signal == 0:
            actions: list[Action] = [CleanGroup(event.rank, kill=False, because="it ended well")]
            if self._untold and self._nobody_left():
                return actions + self._tell(self._untold)
            return actions + (
                self._all_ended(now) if self._nobody_left() else self._look_for_absent(now)
            )
        rank.failed = True
        if self._continue:  # the row of --on-failure continue: said, and the others go on
            return [
                CleanGroup(event.rank, kill=True, because=event.because),
                *self._perhaps_tell(event, now),
            ]
        self._sure = self._sure or event.sure
        return [
            CleanGroup(event.rank, kill=True, because=event.because),
            *self._judge(event.because, now),
        ]

    def _perhaps_tell(self, event: RankEnded, now: float) -> list[Action]:
        """Who perhaps lost a peer only is told of when the peer's end has had its time to
        be heard.
        """
        if event.sure or self._nobody_left():
            return self._tell(event.because)
        if self._untold:
            return []
        self._untold = event.because
        return [SetTimer("settle", now + SETTLE_FOR_CAUSE)]

    def _tell(self, because: str) -> list[Action]:
        self._untold = ""
        return [MakeReport("failure", because)]

    def _helper_lost(self, event: Event, now: float) -> list[Action]:
        assert isinstance(event, HelperLost)
        self._reason, self._because = "helper", f"the {event.name} has ended"
        # Without its guard or its template a job has lost the promise that nothing outlives it:
        # there is no time for a grace.
        self._at_once = event.name in ("guard", "template")
        return self._conclude(now)

    def _signalled(self, event: Event, now: float) -> list[Action]:
        assert isinstance(event, Signalled)
        if self._is_the_same(now):
            return []
        self._at_once = (
            self._asked_by is not None
        )  # asked a second time, while the evidence of the first comes in: kill
        self._asked_by, self._asked_at = event, now
        self._reason, self._sure = "interrupted", True
        if self._at_once:
            self._because = f"the launcher got {event.name} a second time"
            return self._conclude(now)
        if self._nobody_left():
            self._because = f"the launcher got {event.name}"
            return self._conclude(now)
        return self._judge(f"the launcher got {event.name}", now)

    def _is_the_same(self, now: float) -> bool:
        """Whether a signal that comes now and the one that has come are one wish of one person."""
        return (
            self._asked_by is not None
            and self._reason == "interrupted"
            and now < self._asked_at + ONE_SIGNAL
        )

    def _overdue(self, event: Event, now: float) -> list[Action]:
        assert isinstance(event, Overdue)
        because = f"the time that was given, {event.seconds:g} s, is over"
        self._asked_by = Signalled("SIGTERM", signal.SIGTERM)
        self._reason, self._sure, self._kill_at = "overdue", True, now + event.grace
        if self._nobody_left():
            self._because = because
            return self._conclude(now)
        return self._judge(because, now)

    def _overdue_too_late(self, event: Event, now: float) -> list[Action]:
        """Something has failed by then, and that is how it ends: nothing is started again."""
        assert isinstance(event, Overdue)
        self._max_restarts, self._kill_at = self.attempt, now + event.grace
        return (
            [SetTimer("grace", min(self._grace_over, self._kill_at))]
            if self.state is State.STOPPING
            else []
        )

    # --- judging

    def _judge(self, because: str, now: float) -> list[Action]:
        """Something failed: everyone is asked where he is before anything is stopped."""
        self.state, self._because, self._evidence_in = State.JUDGING, because, False
        if self._asked_by is None:
            self._reason = "failure"
        self._settle_until = now + self._settle()
        return [AskEvidence(because), SetTimer("settle", self._settle_until)]

    def _settle(self) -> float:
        if not self._sure:
            return SETTLE_FOR_CAUSE
        apart = any(
            not (rank.ended or rank.failed or rank.joined or rank.waits) for rank in self._ranks
        )
        return SETTLE_APART if apart else SETTLE

    def _another(self, event: Event, now: float) -> list[Action]:
        assert isinstance(event, Raised | RankEnded | Misfit)
        actions: list[Action] = []
        was_sure = self._sure
        if isinstance(event, RankEnded):
            rank = self._ranks[event.rank]
            rank.ended, well = True, event.code == 0 and event.signal == 0
            rank.failed = rank.failed or not well
            self._sure = self._sure or (event.sure and not well)
            actions.append(CleanGroup(event.rank, kill=not well, because=event.because))
        elif isinstance(event, Raised):
            self._ranks[event.rank].failed = True
            self._sure = self._sure or not event.consequence
        else:
            self._sure = True
        if self._sure and not was_sure and now + self._settle() < self._settle_until:
            self._settle_until = now + self._settle()
            actions.append(SetTimer("settle", self._settle_until))
        return actions + self._perhaps_conclude(now)

    def _evidence(self, event: Event, now: float) -> list[Action]:
        self._evidence_in = True
        return self._perhaps_conclude(now)

    def _time_up(self, event: Event, now: float) -> list[Action]:
        assert isinstance(event, Timer)
        if event.name != "settle":
            return []
        return self._perhaps_conclude(now)

    def _perhaps_conclude(self, now: float) -> list[Action]:
        settled = (
            now >= self._settle_until
            or (self._sure and self._reason in ("interrupted", "overdue"))
            or self._nobody_left()
        )
        return self._conclude(now) if self._evidence_in and settled else []

    def _conclude(self, now: float) -> list[Action]:
        """The evidence is in: report; what follows waits for `Judged`, which carries the status to
        leave with.
        """
        self.state = State.STOPPING
        return [MakeReport(self._reason, self._because)]

    def _judged(self, event: Event, now: float) -> list[Action]:
        assert isinstance(event, Judged)
        if (
            self._status is None or self.state is State.RUNNING
        ):  # of a job that goes on, each report is one of all that has failed by now
            self._status = event.status
        if self.state is State.STOPPING:
            again = event.same == self._same and now - self._attempt_began <= SOON_AFTER_START
            self._same, self._times = event.same, self._times + 1 if again else 1
        if self.state is State.STOPPING and self._at_once:
            return self._kill(self._living(), self._because, now) or self._all_ended(now)
        if self.state is State.STOPPING:
            return self._stop(
                self._asked_by.name if self._asked_by else "SIGTERM", self._because, now
            )
        return self._all_ended(now) if self._nobody_left() else []

    # --- stopping

    def _stop(self, name: str, because: str, now: float) -> list[Action]:
        living = self._living()
        if not living:
            return self._all_ended(now)
        self._news_at, self._vain = now, 0
        actions: list[Action] = []
        for number in living:
            actions += self._ask(number, name, because)
        self._grace_over = min(now + self._grace, self._kill_at)
        if self._grace_over - now >= SILENT + WORTH_A_LINE:
            actions.append(SetTimer("silent", now + SILENT))
        return [*actions, SetTimer("stuck", now + STUCK_AFTER), SetTimer("grace", self._grace_over)]

    def _ask(self, number: int, name: str, because: str) -> list[Action]:
        self._ranks[number].asked = name
        return [SignalGroup(number, name, because)]

    def _ended_while_stopping(self, event: Event, now: float) -> list[Action]:
        assert isinstance(event, RankEnded)
        self._ranks[event.rank].ended = True
        actions: list[Action] = [CleanGroup(event.rank, kill=True, because=self._because)]
        if self._nobody_left():
            return actions + self._all_ended(now)
        if not self._from_outside():
            return actions
        self._news_at, self._vain = (
            now,
            0,
        )  # whoever waited for it has lost its connection, and may run its handler now
        return [*actions, SetTimer("stuck", now + STUCK_AFTER)]

    def _timer_while_stopping(self, event: Event, now: float) -> list[Action]:
        assert isinstance(event, Timer)
        living = self._living()
        if not living:
            return []
        if event.name == "stuck":
            return [LookWhetherStuck(living, together=self._from_outside())]
        asked = tuple(number for number in living if self._ranks[number].asked != "SIGKILL")
        if event.name == "silent" and asked:
            return [SayWaiting(asked, self._grace, self._hurry())]
        if event.name == "grace":
            why = (
                f"the grace of {self._grace:g} s is over"
                if now < self._kill_at
                else "the time that was given is over"
            )
            return self._kill(living, why, now)
        if event.name == "patience":
            self.state = State.ENDED
            status = self._status if self._status is not None else 1
            because = f"{ranks_phrase(living)} would not die"
            return [CleanUp(gently=False, because=because), Leave(status, because)]
        return []

    def _hurry(self) -> str:
        """What a person does who will not wait for the grace."""
        if self._reason != "interrupted" or self._asked_by is None:
            return "Ctrl-C"
        return (
            "Ctrl-C again" if self._asked_by.name == "SIGINT" else f"a second {self._asked_by.name}"
        )

    @property
    def is_stopping_from_outside(self) -> bool:
        """Whether the ranks were asked to end, and none of them is the reason."""
        return self.state is State.STOPPING and self._from_outside()

    def _from_outside(self) -> bool:
        """Whether a person, a batch system or the caller of `launch` ends the job, and no rank has
        failed.
        """
        return self._reason in ("interrupted", "overdue")

    def _stuck(self, event: Event, now: float) -> list[Action]:
        """Who cannot have seen the signal gets the next stronger one, if waiting longer is in vain.

        After a failure it is: the rank that the others wait for does not come. When the job is
        ended from outside, a wait ends as soon as the peer comes, and then the handler runs. So
        each keeps its grace while any living rank does anything but wait: it computes, sleeps,
        saves, or leaves, which ends its connections and so their waits. Who saw the signal is left
        alone for its whole grace.
        """
        assert isinstance(event, Stuck)
        living = self._living()
        self._vain = (
            self._vain + 1 if event.ranks and set(living) <= {*event.ranks, *event.waiting} else 0
        )
        again = SetTimer(
            "stuck",
            now
            + (STUCK_LATER if now > self._news_at + STUCK_SOON and not self._vain else STUCK_AFTER),
        )
        if self._from_outside() and self._vain < VAIN_LOOKS:
            return [again]
        actions: list[Action] = []
        killed: list[int] = []
        in_vain = "they wait in a call that no signal ends"
        in_vain += ", and no living rank can end it" if self._from_outside() else ""
        for number in event.ranks:
            rank = self._ranks[number]
            if rank.ended or rank.asked == "SIGKILL":
                continue
            following = "SIGKILL" if rank.asked == "SIGTERM" else "SIGTERM"
            why = f"{rank.asked} did not reach it: its main thread stands in a call"
            actions += self._ask(number, following, why)
            killed += [number] if following == "SIGKILL" else []
        if killed:
            actions.append(SayKilled(tuple(killed), in_vain))
        return [*actions, again]  # also of one that had no turn yet to hear it

    def _helper_lost_while_stopping(self, event: Event, now: float) -> list[Action]:
        assert isinstance(event, HelperLost)
        if event.name not in ("guard", "template"):
            return []  # the c10d host: nobody needs a meeting point any more
        return self._kill(self._living(), f"the {event.name} has ended", now)

    def _signal_while_stopping(self, event: Event, now: float) -> list[Action]:
        assert isinstance(event, Signalled)
        if self._is_the_same(now):
            return []
        if self._asked_by is None:
            self._asked_by = event
        return self._kill(self._living(), f"a second signal ({event.name}) has come", now)

    def _kill(self, living: tuple[int, ...], because: str, now: float) -> list[Action]:
        """SIGKILL for those that have not got it yet."""
        killed = tuple(number for number in living if self._ranks[number].asked != "SIGKILL")
        asked = any(self._ranks[number].asked for number in killed)
        actions: list[Action] = []
        for number in killed:
            actions += self._ask(number, "SIGKILL", because)
        return (
            [*actions, SetTimer("patience", now + KILL_PATIENCE), SayKilled(killed, because, asked)]
            if killed
            else []
        )

    # --- ends

    def _all_ended(self, now: float) -> list[Action]:
        failed = self.state is not State.RUNNING
        if not failed:
            self.state = State.ENDED
            because = "every rank has ended"
            return [
                CleanUp(gently=self._status is None, because=because),
                Leave(self._status or 0, because),
            ]
        cleaning = CleanUp(gently=False, because=self._because)
        if (
            self._reason == "failure"
            and self._asked_by is None
            and self.attempt < self._max_restarts
        ):
            if self._same and self._times >= ENOUGH_TIMES:
                self.state = State.ENDED
                return [
                    cleaning,
                    SayHopeless(self._times),
                    Leave(self._status if self._status is not None else 1, self._because),
                ]
            self.attempt += 1
            return [
                cleaning,
                *self._start_attempt(
                    f"attempt {self.attempt} of {self._max_restarts}: {self._because}", now
                ),
            ]
        self.state = State.ENDED
        return [cleaning, Leave(self._status if self._status is not None else 1, self._because)]

    def _living(self) -> tuple[int, ...]:
        return tuple(number for number, rank in enumerate(self._ranks) if not rank.ended)

    def _nobody_left(self) -> bool:
        return all(rank.ended for rank in self._ranks)


def _wait_in_init(ranks: list[int]) -> str:
    return f"{ranks_phrase(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in init_process_group"


TABLE = {
    (State.PREPARING, Prepared): Supervisor._start,
    (State.PREPARING, Impossible): Supervisor._impossible,
    (State.PREPARING, HelperLost): Supervisor._helper_lost,
    (State.PREPARING, Signalled): Supervisor._signalled,
    (State.PREPARING, Overdue): Supervisor._overdue,
    (State.RUNNING, AtPhase): Supervisor._phase,
    (State.RUNNING, Erred): Supervisor._erred,
    (State.RUNNING, Debugged): Supervisor._debugged,
    (State.RUNNING, Timer): Supervisor._timer_while_running,
    (State.RUNNING, Raised): Supervisor._failure,
    (State.RUNNING, Misfit): Supervisor._failure,
    (State.RUNNING, RankEnded): Supervisor._rank_ended,
    (State.RUNNING, Impossible): Supervisor._impossible,
    (State.RUNNING, HelperLost): Supervisor._helper_lost,
    (State.RUNNING, Signalled): Supervisor._signalled,
    (State.RUNNING, Overdue): Supervisor._overdue,
    (State.RUNNING, Judged): Supervisor._judged,
    (State.JUDGING, Raised): Supervisor._another,
    (State.JUDGING, Misfit): Supervisor._another,
    (State.JUDGING, RankEnded): Supervisor._another,
    (State.JUDGING, EvidenceIn): Supervisor._evidence,
    (State.JUDGING, Timer): Supervisor._time_up,
    (State.JUDGING, HelperLost): Supervisor._helper_lost,
    (State.JUDGING, Signalled): Supervisor._signalled,
    (State.JUDGING, Overdue): Supervisor._overdue_too_late,
    (State.STOPPING, Judged): Supervisor._judged,
    (State.STOPPING, RankEnded): Supervisor._ended_while_stopping,
    (State.STOPPING, Timer): Supervisor._timer_while_stopping,
    (State.STOPPING, Stuck): Supervisor._stuck,
    (State.STOPPING, Signalled): Supervisor._signal_while_stopping,
    (State.STOPPING, HelperLost): Supervisor._helper_lost_while_stopping,
    (State.STOPPING, Overdue): Supervisor._overdue_too_late,
}
