"""Tables and paragraphs in which torchrun, MPI and Horovod tell of the processes of a job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from math import nan
from signal import SIGTERM

import msgspec

from rallypoint.diagnosis.error_patterns import launchers, mpi_words, read_line
from rallypoint.diagnosis.log_events import (
    Collective,
    End,
    Place,
    Sighting,
    Sign,
    Speaker,
    of_rank,
)
from rallypoint.diagnosis.logs.block import HEADER, MESSAGE_LINES, WORDS, Block
from rallypoint.diagnosis.logs.traceback_blocks import GroupTraceback, Traceback
from rallypoint.diagnosis.pattern import Pattern

# Numbers of signals that MPICH gives as an exit code.
FATAL_SIGNALS = frozenset((4, 6, 7, 8, 9, 11))
GRACE = 30  # seconds after its SIGTERM until torchrun sends SIGKILL


class Failure:
    """A paragraph of torchrun's table."""

    def __init__(self, line: int, first: bool) -> None:
        self.line, self.first = line, first
        self.fields: dict[str, str] = {}
        self.traceback: Traceback | GroupTraceback | None = None

    @property
    def at(self) -> float:
        """Return when it was, in seconds; nan when its line was not pasted."""
        try:
            return datetime.strptime(self.fields.get("time", ""), "%Y-%m-%d_%H:%M:%S").timestamp()
        except ValueError:
            return nan


class Summary(Block):
    """The table of failures that torchrun prints: one paragraph for each rank that failed."""

    _NEXT = Pattern(r"^ *\[\d+\]:$")
    _FIELD = Pattern(r"^ *(time|host|rank|exitcode|error_file|traceback|msg) *: ?(.*)$")

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number)
        self._root = number if "Root Cause" in text else 0  # the line of that heading
        self._failures: list[Failure] = []
        self._strays = 0
        if self._FIELD.match(text):  # what stands above it was not pasted
            self.take(number, text)

    @staticmethod
    def begins(text: str) -> bool:
        """Tell whether the line is the first of one."""
        return bool(
            re.search(  # torch 1.9 has other spaces, and "Root Cause:"
                r"^ *rank *: \d+ \(local_rank: \d+\)$|^(?:Failures|Root Cause):$|Root Cause \(first observed",
                text,
            )
        )

    def take(self, number: int, text: str) -> bool:
        """Tell whether the line belongs to it."""
        self.last = number
        field = self._FIELD.match(text)
        inner = self._failures[-1].traceback if self._failures else None
        within = inner if inner is not None and not inner.done and field is None else None
        within = None if text.startswith("Root Cause") or self._NEXT.match(text) else within
        if within is not None and (within.take(number, text) or text.startswith("  ")):
            return True
        if text.startswith("Root Cause"):
            self._root = number
        elif text.startswith("====="):
            self.done = bool(self._failures)
        elif self._NEXT.match(text) is not None:
            self._failures.append(Failure(self._root or number, self._root > 0))
        elif field is not None:
            name, value = field.groups()
            if not self._failures or name in self._failures[-1].fields:
                self._failures.append(Failure(self._root or number, self._root > 0))
            self._failures[-1].fields[name] = value
            if HEADER in value:
                group = GroupTraceback.HEAD.search(value.partition(HEADER)[0])
                inner = GroupTraceback(number) if group else Traceback(number, "  " + HEADER)
                self._failures[-1].traceback = inner
        elif text.strip() and not text.startswith(("---", "Failures:", "  <NO_OTHER")):
            self._strays += 1
            self.done = self._strays > 8
            return False
        return True

    def sightings(self, speaker: Speaker, log: str) -> Iterator[Sighting]:
        """Tell how each rank ended, and what it raised."""
        began = next((one.at for one in self._failures if one.first), nan)
        for failure in self._failures:
            fields = failure.fields
            rank = re.match(r"(\d+)(?: \(local_rank: (\d+)\))?", fields.get("rank", ""))
            status = re.match(r"(-?\d+) *(?:\(pid: (\d+)\)|$)", fields.get("exitcode", ""))
            if rank is None or status is None:
                continue
            number, local, code, pid = (int(x or -1) for x in (*rank.groups(), *status.groups()))
            place, host = Place(log, failure.line, self.last), fields.get("host", "")
            ends = (max(code, 0), max(-code, 0), number, local, max(pid, 0), host, "torchrun")
            stopped = failure.at - began >= GRACE - 1  # the table's times are whole seconds
            yield Sighting(
                Sign.ENDED, place, end=End(*ends, failure.first, stopped=stopped, at=failure.at)
            )
            for error in failure.traceback.errors() if failure.traceback is not None else ():
                if not launchers.of_launcher(error, number):
                    yield Sighting(Sign.RAISED, place, of_rank(number), error=error)


class MpiExit(Block):
    """The paragraph of mpirun (Open MPI) or mpiexec (MPICH, Intel MPI) on the first process that
    ended badly.
    """

    _FACTS = tuple(
        Pattern(words)
        for words in (
            r"(?P<last>with errorcode|Exit code:) +(?P<code>-?\d+)",
            r"Process name: \[\[\d+,\d+\],(?P<rank>\d+)\]",
            r"^= +(?:RANK (?P<rank>\d+) )?PID (?P<pid>\d+) RUNNING AT (?P<host>\S+)",
            r"^= +EXIT CODE: (?P<code>\d+)",
            r"^= +KILLED BY SIGNAL: (?P<signal>\d+)",
            r"(?P<last>TERMINATED WITH THE EXIT STRING): .{0,100}\(signal (?P<signal>\d+)\)",
        )
    )

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number)
        found = mpi_words.EXIT.search(text)
        assert found is not None
        self._told: dict[str, str] = {"rank": found["rank"] or "-1"}
        by = "Horovod" if "Horovod" in text else "mpirun"
        self._by = "mpiexec" if found["mpich"] else "MPI_ABORT" if found["rank"] else by
        self._lines = 0

    @classmethod
    def begins(cls, text: str) -> bool:
        """Tell whether the line is the first of one."""
        return mpi_words.EXIT.search(text) is not None

    def take(self, number: int, text: str) -> bool:
        """Tell whether the line belongs to it."""
        self._lines += 1
        for found in filter(None, (words.search(text) for words in self._FACTS)):
            self._told.update({name: told for name, told in found.groupdict().items() if told})
        self.done = "last" in self._told or self._lines > 10 or text.startswith("-----")
        self.last = number
        return True

    def sightings(self, speaker: Speaker, log: str) -> Iterator[Sighting]:
        """Tell how the process ended, where the paragraph does."""
        told = self._told
        code, signal = int(told.get("code", 0)), int(told.get("signal", 0))
        # MPICH names in its last line the signal by which it ended the others, too.
        if signal == SIGTERM and code not in (0, SIGTERM):
            signal = code if self._by == "mpiexec" and code in FATAL_SIGNALS else 0
        if code > 0 or signal:
            end = msgspec.structs.replace(
                End(signal=signal) if signal else read_line.exit_of(code),
                rank=int(told["rank"]),
                pid=int(told.get("pid", 0)),
                host=told.get("host", ""),
                by=self._by,
                first=True,
            )
            yield Sighting(Sign.ENDED, Place(log, self.start, self.last), end=end)


class Stall(Block):
    """The list that Horovod prints of the calls that some ranks are in and others are not."""

    _CALL = Pattern(r"^\s*(?P<call>\S+) \[(?P<which>ready|missing) ranks: (?P<ranks>[\d, ]+)\]")

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number)
        self._lines = [text]
        self._call = ""
        self._ranks: dict[str, set[int]] = {"ready": set(), "missing": set()}  # of the first call

    @staticmethod
    def begins(text: str) -> bool:
        """Tell whether the line is the first of one."""
        return mpi_words.stalls(text)

    def take(self, number: int, text: str) -> bool:
        """Tell whether the line belongs to it."""
        found = self._CALL.match(text)
        if found is None and "Stalled ops:" not in text:
            self.done = True
            return False
        if found is not None:
            self._call = self._call or found["call"]
            if found["call"] == self._call:
                self._ranks[found["which"]].update(map(int, re.findall(r"\d+", found["ranks"])))
        self.last = number
        self._lines.append(text)
        self.done = len(self._lines) > MESSAGE_LINES
        return True

    def sightings(self, speaker: Speaker, log: str) -> Iterator[Sighting]:
        """Tell the first call, and the ranks that are missing there."""
        ranks = tuple(sorted(self._ranks["missing"] or self._ranks["ready"]))
        yield Sighting(
            Sign.STALLED,
            Place(log, self.start, self.last),
            speaker,
            self._lines[0][:WORDS],
            collective=Collective(0, self._call),
            lines=tuple(self._lines),
            ranks=ranks,
        )


Table = Summary | MpiExit | Stall
"""Blocks in which a launcher tells of other processes."""
