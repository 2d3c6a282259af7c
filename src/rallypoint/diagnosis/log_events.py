"""Sightings in a log: one value for each kind of thing that a failure is told by."""

from __future__ import annotations

from enum import Enum
from math import inf
from signal import SIGKILL, SIGTERM
from typing import NamedTuple

import msgspec

from rallypoint.diagnosis.raised import Raised

NEAR = 40
"""Lines between a failure and what follows from it: other ranks write some, and a job that goes on
writes more.
"""


class Speaker(NamedTuple):
    """A process, as far as the log names it. Nobody: the line has no prefix that tells."""

    rank: int = -1
    name: str = ""  # what a report calls it: "rank 3", "local rank 1", "worker pid 933"
    mark: str = ""  # the prefix as it stands in the log

    @property
    def known(self) -> bool:
        return bool(self.name)


NOBODY = Speaker()


def of_rank(rank: int, mark: str = "") -> Speaker:
    """Return the process of a rank."""
    return Speaker(rank, f"rank {rank}", mark)


class Sign(Enum):
    """Kinds of sightings."""

    # an exception: with a traceback, or a line that has an exception's form or a text of torch's
    RAISED = "raised"
    ENDED = "ended"  # somebody says how a process ended
    KILLED_FOR_MEMORY = "killed for memory"  # the kernel's or Slurm's word that it did
    INTERRUPTED = "interrupted"  # the launcher was told to stop, or the time of the job was over
    CRASHED = "crashed"  # native code: faulthandler's dump, an exception of C++ that nobody caught
    WATCHDOG = "watchdog"  # NCCL's watchdog: a collective did not end in time
    NCCL = "nccl"  # NCCL's own warning
    LOST = "lost"  # a line of torch's that says that a peer or the store is gone or did not come
    UNREACHED = "unreached"  # a connection to the meeting point failed, with its reason
    # torch's store refuses a message for its size, and closes the connection of whoever sent it
    TOO_LARGE = "too large"
    REPORTED = "reported"  # the headline of a report of rallypoint's own
    NOT_STARTED = "not started"  # the interpreter, or Slurm, did not find the program
    STALLED = "stalled"  # Horovod lists the ranks that wait, and those that are missing
    # as many processes as a group has came to it, and some of them as the same rank
    SAME_RANK = "same rank"
    SPOKEN = "spoken"  # a line that plainly speaks of a failure, in words that are not known here


class End(msgspec.Struct, frozen=True):
    """The end of a process, by the word of its launcher, of Slurm, of MPI or of the shell."""

    code: int = 0
    signal: int = 0
    rank: int = -1
    local_rank: int = -1
    pid: int = 0
    host: str = ""
    by: str = ""  # its teller: "torchrun", "srun", ...
    first: bool = False  # the launcher says that this was the first
    # Windows' own word for a crash, which has no signals there: "0xC0000005 (access violation)"
    status: str = ""
    stopped: bool = False  # by its launcher, as the times of two ends show
    at: float = inf  # by its launcher's clock; inf or nan: not known


NOT_ENDED = End()
"""The end of a sighting that tells of none."""

NOT_RAISED = Raised("", "", (), "")
"""The error of a sighting that tells of none."""


class Collective(msgspec.Struct, frozen=True):
    """The collective call of a rank when NCCL's watchdog gave up."""

    sequence: int
    kind: str  # "ALLREDUCE"
    elements: int = -1
    group: str = ""
    milliseconds: int = 0


class Place(msgspec.Struct, frozen=True):
    """A place in the logs."""

    # the name of the log, as the report shows it; "" when it came from nowhere that can be opened
    log: str
    line: int
    last: int = 0  # the last line that belongs to it

    @property
    def shown(self) -> tuple[str, ...]:
        """`train.log:12`, as a report has it; () where there is no file to open."""
        return (f"{self.log}:{self.line}",) if self.log else ()


class Sighting(msgspec.Struct, frozen=True):
    """A thing that was seen, once or many times."""

    sign: Sign
    place: Place
    speaker: Speaker = NOBODY
    text: str = ""
    error: Raised = NOT_RAISED
    end: End = NOT_ENDED
    collective: Collective | None = None
    lines: tuple[str, ...] = ()  # its own words, without prefix
    ranks: tuple[
        int, ...
    ] = ()  # that the words name: both ranks of a shared GPU, the tasks that Slurm lists
    went_on: bool = False  # the same process went on for long: it was handled
    followed: bool = False  # the same process said something after it, and the log ends soon after
    # how many times the same process wrote so much after it that it did without what failed
    did_without: int = 0

    def stands_before(self, other: Sighting, most: float = NEAR) -> bool:
        """Tell whether this stands in the same log before the other, by `most` lines at most."""
        mine, its = self.place, other.place
        before = mine.log == its.log and mine.line < its.line
        return before and its.line - max(mine.line, mine.last) <= most

    @property
    def has_error(self) -> bool:
        """Tell whether an exception was seen there."""
        return self.error is not NOT_RAISED


class Findings(msgspec.Struct, frozen=True):
    """All that was seen in one or several logs."""

    sightings: tuple[Sighting, ...]  # in the order of the logs
    lines: int
    ranks: tuple[int, ...]  # that some line names
    stopped: tuple[int, ...]  # pids that the launcher says to have stopped
    failed: bool = False  # a launcher says that the job failed
    last_words: tuple[str, ...] = ()  # before the first word of a launcher on an end
    before: tuple[str, ...] = ()  # last lines without a process name before the first sighting
    restarts: tuple[Place, ...] = ()  # where a launcher says that it starts all ranks again
    stood: tuple[str, ...] = ()  # where living processes stood: "line 7: train.py:42 in step"

    @property
    def empty(self) -> bool:
        """Tell whether there was nothing to read."""
        return not self.lines

    def only_unreached(self) -> list[Sighting]:
        """Return the connections to the meeting point that failed, where the log tells of no other
        failure in words that are known.
        """
        unreached = [s for s in self.sightings if s.sign is Sign.UNREACHED]
        if not unreached:
            return []
        for s in self.sightings:
            known = s.sign not in (Sign.UNREACHED, Sign.SPOKEN, Sign.INTERRUPTED)
            near = s.stands_before(unreached[0], inf) or unreached[-1].stands_before(s)
            if s.sign is not Sign.UNREACHED and (not near or (known and s.end.code != 1)):
                return []
        return unreached

    def has_failed(self, ended: Sighting) -> bool:
        """Tell whether a process ended badly, and not because the launcher stopped it. One that the
        launcher names as the first, and not among those that it stopped, got SIGTERM from outside,
        unless the whole job did.
        """
        end = ended.end
        stopped = end.stopped or end.pid in self.stopped
        if end.signal == SIGTERM and not stopped:
            by_name = end.first and end.by in ("torchrun", "mp.spawn")
            stopped = not (self.stopped and by_name) or self._was_of_a_stop(ended)
        return bool(end.code or end.signal) and not (stopped and end.signal in (SIGKILL, SIGTERM))

    def _was_of_a_stop(self, ended: Sighting) -> bool:
        """Tell whether the log has a stop of the job that reached this process, too: before its
        end, or after it with no other failure between.
        """
        log, line = ended.place.log, ended.place.line
        exits = [s.place for s in self.sightings if s.sign is Sign.ENDED and s.end.code]
        failures = [place.line for place in exits if place.log == log and place.line > line]
        first = min(failures, default=self.lines + 1)
        stops = [s.place for s in self.sightings if s.sign is Sign.INTERRUPTED]
        return any(stop.log != log or stop.line < first for stop in stops)
