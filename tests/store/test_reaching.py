"""A connection that does not come about: told apart by code and words, within its deadline; and all
the ways on which it does.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rallypoint
from rallypoint.clock import Clock
from rallypoint.errors import StoreUnreachable
from rallypoint.host import probe
from rallypoint.store import limits
from rallypoint.store.address import Address
from rallypoint.store.client.connect import Failure
from rallypoint.store.client.connect_errors import unreachable
from rallypoint.store.server.server import Server
from rallypoint.testing import ChaosProxy

from .live import Thread, output_of, transport, until
from .processes import SECRET, ServerProcess

SHORT = 1.0
"""Seconds, of a connect that is to use them all up."""

LATE = 5.0
"""Seconds that such a call may end later than it should, on a busy machine."""

PLENTY = 60.0
"""Seconds, of a connect that is to end long before."""

SOON = 20.0
"""What it may take then."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(secret=SECRET, max_bytes="64MiB") as made:
        yield made


@pytest.fixture
def port() -> Iterator[int]:
    """A port that nobody listens on, and that nobody else gets."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def failed(address: str, timeout: float, **options: Any) -> tuple[StoreUnreachable, float]:
    """With what connecting fails, and after how many seconds."""
    clock = Clock()
    with pytest.raises(StoreUnreachable) as caught:
        rallypoint.connect(address, secret=SECRET, timeout=timeout, **options)
    assert isinstance(caught.value, ConnectionError)
    return caught.value, clock.elapsed()


def lasted(seconds: float) -> bool:
    """Whether a connect with the timeout SHORT took that long and not longer."""
    return SHORT <= seconds < SHORT + LATE


@contextlib.contextmanager
def service(talk: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """Something else that listens on a port: `talk` is called with each connection, which is closed
    afterwards. Its address and port.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    with sock, contextlib.suppress(OSError):
                        talk(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        number = listener.getsockname()[1]
        try:
            yield f"tcp://127.0.0.1:{number}", number
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def works(store: rallypoint.Store) -> bool:
    before = store.add("works")
    return store.add("works") == before + 1


# --- nobody ---


def test_refused_is_tried_again_until_the_deadline_and_counted(port: int) -> None:
    error, seconds = failed(f"tcp://127.0.0.1:{port}", SHORT)
    assert error.code == "port-refused"
    assert lasted(seconds)
    assert str(error) == f"no store at tcp://127.0.0.1:{port}: nothing listens there"
    (line,) = error.why
    found = re.fullmatch(
        rf"(\d+) attempts in (\d+\.\d) s: (\d+) x nothing listens there \(127\.0\.0\.1:{port}\)",
        line,
    )
    assert found is not None, line
    assert int(found[1]) == int(found[3]) >= 3
    assert SHORT - 0.05 <= float(found[2]) <= seconds + 0.1
    assert any("rallypoint serve" in command for _, command in error.help)


def test_a_server_that_starts_late_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = probe.connecting
    attempts = 0
    with socket.socket() as sock, contextlib.ExitStack() as stack:
        sock.bind(("127.0.0.1", 0))

        def open_socket(
            family: socket.AddressFamily, sockaddr: tuple[object, ...]
        ) -> socket.socket:
            nonlocal attempts
            attempts += 1
            if attempts == 4:  # three have found nobody
                sock.listen()
                stack.enter_context(Server(secret=SECRET, listeners=[sock.dup()]))
            return usual(family, sockaddr)

        monkeypatch.setattr(probe, "connecting", open_socket)
        address = f"tcp://127.0.0.1:{sock.getsockname()[1]}"
        with rallypoint.connect(address, secret=SECRET, timeout=PLENTY, same_host=False) as store:
            assert works(store)
        assert attempts == 4


def test_no_unix_socket_and_one_without_a_server(tmp_path: Path) -> None:
    error, seconds = failed(f"unix://{tmp_path}/nothing", SHORT)
    assert (error.code, lasted(seconds)) == ("port-refused", True)
    assert "there is no such socket" in str(error)
    path = str(tmp_path / "dead")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
    error, seconds = failed(f"unix://{path}", SHORT)
    assert (error.code, lasted(seconds)) == ("port-refused", True)
    assert "nothing listens there" in str(error)
    assert any(path in command for _, command in error.help)


def test_unix_socket_with_a_full_queue(tmp_path: Path) -> None:
    path = str(tmp_path / "full")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                sock = stack.enter_context(socket.socket(socket.AF_UNIX))
                sock.setblocking(False)
                sock.connect(path)
        error, seconds = failed(f"unix://{path}", SHORT)
    assert (error.code, lasted(seconds)) == ("port-refused", True)
    assert "its queue of connections is full" in str(error)


def test_a_name_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def getaddrinfo(host: str, *_: object, **__: object) -> list[object]:
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    error, seconds = failed("tcp://no-such-host.invalid:29500", SHORT)
    assert (error.code, lasted(seconds)) == ("address-unresolved", True)
    assert "no-such-host.invalid has no address here (Name or service not known)" in str(error)
    assert len(asked) >= 3  # a name may be registered while the job starts
    assert error.why[0].startswith(f"{len(asked)} attempts in ")
    assert ("ask this machine's resolver", "getent hosts no-such-host.invalid") in error.help


def test_a_name_that_gets_its_address_late(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = socket.getaddrinfo
    asked = 0

    def getaddrinfo(host: str, port: int, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked < 4:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return usual("127.0.0.1", port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    port = server.address.rpartition(":")[2]
    with rallypoint.connect(
        f"tcp://some-host.invalid:{port}", secret=SECRET, timeout=PLENTY
    ) as store:
        assert works(store)
    assert asked == 4


WAITS = """
import logging, sys
import rallypoint
if sys.argv[2] == "set up":
    logging.basicConfig(format="theirs: %(message)s")
elif sys.argv[2] == "unwanted":
    logging.getLogger("rallypoint").setLevel(logging.ERROR)
try:
    rallypoint.connect(sys.argv[1], secret="of at least sixteen bytes", timeout=float(sys.argv[3]))
except ConnectionError as error:
    print("error", error.code)
"""


@pytest.mark.parametrize(
    ("program", "timeout", "said"),
    [
        ("silent", 3.0, "rallypoint: {}"),
        ("set up", 3.0, "theirs: {}"),
        ("unwanted", 3.0, None),
        ("silent", 0.15, None),  # the error comes as soon
    ],
)
def test_a_first_connection_that_is_tried_for_long_says_so_once(
    port: int, program: str, timeout: float, said: str | None
) -> None:
    lines = output_of(WAITS, f"tcp://127.0.0.1:{port}", program, str(timeout))
    assert lines.pop() == "error port-refused"
    if said is None:
        assert lines == []
    else:
        waits = re.escape(
            said.format(
                f"no store at tcp://127.0.0.1:{port}: nothing listens there; still trying, for "
            )
        )
        assert re.fullmatch(f"{waits}[01] s more", "\n".join(lines)), lines


def test_a_resolver_that_hangs_holds_up_neither_deadline_nor_signal_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = threading.Event()
    asked = []

    def getaddrinfo(host: str, *_: object, **__: object) -> list[object]:
        asked.append(host)
        if len(asked) == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert released.wait(PLENTY)
        raise socket.gaierror(socket.EAI_FAIL, "it was released")

    ran: list[float] = []
    clock = Clock()
    former = signal.signal(signal.SIGUSR1, lambda *_: ran.append(clock.elapsed()))
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    try:
        error, seconds = failed("tcp://hangs.invalid:29500", 3.0)
        took = clock.elapsed()
        assert error.code == "address-unresolved"
        assert "the resolver gave no answer" in str(error)
        assert 3.0 <= seconds < 3.0 + LATE
        assert len(ran) == 1
        assert took - ran[0] > 1.0  # while it hung, and not after that
        assert asked == ["hangs.invalid"]  # no thread for every attempt
    finally:
        signal.signal(signal.SIGUSR1, former)
        released.set()
        for thread in threading.enumerate():
            if thread.name.startswith("rallypoint: resolve"):
                thread.join()


def test_a_resolver_that_is_slow_holds_up_the_first_connection_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher asked for its lead's name at each connection, and was lost by the lead."""
    released = threading.Event()
    port = server.address.rpartition(":")[2]
    known = socket.getaddrinfo("127.0.0.1", port, type=socket.SOCK_STREAM)
    asked = []

    def getaddrinfo(host: str, *_: object, **__: object) -> list[Any]:
        asked.append(host)
        assert len(asked) == 1 or released.wait(PLENTY)
        return known

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    address = f"tcp://slow.invalid:{port}"
    try:
        for _ in range(3):
            rallypoint.connect(address, secret=SECRET, same_host=False, timeout=SOON).close()
        assert asked == ["slow.invalid"] * 2
    finally:
        released.set()


def test_an_address_outlives_a_resolver_that_knows_it_no_more(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer of a name server that failed for seconds ended jobs of several nodes."""
    port = server.address.rpartition(":")[2]
    answers = [socket.getaddrinfo("127.0.0.1", port, type=socket.SOCK_STREAM)]

    def getaddrinfo(host: str, *_: object, **__: object) -> list[Any]:
        if not answers:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return answers.pop()

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    address = f"tcp://gone.invalid:{port}"
    for _ in range(3):
        rallypoint.connect(address, secret=SECRET, same_host=False, timeout=SOON).close()


class Interrupted(Exception):
    """Raised by a signal handler."""


def test_a_signal_handler_raises_while_the_resolver_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def getaddrinfo(*_: object, **__: object) -> list[object]:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        assert released.wait(PLENTY)
        raise socket.gaierror(socket.EAI_FAIL, "it was released")

    def handler(number: int, frame: object) -> None:
        raise Interrupted

    former = signal.signal(signal.SIGUSR1, handler)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    clock = Clock()
    try:
        with pytest.raises(Interrupted):
            rallypoint.connect("tcp://hangs-too.invalid:29500", secret=SECRET, timeout=PLENTY)
        assert clock.elapsed() < SOON
    finally:
        signal.signal(signal.SIGUSR1, former)
        released.set()
        for thread in threading.enumerate():
            if thread.name.startswith("rallypoint: resolve"):
                thread.join()


def test_unreachable(server: Server) -> None:
    with ChaosProxy(server.address) as proxy, proxy.black_hole(accept=False):
        error, seconds = failed(proxy.address, SHORT)
        assert (error.code, lasted(seconds)) == ("address-unreachable", True)
        assert (
            str(error)
            == f"no store at {proxy.address}: no answer at all: packets to it are dropped, or it is off"
        )
        assert any(command == "ip route get 127.0.0.1" for _, command in error.help)


# --- something else ---


def test_a_web_server() -> None:
    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        thread = threading.Thread(target=web.serve_forever, args=(0.01,))
        thread.start()
        try:
            error, seconds = failed(f"tcp://127.0.0.1:{web.server_port}", PLENTY)
        finally:
            web.shutdown()
            thread.join()
    assert error.code == "store-foreign"
    assert seconds < SOON  # another attempt would only repeat it
    assert "it does not speak rallypoint's protocol" in str(error)
    holder, said = error.why
    assert holder.startswith("on this machine ")
    assert str(os.getpid()) in holder
    assert re.fullmatch(r"it said first: '(HTTP/1|<!DOCTYPE).*'", said), said


@pytest.mark.parametrize(
    ("banner", "shown"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "'SSH-2.0-OpenSSH_9.6'"),
        (
            b"\x15\x03\x01\x00\x02\x02\x28\x15\x03\x01\x00\x02\x02\x28",
            "15 03 01 00 02 02 28 15 03 01 00 02 02 28",
        ),
        (b"\x00" * 12, "00 00 00 00 00 00 00 00 00 00 00 00"),
        (
            b"\x05\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xc1\xc1\xc1\xc1\xc1",
            None,
        ),  # in a frame of ours, and nothing that we say
    ],
)
def test_another_service(banner: bytes, shown: str | None) -> None:
    def talk(sock: socket.socket) -> None:
        sock.sendall(banner)
        while sock.recv(4096):
            pass

    with service(talk) as (address, _):
        error, seconds = failed(address, PLENTY)
    assert error.code == "store-foreign"
    assert seconds < SOON
    assert str(os.getpid()) in error.why[0]
    if shown is not None:
        assert f"it said first: {shown}" in error.why


@pytest.mark.parametrize("closes", [False, True])
def test_another_service_with_a_short_greeting(closes: bool) -> None:
    def talk(sock: socket.socket) -> None:
        sock.sendall(b"ERROR\r\n")  # shorter than a frame's header
        while not closes and sock.recv(4096):
            pass
        if closes:
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass

    with service(talk) as (address, _):
        error, seconds = failed(address, SHORT)
    assert error.code == "store-foreign"
    assert seconds < SHORT + LATE
    assert "it said first: 'ERROR'" in error.why


def test_a_listener_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        error, seconds = failed(address, SHORT)
        assert (error.code, lasted(seconds)) == ("store-silent", True)
        assert str(error) == f"no store at {address}: it accepted the connection and said nothing"
        assert str(os.getpid()) in error.why[0]
        assert any(command.startswith("ss -ltnp") for _, command in error.help)


def test_a_listener_that_closes_at_once_is_tried_again() -> None:
    accepted = 0

    def talk(sock: socket.socket) -> None:
        nonlocal accepted
        accepted += 1

    with service(talk) as (address, _):
        error, seconds = failed(address, SHORT)
    assert (error.code, lasted(seconds)) == ("store-silent", True)
    assert "it closed the connection without an answer" in str(error)
    assert accepted >= 3
    assert any(line.startswith(f"{accepted} attempts in ") for line in error.why)


def test_different_failures_are_counted_by_kind() -> None:
    accepted = 0

    def talk(sock: socket.socket) -> None:
        nonlocal accepted
        accepted += 1
        sock.recv(4096)
        if accepted == 3:
            sock.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            sock.recv(4096)

    with service(talk) as (address, _):
        error, _ = failed(address, PLENTY)
    assert error.code == "store-foreign"
    (line,) = (line for line in error.why if "attempts" in line)
    assert line.startswith("3 attempts")
    assert "2 x it closed the connection without an answer" in line
    assert "1 x it does not speak rallypoint's protocol" in line


# --- a store, which refuses ---


def test_wrong_secret(server: Server) -> None:
    clock = Clock()
    with pytest.raises(
        StoreUnreachable, match="has another secret than this client was given"
    ) as caught:
        rallypoint.connect(
            server.address, secret=b"another secret, of somebody else", timeout=PLENTY
        )
    assert caught.value.code == "wrong-secret"
    assert clock.elapsed() < SOON
    assert "another secret, of" not in "".join(
        (str(caught.value), *caught.value.why, *caught.value.__notes__)
    )


def test_version_skew() -> None:
    with ServerProcess(
        "from rallypoint.wire import handshake as connection; connection.VERSIONS = (7, 9)"
    ) as server:
        error, seconds = failed(server.address, PLENTY)
    assert error.code == "version-skew"
    assert seconds < SOON
    assert "the client speaks protocol 1 (rallypoint" in str(error)
    assert "the server 7 to 9 (rallypoint" in str(error)


def test_wrong_job() -> None:
    with Server(secret=SECRET, job="blue") as server:
        error, seconds = failed(server.address, PLENTY, job="green")
        assert error.code == "wrong-job"
        assert seconds < SOON
        assert "this is the store of job blue, not of green" in str(error)
        for job in ("blue", ""):
            with rallypoint.connect(server.address, secret=SECRET, job=job) as store:
                assert works(store)


def test_a_store_with_as_many_sessions_as_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SESSIONS", 1)
    with (
        Server(secret=SECRET) as server,
        rallypoint.connect(server.address, secret=SECRET) as store,
    ):
        error, seconds = failed(server.address, PLENTY)
        assert error.code == "store-full"
        assert seconds < SOON
        assert works(store)


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.0, "2 attempts"), (0.04, "2 attempts"), (3.14, "2 attempts in 3.1 s")]
)
def test_attempts_that_took_no_time_are_only_counted(seconds: float, told: str) -> None:
    failures = [
        Failure("refused", "[::1]:29500", "nothing listens there"),
        Failure("refused", "127.0.0.1:29500", "nothing listens there"),
    ]
    error = unreachable([Address("localhost", 29500)], failures, 7.0, 7.0 + seconds)
    assert error.why == (
        f"{told}: 1 x nothing listens there ([::1]:29500), 1 x nothing listens there (127.0.0.1:29500)",
    )


def test_a_socket_of_another_user_is_on_no_network() -> None:
    """A rank that had given up root was told to look for a route to the socket's path."""
    path = "/run/user/0/rallypoint-1/store.sock"
    failures = [Failure("unreachable", path, "Permission denied")]
    error = unreachable([Address(path=path)], failures, 7.0, 17.0)
    assert error.code == "address-unreachable"
    (look,) = error.help
    assert look == (
        "is its server running, and this user's? the socket's folder goes with it",
        f"ls -l {path}",
    )


# --- several addresses ---


def stand_for(name: str, *addresses: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> str:
    """Let a name have these addresses, in this order."""

    def getaddrinfo(host: str, port: int, **_: object) -> Any:
        assert host == name
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (host, number, 0, 0))
            if ":" in host
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, number))
            for host, number in addresses
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return f"tcp://{name}:29500"


def pair(address: str) -> tuple[str, int]:
    host, _, number = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(number)


def ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "dead",
    [
        pytest.param(
            "[::1]", marks=pytest.mark.skipif(not ipv6(), reason="this machine has no IPv6")
        ),
        "127.0.0.2",
    ],
)
def test_the_first_address_of_a_name_is_dead(
    server: Server, dead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        ChaosProxy(server.address, listen=f"tcp://{dead}:0") as proxy,
        proxy.black_hole(accept=False),
    ):
        address = stand_for(
            "two.invalid", pair(proxy.address), pair(server.address), monkeypatch=monkeypatch
        )
        clock = Clock()
        with rallypoint.connect(address, secret=SECRET, timeout=PLENTY, same_host=False) as store:
            assert clock.elapsed() < SOON
            assert works(store)
        # Even when there is little time it is enough for both.
        with rallypoint.connect(address, secret=SECRET, timeout=2.0, same_host=False) as store:
            assert works(store)


def test_the_first_address_of_a_name_is_refused_or_something_else(
    server: Server, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service(lambda sock: sock.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")) as (_, other):
        address = stand_for(
            "three.invalid",
            ("127.0.0.1", port),
            ("127.0.0.1", other),
            pair(server.address),
            monkeypatch=monkeypatch,
        )
        with rallypoint.connect(address, secret=SECRET, timeout=PLENTY, same_host=False) as store:
            assert works(store)


def test_all_addresses_are_dead_within_one_deadline(
    server: Server, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        ChaosProxy(server.address) as one,
        ChaosProxy(server.address) as two,
        one.black_hole(accept=False),
        two.black_hole(accept=False),
    ):
        addresses = [pair(one.address), pair(two.address), ("127.0.0.1", port)]
        error, seconds = failed(
            stand_for("dead.invalid", *addresses, monkeypatch=monkeypatch), SHORT
        )
    assert error.code in ("port-refused", "address-unreachable")  # both are true
    assert lasted(seconds)
    (line,) = error.why
    for host, number in addresses:
        assert f"({host}:{number})" in line


# --- the same host ---


def test_the_connection_moves_to_the_unix_socket(server: Server) -> None:
    with rallypoint.connect(server.address, secret=SECRET) as store:
        assert (transport(store), works(store)) == ("unix", True)
        assert store.status()["sessions"] == 1
    with rallypoint.connect(server.address, secret=SECRET, same_host=False) as store:
        assert (transport(store), works(store)) == ("tcp", True)


def test_the_unix_path_is_another_servers(server: Server) -> None:
    """As in containers that share /tmp but not the network, or the other way round."""
    path = server._path
    os.rename(path, path + ".moved")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        sock.listen()
        with Server(secret=b"the secret of another server here", listeners=[sock.dup()]) as other:
            with rallypoint.connect(server.address, secret=SECRET, timeout=PLENTY) as store:
                assert (transport(store), works(store)) == ("tcp", True)
                store["large"] = b"x" * 5_000_000
                assert store["large"] == b"x" * 5_000_000
            with rallypoint.connect(f"unix://{path}", secret=other.secret) as store:
                assert len(store) == 0
                assert store.status()["sessions"] == 1


def test_the_unix_path_is_that_of_another_server_with_the_same_secret(server: Server) -> None:
    path = server._path
    os.rename(path, path + ".moved")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        sock.listen()
        with Server(secret=SECRET, listeners=[sock.dup()]):
            with rallypoint.connect(server.address, secret=SECRET, timeout=PLENTY) as store:
                assert (transport(store), works(store)) == ("tcp", True)
            with rallypoint.connect(f"unix://{path}", secret=SECRET) as store:
                assert len(store) == 0


def test_the_unix_path_is_dead_or_silent(server: Server) -> None:
    path = server._path
    os.rename(path, path + ".moved")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        with rallypoint.connect(server.address, secret=SECRET, timeout=PLENTY) as store:
            assert (transport(store), works(store)) == ("tcp", True)
        sock.listen()
        clock = Clock()
        with rallypoint.connect(server.address, secret=SECRET, timeout=PLENTY) as store:
            assert (transport(store), works(store)) == ("tcp", True)
        assert clock.elapsed() < SOON


FEW = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))"
"""The server would raise a soft limit."""


@pytest.mark.parametrize("by", ["tcp", "unix"])
def test_a_server_without_descriptors_says_so_and_takes_who_waits_when_one_is_free(by: str) -> None:
    with ServerProcess(FEW) as process, contextlib.ExitStack() as stack:
        address = process.address if by == "tcp" else process.local

        def connect(timeout: float) -> rallypoint.Store:
            return rallypoint.connect(
                address, secret=SECRET, timeout=timeout, same_host=by == "unix"
            )

        stores = [stack.enter_context(connect(PLENTY))]

        def fill() -> None:
            while len(stores) < 48:
                stores.append(stack.enter_context(connect(SHORT)))

        with pytest.raises(StoreUnreachable) as caught:
            fill()
        assert len(stores) > 10
        error = caught.value
        assert error.code == "store-full"
        refused = (
            "its server cannot take another connection now: Too many open files (ulimit -n: 48)"
        )
        assert str(error) == f"the store at {address} refused this client: {refused}"
        assert stores[0].add("n") == 1, "those who are in are served"
        waiting = Thread(connect, PLENTY)
        until(lambda: stores[0].add("n") > 20)
        assert waiting.is_alive()
        for _ in range(3):
            stores.pop().close()
        waiting.result().close()
