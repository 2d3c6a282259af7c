"""A barrier's decisions: who passes, who is told what when that cannot be, and what is remembered
of it for those who come too late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rallypoint.store.state import attendance, barriers
from rallypoint.store.state.attendance import Sighting
from rallypoint.store.state.state import Session, State
from rallypoint.wire import messages as m

from ..search import tries

MIB = 1024 * 1024
ROOMY = m.Limits(64 * MIB, 64 * MIB, 4096, 10_000, 2000, 5000)


class Room:
    """A state, and callers who have numbers. Rank r is pid 100 + r on node0."""

    def __init__(
        self, roster: Mapping[int, Sighting] | None = None, limits: m.Limits = ROOMY
    ) -> None:
        self.state = State(limits, roster=None if roster is None else lambda: roster)
        self.now = 1000.0
        self.sessions: dict[int, Session] = {}
        self.seqs: Counter[int] = Counter()
        self._born = 0

    def enter(self, caller: int, rank: int | None = -1, ttl: float = 1e6) -> Session:
        """A session; whoever had the number before is another one."""
        self._born += 1
        identity = m.Identity("node0", 100 + caller, caller if rank == -1 else rank)
        session = self.state.open(
            self.now, self._born.to_bytes(16, "big"), ttl, identity, resume=False, acked=0
        )
        assert isinstance(session, Session)
        self.sessions[caller] = session
        self.seqs[caller] = 0
        return session

    def arrive(
        self,
        caller: int,
        size: int,
        timeout: float | None = 30.0,
        value: bytes = b"",
        quorum: int | None = None,
        name: str = "b",
    ) -> Any:
        """The reply; None when he waits."""
        if caller not in self.sessions:
            self.enter(caller)
        self.seqs[caller] += 1
        session = self.sessions[caller]
        request = m.Arrive(
            self.seqs[caller], session.acked_in_slot(0), name, size, timeout, value, quorum
        )
        return self.state.apply(self.now, session, request)

    def cancel(self, caller: int) -> None:
        """His call ends with an exception."""
        self.state.apply(self.now, self.sessions[caller], m.Cancel(0, 0, self.seqs[caller]))

    def die(self, caller: int, because: str = "its connection was closed") -> None:
        self.state.end(self.now, self.sessions.pop(caller), because)

    def pass_time(self, seconds: float) -> dict[int, Any]:
        self.now += seconds
        self.state.tick(self.now)
        return self.told()

    def told(self) -> dict[int, Any]:
        """Who was answered meanwhile, and what."""
        woken, self.state.woken = self.state.woken, []
        found = {session.identity.pid - 100: reply for session, reply in woken}
        assert len(found) == len(woken)
        return found


@pytest.fixture
def room() -> Room:
    return Room()


# --- all, or nobody ---


def test_all_arrive_or_nobody_leaves(room: Room) -> None:
    assert room.arrive(0, 3) is None
    assert room.arrive(1, 3) is None
    assert room.told() == {}
    last = room.arrive(2, 3)
    told = room.told()
    assert sorted(told) == [0, 1]
    assert {reply.number for reply in told.values()} == {last.number}
    assert room.arrive(0, 2) is None  # the next round, of another size
    assert room.arrive(1, 2).number > last.number


def test_one_alone_does_not_wait(room: Room) -> None:
    assert isinstance(room.arrive(0, 1, 0.0), m.Integer)


@pytest.mark.parametrize(("size", "quorum"), [(0, None), (-1, None), (3, 0), (3, 4)])
def test_what_no_barrier_can_be_is_refused(room: Room, size: int, quorum: int | None) -> None:
    assert room.arrive(0, size, quorum=quorum).code == "bad-request"
    assert len(room.state.waiting) == 0


def test_threads_of_one_session_take_a_seat_each(room: Room) -> None:
    session = room.enter(0)
    one, two = (m.Arrive(seq, 0, "b", 2, 5.0) for seq in (1, 2))
    assert room.state.apply(room.now, session, one) is None
    assert room.state.apply(room.now, session, one) is None  # repeated: still the same seat
    assert isinstance(room.state.apply(room.now, session, two), m.Integer)
    assert isinstance(room.told()[0], m.Integer)


def test_when_one_gives_up_all_learn_who_was_there_and_who_was_not(room: Room) -> None:
    room.arrive(0, 3, 2.0)
    room.arrive(1, 3, 50.0)
    told = room.pass_time(2.0)
    late, broken = told[0], told[1]
    present = (room.sessions[0].identity, room.sessions[1].identity)
    assert late == m.TimedOut(1, 0, present=present, absent=(m.Member(None, 2),), arrived=2)
    assert (broken.code, broken.present, broken.absent) == (
        "barrier-broken",
        present,
        (m.Member(None, 2),),
    )
    assert broken.text == (
        'the barrier "b" of 3 is broken: rank 0 (pid 100 on node0) gave up after 2.0 s; 2 arrived (ranks 0-1), '
        "missing: rank 2 (not connected to the store)"
    )
    assert dict(broken.details) == {"size": 3, "arrived": 2}
    assert len(room.state.waiting) == 0


def test_who_does_not_wait_breaks_it_as_well(room: Room) -> None:
    room.arrive(0, 3)
    reply = room.arrive(1, 3, 0.0)
    assert (type(reply), reply.arrived) == (m.TimedOut, 2)
    assert "rank 1 (pid 101 on node0) did not wait" in room.told()[0].text


def test_when_one_dies_the_others_learn_it_at_once(room: Room) -> None:
    room.arrive(0, 3)
    room.arrive(1, 3)
    room.die(1)
    broken = room.told()[0]
    assert broken.code == "barrier-broken"
    assert (
        "the session of rank 1 (pid 101 on node0) ended while it waited: its connection was closed; 2 arrived (ranks 0-1)"
        in broken.text
    )
    assert len(room.state.waiting) == 0


def test_when_one_is_interrupted_the_others_learn_it_at_once(room: Room) -> None:
    room.arrive(0, 3)
    room.arrive(1, 3)
    room.now += 0.8
    room.cancel(1)
    told = room.told()
    assert list(told) == [0]
    assert "rank 1 (pid 101 on node0) left after 0.8 s: an exception ended its call" in told[0].text


def test_two_seats_of_one_who_dies_count_as_two(room: Room) -> None:
    session = room.enter(0)
    for seq in (1, 2):
        room.state.apply(room.now, session, m.Arrive(seq, 0, "b", 4, 30.0))
    room.arrive(1, 4)
    room.die(0)
    broken = room.told()[1]
    assert (
        "; 3 arrived (rank 1 (pid 101 on node0) and 2 in rank 0 (pid 100 on node0)), 1 is missing"
        in broken.text
    )


# --- who comes late ---


def test_who_comes_late_to_a_broken_round_is_told_once(room: Room) -> None:
    room.enter(2)
    room.enter(3)
    room.arrive(0, 4, 2.0)
    room.arrive(1, 4)
    broken = room.pass_time(2.0)[1]
    room.now += 3.2
    for late in (2, 3):
        reply = room.arrive(late, 4)
        assert (reply.code, reply.present) == ("barrier-broken", broken.present)
        assert reply.text == f"{broken.text}; that was 3.2 s before this caller came"
    for caller in (2, 3, 0):
        assert room.arrive(caller, 4) is None
    assert isinstance(room.arrive(1, 4), m.Integer)
    assert set(room.told()) == {0, 2, 3}


def test_who_was_there_begins_the_next_round_and_the_late_one_does_not_sit_down_in_it(
    room: Room,
) -> None:
    room.enter(2)
    room.arrive(0, 3, 2.0)
    room.arrive(1, 3)
    room.pass_time(2.0)
    assert room.arrive(0, 3) is None
    assert room.arrive(2, 3).code == "barrier-broken"
    assert room.arrive(1, 3) is None
    assert isinstance(room.arrive(2, 3), m.Integer)


def test_whose_session_began_after_the_break_takes_his_seat(room: Room) -> None:
    """A process that was started again in the place of one that died."""
    room.arrive(0, 2)
    room.die(0)
    assert room.arrive(0, 2) is None
    assert isinstance(room.arrive(1, 2), m.Integer)


def test_who_comes_after_the_only_one_there_has_died_is_told(room: Room) -> None:
    room.enter(1)
    room.arrive(0, 2)
    room.die(0)
    assert (
        "the session of rank 0 (pid 100 on node0) ended while it waited" in room.arrive(1, 2).text
    )
    assert room.arrive(1, 2) is None


def test_no_more_are_told_than_were_missing(room: Room) -> None:
    for caller in (2, 3, 4):
        room.enter(caller)
    room.arrive(0, 3, 1.0)
    room.arrive(1, 3, 1.0)
    room.pass_time(1.0)
    assert room.arrive(4, 3).code == "barrier-broken"
    assert room.arrive(3, 3) is None


def test_a_complete_round_is_the_end_of_it(room: Room) -> None:
    room.enter(1)
    room.enter(2)
    room.arrive(0, 3, 1.0)
    room.pass_time(1.0)
    room.arrive(0, 2)
    assert room.arrive(1, 2).code == "barrier-broken"
    assert isinstance(room.arrive(1, 2), m.Integer)
    assert room.arrive(2, 2) is None  # the break before is forgotten


def test_what_is_remembered_is_bounded(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barriers, "NAMES_KEPT", 5)
    room.enter(1)
    for number in range(20):
        room.arrive(0, 2, 0.0, name=f"b{number}")
        room.arrive(0, 1, name=f"c{number}")
    assert room.arrive(1, 2, name="b17") is None
    assert room.arrive(1, 2, name="b18").code == "barrier-broken"
    held: Any = room.state._barriers
    assert len(held._last) == 5
    monkeypatch.setattr(barriers, "SEATS_KEPT", 3)
    for number in range(4):
        room.arrive(0, 1, name=f"d{number}")
    assert held._weight == len(held._last) == 3


def test_who_did_not_come_counts_in_what_is_remembered(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a thousand ranks looks again and again, under names of their own, whether the others
    are there.
    """
    monkeypatch.setattr(barriers, "SEATS_KEPT", 100)
    for rank in range(30):
        room.enter(rank)
    for number in range(20):
        room.arrive(0, 30, 0.0, name=f"b{number}")
        room.arrive(0, 30, 0.0, name=f"q{number}", quorum=1)
    held: Any = room.state._barriers
    assert len(held._last) == 3  # of one who came and 29 who did not


def test_the_end_of_a_session_looks_only_at_barriers_that_it_may_complete(room: Room) -> None:
    """With all of them, a thousand ranks that end together held the server for seconds, and 200,000
    barriers for half a second each.
    """
    for caller in range(3):
        room.arrive(caller, 3, 5.0, b"x", quorum=2, name="q")
    assert len(room.told()) == 2
    room.arrive(0, 3, 5.0, b"x", quorum=2, name="q")
    for number in range(50):
        room.arrive(0, 2, name=f"b{number}")
    held: Any = room.state._barriers
    assert set(held._expecting) == {"q"}
    assert room.arrive(1, 3, 5.0, b"x", quorum=2, name="q") is None
    room.die(2)
    assert len(room.told()) == 2
    assert not held._expecting
    assert len(held._generations) == 50


# --- one size ---


def test_a_barrier_has_one_size(room: Room) -> None:
    room.arrive(0, 4)
    room.arrive(1, 4)
    room.enter(3)
    newcomer = room.arrive(2, 3)
    told = room.told()
    assert newcomer.code == "barrier-size"
    assert (
        newcomer.text
        == 'the barrier "b" has no one size: ranks 0-1 said 4, rank 2 (pid 102 on node0) said 3'
    )
    assert {reply.text for reply in told.values()} == {newcomer.text}
    assert len(room.state.waiting) == 0
    late = room.arrive(3, 4)
    assert (late.code, late.text) == (
        "barrier-size",
        f"{newcomer.text}; that was 0.0 s before this caller came",
    )
    assert room.arrive(3, 4) is None


def test_and_one_quorum(room: Room) -> None:
    room.arrive(0, 3, quorum=2)
    assert room.arrive(1, 3).text == (
        'the barrier "b" has no one size: rank 0 (pid 100 on node0) said 3 with a quorum of 2, rank 1 (pid 101 on node0) said 3'
    )
    assert room.told()[0].code == "barrier-size"


# --- values ---


def test_everybody_gets_what_all_have_brought(room: Room) -> None:
    room.arrive(0, 3, value=b"zero")
    room.arrive(1, 3, value=b"one")
    last = room.arrive(2, 3, value=b"two")
    told = room.told()
    seats = tuple(
        m.Seat(room.sessions[caller].identity, value)
        for caller, value in enumerate((b"zero", b"one", b"two"))
    )
    for mine, reply in enumerate((told[0], told[1], last)):
        assert reply == m.Met(1, last.generation, last.generation, mine, seats, ())


def test_values_are_accounted_for(room: Room) -> None:
    big = bytes(5000)
    room.arrive(0, 3, value=big)
    room.arrive(1, 3, value=big)
    assert room.state.budget.used == 10_000
    room.cancel(1)
    assert room.state.budget.used == 0
    for caller in (0, 1, 2):
        room.arrive(caller, 3, value=big)
    assert room.state.budget.used == 0
    room.arrive(0, 3, value=big)
    room.die(0)
    assert room.state.budget.used == 0


def test_a_value_that_cannot_be_passed_on_is_refused_and_takes_no_seat(room: Room) -> None:
    assert room.arrive(0, 2, value=bytes(m.INLINE_BYTES + 1)).code == "value-too-large"
    assert room.arrive(0, 1024, value=bytes(m.INLINE_BYTES)).code == "value-too-large"
    small = Room(limits=m.Limits(1000, 1000, 4096, 10, 10, 10))
    assert small.arrive(0, 3, value=bytes(600)) is None
    assert small.arrive(1, 3, value=bytes(600)).code == "store-full"
    assert len(room.state.waiting) == 0


# --- a quorum ---


def test_a_quorum_is_complete_at_the_first_deadline(room: Room) -> None:
    for caller in range(4):
        room.enter(caller)
    room.arrive(0, 4, 2.0, b"a", quorum=2)
    room.now += 1.0
    room.arrive(1, 4, 50.0, b"b", quorum=2)
    told = room.pass_time(1.0)
    assert [told[caller].mine for caller in (0, 1)] == [0, 1]
    assert [seat.value for seat in told[0].seats] == [b"a", b"b"]
    assert [str(member.identity) for member in told[0].absent] == [
        "rank 2 (pid 102 on node0)",
        "rank 3 (pid 103 on node0)",
    ]


def test_without_it_the_round_breaks(room: Room) -> None:
    room.arrive(0, 4, 2.0, quorum=3)
    room.arrive(1, 4, 50.0, quorum=3)
    told = room.pass_time(2.0)
    assert type(told[0]) is m.TimedOut
    assert told[1].text.startswith(
        'the barrier "b" of 4 with a quorum of 3 is broken: rank 0 (pid 100 on node0) gave up after 2.0 s; '
    )


def test_who_missed_a_round_is_told_which_and_is_waited_for_in_the_next(room: Room) -> None:
    for caller in range(3):
        room.enter(caller)
    room.arrive(0, 3, 1.0, b"a", quorum=2)
    room.arrive(1, 3, 1.0, b"b", quorum=2)
    number = room.pass_time(1.0)[0].generation
    room.now += 2.0
    missed = room.arrive(2, 3, 1.0, b"c", quorum=2)
    assert missed.code == "barrier-missed"
    assert missed.text == (
        f'round {number} of the barrier "b" was complete with 2 of 3 (ranks 0-1; the quorum is 2); that was 2.0 s before this caller came'
    )
    assert dict(missed.details) == {"size": 3, "arrived": 2, "generation": number}
    room.arrive(0, 3, 9.0, b"a", quorum=2)
    assert (
        room.arrive(1, 3, 9.0, b"b", quorum=2) is None
    )  # not complete with those of the former round: the late one is back
    assert len(room.arrive(2, 3, 9.0, b"c", quorum=2).seats) == 3


def test_one_who_is_dead_costs_the_timeout_once(room: Room) -> None:
    for caller in range(4):
        room.arrive(caller, 4, 30.0, b"x", quorum=2)
    room.told()
    room.die(3)
    room.arrive(0, 4, 30.0, b"x", quorum=2)
    room.arrive(1, 4, 30.0, b"x", quorum=2)
    met = room.arrive(2, 4, 30.0, b"x", quorum=2)
    assert len(met.seats) == 3
    assert (
        str(met.absent[0])
        == "rank 3 (pid 103 on node0, its session ended 0.0 s ago: its connection was closed)"
    )


def test_or_not_at_all_when_he_dies_while_the_others_wait_for_him(room: Room) -> None:
    for caller in range(3):
        room.arrive(caller, 3, 30.0, b"x", quorum=2)
    room.told()
    room.arrive(0, 3, 30.0, b"x", quorum=2)
    room.arrive(1, 3, 30.0, b"x", quorum=2)
    room.die(2)
    assert len(room.told()[0].seats) == 2


def test_one_who_dies_in_his_seat_is_not_there_and_the_others_go_on(room: Room) -> None:
    for caller in range(4):
        room.enter(caller)
    for caller in range(3):
        room.arrive(caller, 4, 5.0, b"x", quorum=2)
    room.die(1)
    assert room.told() == {}
    told = room.pass_time(5.0)
    assert [seat.identity.rank for seat in told[0].seats] == [0, 2]
    assert [member.rank for member in told[0].absent] == [1, 3]


def test_until_the_quorum_cannot_be_had(room: Room) -> None:
    for caller in range(3):
        room.arrive(caller, 4, 5.0, b"x", quorum=3)
    room.die(0)
    assert room.told() == {}
    room.die(1)
    assert "the quorum of 3 cannot be had any more" in room.told()[2].text


def test_one_rank_that_dies_again_and_again_costs_nobody_the_quorum(room: Room) -> None:
    """It is started again each time: the places of the dead are the same one."""
    for caller in range(2):
        room.arrive(caller, 4, 5.0, b"x", quorum=3)
    for _ in range(5):
        room.enter(2)
        assert room.arrive(2, 4, 50.0, b"x", quorum=3) is None
        room.die(2)
        assert room.told() == {}
    room.enter(2)
    assert room.arrive(2, 4, 50.0, b"x", quorum=3) is None
    told = room.pass_time(5.0)
    assert [seat.identity.rank for seat in told[0].seats] == [0, 1, 2]
    assert [member.rank for member in told[0].absent] == [3]


def test_a_quorum_that_is_there_cannot_be_lost_by_those_who_are_not(room: Room) -> None:
    """Processes without ranks: of whom a new one is the successor nobody knows."""
    for caller in range(3):
        room.enter(caller, rank=None)
        room.arrive(caller, 5, 5.0, b"x", quorum=3)
    for caller in range(3, 9):
        room.enter(caller, rank=None)
        assert room.arrive(caller, 5, 50.0, b"x", quorum=3) is None
        room.die(caller)
        assert room.told() == {}
    assert len(room.pass_time(5.0)[0].seats) == 3


def test_who_is_interrupted_leaves_the_others_to_their_quorum_and_is_not_told_of_it(
    room: Room,
) -> None:
    for caller in range(3):
        room.arrive(caller, 4, 5.0, b"x", quorum=2)
    room.cancel(1)
    assert set(room.pass_time(5.0)) == {0, 2}
    assert room.arrive(1, 4, 5.0, b"x", quorum=2) is None


def test_who_is_interrupted_and_comes_again_is_there_once(room: Room) -> None:
    """And whoever does not come is told, as always."""
    for caller in range(3):
        room.enter(caller)
    room.arrive(0, 3, 5.0, b"x", quorum=2)
    room.arrive(1, 3, 50.0, b"x", quorum=2)
    room.cancel(1)
    room.arrive(1, 3, 50.0, b"x", quorum=2)
    met = room.pass_time(5.0)[0]
    assert [seat.identity.rank for seat in met.seats] == [0, 1]
    assert [member.rank for member in met.absent] == [2]
    assert room.arrive(2, 3, 5.0, b"x", quorum=2).code == "barrier-missed"


def test_who_is_interrupted_and_comes_again_is_told_of_once(room: Room) -> None:
    room.arrive(0, 3, 50.0, quorum=3)
    room.arrive(1, 3, 5.0, quorum=3)
    room.cancel(0)  # the quorum can be had
    room.arrive(0, 3, 50.0, quorum=3)
    broken = room.pass_time(5.0)[0]
    assert dict(broken.details) == {"size": 3, "arrived": 2}
    assert sorted(identity.rank for identity in broken.present) == [0, 1]


# --- who is missing ---


def test_it_is_told_by_the_former_round_where_there_are_no_ranks(room: Room) -> None:
    for caller in range(3):
        room.enter(caller, rank=None)
    for caller in range(3):
        room.arrive(caller, 3)
    room.told()
    room.now += 4.0
    room.sessions[2].heard = room.now - 0.4
    room.arrive(0, 3, 1.0)
    room.arrive(1, 3, 50.0)
    broken = room.pass_time(1.0)[1]
    assert broken.text.endswith(
        "2 arrived (pid 100 on node0 and pid 101 on node0), missing: pid 102 on node0 (last heard of 1.4 s ago)"
    )


def test_in_the_first_round_without_ranks_their_number_is_all_that_is_known(room: Room) -> None:
    room.enter(0, rank=None)
    room.enter(1, rank=None)
    room.arrive(0, 4, 1.0)
    reply = room.pass_time(1.0)[0]
    assert (reply.absent, reply.arrived) == ((), 1)


def test_it_is_not_guessed_which_ranks_of_a_larger_job_meet(room: Room) -> None:
    for caller in range(4):
        room.enter(caller)
    room.arrive(0, 2, 1.0)  # with rank 2, say
    assert room.pass_time(1.0)[0].absent == ()


def test_of_a_rank_that_is_over_it_is_said_why(room: Room) -> None:
    room.enter(1)
    room.die(1, "nothing was heard of it for 10 s")
    room.now += 2.5
    room.arrive(0, 2, 1.0)
    [member] = room.pass_time(1.0)[0].absent
    assert (
        str(member)
        == "rank 1 (pid 101 on node0, its session ended 3.5 s ago: nothing was heard of it for 10 s)"
    )


def test_of_a_rank_whose_process_has_ended_its_session_is_not_spoken_of() -> None:
    room = Room(
        {
            rank: Sighting(
                "node0", 100 + rank, f"ended {rank}.0 s ago with exit code 0" if rank else ""
            )
            for rank in range(3)
        }
    )
    room.enter(1)
    room.die(1, "it said goodbye")
    room.arrive(0, 3, 1.0)
    absent = room.pass_time(1.0)[0].absent
    assert [str(member) for member in absent] == [
        "rank 1 (pid 101 on node0, ended 1.0 s ago with exit code 0)",
        "rank 2 (pid 102 on node0, ended 2.0 s ago with exit code 0)",
    ]


def test_the_launcher_knows_more() -> None:
    room = Room(
        {
            rank: Sighting(
                "node0",
                100 + rank if rank < 3 else 0,
                f"running for {rank} s" if rank < 3 else "not started yet",
            )
            for rank in range(4)
        }
    )
    room.enter(1)
    room.sessions[1].heard = room.now + 0.5
    room.arrive(0, 4, 1.0)
    absent = room.pass_time(1.0)[0].absent
    assert [str(member) for member in absent] == [
        "rank 1 (pid 101 on node0, running for 1 s, last heard of 0.5 s ago)",
        "rank 2 (pid 102 on node0, running for 2 s, not connected to the store)",
        "rank 3 (not started yet)",
    ]


def test_a_size_that_no_job_of_ours_can_bring_together_is_told_as_that() -> None:
    room = Room({rank: Sighting("node0", 100 + rank, "running for 1 s") for rank in range(2)})
    room.arrive(0, 4, 1.0)
    room.arrive(1, 4, 1.0)
    assert (
        "2 arrived (ranks 0-1), missing: ranks 2-3 (this job has no such rank)"
        in room.pass_time(1.0)[1].text
    )


# --- in words ---


def identity(rank: int) -> m.Identity:
    return m.Identity("node0", 100 + rank, rank)


def stranger(number: int) -> m.Identity:
    return m.Identity("node0", 100 + number)


@pytest.mark.parametrize(
    ("them", "text"),
    [
        ([identity(3)], "rank 3 (pid 103 on node0)"),
        ([identity(rank) for rank in (*range(14), 15)], "ranks 0-13 and 15"),
        ([stranger(0)], "pid 100 on node0"),
        ([stranger(0), stranger(1)], "pid 100 on node0 and pid 101 on node0"),
        ([stranger(0), stranger(0)], "2 in pid 100 on node0"),
        (
            [stranger(number) for number in range(9)],
            "pid 100 on node0, pid 101 on node0, pid 102 on node0 and 6 more",
        ),
    ],
)
def test_who(them: list[m.Identity], text: str) -> None:
    assert attendance.who(them) == text


def test_many_who_are_missing_are_folded() -> None:
    absent = [m.Member(identity(rank), rank, "", 1.0) for rank in range(1, 14)] + [
        m.Member(None, rank) for rank in (14, 15)
    ]
    assert attendance.attendance(16, 1, [identity(0)], absent) == (
        "1 arrived (rank 0 (pid 100 on node0)), missing: rank 1 (pid 101 on node0, last heard of 1.0 s ago), "
        "rank 2 (pid 102 on node0, last heard of 1.0 s ago), rank 3 (pid 103 on node0, last heard of 1.0 s ago), ranks 4-13, "
        "ranks 14-15 (not connected to the store)"
    )


def test_of_very_many_some_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(limits=m.Limits(MIB, MIB, 4096, 10, 4000, 4000))
    monkeypatch.setattr(barriers, "PRESENT_WHOLE", 10)
    monkeypatch.setattr(barriers, "PRESENT_SHOWN", 3)
    for caller in range(20):
        room.enter(caller, rank=None)
        room.arrive(caller, 30, 5.0 if caller == 0 else 50.0)
    told = room.pass_time(5.0)
    assert (len(told[0].present), told[0].arrived) == (3, 20)
    assert (
        "20 arrived (pid 100 on node0, pid 101 on node0, pid 102 on node0 and 17 more), 10 are missing"
        in told[1].text
    )


# --- whatever happens ---

CALLERS = range(5)
NAMES = ("a", "b")
caller = st.sampled_from(CALLERS)


class Model(RuleBasedStateMachine):
    """Arrivals, interruptions, deaths and time in any order. What is asserted is what users are
    promised, from their side alone.
    """

    @initialize(quorums=st.tuples(st.none() | st.integers(1, 3), st.none() | st.integers(1, 4)))
    def begin(self, quorums: tuple[int | None, int | None]) -> None:
        self.room = Room()
        self.sizes = dict(zip(NAMES, (3, 4), strict=True))
        self.quorums = dict(zip(NAMES, quorums, strict=True))
        self.waiting: dict[
            int, tuple[str, float, int]
        ] = {}  # by caller: where, until when, since which step
        self.passed: dict[
            tuple[str, int], set[tuple[int, int]]
        ] = {}  # who (caller, of which session) was in which generation
        self.steps = 0
        self.lives: Counter[int] = Counter()
        for one in CALLERS:
            self.room.enter(one)

    @rule(
        caller=caller, name=st.sampled_from(NAMES), timeout=st.sampled_from([0.0, 3.0, 10.0, None])
    )
    def arrive(self, caller: int, name: str, timeout: float | None) -> None:
        if caller in self.waiting:
            return
        self.steps += 1
        waiters = {one for one, (where, *_) in self.waiting.items() if where == name}
        reply = self.room.arrive(
            caller, self.sizes[name], timeout, str(caller).encode(), self.quorums[name], name
        )
        told = self.room.told()
        if reply is None:
            assert not told
            self.waiting[caller] = (
                name,
                self.room.now + timeout if timeout is not None else 1e18,
                self.steps,
            )
        elif isinstance(reply, m.Met):
            self.over(name, {**told, caller: reply})
            assert set(told) == waiters
        elif isinstance(reply, m.TimedOut):
            assert timeout == 0.0
            self.over(name, {**told, caller: reply})
            assert set(told) == waiters
        else:
            assert reply.code in (
                "barrier-broken",
                "barrier-missed",
            )  # he came late: nobody else is disturbed
            assert not told

    def over(self, name: str, told: dict[int, Any]) -> None:
        """A round ended with these answers."""
        met = {one: reply for one, reply in told.items() if isinstance(reply, m.Met)}
        assert not met or met.keys() == told.keys(), "some passed and others did not"
        for one in told:
            self.waiting.pop(one, None)
        if not met:
            for reply in told.values():
                assert isinstance(reply, m.TimedOut) or reply.code == "barrier-broken"
            assert sum(isinstance(reply, m.TimedOut) for reply in told.values()) <= 1
            return
        [number] = {reply.generation for reply in met.values()}
        [seats] = {reply.seats for reply in met.values()}
        size, quorum = self.sizes[name], self.quorums[name]
        assert len(met) >= (size if quorum is None else quorum)
        assert len(met) <= size
        assert sorted(int(seat.value) for seat in seats) == sorted(met), (
            "the seats are not those who passed"
        )
        for one, reply in met.items():
            assert int(seats[reply.mine].value) == one
        assert (name, number) not in self.passed
        assert all(number > other for where, other in self.passed if where == name)
        self.passed[name, number] = {(one, self.lives[one]) for one in met}

    @rule(seconds=st.sampled_from([1.0, 3.0, 10.0]))
    def time(self, seconds: float) -> None:
        """Nobody waits longer than he said. Who is told before his time is told with somebody whose
        time it was.
        """
        self.room.now += seconds
        self.room.state.tick(self.room.now)
        self.take()
        assert all(until > self.room.now for _, until, _ in self.waiting.values())

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def interrupt(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(sorted(self.waiting)))
        name, _, _ = self.waiting.pop(one)
        self.room.cancel(one)
        self.left(name)

    @rule(one=caller)
    def die(self, one: int) -> None:
        name = self.waiting.pop(one)[0] if one in self.waiting else None
        self.room.die(one)
        self.lives[one] += 1
        if name is not None:
            self.left(name)
        else:
            self.take()  # with a quorum the others need not wait for him
        self.room.enter(one)

    def left(self, name: str) -> None:
        others = {one for one, (where, *_) in self.waiting.items() if where == name}
        told = self.take()
        if self.quorums[name] is None:
            assert others <= set(
                told
            )  # and those of a quorum elsewhere who waited for nobody but him

    def take(self) -> dict[int, Any]:
        """Sort what was told by the place where it was."""
        told = self.room.told()
        for name in NAMES:
            waited = {one for one, (where, *_) in self.waiting.items() if where == name}
            here = {one: reply for one, reply in told.items() if one in waited}
            if here:
                assert set(here) == waited, "not all learned it at once"
                self.over(name, here)
        return told

    @invariant()
    def who_waits_is_known(self) -> None:
        if not hasattr(self, "room"):
            return
        state: Any = self.room.state
        assert {one for one in CALLERS if self.room.sessions[one].waiting} == set(self.waiting)
        assert set(state._barriers._generations) == {where for where, *_ in self.waiting.values()}
        expecting = {
            name
            for name, generation in state._barriers._generations.items()
            if generation.expected is not None
        }
        assert set(state._barriers._expecting) == expecting
        assert not any(session.kept for session in self.room.sessions.values())
        assert state.budget.used == len(self.waiting)  # one byte each


Model.TestCase.settings = tries(150, stateful_step_count=40)
TestModel = Model.TestCase
