"""One attempt to open a conversation: which sockets it makes when, and what it takes a connection
for.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Iterator

import pytest

import rallypoint
from rallypoint.clock import Clock
from rallypoint.host import probe
from rallypoint.store.address import Address
from rallypoint.store.client import connect as dials
from rallypoint.store.client import reconnect
from rallypoint.store.client.connect import DialFailed, dial
from rallypoint.store.server.server import Server
from rallypoint.testing import ChaosProxy
from rallypoint.wire.handshake import Joining
from rallypoint.wire.messages import Identity

from .situations import DEADLINE, Interruption, alarm, descriptors, eventually

SECRET = b"a secret of sixteen bytes or more"


def greet() -> Joining:
    identity = Identity("host", 1)
    return Joining(
        SECRET,
        "",
        "0",
        session=os.urandom(16),
        nonce=os.urandom(32),
        identity=identity,
        ttl=10.0,
        resume=False,
        acked=0,
    )


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(secret=SECRET, max_bytes="16MiB", local=False) as made:
        yield made


@pytest.fixture
def deaf() -> Iterator[tuple[str, int]]:
    """An address that does not answer at all: the queue of its listener is full, and the kernel
    drops what comes.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        name = listener.getsockname()
        callers = [socket.socket() for _ in range(4)]
        for caller in callers:
            caller.setblocking(False)
            caller.connect_ex(name)
        yield name
        for caller in callers:
            caller.close()


def pair_of(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def of_name(monkeypatch: pytest.MonkeyPatch, *places: tuple[str, int]) -> list[Address]:
    """A name that has these addresses."""
    entries = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **named: entries)
    return [Address("several.test", 1)]


def test_all_addresses_of_a_name_are_tried_however_short_the_time(
    server: Server, deaf: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty that do not answer before the one that does: a quarter of a second each would
    be five.
    """
    host, port = pair_of(server.address)
    clock = Clock()
    before = descriptors()
    opened = dial(
        of_name(monkeypatch, *[deaf] * 20, (host, port)), greet, clock.monotonic() + 2.0, clock
    )
    assert opened.where == f"{host}:{port}"
    opened.sock.close()
    eventually(lambda: descriptors() == before)  # the server's end, too


@pytest.mark.parametrize("hangs", [True, False])
def test_a_name_without_an_address_does_not_hide_the_other_addresses(
    server: Server, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """Its resolver gives no answer, or says that there is none. It is asked once for all ports."""
    name, asked, end = f"nowhere-{hangs}.test", [], threading.Event()

    def getaddrinfo(host: str, port: int, **_: object) -> list[object]:
        asked.append(host)
        if hangs:
            end.wait()
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    host, port = pair_of(server.address)
    places = [
        *[Address(name, number) for number in range(1, 9)],
        Address(host, port),
    ]
    clock = Clock()
    try:
        opened = dial(places, greet, clock.monotonic() + 2.0, clock)
        assert opened.address == places[-1]
        opened.sock.close()
        assert asked == [name]
        with pytest.raises(DialFailed) as caught:
            dial(places[:-1], greet, clock.monotonic() + 0.1, clock)
        assert [failure.reason for failure in caught.value.failures] == ["unresolved"]
    finally:
        end.set()


def test_the_next_address_is_tried_beside_the_first_and_not_instead(
    server: Server, deaf: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow address is not given up for a later one that is refused."""
    monkeypatch.setattr(dials, "STAGGER", 0.05)
    host, port = pair_of(server.address)
    order: list[int] = []
    real = probe.connecting

    def open_socket(family: socket.AddressFamily, sockaddr: tuple[object, ...]) -> socket.socket:
        order.append(int(str(sockaddr[1])))
        return real(family, sockaddr)

    clock = Clock()
    opened = dial(
        of_name(monkeypatch, deaf, ("127.0.0.1", 1), (host, port)),
        greet,
        clock.monotonic() + DEADLINE,
        clock,
        open_socket,
    )
    assert order == [deaf[1], 1, port]
    opened.sock.close()


def test_a_lost_first_packet_costs_no_second_of_the_kernels(
    server: Server, deaf: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address is tried once more beside the attempt that has not connected."""
    monkeypatch.setattr(dials, "STAGGER", 0.05)
    before = descriptors()
    places = [deaf, deaf, pair_of(server.address)]
    real = probe.connecting

    def open_socket(family: socket.AddressFamily, sockaddr: tuple[object, ...]) -> socket.socket:
        return real(family, places.pop(0))

    clock = Clock()
    address = Address("127.0.0.1", 1)
    opened = dial([address], greet, clock.monotonic() + DEADLINE, clock, open_socket)
    assert (opened.address, places) == (address, [])
    opened.sock.close()
    eventually(lambda: descriptors() == before)


def test_an_address_that_is_tried_several_times_is_one_failure(
    deaf: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dials, "STAGGER", 0.05)
    clock = Clock()
    with pytest.raises(DialFailed) as caught:
        dial([Address(*deaf)], greet, clock.monotonic() + 0.5, clock)
    assert [failure.reason for failure in caught.value.failures] == ["unreachable"]


def test_what_was_never_tried_does_not_hide_what_was(
    deaf: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with pytest.raises(DialFailed) as caught:
        dial(of_name(monkeypatch, *[deaf] * 3), greet, clock.monotonic() + 0.2, clock)
    assert {failure.reason for failure in caught.value.failures} == {"unreachable"}
    assert not any("not tried" in failure.text for failure in caught.value.failures)


def test_a_refusal_that_came_while_we_had_no_turn_is_one() -> None:
    """On a busy machine: between asking and the deadline this process did not run. Nobody dropped a
    packet.
    """
    clock = Clock()
    deadline = clock.monotonic() + 0.05

    def open_socket(family: socket.AddressFamily, sockaddr: tuple[object, ...]) -> socket.socket:
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            for _ in range(
                4
            ):  # its queue is full: the kernel drops what comes, until nobody listens any more
                caller = stack.enter_context(socket.socket())
                caller.setblocking(False)
                caller.connect_ex(listener.getsockname())
            sock = probe.connecting(family, listener.getsockname())
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        assert poll.poll(DEADLINE * 1000), "the kernel asks again after a second, and is refused"
        assert clock.monotonic() > deadline
        return sock

    with pytest.raises(DialFailed) as caught:
        dial([Address("127.0.0.1", 9)], greet, deadline, clock, open_socket)
    assert [(failure.reason, failure.text) for failure in caught.value.failures] == [
        ("refused", "nothing listens there")
    ]


def test_a_socket_that_is_connected_with_itself_is_no_server() -> None:
    """The kernel may give a client the very port that it wants to reach, and TCP then connects the
    two ends of one socket. Taken for a server, that would be a foreign one, which is final."""

    def open_socket(family: socket.AddressFamily, sockaddr: tuple[object, ...]) -> socket.socket:
        sock = socket.socket(family)
        sock.bind(("127.0.0.1", 0))
        sock.connect(sock.getsockname())
        assert sock.getsockname() == sock.getpeername()
        sock.setblocking(False)
        return sock

    clock = Clock()
    with pytest.raises(DialFailed) as caught:
        dial([Address("127.0.0.1", 9)], greet, clock.monotonic() + DEADLINE, clock, open_socket)
    assert caught.value.told.reason == "refused"


def test_what_was_opened_is_closed_when_a_handler_raises(
    deaf: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()
    clock = Clock()
    with alarm(0.1, _interrupt), pytest.raises(Interruption):
        dial(of_name(monkeypatch, *[deaf] * 5), greet, clock.monotonic() + DEADLINE, clock)
    assert clock.elapsed() < DEADLINE / 5
    assert descriptors() == before


def _interrupt() -> None:
    raise Interruption


def test_a_server_that_is_late_gets_more_time_with_each_attempt(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is given up and made again is work done twice, for a server that is late
    because there is too much of it."""
    monkeypatch.setattr(reconnect, "ATTEMPT_SECONDS", 0.2)
    with ChaosProxy(server.address) as proxy:
        proxy.latency(0.15)  # two round trips take 0.6 s at least
        with rallypoint.connect(proxy.address, secret=SECRET, timeout=DEADLINE) as store:
            assert store.add("n") == 1
