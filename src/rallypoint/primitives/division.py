"""Who does what in one turn of a round: hosts, the first of whose ranks leads each, and the part of every rank of the caller's own.

It follows from what everybody knows, so all come to the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rallypoint.primitives import flat, hosts
from rallypoint.primitives import pages as shared
from rallypoint.primitives.flat import Layout
from rallypoint.primitives.mean import Weights
from rallypoint.primitives.offers import Participant


class Division:
    """One turn's. Numbers are places in the list of those who take part.

    `living`: who is still in it. `alone`: whose memory others cannot open; each of them is a host of his own.
    """

    def __init__(self, layout: Layout, participants: Sequence[Participant], me: int, living: Sequence[int], alone: Collection[int]) -> None:
        by_scope: dict[bytes, list[int]] = {}
        for index in living:
            scope = participants[index].offer.scope if index not in alone else b"%d" % index
            by_scope.setdefault(scope, []).append(index)
        self.me = me
        self.hosts = list(by_scope.values())
        self.host = next(host for host in self.hosts if me in host)  # mine: its ranks
        self.parts = dict(zip(self.host, flat.cuts(layout.size, len(self.host)), strict=True))
        self.weights = Weights([participants[index].offer.weight for index in living])
        self.wide = hosts.Wide(layout) if len(self.hosts) > 1 else None
        self.head = shared.head(len(participants))  # before the bytes of a result
        self._living = list(living)

    @property
    def others(self) -> list[int]:
        """The other ranks of my host."""
        return [index for index in self.host if index != self.me]

    @property
    def first(self) -> int:
        """Who leads my host."""
        return self.host[0]

    @property
    def leads(self) -> bool:
        return self.first == self.me

    @property
    def several_hosts(self) -> bool:
        return len(self.hosts) > 1

    def weight(self, index: int) -> float:
        """What his contribution is multiplied by; 0: it is not read."""
        at = self._living.index(index)
        return self.weights.each[self.weights.counted.index(at)] if at in self.weights.counted else 0.0

    def room(self, index: int) -> int:
        """Bytes of the result of a rank of my host."""
        start, stop = self.parts[index]
        return self.head + (stop - start if self.wide is None else self.wide.at(stop) - self.wide.at(start))

    def is_as_foreseen(self, participants: Sequence[Participant]) -> bool:
        """Whether everybody has brought what his part of the work needs. Known to all, who come to the same answer."""
        if self.several_hosts:
            return False
        for index, part in self.parts.items():
            offer = participants[index].offer
            assert offer.result is not None
            if offer.result.capacity < self.room(index) or offer.skip not in ((0, 0), part):
                return False
        return True
