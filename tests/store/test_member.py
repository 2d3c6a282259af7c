"""A node's session: when others learn of its death, when it learns that it counts as dead, and at
which of several places it finds its server.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import rallypoint
from rallypoint.clock import Clock
from rallypoint.errors import SessionLost, StoreUnreachable
from rallypoint.host.probe import connecting, set_for_signs_of_life
from rallypoint.store.client.member import Member
from rallypoint.store.limits import ORPHAN
from rallypoint.store.server.server import Server
from rallypoint.testing import ChaosProxy

from .live import DEADLINE, Thread, running, until
from .processes import SECRET, ServerProcess

JOB = "job7"
LONG = 3600.0
"""A lease that no test waits for: what happens then happens for another reason."""

LATE = 5.0
"""Seconds that something may happen later, on a busy machine."""

NODE = """
import sys
from rallypoint.store.client.member import Member
member = Member.join([("127.0.0.1", int(sys.argv[1]))], bytes.fromhex(sys.argv[2]), job="job7", ttl=float(sys.argv[3]))
member.set("node/1", b"here", ephemeral=True)
sys.stdin.read()
"""


@pytest.fixture
def server() -> Iterator[Server]:
    listener = socket.create_server(("127.0.0.1", 0))
    with Server(listeners=[listener], secret=SECRET, job=JOB, local=False) as made:
        yield made


def place(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


@contextmanager
def joined(
    *addresses: str,
    job: str = JOB,
    ttl: float = LONG,
    timeout: float = DEADLINE,
    patience: float = 0.0,
    source: str = "",
) -> Iterator[Member]:
    with Member.join(
        [place(address) for address in addresses],
        SECRET,
        job=job,
        ttl=ttl,
        timeout=timeout,
        patience=patience,
        source=source,
    ) as member:
        yield member


# --- death ---


def test_a_killed_node_is_known_as_soon_as_it_cannot_have_come_back(server: Server) -> None:
    with joined(server.address) as lead:
        changes = lead.watch("node/", timeout=DEADLINE)
        port = str(place(server.address)[1])
        with running(NODE, port, SECRET.hex(), str(LONG)) as process:
            assert next(changes).value == b"here"
            clock = Clock()
            os.kill(process.pid, signal.SIGKILL)
            assert next(changes).value is rallypoint.ABSENT
            assert ORPHAN - 0.1 < clock.elapsed() < ORPHAN + 0.1 + LATE


def test_a_stopped_node_is_known_by_its_lease(server: Server) -> None:
    with joined(server.address) as lead:
        changes = lead.watch("node/", timeout=DEADLINE)
        port = str(place(server.address)[1])
        with running(NODE, port, SECRET.hex(), "1.0") as process:
            assert next(changes).value == b"here"
            clock = Clock()
            os.kill(process.pid, signal.SIGSTOP)
            assert next(changes).value is rallypoint.ABSENT
            assert 0.6 < clock.elapsed() < 1.0 + LATE
            os.kill(process.pid, signal.SIGCONT)


@pytest.mark.parametrize("waits", [True, False])
def test_a_node_whose_connections_are_reset_lives_on(
    server: Server, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if none of its threads waits at a connection, and so sees the reset at once."""
    patience = 4 * ORPHAN  # a busy machine takes half of ORPHAN to connect again
    monkeypatch.setattr("rallypoint.store.client.member.ORPHAN", patience)
    with (
        ChaosProxy(server.address) as proxy,
        joined(server.address) as lead,
        joined(proxy.address) as member,
    ):
        member.set("node/1", b"here", ephemeral=True)
        changes = lead.watch("node/", timeout=patience + 0.5)
        waiting = Thread(member.wait, "go") if waits else None
        for number in range(4):
            reset(proxy, member)
            assert lead["node/1"] == b"here", number
        with pytest.raises(rallypoint.StoreTimeout):  # and nothing happens later
            next(changes)
        assert member.left > LONG / 2
        lead["go"] = 1
        assert waiting is None or waiting.result() == 1


def reset(proxy: ChaosProxy, member: Member) -> None:
    """Reset all connections, and wait until there is another one."""
    before = member.statistics()["reconnects"]
    proxy.reset()
    until(lambda: member.statistics()["reconnects"] > before)


def test_a_node_that_is_cut_off_learns_that_others_take_it_for_dead(server: Server) -> None:
    with ChaosProxy(server.address) as proxy, joined(proxy.address, ttl=1.0) as member:
        member.set("node/1", b"here", ephemeral=True)
        assert 0.0 < member.left <= 1.0
        with joined(server.address) as lead:
            changes = lead.watch("node/", timeout=DEADLINE)
            with proxy.black_hole():
                clock = Clock()
                until(lambda: member.left == 0.0)
                knew = clock.elapsed()
                assert member.how_lost == "lease over"
                assert next(changes).value is rallypoint.ABSENT
                assert knew <= clock.elapsed()
                assert knew < 1.0 + LATE
            with pytest.raises(SessionLost):
                member.get("x")
            with pytest.raises(SessionLost):  # it is not replaced
                member.get("x")
            assert member.left == 0.0
            assert "node/1" not in lead


def test_the_death_of_the_server_is_known_before_the_lease_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rallypoint.store.client.client.BYE_SECONDS", 6 * LATE)
    with ServerProcess() as server, joined(server.address, job="") as member:
        assert member.left > LONG / 2
        clock = Clock()
        server.kill()
        until(lambda: member.left == 0.0)
        assert ORPHAN - 0.1 < clock.elapsed() < 2 * ORPHAN + LATE
        assert member.how_lost == "connection ended"
        clock = Clock()
        member.close()
        assert clock.elapsed() < 3 * LATE, "it waited for an answer of a dead server"


def test_a_server_that_says_that_it_ends_is_known_by_that(server: Server) -> None:
    with joined(server.address) as member:
        server.stop("enough for today")
        until(lambda: member.left == 0.0)
        assert member.how_lost == "goodbye"


def test_a_server_that_stands_still_is_not_taken_for_dead() -> None:
    """The client closes connections that bring no answer: that does not count."""
    with ServerProcess() as server, joined(server.address, job="", timeout=1.0) as member:
        member.set("node/1", b"here", ephemeral=True)
        server.stop()
        for _ in range(2):
            with pytest.raises(rallypoint.StoreTimeout):
                member.get("x")
        assert member.left > LONG / 2
        server.go_on()
        until(lambda: member.local_address != "")
        assert member["node/1"] == b"here"


def test_an_answer_may_take_longer_than_the_first_connection() -> None:
    with (
        ServerProcess() as server,
        joined(server.address, job="", timeout=1.5, patience=DEADLINE) as member,
    ):
        server.stop()
        late = threading.Timer(2.0, server.go_on)
        late.start()
        member["x"] = 1
        late.join()
        assert member["x"] == 1


def test_a_call_that_waits_gives_the_signs_of_life(server: Server) -> None:
    """The thread gives none beside it: a lead of 500 nodes would have twice the work."""
    with joined(server.address, ttl=2.0) as member:
        with pytest.raises(rallypoint.StoreTimeout):
            member.wait("none", 1.8)
        assert member.left > 1.0
        assert member.statistics()["operations"].get("Ping", 0) <= 2


def test_a_server_that_gives_no_answer_gets_three_signs_of_life_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TCP repeats them as long as they are few, and those of 500 nodes are no load for a server
    that is late."""
    monkeypatch.setattr("rallypoint.store.client.member.SIGNS", 200)
    with ServerProcess() as server, joined(server.address, job="", ttl=4.0) as member:
        server.stop()
        before = member.statistics()["bytes_sent"]
        with pytest.raises(rallypoint.StoreTimeout):
            member.wait("none", 2.0)
        sent = member.statistics()["bytes_sent"] - before
        server.go_on()
    assert sent < 500, "a hundred of them are more"


def test_lost_messages_are_repeated_as_often_whatever_the_machine_is_set_to() -> None:
    """BBR keeps the kernel from doing so; a listener hands its setting on."""

    def control(sock: socket.socket) -> bytes:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        set_for_signs_of_life(listener)
        with (
            connecting(
                socket.AF_INET, listener.getsockname(), set_options=set_for_signs_of_life
            ) as caller,
            listener.accept()[0] as accepted,
        ):
            assert control(caller) == control(accepted) == b"reno"


# --- the place ---


def test_a_node_connects_from_the_address_that_it_is_given(server: Server) -> None:
    with joined(server.address, source="127.0.0.5") as member:
        assert member.local_address == "127.0.0.5"


def test_the_server_of_the_job_is_found_among_others(server: Server) -> None:
    with (
        Server(secret=SECRET, job="job8", local=False) as other,
        Server(secret=b"another secret of another job", local=False) as foreign,
        socket.socket() as free,
    ):
        free.bind(("127.0.0.1", 0))
        nobody = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        with joined(nobody, other.address, foreign.address, server.address) as member:
            assert member.address == server.address
            assert member.local_address == "127.0.0.1"
            member["x"] = 1
        with pytest.raises(StoreUnreachable) as caught, joined(other.address, foreign.address):
            pass
        assert caught.value.code == "wrong-secret"
        with pytest.raises(StoreUnreachable) as caught, joined(other.address):
            pass
        assert caught.value.code == "wrong-job"
        with (
            pytest.raises(StoreUnreachable) as caught,
            joined(nobody, other.address, foreign.address, timeout=1.5),
        ):
            pass
    (line,) = [line for line in caught.value.why if "attempts" in line]
    for address in (nobody, other.address, foreign.address):
        assert address.removeprefix("tcp://") in line, line
    assert "this is the store of job job8, not of job7" in line


def test_a_server_that_comes_late_is_found_though_others_refuse() -> None:
    with (
        Server(secret=SECRET, job="job8", local=False) as other,
        ChaosProxy(other.address) as proxy,
        socket.socket() as listener,
    ):
        listener.bind(("127.0.0.1", 0))  # nobody listens yet
        late = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        places = [place(proxy.address), place(late)]
        joining = Thread(lambda: Member.join(places, SECRET, job=JOB, ttl=LONG, timeout=DEADLINE))
        proxy.wait_for(lambda seen: seen.connections >= 3)
        listener.listen()
        with (
            Server(listeners=[listener.dup()], secret=SECRET, job=JOB, local=False),
            joining.result() as member,
        ):
            assert member.address == late
            assert member.add("x") == 1
