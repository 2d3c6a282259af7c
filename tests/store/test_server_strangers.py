"""Whoever has not proved itself, and whoever does not keep to the protocol: refused, bounded, and
without harm to the others.
"""

from __future__ import annotations

import logging
import os
import random
import resource
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import rallypoint
from rallypoint.clock import Clock
from rallypoint.errors import StoreUnreachable
from rallypoint.store.client.member import Member
from rallypoint.store.server import admission
from rallypoint.store.server.server import Server
from rallypoint.wire.frames import HEADER, header
from rallypoint.wire.handshake import Joining
from rallypoint.wire.messages import (
    HELLO_BYTES,
    TAG,
    Add,
    Done,
    Failed,
    Hello,
    Identity,
    Ping,
    Refusal,
    Set,
    decode_handshake,
    encode,
)

from .live import Thread, ended_well, transport
from .raw import DEADLINE, Closed, Raw, plug, refused


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(max_bytes="64MiB") as made:
        yield made


def joining(secret: bytes, session: bytes = b"s" * 16) -> Joining:
    return Joining(
        secret,
        "",
        "test",
        session=session,
        nonce=os.urandom(32),
        identity=Identity("here", 1),
        ttl=10.0,
        resume=False,
        acked=0,
    )


def rest(sock: socket.socket) -> bytes:
    """Everything until the end."""
    found = b""
    try:
        while data := sock.recv(65536):
            found += data
    except ConnectionError:
        pass
    return found


def still_serves(server: Server) -> bool:
    with Raw(server.address, server.secret) as client:
        return isinstance(client.ask(Ping), Done)


def test_http_gets_one_line(server: Server) -> None:
    with plug(server.address) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = rest(sock)
    assert answer.startswith(b"HTTP/1.0 400 ")
    assert answer.endswith(b"this is a rallypoint store, not a web server\n")
    assert still_serves(server)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 64,  # TLS
        b"SSH-2.0-OpenSSH_9.6\r\n",
        HEADER.pack(0, 0),
        HEADER.pack(HELLO_BYTES + 1, 0),
        HEADER.pack(2**32 - 1, 2**64 - 1),
        HEADER.pack(10, 1),
        header(5) + b"\xc1\xc1\xc1\xc1\xc1",
        header(4000) + b"\x91" * 4000,  # nested
        header(3) + b"\x93\x01\xa5",
        header(9) + b"\x97\x01\xa4\xff\xfe\xff\xfe\x01\x01",  # text that is not UTF-8
        header(len(encode(Add(1, 0, "n", 1)))) + encode(Add(1, 0, "n", 1)),
    ],
)
def test_what_is_not_the_protocol_is_closed(server: Server, said: bytes) -> None:
    with plug(server.address) as sock:
        sock.sendall(said)
        if not said:
            sock.shutdown(socket.SHUT_WR)
        assert len(rest(sock)) < 200
    assert still_serves(server)


def test_random_bytes_before_and_after_the_proof(server: Server) -> None:
    chance = random.Random(3)
    for turn in range(150):
        noise = chance.randbytes(chance.randrange(1, 300))
        if turn % 3 == 0:  # a header that is in order
            noise = header(min(len(noise), HELLO_BYTES)) + noise
        if turn % 2:
            with Raw(server.address, server.secret) as client:
                client.sock.sendall(noise)
                client.sock.shutdown(socket.SHUT_WR)
                rest(client.sock)
        else:
            with plug(server.address) as sock:
                sock.sendall(noise)
                sock.shutdown(socket.SHUT_WR)
                rest(sock)
    assert still_serves(server)


def test_wrong_secret_wrong_job_wrong_version(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rallypoint"), plug(server.address) as sock:
        joins = joining(b"not the secret at all")
        sock.sendall(header(len(joins.start())) + joins.start())
        length, _ = HEADER.unpack(sock.recv(HEADER.size, socket.MSG_WAITALL))
        challenge = decode_handshake(sock.recv(length, socket.MSG_WAITALL))
        # An honest client sees that the server's proof is not of its secret; a stranger goes on.
        assert not isinstance(challenge, Refusal)
        message = msgspec.msgpack.encode((3, b"p" * 32, 10.0, ("here", 1, None), False, 0))
        sock.sendall(header(len(message)) + message)
        length, _ = HEADER.unpack(sock.recv(HEADER.size, socket.MSG_WAITALL))
        refusal = decode_handshake(sock.recv(length, socket.MSG_WAITALL))
        assert isinstance(refusal, Refusal)
        assert refusal.code == "wrong-secret"
        assert rest(sock) == b""
    assert [
        "127.0.0.1: the client does not know this store's secret" in record.message
        for record in caplog.records
    ] == [True]
    with Server(max_bytes="2MiB", job="a", secret=server.secret) as other:
        assert refused(other.address, other.secret, job="b").code == "wrong-job"
    with plug(server.address) as sock:
        message = encode(Hello(TAG, 7, 9, "12.0", "", b"s" * 16, b"n" * 32))
        sock.sendall(header(len(message)) + message)
        refusal = decode_handshake(rest(sock)[HEADER.size :])
        assert isinstance(refusal, Refusal)
        assert (refusal.code, refusal.oldest, refusal.newest) == ("version-skew", 1, 1)


def test_clients_that_are_not_let_in_are_told_of_and_strangers_are_not() -> None:
    told: list[tuple[str, str]] = []
    with Server(job="a", on_stranger=lambda *one: told.append(one)) as server:
        host, port = server.address.removeprefix("tcp://").split(":")

        def join(secret: bytes, job: str) -> None:
            Member.join([(host, int(port))], secret, job=job, ttl=2.0, timeout=DEADLINE).close()

        with plug(server.address) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            rest(sock)
        join(server.secret, "a")
        with pytest.raises(StoreUnreachable, match="job a"):
            join(server.secret, "b")
        with pytest.raises(StoreUnreachable, match="secret"):
            join(b"not the secret at all", "a")
        join(server.secret, "a")  # the thread that serves has seen the end of the one before
    assert [address for address, _ in told] == ["127.0.0.1", "127.0.0.1"]
    assert "not of b" in told[0][1]
    assert "another secret" in told[1][1]


def test_a_replayed_handshake_is_refused(server: Server) -> None:
    sent: list[bytes] = []

    class Recorded(socket.socket):
        def sendall(self, data: bytes, *_: object) -> None:  # type: ignore[override]
            sent.append(bytes(data))
            super().sendall(data)

    plain = plug(server.address)
    recorded = Recorded(fileno=plain.detach())
    recorded.settimeout(DEADLINE)
    Raw(recorded, server.secret).close()
    assert len(sent) == 2
    with plug(server.address) as sock:
        for frame in sent:
            sock.sendall(frame)
        said = rest(sock)
    at, answers = 0, []
    while at < len(said):
        length, _ = HEADER.unpack_from(said, at)
        at += HEADER.size + length
        answers.append(decode_handshake(said[at - length : at]))
    assert isinstance(answers[-1], Refusal)
    assert answers[-1].code == "wrong-secret"


def test_nothing_is_decoded_before_the_proof(server: Server) -> None:
    with plug(server.address) as sock:
        joins = joining(server.secret)
        request = encode(Add(1, 0, "n", 1))
        sock.sendall(header(len(joins.start())) + joins.start() + header(len(request)) + request)
        said = rest(sock)
    assert said == b""
    with Raw(server.address, server.secret) as client:
        assert client.ask(Add, "n", 0).number == 0


def test_a_slow_loris_has_half_a_minute_whatever_it_sends(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert admission.GREETING == 30.0
    monkeypatch.setattr("rallypoint.store.server.server_loop.GREETING", 0.2)
    with plug(server.address) as silent, plug(server.address) as slow:
        slow.settimeout(0.02)
        clock = Clock()
        message = joining(server.secret).start()
        for byte in header(len(message)) + message:
            try:
                slow.sendall(bytes([byte]))
                if slow.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            raise AssertionError("the slow one was served")
        assert rest(silent) == b""
        assert clock.elapsed() < DEADLINE
    assert still_serves(server)


def test_half_open_connections_do_not_lock_anybody_out(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "STRANGERS", 100)
    crowd = [plug(server.address) for _ in range(500)]
    try:
        assert still_serves(server)
        assert server._loop is not None
        assert len(server._loop._gate) <= 100
        assert rest(crowd[0]) == b"", "the oldest went"
        crowd[-1].settimeout(0.05)
        with pytest.raises(TimeoutError):
            crowd[-1].recv(1)
    finally:
        for sock in crowd:
            sock.close()
    assert still_serves(server)


def test_the_log_has_one_line_for_a_source(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rallypoint"):
        for _ in range(20):
            with plug(server.address) as sock:
                sock.sendall(b"\x1b[31mGET / with\nlines and colours")
                rest(sock)
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("the store turned away 127.0.0.1: ")
    assert line.isprintable()


def test_many_sources_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    told = admission.Gate()
    with caplog.at_level(logging.WARNING, "rallypoint"):
        for number in range(5000):
            told.complain(f"source {number}", "it said nothing", 1000.0)
        assert len(caplog.records) == admission.LINES
        assert len(told._told) == admission.SOURCES
        told.complain("another", "it said nothing", 1000.0 + admission.QUIET)
    assert (
        caplog.records[-2].message
        == f"the store left out {5000 - admission.LINES} more lines like these in the last minute"
    )


def test_without_a_descriptor_newcomers_are_turned_away_and_the_others_served(
    server: Server,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Raw(server.address, server.secret) as client:
        socks = [socket.socket() for _ in range(5)]
        port = int(server.address.rpartition(":")[2])
        used = max(map(int, os.listdir("/proc/self/fd"))) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
        try:
            fill = []
            while True:
                try:
                    fill.append(os.dup(0))
                except OSError:
                    break
            for sock in socks:
                sock.settimeout(DEADLINE)
                sock.connect(("127.0.0.1", port))
                assert f"Too many open files (ulimit -n: {used})".encode() in rest(sock)
            assert isinstance(client.ask(Ping), Done)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in fill:
                os.close(fd)
            for sock in socks:
                sock.close()
    assert still_serves(server)


@pytest.mark.parametrize(
    "frame",
    [
        header(4) + b"\x91\x7f\x01\x02",
        header(2000) + b"\x91" * 2000,
        HEADER.pack(2**32 - 1, 0),
        header(len(encode(Ping(1, 0))), 5) + encode(Ping(1, 0)) + b"12345",  # a Ping has no value
        header(len(encode(Set(1, 0, "k", b"x"))), 5)
        + encode(Set(1, 0, "k", b"x"))
        + b"12345",  # two values
        header(len(encode(Set(1, 0, "k", b"", shared=5))))
        + encode(Set(1, 0, "k", b"", shared=5)),  # and no memory
        header(9) + b"\x95\x02\x01\x00\xa3\xff\xfe\xff\xc0",
    ],
)
def test_a_malformed_request_is_answered_and_the_connection_closed(
    server: Server, frame: bytes
) -> None:
    with Raw(server.address, server.secret) as client:
        client.sock.sendall(frame)
        failed = client.reply()
        assert isinstance(failed, Failed)
        assert failed.code == "bad-request"
        with pytest.raises(Closed):
            client.reply()
    assert still_serves(server)


# --- who passes a handshake on ---


class Relay:
    """Listens, and passes one connection on to `target`, byte by byte, as somebody without the
    secret can. `heard`: what the client has sent to it."""

    def __init__(self, listener: socket.socket, target: str) -> None:
        self.listener, self.target, self.heard = listener, target, bytearray()
        self.passing = Thread(self._pass_on)

    def _pass_on(self) -> None:
        self.listener.settimeout(DEADLINE)
        client, _ = self.listener.accept()
        with client, plug(self.target) as server:
            ends = {client: server, server: client}
            while True:
                for ready in select.select(list(ends), [], [], DEADLINE)[0]:
                    data = ready.recv(65536)
                    if not data:
                        return
                    if ready is client:
                        self.heard += data
                    ends[ready].sendall(data)


def test_somebody_at_the_address_cannot_let_itself_in_by_passing_the_handshake_on(
    server: Server,
) -> None:
    """With an old port or a stale name a client proved itself to whoever listened there; that
    stranger forwarded Hello, Challenge, Proof and Welcome to the real store, and then read and
    wrote as the client."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = Relay(listener, server.address)
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(rallypoint.StoreUnreachable) as caught:
            rallypoint.connect(address, secret=server.secret, timeout=DEADLINE)
        relay.passing.result()
    assert caught.value.code == "store-relayed"
    assert any(address in command for _, command in caught.value.help)
    assert len(server._loop or ()) == 0


def test_the_same_port_on_another_address_is_another_place(server: Server) -> None:
    port = int(server.address.rpartition(":")[2])
    with socket.create_server(("127.0.0.2", port)) as listener:
        relay = Relay(listener, server.address)
        with pytest.raises(rallypoint.StoreUnreachable) as caught:
            rallypoint.connect(f"tcp://127.0.0.2:{port}", secret=server.secret, timeout=DEADLINE)
        relay.passing.result()
    assert caught.value.code == "store-relayed"


def test_an_address_that_is_named_as_forwarded_may_pass_connections_on(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setenv("RALLYPOINT_FORWARDED", f"tcp://node07:1, tcp://localhost:{port}/")
        relay = Relay(listener, server.address)
        with rallypoint.connect(
            f"tcp://localhost:{port}", secret=server.secret, same_host=False
        ) as store:
            store["k"] = 1
            assert store["k"] == 1
        relay.passing.result()


@pytest.mark.parametrize(
    ("host", "dialled"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("0.0.0.0", "localhost"),
        ("::", "[::1]"),
        ("::1", "[::1]"),
        ("127.0.0.1", "[::ffff:127.0.0.1]"),
    ],
)
def test_every_name_of_the_same_place_leads_there(host: str, dialled: str) -> None:
    """Wildcard binds, names, IPv4 addresses in IPv6: compared are the two ends of the connection,
    never what was typed.
    """
    with Server(host=host, local=False) as server:
        port = server.address.rpartition(":")[2]
        with rallypoint.connect(
            f"tcp://{dialled}:{port}", secret=server.secret, timeout=DEADLINE
        ) as store:
            assert len(store) == 0


def test_the_announced_unix_socket_may_be_somebody_elses_on_this_machine(
    server: Server, tmp_path: Path
) -> None:
    """The path of a store's Unix socket is known to everybody on its machine. On another machine,
    or in a container with another /tmp, somebody made that path first and passed the handshake on
    by TCP: the client moved there."""
    path = str(tmp_path / "store.sock")
    assert server._loop is not None
    server._loop._local = path
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        relay = Relay(listener, server.address)
        with rallypoint.connect(server.address, secret=server.secret, timeout=DEADLINE) as store:
            relay.passing.result()
            assert transport(store) == "tcp"
            assert len(store) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to listen as another user")
def test_a_unix_socket_of_another_user_is_told_nothing(server: Server, tmp_path: Path) -> None:
    path = str(tmp_path / "store.sock")
    assert server._loop is not None
    server._loop._local = path
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        child = os.fork()
        if child == 0:  # the kernel shows the one who has called listen(2)
            os.setresuid(65534, 65534, 65534)
            listener.listen()
            os._exit(0)
        assert ended_well(child)
        with rallypoint.connect(server.address, secret=server.secret, timeout=DEADLINE) as store:
            assert transport(store) == "tcp"
        client, _ = listener.accept()
        with client:
            assert client.recv(1) == b""
        with pytest.raises(rallypoint.StoreUnreachable) as caught:
            rallypoint.connect(f"unix://{path}", secret=server.secret, timeout=DEADLINE)
    assert caught.value.code == "store-foreign"
    assert "65534" in str(caught.value)
