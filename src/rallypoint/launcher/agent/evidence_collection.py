"""Questions to the ranks where they are: when something has failed, at a roll call, and to ranks
that do not end. A signal asks, stacks answer, a deadline ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rallypoint.diagnosis import reachability
from rallypoint.diagnosis.evidence import RankEvidence
from rallypoint.host.probe import Looking
from rallypoint.launcher.agent.evidence_gatherer import positions
from rallypoint.launcher.agent.job import Job
from rallypoint.launcher.agent.process_handles import RankHandle
from rallypoint.launcher.agent.supervisor import EvidenceIn, Stuck

# Seconds for all ranks to write their stacks. A dump takes a millisecond; a rank that holds the
# interpreter's memory lock, or is stopped, never answers, and the report must come within 0.3 s.
EVIDENCE_DEADLINE = 0.2
# Seconds for the ranks that are missing at a roll call to write their stacks. Nobody waits for it,
# so a busy machine gets more time.
ROLL_CALL_DEADLINE = 2.0
# Seconds between looks whether a dump is whole. The handler has no way to say so; its blocked
# signal in /proc does.
ANSWER_LOOK = 0.004


class StackQuestion:
    """One question to some ranks. It is over when each of them that lives has answered, or has no
    more time.
    """

    def __init__(self, job: Job, ranks: Iterable[RankHandle]) -> None:
        """Ask every rank that lives. One that has no handler for the question is not in `asked`."""
        job.console.pump.interrupts = True  # torch's lines about interrupted calls are not shown
        self._loop = job.loop
        self.asked = [handle for handle in ranks if handle.alive and handle.ask()]

    def is_answered(self) -> bool:
        """Return whether every rank that lives has answered."""
        return all(handle.answered() for handle in self.asked if handle.alive)

    def wait(self, name: str, seconds: float, then: Callable[[float], object]) -> None:
        """Call `then` when the question is over, under a timer of this name."""
        until = self._loop.now + seconds
        self._loop.poll(
            name, lambda now: now >= until or self.is_answered(), then, every=ANSWER_LOOK
        )


def collect_evidence(job: Job, because: str) -> None:
    """Ask all ranks, and look at the meeting point that one did not reach; `EvidenceIn` follows."""
    rendezvous, until = job.rendezvous, job.loop.now + EVIDENCE_DEADLINE
    question = StackQuestion(job, (*job.ranks, *job.spawned))
    job.reporter.event(
        "evidence-asked", because=because, ranks=[handle.rank for handle in question.asked]
    )
    rendezvous.look_for_lost()

    def is_over(now: float) -> bool:
        if not rendezvous.has_looked:  # torch's own log may have the address, and is read by now
            rendezvous.look_for_lost()
        return (now >= until or question.is_answered()) and not rendezvous.is_looking(now)

    job.loop.poll("evidence", is_over, lambda now: job.feed(EvidenceIn()), every=ANSWER_LOOK)


def call_roll(job: Job, because: str) -> None:
    """Ask the ranks that others wait for in init_process_group where they are, then say it. Nothing
    is stopped.

    The evidence signal makes a system call return early, which Python and most other code does over
    again; a healthy rank is spared it all the same. A rank that all others have waited for is not
    healthy until it was looked at, and /proc shows no line of its program. Ranks that wait are not
    asked, nor is one that was stopped or is at a debugger: that is seen from here.
    """
    numbers = job.evidence.absent(job.members, job.size)
    question = StackQuestion(
        job, [one for one in job.members if one.rank in numbers and one.alive and not one.halted()]
    )
    place = job.rendezvous.where_all_wait()
    # Nobody is asked when all wait: the look at their meeting point has the time then.
    looking = Looking(*place, reachability.GREETING, reachability.LOOK_TIMEOUT) if place else None
    until = job.loop.now + ROLL_CALL_DEADLINE

    def is_over(now: float) -> bool:
        looked = looking is None or looking.result is not None
        return now >= until or (looked and question.is_answered())

    def say(now: float) -> None:
        seen = looking.result if looking is not None else None
        if job.is_running:
            lines = job.evidence.roll_call(
                job.members, job.size, question.asked, seen, spawned=bool(job.spawned)
            )
            if lines:
                job.reporter.report_roll_call(lines, because)

    job.loop.poll("roll answers", is_over, say, every=ANSWER_LOOK)


def locate(
    job: Job,
    numbers: Sequence[int],
    tell: Callable[[tuple[RankEvidence, ...], dict[int, str]], object],
) -> None:
    """Ask these ranks where they are, for the lead; `tell` gets their positions, and why those that
    did not answer are silent. Nothing is stopped.
    """
    ranks = [one for one in job.ranks if one.rank in numbers]
    question = StackQuestion(job, [one for one in ranks if one.alive and not one.halted()])
    question.wait(
        "located", ROLL_CALL_DEADLINE, lambda now: tell(*positions(ranks, question.asked))
    )


def look_for_stuck(job: Job, ranks: tuple[int, ...], *, together: bool) -> None:
    """Look which ranks cannot have heeded their signal, since their main threads wait in C code;
    `Stuck` follows.

    Only a rank is asked that was signalled, and sleeps though the signal has reached it. It waits in C code, in a
    handler, or in Python code that has heeded the signal, and its stack tells which. When it
    matters only that no rank goes on (`together`), none is asked while /proc shows one that does.
    """
    living = [one for one in job.ranks if one.rank in ranks and one.alive and one.sent]
    if together:
        asked = living if all(handle.may_wait() for handle in living) else []
    else:
        asked = [handle for handle in living if handle.may_be_deaf()]
    question = StackQuestion(job, asked)

    def tell(now: float) -> None:
        found: dict[str, list[int]] = {"deaf": [], "waiting": [], "": []}
        for handle in question.asked:
            if handle.alive:
                found[handle.waits(now, together=together)].append(handle.rank)
        job.feed(Stuck(tuple(found["deaf"]), tuple(found["waiting"])))

    question.wait("stuck answers", EVIDENCE_DEADLINE, tell)
