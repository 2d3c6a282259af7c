"""Hundreds of histories of primitives under death, and the checker that judges them: it must find
what is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rallypoint.store.state.state import Session, State
from rallypoint.store.state.waiters import Lines, Waiter
from rallypoint.wire import messages as m

from .histories import Event, Kind, check
from .simulation import World, counts, judged


def event(
    who: str, kind: Kind, start: float, end: float, told: Any = "unknown", **more: Any
) -> Event:
    """Of the thing "x"; the session is named like the process, unless it is said."""
    more.setdefault("session", who.partition(".")[0])
    return Event(who=who, kind=kind, name="x", start=start, end=end, told=told, **more)


def rules(*history: Event) -> set[str]:
    return {violation.rule for violation in check(history)}


# --- the checker, on histories that are right and histories that are wrong in one way


def test_a_lock_that_is_passed_on_is_right() -> None:
    assert rules(
        event("a", "lock", 0, 1, "granted", token=1, revision=1),
        event("b", "lock", 2, 6, "granted", token=4, revision=4, queued=3),
        event("a", "write", 3, 4, "done", token=1, revision=2),
        event("a", "unlock", 5, 6, "done", token=1, revision=4),
        event("b", "write", 7, 8, "done", token=4, revision=5),
        event("a", "write", 7, 8, "refused", token=1, revision=5),
    ) == set()  # fmt: skip


def test_two_that_hold_a_lock_at_once() -> None:
    first = event("a", "lock", 0, 1, "granted", token=1)
    second = event("b", "lock", 2, 3, "granted", token=2)
    assert rules(first, second, event("a", "unlock", 4, 5, "done", token=1)) == {"exclusion"}
    assert rules(first, second, event("a", "sign", 4, 5, "done")) == {
        "exclusion"
    }  # its session lives, so it still has it
    assert rules(first, second, event("a", "sign", 4, 5)) == set()  # nobody knows
    leased = msgspec.structs.replace(first, leased=True)
    assert (
        rules(leased, second, event("a", "sign", 4, 5, "done")) == set()
    )  # the lease may have been over
    assert rules(leased, second, event("a", "write", 4, 5, "done", token=1)) == {
        "exclusion",
        "fencing",
    }


def test_a_lock_that_was_given_back_is_had_by_nobody() -> None:
    first = event("a", "lock", 0, 1, "granted", token=1)
    second = event("b", "lock", 6, 7, "granted", token=2)
    assert (
        rules(first, event("a", "unlock", 4, 5, token=1), second, event("a", "sign", 8, 9, "done"))
        == set()
    )


def test_one_token_twice() -> None:
    assert rules(
        event("a", "lock", 0, 1, "granted", token=1), event("b", "lock", 5, 6, "granted", token=1)
    ) == {"exclusion"}


def test_a_write_with_an_old_token() -> None:
    first = event("a", "lock", 0, 1, "granted", token=1, revision=1)
    second = event("b", "lock", 2, 5, "granted", token=4, revision=4)
    assert rules(first, second, event("c", "write", 2, 9, "done", token=1, revision=3)) == set()
    assert rules(first, second, event("c", "write", 2, 9, "done", token=1, revision=5)) == {
        "fencing"
    }
    # By the clock, when no revision is known. And then two have it.
    assert rules(first, second, event("c", "write", 6, 9, "done", token=1)) == {
        "fencing",
        "exclusion",
    }
    assert rules(first, second, event("c", "write", 4, 9, "done", token=1)) == set()


def test_a_write_after_the_lock_was_given_back() -> None:
    first = event("a", "lock", 0, 1, "granted", token=1, revision=1)
    back = event("a", "unlock", 2, 3, "done", token=1, revision=2)
    assert rules(first, back, event("c", "write", 2, 5, "done", token=1, revision=3)) == {"fencing"}
    assert rules(first, back, event("c", "write", 4, 5, "done", token=1)) == {"fencing"}


def test_a_refusal_that_is_taken_back() -> None:
    first = event("a", "lock", 0, 1, "granted", token=1)
    assert rules(
        first,
        event("a", "write", 2, 3, "refused", token=1),
        event("a", "unlock", 4, 5, "done", token=1),
    ) == {"fencing"}
    assert rules(
        first,
        event("a", "unlock", 2, 3, "absent", token=1),
        event("a", "write", 4, 5, "done", token=1),
    ) == {"fencing"}


def test_who_comes_later_is_served_first() -> None:
    stayed = event("a", "lock", 0, 9, "granted", token=8, queued=2)
    later = event("b", "lock", 3, 4, "granted", token=5)
    assert rules(stayed, later) == {"in line"}
    assert (
        rules(msgspec.structs.replace(stayed, queued=4), later) == set()
    )  # nobody knows who was first
    assert rules(stayed, msgspec.structs.replace(later, start=1)) == set()


def test_who_stays_is_not_served_and_who_comes_later_is() -> None:
    later = event("b", "lock", 3, 4, "granted", token=5)
    assert rules(event("a", "lock", 0, 9, "timed out", queued=2, left=8), later) == {"in line"}
    assert rules(event("a", "lock", 0, 9, "timed out", queued=2, left=3.5), later) == set()
    assert rules(event("a", "lock", 0, 1e18, queued=2, left=1e18), later) == {"in line"}


def test_an_older_answer_to_a_later_question() -> None:
    assert rules(
        event("a", "sign", 0, 1, "done", revision=7), event("b", "sign", 2, 3, "done", revision=6)
    ) == {"one order"}
    assert (
        rules(
            event("a", "sign", 0, 3, "done", revision=7),
            event("b", "sign", 2, 3, "done", revision=6),
        )
        == set()
    )


def arrivals(
    *spans: tuple[float, float], told: Any = "passed", size: int = 2, **more: Any
) -> list[Event]:
    token = 5 if told == "passed" else 0
    return [
        event(chr(97 + at), "arrive", *span, told, size=size, token=token, **more)
        for at, span in enumerate(spans)
    ]


@pytest.mark.parametrize(
    "history",
    [
        arrivals((0, 9)),  # too few
        arrivals((0, 9), (1, 9), (2, 9)),  # too many
        arrivals((0, 9), (1, 9), (2, 9), size=4, quorum=2)[:1],
        arrivals((0, 1), (2, 3)),  # one had gone before the other came
        [*arrivals((0, 9)), *arrivals((1, 9), size=3)],
        [*arrivals((0, 9)), *arrivals((1, 9))],  # the same one twice
        arrivals((0, 9), (1, 9), value=[1, 2], mine=1)[:1]
        + arrivals((0, 9), (1, 9), value=[1, 3], mine=1)[1:],
        arrivals((0, 9), (1, 9), value=[1, 2], mine=3),  # without what he brought
        [
            *arrivals((0, 9), (8, 9), queued=1),
            event("c", "arrive", 2, 5, "timed out", size=2),
        ],  # broken meanwhile
        [
            *arrivals((0, 9), (8, 9), queued=1),
            event("c", "arrive", 2, 5, "broken", size=2, queued=3),
        ],
        [
            *arrivals((0, 9), (8, 9), queued=1),
            event("c", "arrive", 2, 5, "mismatch", size=3, queued=3),
        ],
    ],
)
def test_a_barrier_that_lies(history: list[Event]) -> None:
    assert rules(*history) == {"barrier"}


@pytest.mark.parametrize(
    "history",
    [
        arrivals((0, 9), (1, 9)),
        [
            *arrivals((0, 9)),
            event("b", "arrive", 1, 1e18, size=2),
        ],  # the other one died before he knew
        arrivals((0, 9), (1, 9), size=4, quorum=2),
        arrivals((0, 9), (1, 9), value=[1, 2], mine=1),
        [
            *arrivals((0, 9), (8, 9), queued=1),
            event("c", "arrive", 2, 5, "broken", size=2),
        ],  # a late comer of the round before
        [*arrivals((0, 9), (4, 9), queued=1), event("c", "arrive", 2, 5, "timed out", size=2)],
        arrivals((0, 9), (1, 9), told="broken"),
    ],
)
def test_a_barrier_that_does_not(history: list[Event]) -> None:
    assert rules(*history) == set()


PUT = event("p", "put", 0, 1, "done", value="i")
TAKEN = event("a", "take", 2, 3, "value", value="i", token=1, held=True, revision=3)
ACCEPTED = event("a", "accept", 4, 5, "done", token=1, revision=5)
AGAIN = event("b", "take", 6, 7, "value", value="i", token=1, held=True, revision=7)


@pytest.mark.parametrize(
    "history",
    [
        [PUT],  # nobody has it
        [PUT, TAKEN],  # it was taken, not accepted, and did not come back
        [PUT, event("a", "take", 2, 1e18, held=True)],
        [TAKEN, ACCEPTED],  # nobody put it
        [event("p", "put", 4, 5, "done", value="i"), TAKEN, ACCEPTED],
        [PUT, TAKEN, ACCEPTED, AGAIN],  # it came out again
        [PUT, TAKEN, AGAIN, event("a", "accept", 8, 9, "done", token=1), event("b", "accept", 8, 9, "done", token=1)],
        # two have it
        [PUT, TAKEN, event("a", "sign", 8, 9, "done"), AGAIN, event("b", "accept", 8, 9, "done", token=1)],
        [PUT, TAKEN, ACCEPTED, event("q", "put", 0, 1, "done", value="j"), event("b", "take", 6, 7, "value", value="j", token=1)],
        [PUT, event("a", "take", 2, 3, "value", value="i", token=1), event("b", "take", 2, 3, "value", value="i", token=2)],
        [
            PUT, event("q", "put", 0, 1, "done", value="j"), event("b", "take", 2, 3, "value", value="j", token=2, revision=3),
            event("a", "take", 3.5, 4, "value", value="i", token=1, revision=4),
        ],  # out of order
    ],
)  # fmt: skip
def test_a_queue_that_loses_or_doubles(history: list[Event]) -> None:
    assert rules(*history) == {"queue"}


def test_who_waits_for_an_item_is_not_overtaken() -> None:
    second = event("q", "put", 0, 1, "done", value="j")
    stayed = event("a", "take", 2, 9, "value", value="j", token=2, revision=9, queued=3)
    later = event("b", "take", 4, 5, "value", value="i", token=1, revision=8)
    assert rules(PUT, second, stayed, later) == {"in line"}


@pytest.mark.parametrize(
    "history",
    [
        [PUT, TAKEN, ACCEPTED],
        [event("p", "put", 0, 1e18, value="i"), TAKEN, ACCEPTED],
        [PUT, TAKEN, event("a", "accept", 4, 1e18, token=1)],
        [PUT, event("a", "take", 2, 1e18)],  # its taker died with it, and it was not to be accepted
        # the first one's session ended
        [PUT, TAKEN, AGAIN, event("b", "accept", 8, 9, "done", token=1)],
        [PUT, TAKEN, event("a", "return", 4, 5, "done", token=1), event("a", "sign", 8, 9, "done"), AGAIN,
         event("b", "accept", 8, 9, "done", token=1)],
    ],
)  # fmt: skip
def test_a_queue_that_does_not(history: list[Event]) -> None:
    assert rules(*history) == set()


CLAIMED = event("a", "claim", 0, 1, "granted", token=1, revision=1)
RESOLVED = event("a", "resolve", 4, 5, "done", token=1, value="v", revision=5)
TOLD = event("b", "claim", 2, 5, "value", token=5, value="v", revision=5)


@pytest.mark.parametrize(
    ("history", "rule"),
    [
        ([CLAIMED, RESOLVED, TOLD], ""),
        ([CLAIMED, event("a", "resolve", 4, 1e18, token=1, value="v"), TOLD], ""),
        (
            [CLAIMED, event("b", "claim", 2, 3, "granted", token=2, revision=2), RESOLVED],
            "exclusion",
        ),
        (
            [CLAIMED, RESOLVED, event("b", "claim", 6, 7, "granted", token=7, revision=7), TOLD],
            "once",
        ),
        ([CLAIMED, RESOLVED, event("b", "resolve", 6, 7, "done", token=2, value="w")], "once"),
        ([CLAIMED, RESOLVED, msgspec.structs.replace(TOLD, value="w")], "once"),
        ([CLAIMED, RESOLVED, TOLD, msgspec.structs.replace(TOLD, token=6)], "once"),
        ([CLAIMED, TOLD], "once"),
        ([CLAIMED, event("b", "claim", 2, 5, "failed", value="e")], "once"),
        (
            [
                CLAIMED,
                msgspec.structs.replace(RESOLVED, failed=True),
                event("b", "claim", 2, 5, "failed", value="v"),
            ],
            "",
        ),
        ([CLAIMED, msgspec.structs.replace(RESOLVED, failed=True), TOLD], "once"),
    ],
)
def test_what_is_computed_once(history: list[Event], rule: str) -> None:
    assert rules(*history) == ({rule} if rule else set())


# --- the simulation


def test_hundreds_of_histories_are_true_and_everything_happens_in_them() -> None:
    """A failure names its seed: `python -m tests.primitives.simulation SEED` prints that
    history. If not everything happened in them, they would show little. The long form is
    `scripts/soak primitives-histories`.
    """
    found: Counter[str] = Counter()
    for seed in range(350):
        world, violations = judged(seed)
        assert not violations, "\n".join([f"seed {seed}", *map(str, violations)])
        found += counts([world])
    answers = (
        "lock granted", "lock timed out", "lock refused", "lock unknown", "unlock done", "unlock absent", "write done", "write refused",
        "arrive passed", "arrive timed out", "arrive broken", "arrive mismatch", "arrive missed", "put done", "put unknown", "take value",
        "take timed out", "take unknown", "accept done", "accept absent", "return done", "claim granted", "claim value", "claim failed",
        "resolve done", "fault cut", "fault freeze", "fault die", "fault impatience", "fault again",
    )  # fmt: skip
    assert [answer for answer in answers if found[answer] < 5] == []


def test_a_seed_is_a_history() -> None:
    assert World(7).run() == World(7).run()


class Mutant(State):
    """A state that is wrong in some way: `before` another request than the one that came, `after`
    another answer than the right one.
    """

    def apply(
        self, now: float, session: Session, request: m.Request, large: Any = None
    ) -> m.Reply | None:
        answer = super().apply(now, session, self.before(session, request), large)
        self.woken[:] = [(who, self.after(reply)) for who, reply in self.woken]
        return None if answer is None else self.after(answer)

    def before(self, session: Session, request: m.Request) -> m.Request:
        return request

    def after(self, reply: m.Reply) -> m.Reply:
        return reply


def instead(kind: type[m.Request], **changed: Callable[[Any], Any]) -> type[Mutant]:
    """Fields of these requests have other values."""

    class Instead(Mutant):
        def before(self, session: Session, request: m.Request) -> m.Request:
            if type(request) is not kind:
                return request
            return msgspec.structs.replace(
                request, **{name: value(request) for name, value in changed.items()}
            )

    return Instead


class SplitBrain(Mutant):
    """Two halves of the clients do not see each other's locks and claims."""

    def before(self, session: Session, request: m.Request) -> m.Request:
        if (
            isinstance(request, m.Lock | m.Unlock | m.Claim | m.Resolve)
            and session.identity.pid % 2
        ):
            return msgspec.structs.replace(request, name=request.name + " of the others")
        return request


class Forgetful(Mutant):
    """What comes a second time is done a second time."""

    seq = 10**6

    def apply(
        self, now: float, session: Session, request: m.Request, large: Any = None
    ) -> m.Reply | None:
        if request.changes and session.replies.get(request.seq) is not None:
            self.seq += 1
            answer = super().apply(
                now, session, msgspec.structs.replace(request, seq=self.seq), large
            )
            return None if answer is None else msgspec.structs.replace(answer, seq=request.seq)
        return super().apply(now, session, request, large)


class Polite(Mutant):
    """It does not tell of a barrier that broke."""

    def after(self, reply: m.Reply) -> m.Reply:
        if isinstance(reply, m.Failed) and reply.code == "barrier-broken":
            return m.Integer(reply.seq, reply.revision, reply.revision)
        return reply


class Backwards(Mutant):
    """Its revisions fall now and then."""

    def after(self, reply: m.Reply) -> m.Reply:
        return (
            msgspec.structs.replace(reply, revision=reply.revision // 2)
            if reply.seq % 7 == 0
            else reply
        )


def last(lines: Lines, name: str) -> Waiter | None:
    return next(reversed(lines[name])) if name in lines else None


class Unfair(Mutant):
    """Whoever waits last is served first."""

    def __init__(self, limits: m.Limits) -> None:
        super().__init__(limits)
        for kind in (self._locks, self._queues, self._claims):
            usual = type(kind._lines)
            kind._lines.__class__ = type("LastFirst", (usual,), {"__slots__": (), "first": last})


class Immortal(Mutant):
    """No session ends by its lease."""

    def open(self, *arguments: Any, **named: Any) -> Session | m.Refusal:
        session = super().open(*arguments, **named)
        if isinstance(session, Session):
            session.ttl = 1e9
        return session


@pytest.mark.parametrize(
    ("mutant", "rule"),
    [
        (SplitBrain, "exclusion"),
        (SplitBrain, "fencing"),
        (SplitBrain, "once"),
        (instead(m.Set, fence=lambda request: None), "fencing"),
        (instead(m.Unlock, token=lambda request: request.token + 1), "end"),
        (Unfair, "in line"),
        (
            instead(
                m.Arrive, size=lambda request: max(1, request.size - 1), quorum=lambda request: None
            ),
            "barrier",
        ),
        (Polite, "barrier"),
        (instead(m.Pop, hold=lambda request: False), "queue"),
        (instead(m.Settle, accept=lambda request: False), "queue"),
        (instead(m.Settle, accept=lambda request: True), "queue"),
        (instead(m.Push, queue=lambda request: f"q{request.seq % 2 or ''}"), "queue"),
        (Forgetful, "queue"),
        (instead(m.Resolve, failed=lambda request: False), "once"),
        (Backwards, "one order"),
        (Immortal, "end"),
    ],
)
def test_a_server_that_is_wrong_is_found_out(mutant: type[State], rule: str) -> None:
    for seed in range(300):
        if rule in {violation.rule for violation in judged(seed, state=mutant)[1]}:
            return
    pytest.fail(f"no {rule} in 300 histories")
