"""Applicants in, seats or refusals out: the nodes of a job of fixed size find together (a table).

Pure: no socket, clock, thread or process. The lead's thread feeds `handle` with what happened and
does what comes back.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, dataclass_transform

import msgspec

from rallypoint.diagnosis.render import plain
from rallypoint.launcher.nodes import refusals
from rallypoint.launcher.nodes.decisions import Decision, Decisions, Tell, TellAll
from rallypoint.launcher.nodes.messages import (
    Applicant,
    Missing,
    Offers,
    Reachable,
    Refused,
    Try,
)
from rallypoint.store.address import Address
from rallypoint.world import Seat, World, ranges

JOIN_TIMEOUT = 600.0
"""Seconds that the nodes have to come, unless the user says otherwise; as under torchrun."""

ROLL_CALL_OF_NODES = 10.0
"""Seconds after which the nodes that wait are told which ones have not come; then twice as many,
and so on."""

TRY_PATIENCE = 3.0
"""Seconds in which a node says which addresses of the lead it reaches. A try itself has one."""

DUPLICATE_PATIENCE = 3.0
"""Seconds that a place may have two applicants: if the older one's process has ended, its session
is over by then, and the place is the younger one's."""

WORDS_MOST = 256
"""Hosts of which it is remembered why they are not here: a stranger may have many addresses."""


class Stage(enum.Enum):
    """States of joining."""

    GATHERING = "gathering"
    PROVING = "proving"  # all are here: which address of the lead do all of them reach?
    FORMED = "formed"
    CLOSED = "closed"  # given up


@dataclass_transform(frozen_default=True)
class NodeEvent(msgspec.Struct, frozen=True):
    """Something that has happened to a job on several nodes, beside the messages of its nodes."""


class Came(NodeEvent):
    """An applicant's key has appeared."""

    applicant: Applicant


class Went(NodeEvent):
    """An applicant's key is gone: its session is over."""

    id: str


class Rejected(NodeEvent):
    """The lead's server has not let in a client (its secret differs, say). `host`: its address."""

    host: str
    because: str


class Tick(NodeEvent):
    """A time that `due` named has come."""


class Form(Decision):
    """The world is complete; these are the seats of its first attempt, by applicant."""

    seats: dict[str, Seat]
    world: World


class Joining:
    """The one decision maker about the nodes of the world. `handle` returns what to do now."""

    def __init__(
        self,
        lead: Applicant,
        *,
        timeout: float = JOIN_TIMEOUT,
        now: float = 0.0,
        listens_on: str = "",
        leads_since: str = "",
    ) -> None:
        """`lead`: the lead's own applicant, with which all are compared; node 0 is its place. It
        counts as here from its `Came` on. `listens_on`: the address of its socket. `leads_since`:
        why it leads, to be told while it is alone: another node may lead for the same reason.
        """
        self.state = Stage.GATHERING
        self._lead = lead
        self._listens_on = listens_on
        self._leads_since = leads_since
        self._count = lead.nnodes
        self._began = now
        self._timeout = timeout
        self._roll_after = ROLL_CALL_OF_NODES
        self._here: dict[str, Applicant] = {}  # in the order of coming
        self._came_at: dict[str, float] = {}
        self._holders = {0: lead}  # of places that were asked for
        self._doubtful: dict[str, tuple[Applicant, float]] = {}  # and when each is refused
        self._kept: dict[str, Applicant] = {}  # that came while an address was looked for
        self._last_words: dict[str, str] = {}  # by host: of each that tried and is not here
        self._candidates: tuple[str, ...] = ()  # addresses of the lead
        self._reached: dict[str, frozenset[str]] = {}
        self._try_until = math.inf
        self._address = ""  # of node 0, which all others reach
        self._order: tuple[Applicant, ...] = ()  # by node
        # Once the world is formed: the node of each applicant, the hosts by node, and the shape.
        self.nodes: dict[str, int] = {}
        self.hosts: tuple[str, ...] = ()
        self.world = World(())

    def __repr__(self) -> str:
        return f"<Joining {self.state.value}, {len(self._here)} of {self._count} nodes here>"

    def handle(self, event: NodeEvent | Reachable, now: float) -> Decisions:
        """Return what to do about `event` at `now` (seconds, any origin, never going back)."""
        row = self._TABLE[self.state].get(type(event))
        decisions = row(self, event, now) if row else []
        while self._kept and self.state is not Stage.PROVING:
            first = self._kept.pop(next(iter(self._kept)))
            decisions += self.handle(Came(first), now)
        return decisions

    @property
    def due(self) -> float:
        """When the next `Tick` must come at the latest; infinity when there is nothing to wait
        for.
        """
        times = [until for _, until in self._doubtful.values()]
        if self.state is Stage.GATHERING:
            times += (self._began + self._timeout, self._began + self._roll_after)
        elif self.state is Stage.PROVING:
            times.append(self._try_until)
        return min(times, default=math.inf)

    # --- once the world is formed

    def seats(self, attempt: int, offers: Offers) -> dict[str, Seat]:
        """Return every applicant's seat in an attempt. `offers`: what node 0 holds for it."""
        count, port, store = self._count, offers.master_port, ""
        if count > 1 and offers.store_port:
            store = str(Address(self._address, offers.store_port, tls=offers.tls))
        # All nodes but node 0, twice in a row: behind a node stand the next ones.
        ring = 2 * [one.addresses[0] if one.addresses else one.host for one in self._order[1:]]
        seats = {}
        for node, applicant in enumerate(self._order):
            buddies = tuple(ring[node : node + min(2, count - 1 - (node > 0))])
            known = attempt, node, self.world, self._address, port, store
            seats[applicant.id] = Seat(*known, buddies=buddies)
        return seats

    # --- gathering

    def _came(self, event: Came, now: float) -> Decisions:
        applicant = event.applicant
        if applicant.id in self._here or applicant.id in self._doubtful:
            return []
        if applicant.id != self._lead.id:
            if refused := refusals.unfit(applicant, self._lead):
                return [self._refuse(applicant, refused)]
            rank = applicant.node_rank
            if rank in self._holders:
                self._doubtful[applicant.id] = (applicant, now + DUPLICATE_PATIENCE)
                return []
            # The place of the lead, which may come last, is kept.
            if len(self._here) - (self._lead.id in self._here) == self._count - 1:
                return [Tell(applicant.id, self._complete(applicant))]
            if rank is not None:
                self._holders[rank] = applicant
        return self._admit(applicant, now)

    def _admit(self, applicant: Applicant, now: float) -> Decisions:
        self._here[applicant.id] = applicant
        self._came_at[applicant.id] = now
        for name in (applicant.host, *applicant.addresses):
            self._last_words.pop(name, None)
        return self._prove(now) if len(self._here) == self._count else []

    def _went(self, event: Went, now: float) -> Decisions:
        self._doubtful.pop(event.id, None)
        self._kept.pop(event.id, None)
        gone = self._here.pop(event.id, None)
        if gone is None:
            return []
        self.state = Stage.GATHERING
        lasted = now - self._came_at.pop(gone.id)
        self._last_words[gone.host] = f"{gone.host} came, and left again after {lasted:.0f} s"
        rank = gone.node_rank
        if rank is None or self._holders[rank].id != gone.id or gone.id == self._lead.id:
            return []
        del self._holders[rank]
        for applicant, _ in self._doubtful.values():
            if applicant.node_rank == rank:
                del self._doubtful[applicant.id]
                self._holders[rank] = applicant
                return self._admit(applicant, now)
        return []

    def _rejected(self, event: Rejected, now: float) -> Decisions:
        self._last_words[event.host] = f"refused: {event.host}: {plain(event.because)}"
        if len(self._last_words) > WORDS_MOST:
            del self._last_words[next(iter(self._last_words))]
        return []

    def _late(self, event: Came, now: float) -> Decisions:
        """Refuse one that comes too late. A watch that begins anew tells of the others again."""
        applicant = event.applicant
        if applicant.id in self._here or applicant.id in self._doubtful:
            return []
        if self.state is Stage.FORMED and len(self._here) < self._count:
            refused = refusals.over(applicant, self._lead.host)
        elif unfit := refusals.unfit(applicant, self._lead):
            refused = unfit
        elif self.state is Stage.CLOSED:
            refused = refusals.timed_out("the job was given up", [*self._roll()])
        else:
            refused = self._complete(applicant)
        return [Tell(applicant.id, refused)]

    def _complete(self, applicant: Applicant) -> Refused:
        return refusals.complete(applicant, self._here.values(), self._lead)

    def _refuse(self, applicant: Applicant, refused: Refused) -> Decision:
        """Refuse one that is missing because of it, which the others are told."""
        self._last_words[applicant.host] = f"refused: {refused.headline}"
        return Tell(applicant.id, refused)

    def _left(self, event: Went, now: float) -> Decisions:
        """Note that the job ends: one of its nodes is lost, or has been dismissed."""
        self._here.pop(event.id, None)
        return []

    def _tick(self, event: Tick, now: float) -> Decisions:
        decisions = self._refuse_doubtful(now)
        if now >= self._began + self._timeout:
            self.state = Stage.CLOSED
            missing = f"{self._count - len(self._here)} of {self._count} nodes"
            because = f"{missing} did not come within {now - self._began:.0f} s"
            refused = refusals.timed_out(because, [*self._roll()])
            decisions += (Tell(id, refused) for id in (*self._here, *self._doubtful))
            self._doubtful.clear()
            return decisions
        if now >= self._began + self._roll_after:
            self._roll_after *= 2
            came = f"{len(self._here)} of {self._count} nodes have come"
            head = f"{came} after {now - self._began:.0f} s"
            decisions.append(TellAll(Missing((head, *self._roll()))))
        return decisions

    def _refuse_doubtful(self, now: float) -> Decisions:
        """Refuse the younger of two applicants for one place, when the older one lives."""
        decisions: Decisions = []
        for applicant, until in [*self._doubtful.values()]:
            if now < until:
                continue
            del self._doubtful[applicant.id]
            rank = applicant.node_rank or 0
            refused = refusals.duplicate(applicant, self._holders[rank].host, rank)
            decisions.append(self._refuse(applicant, refused))
        return decisions

    def _roll(self) -> Iterator[str]:
        """Yield a line about the nodes that are here, about the missing, and about each that tried."""
        yield f"here: {refusals.named(self._here.values(), self._lead.id) or 'none'}"
        if all(one.node_rank is not None or one.id == self._lead.id for one in self._here.values()):
            ids = {one.id for one in self._here.values()}
            free = [
                rank
                for rank in range(self._count)
                if rank not in self._holders or self._holders[rank].id not in ids
            ]
            yield f"missing: node{'s' * (len(free) > 1)} {ranges(free)}"
        if _is_loopback(self._listens_on):
            yield refusals.unreachable(self._listens_on)
        elif self._leads_since and self._here.keys() <= {self._lead.id}:
            yield self._leads_since
        yield from [*self._last_words.values()][-refusals.HOSTS_MOST :]

    # --- an address that all reach

    def _prove(self, now: float) -> Decisions:
        """Form the world when all have come to the lead by one address; else have all try all of
        them.

        A node that came over loopback is on the lead's host, and reaches every address of it. Of
        two nodes of one host the first may be a process that has just ended, and was started again:
        all are asked, and by the answers its session is over.
        """
        others = self._others()
        came_by = {one.reached for one in others}
        distant = {address for address in came_by if not _is_loopback(address)} or came_by
        is_sure = len(distant) < 2 and "" not in distant
        self._address = next(iter(distant), "127.0.0.1") if is_sure else ""
        if is_sure and len({one.host for one in self._here.values()}) == self._count:
            return self._form(self._address)
        self.state = Stage.PROVING
        every = () if is_sure else (*self._lead.addresses, *came_by)
        self._candidates = tuple(filter(None, dict.fromkeys(every)))
        self._reached = {}
        self._try_until = now + TRY_PATIENCE
        return [Tell(one.id, Try(self._candidates)) for one in others]

    def _reachable(self, event: Reachable, now: float) -> Decisions:
        if event.id in self._here:
            self._reached[event.id] = frozenset(event.addresses)
        return self._choose() if len(self._reached) == self._count - 1 else []

    def _keep(self, event: Came, now: float) -> Decisions:
        """Keep one that comes meanwhile: of the others one may be gone, and its place be free."""
        self._kept[event.applicant.id] = event.applicant
        return []

    def _tick_while_proving(self, event: Tick, now: float) -> Decisions:
        return self._refuse_doubtful(now) + (self._choose() if now >= self._try_until else [])

    def _others(self) -> list[Applicant]:
        return [one for one in self._here.values() if one.id != self._lead.id]

    def _choose(self) -> Decisions:
        """Take the first address that every node reaches; a silent node reaches the one by which
        it came.
        """
        if self._address:
            return self._form(self._address)
        others = self._others()
        reached = {one.id: self._reached.get(one.id, frozenset((one.reached,))) for one in others}
        common = frozenset(self._candidates).intersection(*reached.values())
        for address in self._candidates:
            if address in common:
                return self._form(address)
        self.state = Stage.CLOSED
        table: dict[frozenset[str], list[Applicant]] = {}
        for one in others:
            table.setdefault(reached[one.id], []).append(one)
        refused = refusals.no_common_address(self._lead, table)
        told: Decisions = [Tell(id, refused) for id in (*self._here, *self._doubtful)]
        self._doubtful.clear()
        return told

    def _form(self, address: str) -> Decisions:
        self.state, self._address = Stage.FORMED, address
        others = self._others()
        places = {one.node_rank: one for one in others if one.node_rank is not None}
        places[0] = self._here[self._lead.id]
        rest = iter([one for one in others if one.node_rank is None])
        self._order = tuple(
            places[node] if node in places else next(rest) for node in range(self._count)
        )
        self.nodes = {applicant.id: node for node, applicant in enumerate(self._order)}
        self.hosts = tuple(applicant.host for applicant in self._order)
        self.world = World.of(applicant.slots for applicant in self._order)
        seats = self.seats(0, self._lead.offers or Offers(0))
        lines = refusals.patches(self._order, self._lead.id)
        told = [TellAll(Missing(lines))] if lines else []
        return [*told, *self._refuse_doubtful(math.inf), Form(seats, self.world)]

    _TABLE: ClassVar[dict[Stage, dict[type[Any], Callable[[Joining, Any, float], Decisions]]]] = {
        Stage.GATHERING: {
            Came: _came,
            Went: _went,
            Rejected: _rejected,
            Tick: _tick,
        },
        Stage.PROVING: {
            Came: _keep,
            Went: _went,
            Reachable: _reachable,
            Tick: _tick_while_proving,
        },
        Stage.FORMED: {Came: _late, Went: _left},
        Stage.CLOSED: {Came: _late},
    }
    """The whole state machine: what an event does in each state. An event without a row does nothing."""


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
