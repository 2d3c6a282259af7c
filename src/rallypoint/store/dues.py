"""What the server is to be told at the next opportunity: what was given up, read and taken in, and that we live.

None of it is answered but the sign of life, and nobody waits for it: it goes when nobody is sending, and else the keeper's next round
has another try. As in `session.py`, "one step" means that nothing is called in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rallypoint.store.link import Link
from rallypoint.store.pending import Pending
from rallypoint.wire.messages import Cancel, Ping, Release, encode


class Dues:
    """Of one session object. Any thread may call these."""

    def __init__(self, pending: dict[int, Pending], acked: Callable[[], int], now: Callable[[], float]) -> None:
        """`pending`: the requests that have no answer yet, by number; one that was given up is removed from it here. `acked`: up to
        which number all replies have arrived."""
        self.arrived: list[int] = []  # answered, while an older request waits: `acked` does not cover them
        self.read: list[int] = []  # answered by shared memory, which has been read
        self._pending = pending
        self._acked = acked
        self._now = now
        self._paying = False
        self._more = False  # there is more than whoever is at it has seen
        self._pings: deque[float] = deque()  # when those were sent that have no answer yet, on this link
        self._pongs = 0  # and how many have

    def begin(self) -> None:
        """Another link is about to be used: what was about the former one is void."""
        self._pings, self._pongs, self.read = deque(), 0, []

    def pay(self, link: Link, me: int, *, ping: bool = False) -> bool:
        """Say all of it on this link, as far as it goes without waiting, or leave it to the thread that is at it. `ping`: and say that we
        live; whether that went. Raises LinkBroken. If `link.writer` is `me` afterwards, this thread has to `pump`."""
        pinged = False
        self._more = True
        if self._paying:
            return ping and self._ping(link, me)
        self._paying = True  # one step with the question above, and so into the `try`
        try:
            while self._more:
                self._more = False
                if self._cancel(link, me) or (ping and not pinged):
                    pinged = self._ping(link, me)
                self._release(link, me)
        finally:
            self._paying = False
        return pinged

    def answered(self, link: Link) -> float:
        """A sign of life was: when that was sent."""
        self._pongs += 1  # before it is taken from those without an answer: see `told` below
        sent = self._pings.popleft() if self._pings else 0.0
        for pending in list(self._pending.values()):
            if pending.given_up[0] and pending.told[0] == link.number and pending.told[1] <= self._pongs:
                self._pending.pop(pending.seq, None)
        return sent

    def _cancel(self, link: Link, me: int) -> bool:
        """Say what was given up; whether there was anything. Such a request stays pending, and so above `acked`, until a ping that was sent
        behind its Cancel is answered: if the link breaks first, it is said again on the next one."""
        told = False
        for pending in list(self._pending.values()):
            if pending.given_up[0] and pending.told[0] != link.number:
                if not link.try_post(encode(Cancel(0, self._acked(), pending.seq)), me):
                    break
                pending.told = (link.number, self._pongs + len(self._pings) + 1)
                told = True
        return told

    def _release(self, link: Link, me: int) -> None:
        read, self.read = self.read, []
        arrived, self.arrived = self.arrived, []
        if read or arrived:
            acked = self._acked()
            if not link.try_post(encode(Release(0, acked, tuple(read), tuple([seq for seq in arrived if seq > acked]))), me):
                self.read += read
                self.arrived += arrived

    def _ping(self, link: Link, me: int) -> bool:
        pings = self._pings  # of this link: another one may `begin` meanwhile
        pings.append(self._now())  # before it goes: another thread may read the answer before this one goes on
        if link.try_post(encode(Ping(0, self._acked())), me):
            return True
        pings.pop()
        return False
