"""Was it all true? Checks what the users of locks, barriers, queues and `once` were told while some
of them died, froze or were cut off.

An `Event` is one call as its caller saw it: when it was asked, when the answer was there, what it
said. Times are of one clock, which all callers share; the store's revision, where an answer has it,
says more than any clock. What a caller never learned is "unknown": it may have happened or not.
From this alone, `check` looks for what cannot be:

    one order      a later question has no older answer
    exclusion      nobody gets a lock (or a claim) while another surely has it; no token is given twice
    fencing        a write is accepted with the newest grant's token only, and not after that was given back
    in line        who surely waited, and stayed, is not overtaken by who came later
    barrier        a generation has exactly its size, the same answer for all, and nobody who waited for it broke it meanwhile
    queue          every item that was put is accepted once or still there; at no time two have it; what was never returned is in order
    once           at most one computation of a name succeeds; everybody gets its value

The rules are one-sided: what they report is wrong for certain, whatever the network did. "Surely"
is what makes it so. A lock is surely held from when its holder knew until the last thing that the
server would have refused him without it: the start of a successful unlock, of an accepted write, or
(unless the lock has a lease of its own) of any call that his session got an answer to.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

Kind = Literal[
    "lock",
    "unlock",
    "write",
    "arrive",
    "put",
    "take",
    "accept",
    "return",
    "claim",
    "resolve",
    "sign",
]

Told = Literal[
    "unknown",  # no answer came, or nobody looked at it
    "not done",  # no answer came, but it is known that nothing happened
    "done",
    "granted",  # lock, claim
    "passed",  # arrive
    "value",  # take, claim
    "absent",  # unlock, accept, return, resolve: it was over; take: nothing there
    "refused",  # write: with that token not; lock: not in this situation
    "timed out",
    "broken",  # arrive
    "mismatch",  # arrive
    "missed",  # arrive
    "failed",  # claim: the one who computed it failed
]

NEVER = 1e18
"""Later than everything; infinity is no number in JSON."""


class Event(msgspec.Struct, omit_defaults=True):
    """One call. `who` makes one call at a time.

    | kind    | told when it went well | `token`                     | `value`                        |
    |---------|------------------------|-----------------------------|--------------------------------|
    | lock    | granted                | the grant's                 |                                |
    | unlock  | done                   | the one presented           |                                |
    | write   | done                   | the one presented           | what was written               |
    | arrive  | passed                 | the generation              | what all had brought, or None  |
    | put     | done                   |                             | the item: no two are equal     |
    | take    | value                  | the item's number           | the item                       |
    | accept  | done                   | the item's number           |                                |
    | return  | done                   | the item's number           |                                |
    | claim   | granted                | the grant's                 |                                |
    | claim   | value                  | the revision of the value   | the value                      |
    | resolve | done                   | the claim's                 | the value; None: it gave up    |
    | sign    | done                   | (a sign of life)            |                                |
    """

    who: str
    session: str  # what is held goes with it
    kind: Kind
    name: str
    start: float
    end: float = NEVER
    told: Told = "unknown"
    revision: int = 0  # of the store, when the answer was given; 0: not known
    token: int = 0
    value: Any = None
    size: int = 0  # arrive
    quorum: int = 0  # arrive: so many are enough; 0: all of them
    mine: Any = None  # arrive: what this one brought
    held: bool = False  # take: it is to be accepted
    leased: bool = False  # lock: it may end before the session does
    failed: bool = False  # resolve: the value is an error
    queued: float = NEVER  # from here on it surely stood in line
    left: float = 0.0  # until here it surely stood in line, unless it was served before

    def __str__(self) -> str:
        end = "never" if self.end == NEVER else f"{self.end:.6g}"
        more = "".join(
            f" {name} {value}"
            for name, value in (
                ("token", self.token),
                ("value", self.value),
                ("at revision", self.revision),
            )
            if value
        )
        queued = f", in line at {self.queued:.6g}" if self.queued != NEVER else ""
        return f"{self.who} {self.kind} {self.name!r} ({self.start:.6g} to {end}{queued}): {self.told}{more}"


class Violation(NamedTuple):
    """What cannot be, and the events that say so."""

    rule: str
    text: str
    events: tuple[Event, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.rule}: {self.text}", *(f"    {event}" for event in self.events)])


def check(history: Iterable[Event]) -> list[Violation]:
    """Everything that cannot be; nothing when all of it can."""
    events = list(history)
    alive = _Alive(events)
    groups: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        groups[_THING.get(event.kind, ""), event.name].append(event)
    found = one_order(events) + _tokens(events)
    for (thing, _), group in groups.items():
        if thing in _RULES:
            found += _RULES[thing](group, alive)
    return found


_THING = {
    "lock": "lock", "unlock": "lock", "write": "lock", "arrive": "barrier", "put": "queue", "take": "queue", "accept": "queue",
    "return": "queue", "claim": "once", "resolve": "once",
}  # fmt: skip


class _Alive:
    """When each session was surely there: whenever it asked something that was answered."""

    def __init__(self, events: Iterable[Event]) -> None:
        starts: dict[str, list[float]] = defaultdict(list)
        for event in events:
            if event.end != NEVER and event.told not in ("unknown", "not done"):
                starts[event.session].append(event.start)
        self._starts = {session: sorted(times) for session, times in starts.items()}

    def until(self, session: str, cap: float) -> float:
        """The last such time that is not later than `cap`."""
        starts = self._starts.get(session, [])
        at = bisect_right(starts, cap)
        return starts[at - 1] if at else 0.0


# --- for all


def one_order(events: Iterable[Event]) -> list[Violation]:
    """Revisions grow with time: what was asked after an answer was there has no lower one."""
    numbered = [event for event in events if event.revision and event.end != NEVER]
    by_end = sorted(numbered, key=lambda event: event.end)
    found = []
    at, newest = 0, None
    for event in sorted(numbered, key=lambda event: event.start):
        while at < len(by_end) and by_end[at].end < event.start:
            if newest is None or by_end[at].revision > newest.revision:
                newest = by_end[at]
            at += 1
        if newest is not None and event.revision < newest.revision:
            found.append(
                Violation(
                    "one order",
                    f"revision {event.revision} was given after {newest.revision}",
                    (newest, event),
                )
            )
    return found


def _tokens(events: Iterable[Event]) -> list[Violation]:
    """No token is given twice, whatever the lock or claim."""
    found: list[Violation] = []
    given: dict[int, Event] = {}
    for event in events:
        if event.told == "granted":
            first = given.setdefault(event.token, event)
            if first is not event:
                found.append(
                    Violation("exclusion", f"token {event.token} was given twice", (first, event))
                )
    return found


def _exclusion(
    grants: Sequence[Event], endings: Iterable[Event], proofs: Iterable[Event], alive: _Alive
) -> list[Violation]:
    """`grants` in the order of their tokens; `endings`: what was to end one; `proofs`: what would
    have been refused without it.
    """
    ended: dict[int, float] = {}
    proved: dict[int, float] = {}
    for event in endings:
        ended[event.token] = min(event.start, ended.get(event.token, NEVER))
    for event in proofs:
        proved[event.token] = max(event.start, proved.get(event.token, 0.0))
    found: list[Violation] = []
    longest, until = None, 0.0
    for grant in grants:
        if longest is not None and grant.end < until:
            found.append(
                Violation(
                    "exclusion",
                    f"it was granted while another surely had it, until {until:.6g}",
                    (longest, grant),
                )
            )
        held = proved.get(grant.token, 0.0)
        if not grant.leased:
            held = max(held, alive.until(grant.session, ended.get(grant.token, NEVER)))
        if held > until:
            longest, until = grant, held
    return found


def _in_line(waits: Iterable[Event], order: Callable[[Event], int]) -> list[Violation]:
    """`order`: by what the served ones were served one after the other; 0 for those who
    were not.
    """
    waits = list(waits)
    served = sorted((event for event in waits if order(event)), key=order, reverse=True)
    found: list[Violation] = []
    first: Event | None = (
        None  # to be in line, of those who were served later than the one that is looked at
    )
    for event in served:
        if first is not None and first.queued < event.start:
            found.append(Violation("in line", "who came later was served first", (first, event)))
        if first is None or event.queued < first.queued:
            first = event
    for event in waits:
        if not order(event) and event.queued < event.left:
            for other in served:
                if event.queued < other.start and other.end < event.left:
                    found.append(
                        Violation(
                            "in line",
                            "who came later was served, who stayed was not",
                            (event, other),
                        )
                    )
                    break
    return found


# --- locks


def _lock(events: Sequence[Event], alive: _Alive) -> list[Violation]:
    grants = sorted(
        (event for event in events if event.told == "granted"), key=lambda event: event.token
    )
    unlocks = [event for event in events if event.kind == "unlock"]
    writes = [event for event in events if event.kind == "write"]
    proofs = [event for event in (*unlocks, *writes) if event.told == "done"]
    found = _exclusion(grants, unlocks, proofs, alive)
    found += _in_line(
        (event for event in events if event.kind == "lock"),
        lambda event: event.token if event.told == "granted" else 0,
    )
    found += _fencing(grants, unlocks, writes)
    last: dict[int, Event] = {}
    for event in proofs:
        if event.token not in last or event.start > last[event.token].start:
            last[event.token] = event
    for event in (*unlocks, *writes):
        if (
            event.told in ("absent", "refused")
            and event.token in last
            and event.end < last[event.token].start
        ):
            found.append(
                Violation("fencing", "it was over, and then it was not", (event, last[event.token]))
            )
    return found


def _fencing(
    grants: Sequence[Event], unlocks: Iterable[Event], writes: Iterable[Event]
) -> list[Violation]:
    tokens = [grant.token for grant in grants]
    back = {event.token: event for event in unlocks if event.told == "done"}
    found: list[Violation] = []
    for write in writes:
        if write.told != "done":
            continue
        newer = bisect_right(tokens, write.token)
        over = back.get(write.token)
        if write.revision:
            if newer < len(tokens) and tokens[newer] < write.revision:
                text = f"the write was accepted with token {write.token}, and {tokens[newer]} had been granted"
                found.append(Violation("fencing", text, (grants[newer], write)))
            if over is not None and over.revision and over.revision < write.revision:
                found.append(
                    Violation(
                        "fencing",
                        "it was accepted after the lock had been given back",
                        (over, write),
                    )
                )
            continue
        for grant in grants[newer:]:
            if grant.end < write.start:
                text = f"the write was accepted with token {write.token}, and {grant.token} had been granted"
                found.append(Violation("fencing", text, (grant, write)))
                break
        if over is not None and over.end < write.start:
            found.append(
                Violation(
                    "fencing", "it was accepted after the lock had been given back", (over, write)
                )
            )
    return found


# --- barriers


def _barrier(events: Sequence[Event], alive: _Alive) -> list[Violation]:
    rounds: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.told == "passed":
            rounds[event.token].append(event)
    unknown = [event for event in events if event.told == "unknown"]
    # A late comer is told that a round broke which he was never in. So only those count who surely
    # waited, or gave up themselves.
    breakers = [
        event for event in events
        if event.told == "timed out" or (event.told in ("broken", "mismatch") and event.queued < event.end)
    ]  # fmt: skip
    found: list[Violation] = []
    for generation, members in rounds.items():
        found += _round(generation, members, unknown)
        latest = max(members, key=lambda event: event.start)
        first = min(members, key=lambda event: event.queued)
        for event in breakers:
            if first.queued < event.start and event.end < latest.start:
                found.append(
                    Violation(
                        "barrier",
                        f"{generation} was passed although it was broken meanwhile",
                        (first, event, latest),
                    )
                )
                break
    return found


def _round(generation: int, members: Sequence[Event], unknown: Iterable[Event]) -> list[Violation]:
    """Of one generation."""
    found: list[Violation] = []
    one = members[0]

    def wrong(text: str, *events: Event) -> None:
        found.append(Violation("barrier", f"{generation}: {text}", events or tuple(members)))

    earliest = min(members, key=lambda event: event.end)
    latest = max(members, key=lambda event: event.start)
    if earliest.end < latest.start:
        wrong("one had passed before another had come", earliest, latest)
    if {(event.size, event.quorum) for event in members} != {(one.size, one.quorum)}:
        wrong("it was passed with different sizes")
    if len(members) > one.size:
        wrong(f"{len(members)} passed a barrier of {one.size}")
    possible = len(members) + sum(event.start < earliest.end for event in unknown)
    if possible < (one.quorum or one.size):
        wrong(f"at most {possible} were there, for a barrier of {one.quorum or one.size}")
    if len({event.who for event in members}) < len(members):
        wrong("somebody passed it twice")
    if any(event.value != one.value for event in members):
        wrong("not all were told the same")
    elif one.value is not None and any(event.mine not in event.value for event in members):
        wrong("somebody passed it without what he brought")
    return found


# --- queues


def _queue(events: Sequence[Event], alive: _Alive) -> list[Violation]:
    takes = [event for event in events if event.kind == "take"]
    delivered: dict[Any, list[Event]] = defaultdict(list)
    for event in sorted(
        (event for event in takes if event.told == "value"),
        key=lambda event: (event.revision, event.end),
    ):
        delivered[event.value].append(event)
    endings: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.kind in ("accept", "return"):
            endings[event.token].append(event)
    put = {event.value: event for event in events if event.kind == "put"}
    found: list[Violation] = []
    for value, deliveries in delivered.items():
        if value not in put or put[value].told in ("not done", "refused"):
            found.append(
                Violation("queue", f"{value} came out and was not put in", tuple(deliveries))
            )
        elif deliveries[0].end < put[value].start:
            found.append(
                Violation(
                    "queue", f"{value} came out before it was put in", (put[value], deliveries[0])
                )
            )
        if len({event.token for event in deliveries}) > 1:
            found.append(Violation("queue", f"{value} has more than one number", tuple(deliveries)))
        found += _item(deliveries, endings.get(deliveries[0].token, []), alive)
    numbers: dict[int, Event] = {}
    for deliveries in delivered.values():
        first = numbers.setdefault(deliveries[0].token, deliveries[0])
        if first is not deliveries[0]:
            found.append(Violation("queue", "two items have one number", (first, deliveries[0])))
    found += _lost(put, delivered, takes, (event for event in events if event.kind == "accept"))
    if all(event.revision for deliveries in delivered.values() for event in deliveries):
        found += _order(delivered, takes)
        found += _in_line(takes, lambda event: event.revision if event.told == "value" else 0)
    return found


def _item(deliveries: Sequence[Event], endings: Sequence[Event], alive: _Alive) -> list[Violation]:
    """One item: who had it, one after the other."""
    found: list[Violation] = []
    final = [event for event in endings if event.kind == "accept" and event.told == "done"]
    final += [event for event in deliveries if not event.held]
    if len(final) > 1:
        found.append(Violation("queue", f"item {deliveries[0].token} was done twice", tuple(final)))
    for event in final[:1]:
        for delivery in deliveries:
            later = (
                delivery.revision > event.revision
                if delivery.revision and event.revision
                else delivery.start > event.end
            )
            if later and delivery is not event:
                found.append(
                    Violation(
                        "queue", f"item {delivery.token} was given out again", (event, delivery)
                    )
                )
    # At any time one has it.
    holder, until = None, 0.0
    for delivery in deliveries:
        if holder is not None and delivery.end < until:
            found.append(
                Violation("queue", f"two had item {delivery.token} at once", (holder, delivery))
            )
        mine = [
            event.start
            for event in endings
            if event.who == delivery.who and event.start > delivery.end
        ]
        held = alive.until(delivery.session, min(mine, default=NEVER)) if delivery.held else 0.0
        if held > until:
            holder, until = delivery, held
    return found


def _lost(
    put: dict[Any, Event],
    delivered: dict[Any, list[Event]],
    takes: Sequence[Event],
    accepts: Iterable[Event],
) -> list[Violation]:
    """What was put, and is neither done nor perhaps done. Whoever took last must have emptied the
    queue. A take whose answer nobody saw explains one item, unless that was to be accepted: then it
    must have come back."""
    settled = {event.token for event in accepts if event.told in ("done", "unknown")}
    missing = []
    for value, event in put.items():
        deliveries = delivered.get(value, [])
        if event.told == "done" and not any(
            not one.held or one.token in settled for one in deliveries
        ):
            missing.append(event)
    explained = sum(event.told == "unknown" and not event.held for event in takes)
    if len(missing) > explained:
        return [
            Violation(
                "queue",
                f"{len(missing)} items are lost, {explained} of them perhaps with their takers",
                tuple(missing),
            )
        ]
    return []


def _order(delivered: dict[Any, list[Event]], takes: Sequence[Event]) -> list[Violation]:
    """An item that comes out for the first time comes after all before it. A take whose answer
    nobody saw may have been another's first.
    """
    firsts = sorted(
        (deliveries[0] for deliveries in delivered.values()), key=lambda event: event.revision
    )
    unseen = sorted(event.start for event in takes if event.told == "unknown")
    highest: Event | None = None
    late: list[tuple[Event, Event]] = []
    for event in firsts:
        if highest is not None and event.token < highest.token:
            late.append((highest, event))
            if len(late) > bisect_left(unseen, event.end):
                return [Violation("queue", f"{len(late)} items came out of their order", late[-1])]
        else:
            highest = event
    return []


# --- once


def _once(events: Sequence[Event], alive: _Alive) -> list[Violation]:
    grants = sorted(
        (event for event in events if event.told == "granted"), key=lambda event: event.token
    )
    resolves = [event for event in events if event.kind == "resolve"]
    done = [event for event in resolves if event.told == "done"]
    values = [event for event in events if event.kind == "claim" and event.told == "value"]
    found = _exclusion(grants, resolves, done, alive)
    found += _in_line(
        (event for event in events if event.kind == "claim"),
        lambda event: event.token if event.told == "granted" else 0,
    )
    succeeded = [event for event in done if event.value is not None and not event.failed]
    if len(succeeded) > 1:
        found.append(Violation("once", "it was computed more than once", tuple(succeeded)))
    if len({(event.value, event.token) for event in values}) > 1:
        found.append(Violation("once", "not all got the same value", tuple(values)))
    if values:
        made = [
            event
            for event in resolves
            if event.value == values[0].value
            and not event.failed
            and event.told in ("done", "unknown")
        ]
        first = min(values, key=lambda event: event.end)
        if not any(event.start < first.end for event in made):
            found.append(Violation("once", "a value that nobody had made", (first,)))
        if succeeded and succeeded[0].value != values[0].value:
            found.append(
                Violation(
                    "once", "another value than the one that was made", (succeeded[0], values[0])
                )
            )
        found += [
            Violation("once", "it was to be computed again", (values[0], grant))
            for grant in grants
            if grant.token > values[0].token
        ]
    for event in events:
        if event.told == "failed" and not any(
            one.failed and one.value == event.value and one.start < event.end for one in resolves
        ):
            found.append(Violation("once", "an error that nobody had", (event,)))
    return found


_RULES: dict[str, Callable[[Sequence[Event], _Alive], list[Violation]]] = {
    "lock": _lock,
    "barrier": _barrier,
    "queue": _queue,
    "once": _once,
}
