"""The closed list of things that happen: rank, time, because.

One JSON line each in `events.jsonl`. The event log answers "why did you stop rank 3?": a decision
carries its reason in `because`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rallypoint.record.disk_writer import DiskWriter
from rallypoint.record.kept_file import KeptFile, as_json
from rallypoint.record.run_folder import RunFolder

What = Literal[
    "job-started",  # program, world_size, job; of several nodes also host, first (rank), offset
    "template-started",  # pid
    "template-ready",  # seconds
    "template-unclean",  # because: which module did what; fresh interpreters are used
    # because, parts: another template is started, which leaves these parts of torch to the ranks
    "template-renewed",
    "port-held",  # host, port
    "c10d-ready",  # address
    "store-serves",  # address: the first client of the job's store has come
    "door-missing",  # because: rallypoint stacks cannot ask this launcher
    "attempt-started",  # attempt
    "worker-started",  # rank; pid
    "phase",  # rank; phase
    "group-closed",  # rank; line: the program closed its process group in good order
    "handled-error",  # rank; type, message, call
    "raised",  # rank; type, message
    "ended",  # rank; code or signal
    "stalled",  # code, headline: no rank has moved for five minutes, or for as long as --stall says
    "stall-over",  # ranks that have moved since
    "evidence-asked",  # rank, or none: all; because
    "roll-call",  # because; lines: ranks that wait in init_process_group, and where the others are
    "signal-received",  # signal: one that the launcher itself got
    "stop-sent",  # rank; signal; because
    "killed",  # rank; because: SIGKILL sent by the launcher
    "reaped",  # rank; user, system: seconds; resident: bytes
    # rank; pids of processes that its program had started, and did not ask how they ended
    "children-failed",
    "left-running",  # rank; pids that outlived a successful rank
    "attempt-ended",  # attempt; because
    "report",  # code, headline
    "job-ended",  # status
]


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that happened. `rank` None: the launcher. What belongs in `details` stands beside
    each name in `What`."""

    at: float  # seconds since the job's start
    what: What
    rank: int | None = None
    because: str = ""
    details: dict[str, Any] = {}


class EventLog:
    """Appends events to `events.jsonl`, each at once and whole; a full disk ends it with one line
    (`RunFolder.trouble`).

    Keeps them all in memory too: `events` is what the report and the timeline are made from.
    """

    def __init__(self, folder: RunFolder, writer: DiskWriter | None = None) -> None:
        """With a `writer` nobody here waits for the disk."""
        self._writer = writer
        self.events: list[Event] = []
        path = folder.file("events.jsonl")
        self._file = KeptFile(path, folder.trouble, "events are no longer kept") if path else None

    def write(self, event: Event) -> None:
        """Keep an event. Never raises for what the disk does."""
        self.events.append(event)
        if self._file is not None:
            file, line = self._file, as_json(event) + b"\n"
            if self._writer is not None:
                self._writer.submit(lambda: file.write(line))
            else:
                file.write(line)

    def close(self) -> None:
        """May be called twice."""
        if self._file is not None:
            self._file.close()
