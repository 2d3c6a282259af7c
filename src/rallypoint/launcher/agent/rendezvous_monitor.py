"""Whether the ranks can meet: what each says of its meeting point, what the launcher sees there,
and when that ends the job.

Ranks tell where they meet, and come and go in init_process_group. Three things follow. What is
certain to keep them apart (a *misfit*) is judged whenever one comes, and counts once it has lasted.
A rank that waits beyond its own deadline makes the launcher look at the meeting point. And an error
that speaks of a peer has somebody look where it points, before the report.
"""

from __future__ import annotations

from rallypoint.diagnosis import classify, reachability, rendezvous_mismatch
from rallypoint.diagnosis.evidence import Meeting
from rallypoint.diagnosis.rendezvous_mismatch import Caller, Misfit
from rallypoint.host.probe import Looking, Reached
from rallypoint.launcher.agent import supervisor
from rallypoint.launcher.agent.evidence_gatherer import share_a_device
from rallypoint.launcher.agent.job import Job
from rallypoint.launcher.agent.process_handles import RankHandle
from rallypoint.launcher.agent.tcpstore_monitor import StoreAddress, TcpStoreMonitor
from rallypoint.launcher.protocol import Meets

# Seconds after a rank's own deadline for meeting the others before the launcher looks there: torch,
# when it keeps it, is heard first.
TORCH_OVERRUN = 0.05
# Seconds for a look at a meeting point. It has a deadline of its own, of less than half as much:
# this is for a machine so busy that a thread does not get to run.
LOOK_PATIENCE = 0.8
# Seconds between looks whether the thread has come back.
LOOK_AGAIN = 0.004
# Seconds for the look at a meeting point of the program's own as soon as a rank names it, and
# between looks whether it has come back. Nobody waits for that one: a resolver that is slow, or has
# to ask far away, gets the time that it takes as a rule.
FIRST_LOOK, FIRST_LOOK_AGAIN = 2.0, 0.05
# Seconds that ranks which cannot meet must be seen to wait. A call that torch refuses (a backend
# that is not there, a port that is taken) raises in less, most of the time spent on starting CUDA,
# and the program may have something else to try.
MISFIT_SETTLE = 2.0


class RendezvousMonitor:
    """One attempt's at a time."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._differing_told = False
        self._answers = TcpStoreMonitor(job, self._on_unanswered)
        self._forget()

    def _forget(self) -> None:
        self._looking: Looking | None = None  # at the meeting point that ranks do not reach
        self._looks_until = 0.0
        self._first: Looking | None = None  # at once, at the one of the program's own
        self._until: dict[
            int, float
        ] = {}  # when the time is up that a rank gives torch to meet the others
        self._misfit: Misfit | None = (
            None  # what keeps this attempt's ranks from meeting, as it looks
        )
        self._settled = False  # and it has lasted
        self._gone: Misfit | None = (
            None  # one that did not last: its ranks may just have given up waiting
        )

    def begin(self) -> None:
        """Another attempt: nothing that was seen is of its ranks."""
        self._forget()
        self._answers.begin()

    # --- what a rank says

    def meets(self, handle: RankHandle, message: Meets) -> None:
        """It is about to call init_process_group."""
        job = self._job
        handle.meeting, handle.at_held = (
            message.meeting,
            bool(job.attempt.held) and not message.differs,
        )
        if message.differs and not self._differing_told:
            self._differing_told = True
            job.console.say_differs(message.meeting, job.attempt.held)
            self._look_at_once(message.meeting)
        if share_a_device(job.ranks):
            job.feed(supervisor.CannotMeet("ranks of one group of NCCL's have the same GPU"))
        if message.meeting.timeout:
            until = job.loop.now + message.meeting.timeout + TORCH_OVERRUN
            self._until[handle.rank] = until
            job.loop.by("meeting", until, self._on_unmet)
        self._answers.meets(handle)

    def joining(self) -> None:
        """A rank waits in it: whether those who wait now can meet at all. A failure that is being
        judged by then came first.
        """
        if self._job.is_running and self._misfit is None:
            self._misfit = self._find_misfit()
            if self._misfit is not None:
                self._job.loop.at("misfit", self._job.loop.now + MISFIT_SETTLE, self._on_misfit)

    # --- a misfit

    def _find_misfit(self) -> Misfit | None:
        """What is certain to keep the ranks that are in init_process_group from meeting."""
        ranks = self._job.members
        called = [
            (handle, Caller(handle.rank, handle.meeting, handle.at_held))
            for handle in ranks
            if handle.meeting
        ]
        return rendezvous_mismatch.misfit(
            [caller for handle, caller in called if handle.waiting],
            self._job.size,
            through=[caller for handle, caller in called if handle.phase == "running"],
            all_there=all(handle.waiting or handle.ended is not None for handle in ranks),
        )

    def _on_misfit(self, now: float) -> None:
        """Those who could not meet a moment ago have had time to raise, and to try
        something else.
        """
        if not self._job.is_running:
            return
        before, self._misfit = self._misfit, None
        self._gone = before
        self.joining()
        if (
            self._misfit is not None
            and before is not None
            and self._misfit.code == before.code
            and self._misfit.ranks == before.ranks
        ):
            self._settled = True
            self._job.feed(supervisor.CannotMeet(self._misfit.because))

    def cause_of_all(self) -> Misfit | None:
        """The misfit, when that is what the job failed of: it has lasted, or ranks gave up waiting,
        or could not have one seat twice.
        """
        found = self._misfit or self._gone
        if found is None or self._settled:
            return found
        ranks = self._job.members
        raised = [handle.raised for handle in ranks if handle.raised is not None]
        told = all(
            one.call == "init_process_group"
            and (found.code == "rank-duplicate" or classify.is_consequence(one))
            for one in raised
        )
        # A seat that is taken twice, or one too few, leaves another one empty: whoever waits for
        # that gives up as well.
        of_all = found.code in ("rank-duplicate", "world-size-differs")
        theirs = of_all or all(
            handle.rank in found.ranks for handle in ranks if handle.raised is not None
        )
        return found if raised and told and theirs else None

    # --- a look at the meeting point

    def _look_at_once(self, meeting: Meeting) -> None:
        """A name without an address stays one, however long the ranks wait: torch asks again for
        half an hour.
        """
        place = reachability.place(meeting)
        if place is not None and not rendezvous_mismatch.is_loopback(place[0]):
            self._first = first = Looking(*place, reachability.GREETING, FIRST_LOOK)
            until = self._job.loop.now + 2 * FIRST_LOOK
            self._job.loop.poll(
                "first look",
                lambda now: first.result is not None or now >= until,
                lambda now: self._say_first_look(meeting, first.result),
                every=FIRST_LOOK_AGAIN,
            )

    def _say_first_look(self, meeting: Meeting, seen: Reached | None) -> None:
        if seen is not None and reachability.is_final(seen) and self._job.is_running:
            self._job.console.say_nobody_there(meeting, seen)

    def where_all_wait(self) -> tuple[str, int] | None:
        """The meeting point of the program's own at which all ranks wait, and nobody is missing.
        (At the held one there is a store.)
        """
        meetings = [
            handle.meeting
            for handle in self._job.members
            if handle.waiting and handle.meeting is not None
        ]
        if (
            not meetings
            or self._job.evidence.absent(self._job.members, self._job.size)
            or meetings[0].address == self._job.attempt.held
        ):
            return None
        return reachability.place(meetings[0])

    def _on_unmet(self, now: float) -> None:
        """Ranks still wait though their own time is up. torch does not keep it when it is refused,
        which costs up to as much again, nor ever when somebody accepts the connection and says
        nothing. So the launcher looks; what keeps them from meeting ends the job.

        A program that catches torch's error may have another place to try, and gets it as late as
        torch is. From a silent one no error ever comes.
        """
        job = self._job
        waiting = {
            number: until for number, until in self._until.items() if job.ranks[number].waiting
        }
        if not job.is_running or not waiting:
            return
        if (soonest := min(waiting.values())) > now:
            job.loop.at("meeting", soonest, self._on_unmet)
            return
        late = [job.ranks[number] for number, until in waiting.items() if until <= now]
        place = reachability.place(late[0].meeting) if late[0].meeting is not None else None
        self._look(place)
        if self.is_looking(now):
            job.loop.at("meeting", now + LOOK_AGAIN, self._on_unmet)
            return
        for handle in late:
            del self._until[handle.rank]
        job.loop.at("meeting", now, self._on_unmet)
        seen = self.reached
        if place is None or seen is None or not reachability.explains(seen):
            return
        hangs = seen.outcome in ("answered", "silent", "closed")
        if hangs or not any(
            handle.meeting is not None and handle.meeting.guarded for handle in late
        ):
            job.feed(supervisor.CannotMeet(f"ranks cannot meet at {seen.address}"))

    def _on_unanswered(self, place: StoreAddress) -> None:
        """Ranks that have met wait for torch's store, and their time is up."""
        now = self._job.loop.now
        if not self._job.is_running:
            return
        if self.is_looking(now):
            self._job.loop.at(
                "unanswered", now + LOOK_AGAIN, lambda now: self._on_unanswered(place)
            )
            return
        self._looking = None  # what was seen there when they met says nothing of now
        self._look(place)
        self._judge_unanswered(now)

    def _judge_unanswered(self, now: float) -> None:
        job = self._job
        if self.is_looking(now):
            job.loop.at("unanswered", now + LOOK_AGAIN, self._judge_unanswered)
            return
        seen = self.reached
        if not job.is_running:
            # something else has failed meanwhile, of this perhaps: the report says what is seen
            # here
            return
        if seen is not None and reachability.explains(seen):
            job.feed(supervisor.CannotMeet(f"torch's store at {seen.address} does not answer"))
            return
        for handle in job.ranks:
            handle.unanswered = None

    def look_for_lost(self) -> None:
        """Look where a rank's error, or torch's own log, says that somebody could not be reached;
        or where all wait when a person, or the end of their time, stops them."""
        job = self._job
        judged = any(
            handle.unanswered is not None for handle in job.ranks
        )  # then somebody looks there already
        kept = self._answers.kept_waiting()
        if kept is not None:  # whoever waited for these ranks has given up first
            self._looking = self._looking if judged else None
            self._look(kept)
            return
        untold = all(handle.raised is None and handle.ended is None for handle in job.ranks)
        place = job.evidence.unmet(job.ranks) or (self.where_all_wait() if untold else None)
        first = (
            self._first.result if self._first is not None and self._first.address == place else None
        )
        if first is not None and reachability.is_final(first):
            self._looking = self._first
        self._look(place)

    def _look(self, place: tuple[str, int] | None) -> None:
        """In a thread of its own; once for each place."""
        if place is not None and (self._looking is None or self._looking.address != place):
            self._looking = Looking(*place, reachability.GREETING, reachability.LOOK_TIMEOUT)
            self._looks_until = self._job.loop.now + LOOK_PATIENCE

    @property
    def has_looked(self) -> bool:
        """Whether a look was begun."""
        return self._looking is not None

    def is_looking(self, now: float) -> bool:
        """Whether the result may still come."""
        return (
            self._looking is not None and self._looking.result is None and now < self._looks_until
        )

    @property
    def reached(self) -> Reached | None:
        """What the last look saw; None when there was none, or it has not come back."""
        return self._looking.result if self._looking is not None else None
