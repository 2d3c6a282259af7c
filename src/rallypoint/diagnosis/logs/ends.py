"""Ends of processes in a log: which of them failed, and which were of a stop."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from signal import SIGABRT, SIGKILL

import msgspec

from rallypoint.diagnosis import classify
from rallypoint.diagnosis.error_patterns import known_line, launchers, slurm_words
from rallypoint.diagnosis.log_events import NEAR, Findings, Place, Sighting, Sign
from rallypoint.diagnosis.logs.sighting_facts import is_worker_stopped, line_of, rank_of

AFTER_STOP = 5
"""Lines of others that may stand between a stop and what it ends, beside the launcher's line for
each process. A later run in the same log writes more.
"""

OF_PROCESSES = {
    Sign.CRASHED, Sign.KILLED_FOR_MEMORY, Sign.WATCHDOG, Sign.NCCL, Sign.LOST, Sign.STALLED, Sign.SAME_RANK,
}  # fmt: skip
"""What tells of a process of the job, and not of its command."""


def ended_by_stop(findings: Findings) -> tuple[list[Sighting], set[Place]]:
    """List ends by SIGKILL soon after the job was stopped, which whoever stops a job sends to
    what has not ended yet. Where no failure stands before the stop, only those in the next
    lines: others may be of a later step. Also a DataLoader's words that its worker ended, by no
    signal or by SIGTERM: that goes to all processes of a job. What follows one of these soon is
    of the same stop. Also return the places of what stands soon after a stop.
    """
    stops = {s.place.log for s in findings.sightings if s.sign is Sign.INTERRUPTED}
    found: list[Sighting] = []
    after_stop: set[Place] = set()
    until: dict[str, int] = {}
    failed = stopped = False
    next_line = 0
    for s in sorted(findings.sightings, key=line_of):
        at = s.place
        soon = at.line <= until.get(at.log, -1)
        of_its_own = s.has_error and not classify.is_stop(s.error) and not s.went_on
        ended = s.sign is not Sign.INTERRUPTED and findings.has_failed(s)
        failed = failed or (not soon and (ended or of_its_own))
        if soon or s.sign is Sign.INTERRUPTED:
            last = max(at.line, at.last) + AFTER_STOP + len(findings.stopped)
            until[at.log] = max(last, until.get(at.log, 0))
            after_stop.add(at)
            stopped = stopped or (
                s.sign is Sign.INTERRUPTED and not slurm_words.is_for_a_task(s.text)
            )
        of_stop = failed or (stopped and at.line <= next_line)
        next_line = max(at.line, at.last) + 1
        killed = soon and of_stop and s.sign is Sign.ENDED and s.end.signal == SIGKILL
        if killed or ((soon or stops - {at.log}) and is_worker_stopped(s.error)):
            found.append(s)
    return found, after_stop


def failed_ends(findings: Findings, by_stop: Sequence[Sighting]) -> list[Sighting]:
    """Join the ends of processes, once each: torchrun tells one in a line and again in its table,
    and srun those of several ranks in one line.

    Those that the launcher stopped did not fail.
    """
    by_pid: dict[Hashable, Sighting] = {}
    for sighting in findings.sightings:
        end = sighting.end
        if sighting.sign is not Sign.ENDED or sighting in by_stop:
            continue
        if not findings.has_failed(sighting):
            continue
        if len(sighting.ranks) > 1:
            for rank in sighting.ranks:
                one = msgspec.structs.replace(end, rank=rank)
                one_of = msgspec.structs.replace(sighting, end=one, ranks=())
                by_pid[sighting.place, rank] = one_of
            continue
        key: Hashable = end.pid or (sighting.place, end.rank)
        if (known := by_pid.get(key)) is not None:
            rank, host = max(known.end.rank, end.rank), known.end.host or end.host
            first = known.end.first or end.first
            merged = msgspec.structs.replace(
                known.end, rank=rank, host=host, first=first, at=min(known.end.at, end.at)
            )
            sighting = msgspec.structs.replace(known, end=merged)
        by_pid[key] = sighting
    return list(by_pid.values())


def without_the_command(ends: list[Sighting], findings: Findings) -> list[Sighting]:
    """Leave out how the whole command ended, by the word of the service or the shell that ran it,
    where the log says before that how a process of it failed.
    """
    # a task of srun's may be the launcher of the ranks
    of_shell = [
        s
        for s in ends
        if (s.end.by == "the shell" and not s.end.pid) or (s.end.by == "srun" and s.end.code)
    ]
    of_service = [
        s for s in ends if s.end.by == known_line.SERVICE and s.end.code and s.end.rank < 0
    ]
    sure = [s for s in ends if not s.went_on and s.end.by != known_line.ARGPARSE]
    inner = [s for s in sure if s not in of_shell]
    inner += [s for s in findings.sightings if launchers.ENDS_ITSELF.search(s.text)]
    others = [s for s in sure if s not in of_service]
    told = [s for s in findings.sightings if s.sign in OF_PROCESSES and not s.went_on]
    told += findings.only_unreached()
    return [
        s
        for s in ends
        if not (
            s in of_shell
            and any(one.stands_before(s, findings.lines if s.end.code else NEAR) for one in inner)
        )
        and not (s in of_service and any(one.stands_before(s) for one in (*others, *told)))
    ]


def is_explained(ended: Sighting, said: Iterable[Sighting]) -> bool:
    """Tell whether a process that aborted says why: torch aborts after a timeout, and after an
    uncaught error.
    """
    rank = ended.end.rank
    return ended.end.signal == SIGABRT and any(rank < 0 or rank_of(s) in (rank, -1) for s in said)
