"""Evidence from the ranks themselves, collected when something has failed, at a roll call, and from
ranks that do not end.
"""

from __future__ import annotations

from rallypoint.diagnosis import reachability
from rallypoint.host.probe import Looking
from rallypoint.launcher.agent.job import Job
from rallypoint.launcher.agent.rendezvous_monitor import RendezvousMonitor
from rallypoint.launcher.agent.stack_question import StackQuestion
from rallypoint.launcher.agent.supervisor import (
    AskEvidence,
    CallRoll,
    EvidenceIn,
    LookWhetherStuck,
    Stuck,
)

# Seconds for all ranks to write their stacks. A dump takes a millisecond; a rank that holds the
# interpreter's memory lock, or is stopped, never answers, and the report must come within 0.3 s.
EVIDENCE_DEADLINE = 0.2
# Seconds for the ranks that are missing at a roll call to write their stacks. Nobody waits for it,
# so a busy machine gets more time.
ROLL_CALL_DEADLINE = 2.0


class EvidenceCollection:
    """Stacks of all ranks, and a look at the meeting point that one did not reach, when something
    has failed or a person ends the job.
    """

    def __init__(self, job: Job, rendezvous: RendezvousMonitor) -> None:
        self._job = job
        self._rendezvous = rendezvous

    def begin(self, action: AskEvidence) -> None:
        """Ask all ranks; `EvidenceIn` follows."""
        question = StackQuestion(self._job, (*self._job.ranks, *self._job.spawned))
        self._job.reporter.event(
            "evidence-asked",
            because=action.because,
            ranks=[handle.rank for handle in question.asked],
        )
        self._rendezvous.look_for_lost()
        question.wait(
            "evidence",
            EVIDENCE_DEADLINE,
            lambda now: self._job.feed(EvidenceIn()),
            self._has_looked,
            limited=False,
        )

    def _has_looked(self) -> bool:
        if (
            not self._rendezvous.has_looked
        ):  # torch's own log may have the address, and is read by now
            self._rendezvous.look_for_lost()
        return not self._rendezvous.is_looking(self._job.loop.now)


class RollCall:
    """Stacks of the ranks that others wait for in init_process_group. They are said, and nothing is
    stopped.
    """

    def __init__(self, job: Job, rendezvous: RendezvousMonitor) -> None:
        self._job = job
        self._rendezvous = rendezvous

    def begin(self, action: CallRoll) -> None:
        """Ask the missing ranks where they are, then say it.

        The evidence signal makes a system call return early, which Python and most other code does
        over again; a healthy rank is spared it all the same. A rank that all others have waited for
        is not healthy until it was looked at, and /proc shows no line of its program. Ranks that
        wait are not asked, nor is one that was stopped or is at a debugger: that is seen from here.
        """
        job = self._job
        numbers = job.evidence.absent(job.members, job.size)
        question = StackQuestion(
            job,
            [one for one in job.members if one.rank in numbers and one.alive and not one.halted()],
        )
        place = self._rendezvous.where_all_wait()
        looking = (
            Looking(*place, reachability.GREETING, reachability.LOOK_TIMEOUT)
            if place is not None
            else None
        )

        def say(now: float) -> None:
            seen = looking.result if looking is not None else None
            lines = (
                job.evidence.roll_call(job.members, job.size, question.asked, seen)
                if job.is_running
                else ()
            )
            if lines:
                job.reporter.report_roll_call(lines, action.because)

        question.wait(
            "roll answers",
            ROLL_CALL_DEADLINE,
            say,
            lambda: looking is None or looking.result is not None,
        )


class UnresponsiveRanks:
    """Ranks that were asked to end and cannot have heard it, because their main threads wait in C
    code.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def begin(self, action: LookWhetherStuck) -> None:
        """Look, and ask where it may be so; `Stuck` follows.

        Only a rank is asked that sleeps though the signal has reached it. It waits in C code, in a
        handler, or in Python code that has heeded the signal, and its stack tells which. When it
        matters only that no rank goes on, none is asked while /proc shows one that does.
        """
        together = action.together
        living = [
            handle for handle in self._job.ranks if handle.rank in action.ranks and handle.alive
        ]
        if together:
            asked = living if all(handle.may_wait() for handle in living) else []
        else:
            asked = [handle for handle in living if handle.may_be_deaf()]
        question = StackQuestion(self._job, asked)

        def tell(now: float) -> None:
            seen = {
                handle.rank: handle.waits(now, together=together)
                for handle in question.asked
                if handle.alive
            }
            deaf, waiting = (
                tuple(rank for rank, how in seen.items() if how == wanted)
                for wanted in ("deaf", "waiting")
            )
            self._job.feed(Stuck(deaf, waiting))

        question.wait("deafness", EVIDENCE_DEADLINE, tell)
