"""Watch over torch's store in the middle of a run: no rank says that the store does not answer.

torch's own timeout does not hold when its store is stopped, or when packets to it are dropped:
`get` and `wait` say that their time is up and go on waiting for the answer, `add` and `set` know no
time at all. But the kernel knows which request nobody has read or acknowledged. One that lies there
for as long as its rank gives torch has no answer, as much as if torch had said so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rallypoint.diagnosis import reachability
from rallypoint.host import process_status, socket_diag
from rallypoint.launcher.agent.job import Job
from rallypoint.launcher.agent.process_handles import RankHandle
from rallypoint.world import ranks_phrase

# Seconds between looks whether the store is stopped, which cost some ten microseconds, or at one of
# another machine's, which cost a millisecond. How late a request may be seen first, of the half
# second in which the report is promised.
LOOK_EVERY = 0.25
# Seconds between looks while it is stopped.
LOOK_AGAIN = 0.1
# Seconds after which a line says that a stopped store keeps ranks waiting, long before their time
# is up.
SAY_AFTER = 1.0
# Seconds between two looks that say that this process itself stood still: then so did the others,
# mostly, and no rank was kept waiting.
STOOD_STILL = 3.0

StoreAddress = tuple[str, int]
"""Host and port of a store."""


class UnreadBytes:
    """Memory of since when bytes lie in each connection, and none was taken. Pure."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[int, float]] = {}
        self._last = 0.0

    def see(self, now: float, lying: Mapping[int, int]) -> dict[int, float]:
        """Return since when each connection has been seen with no fewer bytes than the time before.
        `lying`: the bytes in each connection that has any.
        """
        if now - self._last > STOOD_STILL:
            self._since = {}
        self._last = now
        before = {
            one: since
            for one, (amount, since) in self._since.items()
            if lying.get(one, 0) >= amount
        }
        self._since = {one: (amount, before.get(one, now)) for one, amount in lying.items()}
        return {one: since for one, (_, since) in self._since.items()}


class TcpStoreMonitor:
    """Watch over the stores of one attempt at a time."""

    def __init__(self, job: Job, overdue: Callable[[StoreAddress], None]) -> None:
        """`overdue` is called with a place whose answer has not come in a rank's time."""
        self._job = job
        self._overdue = overdue
        self.begin()

    def begin(self) -> None:
        """Begin another attempt: nothing that was seen is of its ranks."""
        # where ranks of this attempt meet, and the least time that one gives torch
        self._places: dict[StoreAddress, float] = {}
        self._lying: dict[StoreAddress, UnreadBytes] = {}
        self._kept: dict[StoreAddress, list[RankHandle]] = {}  # ranks that a stopped store keeps
        self._told = False

    def meets(self, handle: RankHandle) -> None:
        """Handle a rank that is about to meet the others, and uses the store from then on."""
        meeting = handle.meeting
        place = reachability.place(meeting) if meeting is not None else None
        if meeting is None or place is None or not meeting.timeout:
            return
        self._places[place] = min(meeting.timeout, self._places.get(place, meeting.timeout))
        self._job.loop.by("answers", self._job.loop.now + LOOK_EVERY, self._look)

    def kept_waiting(self) -> StoreAddress | None:
        """Return where a store keeps ranks waiting, if one does, when something else has failed: the
        ranks that wait for those may give up first.
        """
        for handle in self._job.ranks:
            if handle.unanswered is not None:  # `overdue` was called, and may have begun to look
                return handle.unanswered
        for place, handles in self._kept.items():
            for handle in handles:
                handle.unanswered = place
            return place
        return None

    def _look(self, now: float) -> None:
        job = self._job
        if not self._places:
            return
        soonest = LOOK_EVERY
        for place, patience in self._places.items() if job.is_running else ():
            server = self._server(place)
            if server and not process_status.is_stopped(server):  # it answers in a millisecond
                self._lying.pop(place, None)
                self._kept.pop(place, None)
                continue
            lying = socket_diag.unanswered(place[1])
            asking = [handle for handle in job.ranks if lying and handle.alive]
            ranks = {
                inode: handle
                for handle in asking
                for inode in process_status.sockets(handle.pid) & lying.keys()
            }
            since = self._lying.setdefault(place, UnreadBytes()).see(
                now, {inode: lying[inode] for inode in ranks}
            )
            if server and since and now - min(since.values()) >= SAY_AFTER:
                self._kept[place] = [ranks[inode] for inode in since]
                self._say(place, server, [ranks[inode].rank for inode in since])
            # It is time to look there when the look comes back as the rank's time is over.
            left = {
                inode: begun + patience - reachability.LOOK_TIMEOUT - now
                for inode, begun in since.items()
            }
            late = [inode for inode, seconds in left.items() if seconds <= 0]
            to_come = [seconds for seconds in left.values() if seconds > 0]
            soonest = min(soonest, LOOK_AGAIN if server else soonest, *to_come)
            if late:
                for inode in late:
                    ranks[inode].unanswered = place
                del self._lying[place]
                self._overdue(place)
        job.loop.at("answers", now + soonest, self._look)

    def _server(self, place: StoreAddress) -> int:
        """Return the pid of the process of this job that serves the store there: the c10d host, or
        the group's rank 0; 0: a stranger does.
        """
        host = self._job.attempt.host
        there = {
            one: one.meeting
            for one in self._job.ranks
            if one.meeting is not None and reachability.place(one.meeting) == place
        }
        if host is not None and any(handle.at_held for handle in there):
            return host.pid
        first = (one.pid for one, meeting in there.items() if one.alive and meeting.rank == 0)
        return next(first, 0)

    def _say(self, place: StoreAddress, server: int, ranks: list[int]) -> None:
        if not self._told:
            self._told = True
            self._job.console.say(
                f"rallypoint: torch's store at {place[0]}:{place[1]} does not answer {ranks_phrase(sorted(set(ranks)))}: "
                f"its process (pid {server}) is stopped; kill -CONT {server} lets it go on"
            )
