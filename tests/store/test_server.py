"""A server's life: start, addresses, sessions, stop; and that nothing of it is left."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import resource
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rallypoint
from rallypoint.clock import Clock
from rallypoint.errors import EnvironmentProblem, UsageError
from rallypoint.host import system_calls
from rallypoint.primitives.store import connect
from rallypoint.store.limits import limits
from rallypoint.store.server import connection as peers
from rallypoint.store.server import requests
from rallypoint.store.server import server as servers
from rallypoint.store.server import server_loop as loops
from rallypoint.store.server.connection import Body, Peer
from rallypoint.store.server.server import Server, serve
from rallypoint.store.state.quotas import Budget, Refused
from rallypoint.testing import ChaosProxy
from rallypoint.wire.messages import (
    Absent,
    Add,
    Bye,
    Closing,
    Done,
    Exists,
    Get,
    Granted,
    Integer,
    Lock,
    Names,
    Ping,
    Set,
    State,
    Status,
    TimedOut,
    Value,
    encode,
)

from .raw import DEADLINE, Closed, In1970, Raw, plug, refused


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(max_bytes="64MiB", clock=In1970()) as made:
        yield made


def descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


def until(what: Callable[[], bool], seconds: float = DEADLINE) -> bool:
    """Whether something comes true in time. For what can only be looked at."""
    clock = Clock()
    pause = threading.Event()
    while not what():
        if clock.elapsed() > seconds:
            return False
        pause.wait(0.005)
    return True


def test_requests_over_tcp_and_over_the_unix_socket(server: Server) -> None:
    with Raw(server.address, server.secret) as far:
        assert far.welcome.limits == server.limits
        with Raw(f"unix://{far.welcome.local}", server.secret) as near:
            assert far.ask(Set, "k", b"\x01") == Done(1, 1)
            assert near.ask(Get, "k") == Value(1, 1, 1, b"\x01")
            assert near.ask(Add, "k", 4) == Integer(2, 2, 5)
            assert far.ask(Get, "none") == Absent(2, 2)
            state = far.ask(Status)
            assert isinstance(state, State)
            assert (state.keys, state.sessions) == (1, 2)


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    with Raw(server.address, server.secret) as client:
        for _ in range(5000):
            client.post(Add, "n", 1)
        assert [client.reply().number for _ in range(5000)] == list(range(1, 5001))


def test_a_request_in_single_bytes(server: Server) -> None:
    from rallypoint.wire.frames import header
    from rallypoint.wire.messages import encode

    with Raw(server.address, server.secret) as client:
        message = encode(Add(1, 0, "n", 7))
        for byte in header(len(message)) + message:
            client.sock.sendall(bytes([byte]))
        assert client.reply() == Integer(1, 1, 7)


def test_who_waits_is_answered_by_another_and_by_the_clock(server: Server) -> None:
    with Raw(server.address, server.secret) as waiter, Raw(server.address, server.secret) as writer:
        waiter.post(Get, "soon", DEADLINE)
        waiter.post(Get, "never", 0.05)
        assert waiter.reply() == TimedOut(2, 0, ("never",))
        writer.ask(Set, "soon", b"\x07")
        assert waiter.reply() == Value(1, 1, 1, b"\x07")


def test_a_session_has_several_connections(server: Server) -> None:
    """Each has its own answers, unless a request came again on a newer one: then its answer goes
    there, wherever an old copy is read.
    """
    with Raw(server.address, server.secret) as first:
        with Raw(server.address, server.secret, session=first.session, resume=True) as second:
            first.post(Add, "n", 1)
            assert first.reply().number == 1
            second.say(encode(Add(1, 0, "n", 1)))
            assert second.reply().number == 1, "the same seq is the same request"
            first.post(Get, "later", DEADLINE)
            first.ask(Ping)
            second.say(encode(Get(2, 0, "later", DEADLINE)))
            second.say(encode(Ping(0, 0)))
            assert type(second.reply()) is Done
            first.say(encode(Get(2, 0, "later", DEADLINE)))  # a copy that was late
            first.ask(Ping)
            first.post(Set, "later", b"\x01")
            assert second.reply().value == b"\x01"
            assert first.reply().seq == 5
        assert first.ask(Get, "later").value == b"\x01"


def test_a_session_ends_when_nothing_is_heard_of_it(server: Server) -> None:
    with (
        Raw(server.address, server.secret, ttl=1.0) as client,
        Raw(server.address, server.secret) as other,
    ):
        client.ask(Set, "mine", b"\x01", ephemeral=True)
        client.post(Add, "n", 1)
        assert until(lambda: isinstance(other.ask(Get, "mine"), Absent))
        client.post(Ping)
        assert client.reply() == Integer(2, 2, 1)
        with pytest.raises(Closed):
            client.reply()
    refusal = refused(server.address, server.secret, session=client.session, resume=True, acked=1)
    assert (refusal.code, refusal.known, refusal.happened) == ("session-lost", True, (2,))


def test_every_request_is_a_sign_of_life(server: Server) -> None:
    with Raw(server.address, server.secret, ttl=1.5) as client:
        client.ask(Set, "mine", b"\x01", ephemeral=True)
        clock = Clock()
        while clock.elapsed() < 3.6:
            assert isinstance(client.ask(Get, "mine"), Value)
            threading.Event().wait(0.1)


def test_bye_ends_the_session(server: Server) -> None:
    with Raw(server.address, server.secret) as client:
        client.ask(Set, "mine", b"\x01", ephemeral=True)
        assert isinstance(client.ask(Bye), Done)
        with Raw(server.address, server.secret) as other:
            assert isinstance(other.ask(Get, "mine"), Absent)


def test_stop_tells_the_clients_after_everything_that_was_on_its_way(server: Server) -> None:
    with Raw(server.address, server.secret) as idle, Raw(server.address, server.secret) as waiter:
        waiter.ask(Ping)
        waiter.post(Get, "never", DEADLINE)
        waiter.post(Exists, ("none",))
        assert waiter.reply() == Names(3, 0, ())
        server.stop("enough for today")
        for client in (idle, waiter):
            assert client.reply() == Closing(0, 0, "enough for today")
            with pytest.raises(Closed):
                client.reply()
    with pytest.raises(OSError, match="refused"):
        plug(server.address)
    server.stop()


def test_stop_from_two_threads_and_a_server_that_never_served() -> None:
    idle = Server(max_bytes="2MiB", clock=In1970())
    idle.stop()
    idle.stop()
    assert repr(idle) == f"<Server {idle.address}: stopped>"
    idle.serve_forever()  # returns at once
    with pytest.raises(UsageError, match="a server is started once"):
        idle.start()
    running = serve(max_bytes="2MiB")
    threads = [threading.Thread(target=running.stop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()


def test_serve_forever_serves_in_this_thread() -> None:
    server = Server(max_bytes="2MiB", clock=In1970())
    answers: list[object] = []

    def client() -> None:
        with Raw(server.address, server.secret) as raw:
            answers.append(raw.ask(Ping))
        server.stop()

    thread = threading.Thread(target=client)
    thread.start()
    server.serve_forever()
    thread.join(DEADLINE)
    assert answers == [Done(1, 0)]


def test_adopt_serves_a_connected_socket(server: Server) -> None:
    ours, theirs = socket.socketpair()
    server.adopt(theirs)
    with Raw(ours, server.secret) as client:
        assert client.ask(Add, "n", 2).number == 2


def test_listeners_that_are_given() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with Server(
        max_bytes="2MiB", listeners=[listener], address=f"tcp://localhost:{port}", local=False
    ) as server:
        assert server.address == f"tcp://localhost:{port}"
        with Raw(f"tcp://127.0.0.1:{port}", server.secret) as client:
            assert client.welcome.local == ""
    assert listener.fileno() == -1


def test_ipv6() -> None:
    try:
        server = Server(host="::1", max_bytes="2MiB")
    except EnvironmentProblem:
        pytest.skip("no IPv6 here")
    with server:
        assert server.address.startswith("tcp://[::1]:")
        with Raw(server.address, server.secret) as client:
            client.ask(Ping)


def test_a_port_that_is_taken_is_refused_with_its_holder() -> None:
    with Server(max_bytes="2MiB", clock=In1970()) as first:
        port = int(first.address.rpartition(":")[2])
        before = descriptors()
        with pytest.raises(EnvironmentProblem, match=f"pid {os.getpid()}") as caught:
            Server(port=port)
        assert caught.value.code == "port-in-use"
        assert caught.value.help[0][1] == "port=0"
        assert descriptors() == before


def test_a_secret_that_could_be_guessed_is_refused() -> None:
    with pytest.raises(UsageError, match="16"):
        Server(secret="too short")


@pytest.mark.parametrize("host", ["", " ", None])
def test_no_host_is_not_every_host(host: str) -> None:
    with pytest.raises(UsageError, match=f"host={host!r} is not an address to listen on"):
        Server(host=host, max_bytes="2MiB")


def test_a_port_may_be_text() -> None:
    with Server(max_bytes="2MiB", clock=In1970()) as first:
        port = first.address.rpartition(":")[2]
        with pytest.raises(EnvironmentProblem, match=f"port {port} on 127.0.0.1 is taken"):
            Server(port=port, max_bytes="2MiB")
    with Server(port="0", max_bytes="2MiB"):
        pass


@pytest.mark.parametrize("port", ["http", "", "-1", "1" * 5000, None, 29500.0, True, -1, 65536])
def test_what_is_no_port(port: object) -> None:
    with pytest.raises(UsageError, match="is no port number") as caught:
        Server(port=port, max_bytes="2MiB")  # type: ignore[arg-type]
    assert caught.value.code == "port-invalid"


def test_help_is_given_in_the_terms_of_the_caller() -> None:
    with pytest.raises(UsageError) as caught:
        Server(max_bytes=10)
    assert caught.value.help == (("give the unit", 'max_bytes="2GiB"'),)


@pytest.mark.parametrize(("size", "told"), [(600 * 1024, True), (1000, False)])
def test_a_full_store_says_that_a_large_value_needs_room_beside_the_old_one(
    size: int, told: bool
) -> None:
    budget = Budget(limits("1MiB"))
    budget.used = 1024 * 1024 - 10
    with pytest.raises(Refused, match=f"{size} bytes do not fit") as refused:
        budget.check_value(size, size)
    assert ("room for both" in str(refused.value)) == told


def test_all_addresses_only_when_asked_and_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rallypoint"), Server(max_bytes="2MiB", clock=In1970()):
        assert not caplog.records
        with Server(host="0.0.0.0", max_bytes="2MiB"):
            assert [
                record.message for record in caplog.records if "all addresses" in record.message
            ]


def test_accepted_connections_inherit_the_options_of_the_listener(server: Server) -> None:
    with Raw(server.address, server.secret):
        assert server._loop is not None
        ((peer,),) = server._loop._by_session.values()
        option = peer.sock.getsockopt
        assert option(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert option(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
        assert not peer.sock.getblocking()


def test_no_name_is_ever_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for name in ("gethostbyaddr", "getnameinfo", "getfqdn", "getaddrinfo"):
        monkeypatch.setattr(socket, name, lambda *_, name=name: asked.append(name))
    with Server(max_bytes="2MiB", clock=In1970()) as server:
        monkeypatch.undo()
        with Raw(server.address, server.secret) as client:
            client.ask(Ping)
    assert not asked


def test_the_limit_of_open_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        Server(max_bytes="2MiB", clock=In1970()).stop()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_nothing_is_left_after_a_thousand_connections() -> None:
    with Server(max_bytes="2MiB", clock=In1970()):  # whatever is imported or opened once
        pass
    gc.collect()
    before, threads = descriptors(), threading.active_count()
    with Server(max_bytes="64MiB", clock=In1970()) as server:
        with Raw(server.address, server.secret) as first:
            path = first.welcome.local
            for index in range(1000):
                with Raw(
                    server.address if index % 2 else f"unix://{path}", server.secret
                ) as client:
                    client.ask(Add, "n", 1)
                    if index % 100 == 0:
                        client.ask(Set, f"k{index}", b"", body=bytes(2 << 20))
            assert first.ask(Add, "n", 0).number == 1000
            assert until(lambda: server._loop is not None and len(server._loop._peers) == 1)
        assert os.path.exists(path)
    assert not os.path.exists(os.path.dirname(path))
    assert threading.active_count() == threads
    assert descriptors() == before


def links(folder: str) -> set[str]:
    """What the links in a folder point to, without those that go while one looks."""
    found = set()
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"{folder}/{name}"))
    return found


def test_a_forked_child_keeps_neither_port_nor_connections(server: Server) -> None:
    with Raw(server.address, server.secret) as client:
        client.ask(Set, "large", b"", body=bytes(2 << 20))
        loop = server._loop
        assert loop is not None
        parents = [
            *loop._listeners,
            *loop._peers,
            *(segment.fileno() for segment in loop._values.segments),
        ]
        assert len(parents) == 4
        blocked, release = os.pipe()
        child = os.fork()
        if not child:
            os.close(release)
            os.read(blocked, 1)  # until the parent has looked
            os._exit(0)
        try:
            # The child's `after fork` code has run when it waits for the pipe.
            kept = {os.readlink(f"/proc/self/fd/{fd}") for fd in parents}
            assert until(lambda: not kept & links(f"/proc/{child}/fd"))
            server.stop()
            assert isinstance(client.reply(), Closing)
            with pytest.raises(Closed):
                client.reply()
            with pytest.raises(OSError, match="refused"):
                plug(server.address)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(blocked)
            os.close(release)


def test_another_user_is_not_let_in_at_the_unix_socket(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Raw(server.address, server.secret) as client:
        path = client.welcome.local
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    sock = plug(f"unix://{path}")
    assert sock.recv(1) == b""
    sock.close()


def test_sessions_survive_a_server_that_was_frozen(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signs of life that wait in the sockets are read before anybody is declared dead."""
    loop = server._loop
    assert loop is not None
    frozen, go = threading.Event(), threading.Event()
    overdue = loop._gate.overdue

    def freeze(now: float) -> list[Peer]:
        frozen.set()
        go.wait(DEADLINE)
        return overdue(now)

    monkeypatch.setattr(
        "rallypoint.store.server.server_loop.EVENTS", 1
    )  # so that one look does not see them all
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(Raw(server.address, server.secret, ttl=2.0)) for _ in range(5)
        ]
        monkeypatch.setattr(loop._gate, "overdue", freeze)
        monkeypatch.setattr("rallypoint.store.server.server_loop.GREETING", 0.01)
        stack.enter_context(plug(server.address))  # whose time is soon up
        assert frozen.wait(DEADLINE)
        for client in clients:
            client.post(Ping)
        threading.Event().wait(2.2)  # the ttl passes
        monkeypatch.setattr(loop._gate, "overdue", overdue)
        go.set()
        for client in clients:
            assert client.reply() == Done(1, 0)


def test_the_loop_survives_a_fault_of_the_state(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    loop = server._loop
    assert loop is not None

    def broken(*_: object) -> None:
        raise ZeroDivisionError("on purpose")

    with Raw(server.address, server.secret) as client, caplog.at_level(logging.ERROR, "rallypoint"):
        loop._state._handlers[Status] = broken
        failed = client.ask(Status)
        assert failed.code == "bad-request"
        assert "rallypoint itself failed" in failed.text
        assert isinstance(client.ask(Ping), Done)
        assert "on purpose" in caplog.text


def test_a_hung_up_client_costs_nothing_but_its_connection(server: Server) -> None:
    client = Raw(server.address, server.secret)
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.post(Get, "later", DEADLINE)
    client.close()  # a reset
    with Raw(server.address, server.secret) as other:
        assert until(lambda: len(server._loop or ()) == 1)
        other.ask(Set, "later", b"\x01")
        other.ask(Ping)


def test_serve_is_started(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="size"):
        serve(max_bytes="2 parsecs")
    server = serve(max_bytes="2MiB", secret="x" * 16)
    try:
        assert server.secret == b"x" * 16
        assert repr(server) == f"<Server {server.address}: serving, 0 clients>"
    finally:
        server.stop()
    assert server not in [made for made in servers._servers if made._loop is not None]


def test_a_key_that_lives_longer_than_epoll_can_wait(server: Server) -> None:
    with Raw(server.address, server.secret, ttl=0.05) as client:
        client.ask(Set, "k", b"\x01", ttl=1e9)
        client.ask(Set, "l", b"\x01", ttl=1e300)
        client.ask(Bye)
    loop = server._loop
    assert loop is not None
    assert until(lambda: (loop._state.due() or 0) > 1e6), "nothing is due but these two keys"
    with Raw(server.address, server.secret) as client:
        assert client.ask(Get, "k").value == b"\x01"
        assert client.ask(Get, "none", 0.05) is not None


def test_a_client_that_never_acknowledges_is_ended(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "UNACKNOWLEDGED", 100)
    with Raw(server.address, server.secret) as client:
        for _ in range(100):
            client.ask(Add, "k", 1)
            client.acked = 0
        with pytest.raises(Closed):
            client.ask(Add, "k", 1)
        assert refused(server.address, server.secret, session=client.session, resume=True).known
    with Raw(server.address, server.secret) as other:
        assert other.ask(Status).sessions == 1
        for _ in range(200):
            other.ask(Add, "k", 1)


def test_a_server_whose_thread_cannot_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()

    def no(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    server = Server(max_bytes="2MiB", clock=In1970())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no)
        with pytest.raises(RuntimeError, match="new thread"):
            server.start()
    server.stop()  # and does not wait for a thread that never was
    assert "stopped" in repr(server)
    assert descriptors() == before


def test_a_fault_at_one_connection_is_not_everybodys(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Raw(server.address, server.secret) as other, Raw(server.address, server.secret) as client:
        with monkeypatch.context() as patch:
            patch.setattr(Peer, "read", lambda _: 1 / 0)
            client.post(Ping)
            with pytest.raises(Closed):
                client.reply()
        assert "division by zero" in caplog.text
        assert isinstance(other.ask(Ping), Done)


def test_requests_that_had_to_wait_for_the_reader_are_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They lie in the server, so that no event tells of them; and what the reader had not read may
    leave without one, too.
    """
    monkeypatch.setattr(peers, "PAUSE_BYTES", 100_000)
    server = Server(max_bytes="64MiB", local=False, clock=In1970())
    loop = server._loop
    assert loop is not None
    ends: list[Raw] = []
    joining = threading.Thread(
        target=lambda: ends.extend(Raw(server.address, server.secret) for _ in range(2))
    )
    joining.start()
    while joining.is_alive():
        loop._turn(loop._now() + 0.01)
    slow, other = ends
    slow.post(Get, "later", 60.0)
    other.post(Set, "k", bytes(60_000))
    loop._turn(loop._now() + 0.1)
    one, two = loop._peers.values()
    peer, writer = (
        (one, two) if one.session is not None and one.session.id == slow.session else (two, one)
    )
    while not peer.stalled:
        for _ in range(10):
            slow.post(Get, "k")
        loop._turn(loop._now() + 0.01)
    slow.sock.settimeout(0.1)
    with contextlib.suppress(TimeoutError):
        while True:
            slow._data += slow.sock.recv(2**20)
    now = loop._now()
    body = Body(bytes(100_000))
    assert loop._state.reserve(body.size) is None
    assert writer.session is not None
    loop._state.apply(now, writer.session, Set(2, 1, "later", b""), body)
    loop._deliver()
    assert peer.out is None, "all of it has left, before epoll could say that there is room"
    slow.sock.settimeout(DEADLINE)
    asked = slow.seq
    reading = threading.Thread(target=lambda: [slow.reply() for _ in range(asked)], daemon=True)
    reading.start()
    clock = Clock()
    while reading.is_alive() and clock.elapsed() < DEADLINE:
        loop._turn(loop._now() + 0.01)
    assert slow.acked == asked
    server.stop()
    for end in ends:
        end.close()


def test_a_server_without_a_descriptor_for_its_loop_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(select, "epoll", no)
        with pytest.raises(OSError, match="Too many open files"):
            Server(max_bytes="2MiB", clock=In1970())
    gc.collect()
    assert descriptors() == before


def test_the_descriptor_in_reserve_may_be_lost(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread of the program may take the last descriptor between our giving it up and
    taking it back.
    """
    loop = server._loop
    assert loop is not None
    listener = next(iter(loop._listeners.values()))
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    with Raw(server.address, server.secret) as client:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(error))
            loop._no_room(listener, None, error)
            assert loop._reserve == -1
        loop._no_room(listener, None, error)
        assert loop._reserve >= 0
        assert isinstance(client.ask(Ping), Done)


# --- signs of life ---


def test_a_sign_of_life_counts_from_when_it_was_read(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One turn of the loop takes long. What a client sends meanwhile is read in it, and its lease
    counts from when it was sent: the server's must not end before that."""
    loop = server._loop
    assert loop is not None
    state = loop._state
    entered, go_on = threading.Semaphore(0), threading.Semaphore(0)
    handlers: Any = state._handlers
    status = handlers[Status]

    def slow(*args: object) -> object:
        entered.release()
        assert go_on.acquire(timeout=DEADLINE)
        return status(*args)

    monkeypatch.setitem(handlers, Status, slow)
    with Raw(server.address, server.secret) as busy, Raw(server.address, server.secret) as holder:
        busy.post(Status)
        assert entered.acquire(timeout=DEADLINE)
        busy.post(Status)  # both of these are seen by the next turn, in this order
        holder.post(Ping)
        go_on.release()
        assert entered.acquire(timeout=DEADLINE)  # that turn has begun
        sent = Clock().monotonic()
        last = holder.post(Ping)
        go_on.release()
        while holder.reply().seq != last:
            pass
        assert state._sessions[holder.session].heard >= sent


def test_who_cannot_be_told_is_dead_and_that_is_told(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process has died, and is found out by an answer that a timer gives to it. Who waits for its
    lock has it in the same turn.
    """
    loop = server._loop
    assert loop is not None
    with Raw(server.address, server.secret) as dead, Raw(server.address, server.secret) as waiter:
        token = dead.ask(Lock, "l", "", None).token
        granted = waiter.post(Lock, "l", "", None)
        waiter.ask(Ping)
        session = loop._state._sessions[dead.session]
        (peer,) = loop._by_session[session]
        send = Peer.send

        def broken(self: Peer, data: bytes = b"") -> None:
            if self is peer:
                raise BrokenPipeError
            send(self, data)

        def reaped(pid: int, flags: int = 0) -> int:
            raise ProcessLookupError

        dead.post(Get, "never", 0.2)
        assert until(lambda: bool(session.waiting))
        peer.pid = os.getpid()
        monkeypatch.setattr(Peer, "send", broken)
        monkeypatch.setattr(system_calls, "pidfd_open", reaped)
        waiter.sock.settimeout(5.0)  # its session has nothing to do with time for 30 s
        reply = waiter.reply()
        assert (reply.seq, type(reply)) == (granted, Granted)
        assert reply.token > token
        assert session.because == loops.DIED


def test_where_no_process_can_be_watched_the_lease_decides(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel before 5.3, or a sandbox that forbids it."""

    def forbidden(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(system_calls, "pidfd_open", forbidden)
    with (
        ChaosProxy(f"unix://{server._path}", listen=f"unix://{tmp_path}/proxy") as proxy,
        connect(proxy.address, secret=server.secret) as store,
    ):
        store.set("mine", 1, ephemeral=True)
        proxy.reset()
        assert store["mine"] == 1
        assert (store.statistics()["sessions"], store.statistics()["reconnects"]) == (1, 1)


def test_fencing_tokens_grow_over_servers_and_attempts() -> None:
    """Revisions, and so tokens, began at 0 in every server: a resource that refuses lower tokens
    than it has seen refused every holder of a restarted job, or, when it was reset as well, let a
    straggler of the old attempt overwrite the new one's data."""
    tokens = []
    for changes in (500, 3):
        with (
            serve(max_bytes="2MiB") as server,
            rallypoint.connect(server.address, secret=server.secret) as store,
        ):
            revision = 0
            for number in range(changes):
                revision = store.set("k", number)
            with store.lock("checkpoint") as grant:
                assert grant.token > revision
                tokens.append(grant.token)
    assert tokens == sorted(set(tokens))


def test_a_revision_of_an_earlier_server_is_known_for_what_it_is() -> None:
    with (
        serve(max_bytes="2MiB") as first,
        rallypoint.connect(first.address, secret=first.secret) as store,
    ):
        old = store.set("k", 1)
    with (
        serve(max_bytes="2MiB") as second,
        rallypoint.connect(second.address, secret=second.secret) as store,
    ):
        store["k"] = 2
        with pytest.raises(rallypoint.Compacted, match="another server"):
            next(store.watch("k", since=old))
        assert next(store.watch("k", since=0)).value == 2
        assert store.compare_and_set("k", None, 3, revision=old) == (False, 2)
