"""Who computes, who waits, who is told what: the server's half of `once`."""

from __future__ import annotations

from typing import Any

import pytest

from rallypoint.wire import messages as m

from .test_state import Blob, Client, Store


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def a(store: Store) -> Client:
    return store.client(0)


@pytest.fixture
def b(store: Store) -> Client:
    return store.client(1)


def test_a_failure_says_who_failed_at_what(store: Store, a: Client, b: Client) -> None:
    a.ask(m.Claim, "data", None)
    b.ask(m.Claim, "data", None)
    a.ask(m.Resolve, "data", b"\x07", failed=True)
    [(_, failed)] = store.woken()
    assert isinstance(failed, m.Failed)
    assert failed.text == 'once("data") failed in rank 0 (pid 100 on node0)'


def test_several_threads_of_one_session_are_several_callers(store: Store, a: Client) -> None:
    assert isinstance(a.send(a.request(m.Claim, "data", None)), m.Granted)
    assert a.send(a.request(m.Claim, "data", None)) is None
    assert isinstance(a.send(a.request(m.Resolve, "data", b"\x07")), m.Done)
    [(rank, value)] = store.woken()
    assert isinstance(value, m.Value)
    assert (rank, value.value) == (0, b"\x07")


def test_who_waits_is_not_told_when_somebody_in_front_gives_up(
    store: Store, a: Client, b: Client
) -> None:
    c = store.client(2)
    a.ask(m.Claim, "data", None)
    b.ask(m.Claim, "data", None)
    c.ask(m.Claim, "data", None)
    b.end()
    assert store.woken() == []
    a.ask(m.Resolve, "data", b"", retry=True)
    assert [(rank, type(reply)) for rank, reply in store.woken()] == [(2, m.Granted)]


def test_a_value_for_which_there_is_no_room_leaves_the_claim(
    store: Store, a: Client, b: Client
) -> None:
    """So that the one who computed can tell the others."""
    small = Store(m.Limits(10_000, 10_000, 4096, 100, 100, 100))
    a, b = small.client(0), small.client(1)
    a.ask(m.Claim, "data", None)
    b.ask(m.Claim, "data", None)
    assert a.ask(m.Resolve, "data", b"x" * 9999).code == "store-full"
    assert small.woken() == []
    a.ask(m.Resolve, "data", b"\x01", failed=True)
    assert [type(reply) for _, reply in small.woken()] == [m.Failed]


def test_an_outcome_after_the_claim_was_passed_on_changes_nothing(
    store: Store, a: Client, b: Client
) -> None:
    a.ask(m.Claim, "data", None)
    b.ask(m.Claim, "data", None)
    a.ask(m.Resolve, "data", b"", retry=True)
    assert isinstance(a.ask(m.Resolve, "data", b"\x01"), m.Absent)
    assert isinstance(a.ask(m.Resolve, "data", b"\x01", failed=True), m.Absent)
    assert isinstance(a.ask(m.Resolve, "data", b"", retry=True), m.Absent)
    store.woken()
    b.ask(m.Resolve, "data", b"\x02")
    assert a.ask(m.Claim, "data", None).value == b"\x02"


def test_a_large_value_goes_to_all_who_wait_and_is_stored_once(
    store: Store, a: Client, b: Client
) -> None:
    c = store.client(2)
    a.ask(m.Claim, "data", None)
    b.ask(m.Claim, "data", None)
    c.ask(m.Claim, "data", None)
    value = Blob(1 << 20)
    a.ask(m.Resolve, "data", b"", large=value)
    woken, store.state.woken = store.state.woken, []
    assert [(session.identity.rank, getattr(reply, "value", None)) for session, reply in woken] == [
        (1, value),
        (2, value),
    ]
    for client in (a, b, c):
        client.ask(m.Ping)
    assert 1 << 20 < store.used < (1 << 20) + 1000


@pytest.mark.parametrize(
    "how", [{}, {"failed": True}, {"retry": True}], ids=["value", "failure", "retry"]
)
def test_a_late_outcome_does_not_end_the_next_claim_of_the_same_session(
    store: Store, a: Client, b: Client, how: dict[str, Any]
) -> None:
    """Another thread of it computes now."""
    first = a.ask(m.Claim, "data", None)
    a.ask(m.Resolve, "data", b"", retry=True, token=first.token)
    second = a.ask(m.Claim, "data", None)
    b.ask(m.Claim, "data", None)
    assert isinstance(a.ask(m.Resolve, "data", b"\x01", token=first.token, **how), m.Absent)
    assert store.woken() == []
    assert isinstance(a.ask(m.Resolve, "data", b"\x02", token=second.token), m.Done)
    assert [reply.value for _, reply in store.woken() if isinstance(reply, m.Value)] == [b"\x02"]
