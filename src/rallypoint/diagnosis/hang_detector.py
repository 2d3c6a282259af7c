"""Since when each rank's main thread has not moved, and whether the whole job stands still.

Pure. It is fed with looks at /proc, which disturb nobody, and with stacks, which are asked for only
when the looks give a reason to: the signal that asks interrupts system calls, and a healthy job
must not get it.

A main thread that has not run at all between two looks stands where it stood: that is certain. One
that polls runs a little, and one that waits for NCCL spins: how they use the processor is only a
reason to look at their stacks, more than once. One that works, waits and works again is neither, or
now the one and now the other, and its job is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from rallypoint.diagnosis.evidence import Frame
from rallypoint.host.process_status import Activity

# Seconds between looks at most. Where nobody has asked for `--stall` they only tell `rallypoint
# stacks` since when a rank stands where it does, to within as much. 64 ranks cost a millisecond
# each time.
LOOK_EVERY = 5.0
# in the age of a young attempt: somebody who asks after three seconds wants to know it to within
# one
LOOKS_AT_FIRST = 4
LOOKS_IN_A_STALL = 8  # within the time of `--stall`: it is told at most an eighth of that too late
SHORTEST_LOOK = 0.1  # seconds; the kernel counts processor time in hundredths
# A main thread that uses no more than this share of a processor, and gives it up no more often than
# that, or uses no more for each time than a look at a file or a lock takes, waits for something. A
# loader that polls its queue (every 5 s) is far below; a training loop is far above.
IDLE_SHARE = 0.02
IDLE_WAITS = 2.0  # per second
POLL_TIME = 0.0005  # seconds of processor time
# What the question for its stack costs a thread that waits: the signal wakes it, it waits again; a
# tick of processor time for the handler.
WOKEN_WAITS, WOKEN_TICKS = 1, 1
# Parts of the time of `--stall`: stacks are first asked for when every rank has been calm for a
# quarter of it, then every half of it.
FIRST_ASK, NEXT_ASK = 0.25, 0.5


How = Literal["", "polls", "spins"]
"""How a thread that waits uses the processor; "": it works, or it is not known yet."""


class Stall(NamedTuple):
    """The whole job stands still."""

    seconds: float  # for which it has, at least
    looks: int  # at the stacks meanwhile; 0: that no main thread has run at all shows it


class _Thread:
    """What is known of one main thread."""

    __slots__ = (
        "activity",
        "at",
        "calm_since",
        "frames",
        "frames_since",
        "how",
        "looks",
        "still_since",
    )

    def __init__(self, activity: Activity, now: float) -> None:
        self.activity = activity
        self.at = now
        self.still_since = now  # it has not run at all since
        self.calm_since = now  # it has only waited, polled or spun since
        self.how: How = ""  # which of them
        self.frames: tuple[Frame, ...] | None = None  # where it was seen, as long as it is calm
        self.frames_since = now
        self.looks = 0  # that found it there

    @property
    def since(self) -> float:
        """It has stood at one place since then, as far as is known."""
        return self.still_since if self.frames is None else min(self.frames_since, self.still_since)

    def look(self, activity: Activity, now: float, ticks: int) -> None:
        if activity.cpu != self.activity.cpu or activity.switches != self.activity.switches:
            self._ran(activity, now, ticks)
        elif activity.state in "SD":
            self._is_calm("polls", now)
        self.activity, self.at = activity, now

    def stood(
        self, frames: tuple[Frame, ...], activity: Activity, asked: float, now: float, ticks: int
    ) -> None:
        if (
            activity.cpu - self.activity.cpu > WOKEN_TICKS
            or activity.waits - self.activity.waits > WOKEN_WAITS
        ):
            self._ran(activity, now, ticks)  # by itself, and not because our signal woke it
        if (
            frames != self.frames
            # it stood there already if it had not run until we asked; if it has worked since,
            # nobody knows
        ):
            self.frames, self.frames_since, self.looks = (
                frames,
                now if self.calm_since == now else min(self.still_since, asked),
                0,
            )
        self.looks += 1
        self.activity, self.at = activity, now

    def _ran(self, activity: Activity, now: float, ticks: int) -> None:
        """Note that it has run since it was seen last. It is calm if it has only polled, or only
        spun, as it did before.
        """
        passed = now - self.at
        waits, used = activity.waits - self.activity.waits, activity.cpu - self.activity.cpu
        idle = used <= max(1.0, IDLE_SHARE * passed * ticks) and (
            waits <= max(2.0, IDLE_WAITS * passed) or used <= 1.0 + POLL_TIME * waits * ticks
        )
        spins = waits == 0
        self.still_since = now
        if idle and spins:  # it has hardly run, as either would
            return
        self._is_calm("polls" if idle else "spins" if spins else "", now)

    def _is_calm(self, how: How, now: float) -> None:
        if not how or (self.how and how != self.how):
            self.calm_since, self.frames, self.looks = now, None, 0
        self.how = how


class Watch:
    """Remembers what was seen of one attempt's ranks. All times are in seconds, of one clock."""

    def __init__(self, ticks: int, patience: float | None = None) -> None:
        """Begin. `ticks`: of processor time in a second. `patience`: the seconds of `--stall`;
        None: nobody wants to hear of one.
        """
        self._ticks = ticks
        self._patience = patience
        self._threads: dict[int, _Thread] = {}
        self._asked: float | None = None
        self._told: dict[int, tuple[Frame, ...] | None] | None = (
            None  # where each rank stood when a stall was told, until it is over
        )
        self._told_at = 0.0

    def interval(self, age: float) -> float:
        """Return seconds until the next look, in an attempt that is this old."""
        wanted = self._patience / LOOKS_IN_A_STALL if self._patience else LOOK_EVERY
        return max(SHORTEST_LOOK, min(wanted, LOOK_EVERY, age / LOOKS_AT_FIRST + 0.25))

    def look(self, activities: Mapping[int, Activity], now: float) -> None:
        """Take the living ranks' main threads, as /proc shows them now."""
        for rank in self._threads.keys() - activities.keys():
            del self._threads[rank]
        for rank, activity in activities.items():
            if rank in self._threads:
                self._threads[rank].look(activity, now, self._ticks)
            else:
                self._threads[rank] = _Thread(activity, now)

    def wants_stacks(self, now: float) -> bool:
        """Tell whether there is reason to think that no rank moves, and their stacks should be
        asked for.
        """
        if not self._patience or not self._threads:
            return False
        if self._asked is not None and now - self._asked < self._patience * NEXT_ASK:
            return False
        still_since = max(thread.still_since for thread in self._threads.values())
        if self._told is not None:  # nothing is new until somebody has run
            return still_since > self._told_at
        if now - self._stands_since() >= self._patience:
            return True
        calm_since = max(thread.calm_since for thread in self._threads.values())
        return calm_since < still_since and now - calm_since >= self._patience * FIRST_ASK

    def stood(
        self, rank: int, frames: tuple[Frame, ...], activity: Activity, asked: float, now: float
    ) -> float | None:
        """Take a rank's stack, asked for at `asked`, just after a look, and its activity at `now`.
        Return for how long it is known to have stood there; None when that is not known.
        """
        thread = self._threads.setdefault(rank, _Thread(activity, now))
        thread.stood(frames, activity, asked, now, self._ticks)
        return now - thread.frames_since if thread.frames_since < asked else None

    def still_for(self, rank: int, now: float) -> float | None:
        """Return for how long a rank's main thread has not run at all; None when it was seen once
        only, or has just run.
        """
        thread = self._threads.get(rank)
        return (
            now - thread.still_since
            if thread is not None and thread.still_since < thread.at
            else None
        )

    def judge(self, now: float, *, debugged: bool) -> Stall | None:
        """Return, now that the stacks were seen, the stall to tell, once; None when there is none,
        or a person holds a rank in a debugger.
        """
        self._asked = now
        if not self._patience or not self._threads or self._told is not None:
            return None
        since = self._stands_since()
        if debugged or now - since < self._patience:
            return None
        self._told = {rank: thread.frames for rank, thread in self._threads.items()}
        self._told_at = now
        ran = [
            thread.looks
            for thread in self._threads.values()
            if now - thread.still_since < self._patience
        ]
        return Stall(now - since, min(ran, default=0))

    def moved(self) -> tuple[int, ...]:
        """Return the ranks that have moved or ended since a stall was told: it is over then. ()
        while it lasts, and when none was told.
        """
        if self._told is None:
            return ()
        ranks = tuple(
            rank for rank, frames in sorted(self._told.items()) if self._has_moved(rank, frames)
        )
        if ranks:
            self._told = None
        return ranks

    def _has_moved(self, rank: int, frames: tuple[Frame, ...] | None) -> bool:
        thread = self._threads.get(rank)
        if thread is None or thread.frames != frames:
            return True
        return frames is None and thread.still_since > self._told_at

    def _stands_since(self) -> float:
        return max(thread.since for thread in self._threads.values())
