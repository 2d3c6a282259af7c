"""Watch over the ranks' meeting: what each says of its meeting point, what the launcher sees there,
and when that ends the job.

Ranks tell where they meet, and come and go in init_process_group. Three things follow. What is
certain to keep them apart (a *misfit*) is judged whenever one comes, and counts once it has lasted.
A rank that waits beyond its own deadline makes the launcher look at the meeting point. And an error
that speaks of a peer makes it look where the error points, before the report.
"""

from __future__ import annotations

from rallypoint.diagnosis import classify, reachability, rendezvous_mismatch
from rallypoint.diagnosis.rendezvous_mismatch import MISFIT_SETTLE, Caller, Misfit
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


class RendezvousMonitor:
    """Watch over the meeting of one attempt at a time."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._differing_told = False
        self._tcpstore = TcpStoreMonitor(job, self._on_unanswered)
        self.begin()

    def begin(self) -> None:
        """Begin another attempt: nothing that was seen is of its ranks."""
        self._looking: Looking | None = None  # at the meeting point that ranks do not reach
        self._looks_until = 0.0
        # when the time is up that a rank gives torch to meet the others
        self._until: dict[int, float] = {}
        self._misfit: Misfit | None = None  # what keeps the ranks from meeting, as it looks
        self._settled = False  # and it has lasted
        # one that did not last: its ranks may just have given up waiting
        self._gone: Misfit | None = None
        self._tcpstore.begin()

    # --- what a rank says

    def meets(self, handle: RankHandle, message: Meets) -> None:
        """Handle a rank that is about to call init_process_group."""
        job, meeting = self._job, message.meeting
        handle.meeting, handle.at_held = meeting, bool(job.attempt.held) and not message.differs
        if message.differs and not self._differing_told:
            self._differing_told = True
            job.console.say_differs(meeting, job.attempt.held)
        if share_a_device(job.ranks):
            job.feed(supervisor.CannotMeet("ranks of one group of NCCL's have the same GPU"))
        if meeting.timeout:
            until = job.loop.now + meeting.timeout + TORCH_OVERRUN
            self._until[handle.rank] = until
            job.loop.by("meeting", until, self._on_unmet)
        self._tcpstore.meets(handle)

    def joining(self) -> None:
        """Check, when a rank begins to wait in it, that the waiting ranks can meet at all. A failure
        that is being judged by then came first. With other nodes the lead checks.
        """
        if self._job.is_running and self._misfit is None and self._job.others is None:
            self._misfit = self._find_misfit()
            if self._misfit is not None:
                self._job.loop.at("misfit", self._job.loop.now + MISFIT_SETTLE, self._on_misfit)

    # --- a misfit

    def _find_misfit(self) -> Misfit | None:
        """Return what is certain to keep the ranks in init_process_group from meeting."""
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
        """Look again: the ranks that could not meet have had time to raise, and to try something
        else.
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
        """Return the misfit when the job failed of it: it has lasted, or ranks gave up waiting, or
        could not have one seat twice.
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
        # A seat that is taken twice, or one too few, leaves another one empty: the ranks that wait
        # for that one give up as well.
        of_all = found.code in ("rank-duplicate", "world-size-differs")
        theirs = of_all or all(
            handle.rank in found.ranks for handle in ranks if handle.raised is not None
        )
        return found if raised and told and theirs else None

    # --- a look at the meeting point

    def where_all_wait(self) -> tuple[str, int] | None:
        """Return the meeting point of the program's own at which all ranks wait, and nobody is missing.
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
        """Look at the meeting point of ranks that wait though their own time is up. What keeps them
        from meeting ends the job.

        torch does not keep that time when it is refused, which costs up to as much again, nor ever
        when a listener accepts the connection and says nothing.

        A program that catches torch's error may have another place to try, and gets it as late as
        torch is. From a silent one no error ever comes.
        """
        job = self._job
        ranks = {handle.rank: handle for handle in job.ranks if handle.waiting}
        waiting = {number: until for number, until in self._until.items() if number in ranks}
        if not job.is_running or not waiting:
            return
        if (soonest := min(waiting.values())) > now:
            job.loop.at("meeting", soonest, self._on_unmet)
            return
        late = [ranks[number] for number, until in waiting.items() if until <= now]
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
        guarded = any(one.meeting is not None and one.meeting.guarded for one in late)
        if hangs or not guarded:
            job.feed(supervisor.CannotMeet(f"ranks cannot meet at {seen.address}"))

    def _on_unanswered(self, place: StoreAddress) -> None:
        """Look at torch's store: ranks that have met wait for it, and their time is up. A look from
        before, when they met, says nothing of now.
        """
        loop = self._job.loop

        def look_again(now: float) -> None:
            if self._job.is_running:
                self._looking = None
                self._look(place)
                loop.poll("unanswered", is_back, self._judge_unanswered, every=LOOK_AGAIN)

        def is_back(now: float) -> bool:
            return not self.is_looking(now)

        if is_back(loop.now):
            look_again(loop.now)
        else:
            loop.poll("unanswered", is_back, look_again, every=LOOK_AGAIN)

    def _judge_unanswered(self, now: float) -> None:
        job, seen = self._job, self.reached
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
        judged = any(handle.unanswered is not None for handle in job.ranks)
        kept = self._tcpstore.kept_waiting()
        if kept is not None:  # a rank that waited for these has given up first
            # If it was judged already, that look is the last word.
            self._looking = self._looking if judged else None
            self._look(kept)
            return
        untold = all(handle.raised is None and handle.ended is None for handle in job.ranks)
        self._look(job.evidence.unmet(job.ranks) or (self.where_all_wait() if untold else None))

    def _look(self, place: tuple[str, int] | None) -> None:
        """Begin a look, in a thread of its own; once for each place."""
        if place is not None and (self._looking is None or self._looking.address != place):
            self._looking = Looking(*place, reachability.GREETING, reachability.LOOK_TIMEOUT)
            self._looks_until = self._job.loop.now + LOOK_PATIENCE

    @property
    def has_looked(self) -> bool:
        """Whether a look was begun."""
        return self._looking is not None

    def is_looking(self, now: float) -> bool:
        """Return whether the result may still come."""
        looking = self._looking
        return looking is not None and looking.result is None and now < self._looks_until

    @property
    def reached(self) -> Reached | None:
        """Result of the last look; None when there was none, or it has not come back."""
        return self._looking.result if self._looking is not None else None
