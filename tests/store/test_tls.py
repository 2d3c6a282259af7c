"""TLS on real sockets: what is on the wire, who gets in, and that all else is as without it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import rallypoint
from rallypoint.clock import Clock
from rallypoint.store.certificate import TlsIdentity, client_context, new_identity
from rallypoint.store.client.encrypted_socket import EncryptedSocket
from rallypoint.store.client.member import Member
from rallypoint.store.limits import ORPHAN
from rallypoint.store.server.server import Server
from rallypoint.store.tls_socket import poll_of
from rallypoint.testing import ChaosProxy

from .live import DEADLINE, Thread, running, until
from .processes import ServerProcess

SECRET = b"a secret of at least sixteen bytes"
KEY, VALUE = "model/step/checkpoint-path", b"s3 bucket and the token for it, in a value"
LARGE = os.urandom(1024) * 4096
LATE = 5.0
"""Seconds that something may happen later, on a busy machine."""

NODE = """
import sys
from rallypoint.store.client.encrypted_socket import EncryptedSocket
from rallypoint.store.client.member import Member
port, secret = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
member = Member.join([("127.0.0.1", port)], secret, job="", ttl=float(sys.argv[3]), tls=True)
member.set("node/1", b"here", ephemeral=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def identity() -> TlsIdentity:
    return new_identity()


@pytest.fixture
def server(identity: TlsIdentity) -> Iterator[Server]:
    with Server(secret=SECRET, local=False, identity=identity) as made:
        yield made


def connect(address: str) -> rallypoint.Store:
    return rallypoint.connect(address, secret=SECRET, timeout=DEADLINE)


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def joined(server: Server, port: int = 0) -> Member:
    place = ("127.0.0.1", port or port_of(server.address))
    return Member.join([place], SECRET, job="", ttl=3600.0, timeout=DEADLINE, tls=True)


class Between:
    """Somebody between clients and a server, who passes everything on and writes it down; with a
    certificate of its own, what TLS protects.
    """

    def __init__(self, server: Server, identity: TlsIdentity | None = None, *, tls: bool) -> None:
        self.heard = b""
        self._target = ("127.0.0.1", port_of(server.address))
        self._identity = identity
        self._tls = tls  # to the server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [Thread(self._accept)]

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            self._threads.append(Thread(self._pass, near))

    def _pass(self, near: socket.socket) -> None:
        far = socket.create_connection(self._target)
        if self._identity is not None:
            near = self._identity.context.wrap_socket(near, server_side=True)
            far = client_context().wrap_socket(far) if self._tls else far
        with near, far, contextlib.suppress(OSError):
            ends = {near: far, far: near}
            while True:
                held = [one for one in ends if isinstance(one, ssl.SSLSocket) and one.pending()]
                for one in held or select.select(list(ends), [], [], DEADLINE)[0]:
                    data = one.recv(65536)
                    if not data:
                        return
                    self.heard += data
                    ends[one].sendall(data)

    def __enter__(self) -> Between:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.result()


def test_a_store_with_tls_is_used_like_any_other(server: Server) -> None:
    assert server.address.startswith("tls://127.0.0.1:")
    with connect(server.address) as store, connect(server.address) as other:
        assert "connected by TCP" in repr(store)
        store[KEY] = VALUE
        assert other[KEY] == VALUE
        other.set_many({"a": LARGE, "b": 2})
        assert store.get_many(["a", "b"]) == [LARGE, 2]
        waiting = Thread(other.wait, "late")
        store["late"] = 1
        assert waiting.result() == 1
        with store.lock("l"):
            pass


@pytest.mark.parametrize("tls", [True, False])
def test_what_is_on_the_wire(
    identity: TlsIdentity, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    """Without TLS the same record shows all of it but the secret: the test can fail."""
    with (
        Server(
            secret=SECRET, local=False, job="secret-project", identity=identity if tls else None
        ) as server,
        Between(server, tls=tls) as between,
    ):
        address = f"{'tls' if tls else 'tcp'}://127.0.0.1:{between.port}"
        monkeypatch.setenv("RALLYPOINT_FORWARDED", address)
        with connect(address) as store:
            store[KEY], store["large"] = VALUE, LARGE
            assert (store[KEY], store["large"]) == (VALUE, LARGE)
    assert len(between.heard) > 2 * len(LARGE)
    shown = [word for word in (KEY.encode(), VALUE, LARGE[:64]) if word in between.heard]
    assert len(shown) == (0 if tls else 3)
    assert (b"secret-project" in between.heard) is not tls
    assert SECRET not in between.heard


@pytest.mark.parametrize("tls", [True, False])
def test_somebody_in_between_with_a_certificate_of_its_own_is_found(
    identity: TlsIdentity, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    """Whether it speaks TLS to the server or not, the client sends no proof, and no request."""
    with (
        Server(secret=SECRET, local=False, identity=identity if tls else None) as server,
        Between(server, new_identity(), tls=tls) as between,
    ):
        address = f"tls://127.0.0.1:{between.port}"
        monkeypatch.setenv("RALLYPOINT_FORWARDED", address)
        with pytest.raises(rallypoint.StoreUnreachable) as caught:
            connect(address)
        assert caught.value.code == "tls-intercepted"
        assert b"rallypoint" in between.heard  # it did read the greetings
        assert len(server._loop or ()) == 0


def test_a_client_that_uses_another_certificate_is_found(
    identity: TlsIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client without TLS cannot be connected to a server with it by somebody in between."""
    with Server(secret=SECRET, local=False, identity=identity) as server:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
            monkeypatch.setenv("RALLYPOINT_FORWARDED", address)

            def encrypt() -> None:
                near, _ = listener.accept()
                far = client_context().wrap_socket(
                    socket.create_connection(("127.0.0.1", port_of(server.address)))
                )
                with near, far:
                    far.sendall(near.recv(65536))
                    near.sendall(far.recv(65536))
                    near.recv(1)

            passing = Thread(encrypt)
            with pytest.raises(rallypoint.StoreUnreachable) as caught:
                connect(address)
            passing.result()
        assert caught.value.code == "tls-intercepted"


@pytest.mark.parametrize("tls", [True, False])
def test_only_one_side_speaks_tls(identity: TlsIdentity, tls: bool) -> None:
    with Server(secret=SECRET, local=False, identity=identity if tls else None) as server:
        other = f"{'tcp' if tls else 'tls'}://127.0.0.1:{port_of(server.address)}"
        clock = Clock()
        with pytest.raises(rallypoint.StoreUnreachable) as caught:
            connect(other)
        assert clock.elapsed() < LATE
        assert caught.value.code == "tls-mismatch"
        with connect(server.address) as store:  # and the server lives
            store["k"] = 1


@pytest.mark.parametrize("tls", [True, False])
def test_a_server_is_told_of_clients_with_tls_or_without_it_unlike_itself(
    identity: TlsIdentity, tls: bool
) -> None:
    """A lead waited for its nodes until the time was over, and did not say that they had come."""
    told: list[tuple[str, str]] = []
    with Server(
        secret=SECRET, local=False, identity=identity if tls else None,
        on_stranger=lambda *one: told.append(one),
    ) as server:  # fmt: skip
        with socket.create_connection(("127.0.0.1", port_of(server.address))) as scanner:
            scanner.sendall(b"GET / HTTP/1.1\r\n\r\n")
            scanner.recv(1)
        place = [("127.0.0.1", port_of(server.address))]
        with pytest.raises(rallypoint.StoreUnreachable):
            Member.join(place, SECRET, job="", ttl=2.0, timeout=DEADLINE, tls=not tls)
        until(lambda: bool(told))
    ((address, because),) = told
    assert address == "127.0.0.1"
    assert ("does not speak TLS" in because) is tls
    assert "--tls" in because


def test_another_service_or_none_is_told_as_without_tls() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            near, _ = listener.accept()
            with near:
                near.recv(4096)
                near.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        answering = Thread(answer)
        with pytest.raises(rallypoint.StoreUnreachable) as caught:
            connect(f"tls://127.0.0.1:{port}")
        answering.result()
    assert caught.value.code == "store-foreign"
    assert any("HTTP/1.1 400" in line for line in caught.value.why)
    with pytest.raises(rallypoint.StoreUnreachable) as caught:
        rallypoint.connect(f"tls://127.0.0.1:{port}", secret=SECRET, timeout=0.3)
    assert caught.value.code == "port-refused"


def test_a_wrong_secret_is_told_as_without_tls(server: Server) -> None:
    with pytest.raises(rallypoint.StoreUnreachable) as caught:
        rallypoint.connect(server.address, secret=b"another secret, as long")
    assert caught.value.code == "wrong-secret"


def test_an_older_tls_is_refused(server: Server) -> None:
    context = client_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(("127.0.0.1", port_of(server.address))) as sock,
        pytest.raises(ssl.SSLError, match=r"(?i)version"),
    ):
        context.wrap_socket(sock)


def test_a_clients_socket_gives_and_takes_portions_of_any_size(identity: TlsIdentity) -> None:
    """What is left of a record makes no socket readable, and bytes that a full socket has not taken
    are encrypted already."""
    full = threading.Event()
    long = LARGE * 4

    def serve() -> bytes:
        with identity.context.wrap_socket(listener.accept()[0], server_side=True) as sock:
            assert sock.recv(100) == b"begin"
            sock.sendall(LARGE[:100_000])
            assert full.wait(DEADLINE)
            found = bytearray()
            while len(found) < len(long):
                found += sock.recv(65536)
            return bytes(found)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = Thread(serve)
        with EncryptedSocket(socket.create_connection(listener.getsockname())) as sock:
            assert sock.send(b"begin") == 5
            poll, found = poll_of(sock), b""
            while len(found) < 100_000:
                assert poll(DEADLINE * 1000.0)
                with contextlib.suppress(BlockingIOError):
                    found += sock.recv(1000)
            assert found == LARGE[:100_000]
            assert not poll(0)
            left = memoryview(long)
            while left:
                try:
                    left = left[sock.send(left) :]
                except BlockingIOError:
                    full.set()
                    select.select([], [sock], [], DEADLINE)
            assert serving.result() == long


# --- ends ---


def test_a_killed_node_is_known_as_soon_as_without_tls(server: Server) -> None:
    with joined(server) as lead:
        changes = lead.watch("node/", timeout=DEADLINE)
        with running(NODE, str(port_of(server.address)), SECRET.hex(), "3600") as process:
            assert next(changes).value == b"here"
            clock = Clock()
            os.kill(process.pid, signal.SIGKILL)
            assert next(changes).value is rallypoint.ABSENT
            assert ORPHAN - 0.1 < clock.elapsed() < ORPHAN + 0.1 + LATE


def test_a_stopped_node_is_known_by_its_lease(server: Server) -> None:
    with joined(server) as lead:
        changes = lead.watch("node/", timeout=DEADLINE)
        with running(NODE, str(port_of(server.address)), SECRET.hex(), "1.0") as process:
            assert next(changes).value == b"here"
            clock = Clock()
            os.kill(process.pid, signal.SIGSTOP)
            assert next(changes).value is rallypoint.ABSENT
            assert 0.6 < clock.elapsed() < 1.0 + LATE
            os.kill(process.pid, signal.SIGCONT)


def test_a_server_that_stops_says_so(server: Server) -> None:
    with joined(server) as member:
        waiting = Thread(member.wait, "never")
        until(lambda: member.status()["waiting"] > 0)
        clock = Clock()
        server.stop("it was asked to")
        with pytest.raises(rallypoint.StoreClosed, match="it was asked to"):
            waiting.result()
        assert clock.elapsed() < LATE


def test_a_connection_that_is_reset_is_made_again(server: Server) -> None:
    with (
        ChaosProxy(server.address.replace("tls", "tcp")) as proxy,
        joined(server, port_of(proxy.address)) as member,
    ):
        member["k"] = LARGE
        before = member.statistics()["reconnects"]
        proxy.reset()
        until(lambda: member.statistics()["reconnects"] > before)
        assert member["k"] == LARGE


def test_a_fork_has_a_session_of_its_own_and_leaves_the_parents_alone(server: Server) -> None:
    with connect(server.address) as store:
        store["k"] = 1
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if store.add("k", 1) == 2 else 2
                store.close()
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert store.add("k", 1) == 3
        assert store.statistics()["reconnects"] == 0


def test_a_childs_copy_does_not_keep_a_connection_open(server: Server) -> None:
    """A fork that outlives its parent must not hide the parent's death."""
    program = NODE.replace(
        "sys.stdin.read()", "import os, time\nos.fork() or time.sleep(60)\nsys.stdin.read()"
    )
    with joined(server) as lead:
        changes = lead.watch("node/", timeout=DEADLINE)
        with running(program, str(port_of(server.address)), SECRET.hex(), "3600") as process:
            assert next(changes).value == b"here"
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            until(lambda: children.read_text().strip())
            child = int(children.read_text())
            try:
                os.kill(process.pid, signal.SIGKILL)
                assert next(changes).value is rallypoint.ABSENT
            finally:
                os.kill(child, signal.SIGKILL)


def test_nothing_is_left_of_either_side(identity: TlsIdentity) -> None:
    def counted() -> tuple[int, set[str]]:
        names = {thread.name for thread in threading.enumerate()}
        return len(os.listdir("/proc/self/fd")), {name for name in names if "TLS" in name}

    until(lambda: not counted()[1])
    before = counted()
    with (
        Server(secret=SECRET, local=False, identity=identity) as server,
        connect(server.address) as store,
        socket.create_connection(("127.0.0.1", port_of(server.address))),
    ):
        store["k"] = LARGE
    until(lambda: counted() == before, 10.0)


def test_strangers_are_bounded_as_without_tls(
    identity: TlsIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rallypoint.store.server.server_loop.GREETING", 0.3)
    with Server(secret=SECRET, local=False, identity=identity) as server:
        with socket.create_connection(("127.0.0.1", port_of(server.address))) as silent:
            silent.settimeout(DEADLINE)
            assert silent.recv(1) == b""
        with socket.create_connection(("127.0.0.1", port_of(server.address))) as slow:
            slow.settimeout(DEADLINE)
            slow.sendall(b"\x16\x03\x01")  # a TLS client that says no more
            assert slow.recv(1) == b""


FEW = """
import functools, resource
from rallypoint.store.certificate import new_identity
rallypoint.Server = functools.partial(rallypoint.Server, identity=new_identity())
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
"""


def test_a_server_without_descriptors_says_so_and_takes_who_waits_when_some_are_free() -> None:
    with ServerProcess(FEW) as process, contextlib.ExitStack() as stack:

        def join(timeout: float) -> rallypoint.Store:
            return rallypoint.connect(
                process.address, secret=process.secret, timeout=timeout, same_host=False
            )

        stores = [stack.enter_context(join(DEADLINE))]

        def fill() -> None:
            while len(stores) < 48:
                stores.append(stack.enter_context(join(1.0)))

        with pytest.raises(rallypoint.StoreUnreachable) as caught:
            fill()
        assert len(stores) > 5
        assert caught.value.code == "store-full"
        assert "Too many open files" in str(caught.value)
        assert stores[0].add("n") == 1, "those who are in are served"
        waiting = Thread(join, DEADLINE)
        stores.pop().close()
        waiting.result().close()
