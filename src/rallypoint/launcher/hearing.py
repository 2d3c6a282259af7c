"""The ranks are heard: all of them when something has failed, those who are missing when the roll is called, and those who do not end."""

from __future__ import annotations

from rallypoint.diagnosis import meeting_point
from rallypoint.host.reach import Looking
from rallypoint.launcher.handles import RankHandle
from rallypoint.launcher.job import Job
from rallypoint.launcher.meetings import Meetings
from rallypoint.launcher.supervisor import AskEvidence, CallRoll, EvidenceIn, LookWhetherStuck, Stuck

# Seconds for all ranks to write their stacks. A dump takes a millisecond; a rank that holds the interpreter's memory lock, or is
# stopped, never answers, and the report must come within 0.3 s.
EVIDENCE_DEADLINE = 0.2
# Seconds between looks whether a dump is whole. The handler has no way to say so; its blocked signal in /proc does.
EVIDENCE_LOOK = 0.004
# Seconds for the ranks that are missing at a roll call to write their stacks. Nobody waits for it, so a busy machine gets more time.
ROLL_CALL_DEADLINE = 2.0


class Hearing:
    """Something has failed, or a person ends the job: where every rank is, and what is at the meeting point that one did not reach."""

    def __init__(self, job: Job, meetings: Meetings) -> None:
        self._job = job
        self._meetings = meetings
        self._until = 0.0

    def begin(self, action: AskEvidence) -> None:
        """Ask; `EvidenceIn` follows."""
        job = self._job
        job.account.ranks_are_interrupted()
        asked = [handle.rank for handle in (*job.ranks, *job.spawned) if handle.alive and handle.ask()]
        job.account.event("evidence-asked", because=action.because, ranks=asked)
        self._until = job.loop.now + EVIDENCE_DEADLINE
        self._meetings.look_for_lost()
        job.loop.at("evidence", job.loop.now, self._go_on)

    def _go_on(self, now: float) -> None:
        if not self._meetings.has_looked:  # torch's own log may have the address, and is read by now
            self._meetings.look_for_lost()
        asking = now < self._until and not all(handle.answered() for handle in (*self._job.ranks, *self._job.spawned) if handle.alive)
        if asking or self._meetings.is_looking(now):
            self._job.loop.at("evidence", now + EVIDENCE_LOOK, self._go_on)
            return
        self._job.feed(EvidenceIn())


class RollCall:
    """Ranks wait in init_process_group: who is missing, and where they are. Said, and nothing is stopped."""

    def __init__(self, job: Job, meetings: Meetings) -> None:
        self._job = job
        self._meetings = meetings
        self._asked: list[RankHandle] = []
        self._because = ""
        self._until = 0.0
        self._looking: Looking | None = None  # at the meeting point where all ranks wait

    def begin(self, action: CallRoll) -> None:
        """Ask those who are missing where they are, then say it.

        The evidence signal makes a system call return early, which Python's own code and most other code does over again; a healthy rank
        is spared it all the same. One that all others have waited for is not healthy until somebody has looked, and /proc shows no line
        of its program. Who waits is not asked, nor who was stopped or is before a person: that is seen from here.
        """
        job = self._job
        numbers = job.account.absent(job.members, job.size)
        absent = [handle for handle in job.members if handle.rank in numbers]
        job.account.ranks_are_interrupted()
        self._asked = [handle for handle in absent if handle.alive and not handle.halted() and handle.ask()]
        place = self._meetings.where_all_wait()
        self._looking = Looking(*place, meeting_point.GREETING, meeting_point.LOOK_TIMEOUT) if place is not None else None
        self._because, self._until = action.because, job.loop.now + ROLL_CALL_DEADLINE
        job.loop.at("roll answers", job.loop.now, self._go_on)

    def _go_on(self, now: float) -> None:
        job, seen = self._job, self._looking.result if self._looking is not None else None
        answered = all(handle.answered() for handle in self._asked if handle.alive)
        if now < self._until and not (answered and (self._looking is None or seen is not None)):
            job.loop.at("roll answers", now + EVIDENCE_LOOK, self._go_on)
        elif job.is_running:
            job.account.say_roll_call(job.members, job.size, self._asked, self._because, seen)


class Deafness:
    """Ranks were asked to end: which of them cannot have heard it, because their main threads wait in C code."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._asked: list[RankHandle] = []
        self._together = False
        self._until = 0.0

    def begin(self, action: LookWhetherStuck) -> None:
        """Look, and ask where it may be so; `Stuck` follows.

        Asked is only who sleeps though the signal has reached it: it waits in C code, in a handler, or in Python code that has heeded the
        signal, and its stack tells which. When it matters only that nobody goes on, nobody is asked while /proc shows one who does.
        """
        living = [self._job.ranks[number] for number in action.ranks if self._job.ranks[number].alive]
        self._together = action.together
        if self._together:
            self._asked = living if all(handle.may_wait() for handle in living) else []
        else:
            self._asked = [handle for handle in living if handle.may_be_deaf()]
        self._job.account.ranks_are_interrupted()
        self._asked = [handle for handle in self._asked if handle.ask()]
        self._until = self._job.loop.now + EVIDENCE_DEADLINE
        self._job.loop.at("deafness", self._job.loop.now, self._go_on)

    def _go_on(self, now: float) -> None:
        if now < self._until and not all(handle.answered() for handle in self._asked if handle.alive):
            self._job.loop.at("deafness", now + EVIDENCE_LOOK, self._go_on)
            return
        seen = {handle.rank: handle.waits(now, together=self._together) for handle in self._asked if handle.alive}
        deaf, waiting = (tuple(rank for rank, how in seen.items() if how == wanted) for wanted in ("deaf", "waiting"))
        self._job.feed(Stuck(deaf, waiting))
