"""Each fault of the chaos proxy as the client of a plain echo server sees it."""

from __future__ import annotations

import array
import contextlib
import gc
import hashlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rallypoint.errors import UsageError
from rallypoint.testing import ChaosProxy, ProxiedConnection, ProxyStatistics

PATIENCE = 30.0
"""Seconds after which something that must happen has not: only a broken proxy, or a machine that
stands still, needs them.
"""

Dial = Callable[[], socket.socket]


class Echo:
    """Sends back what it gets, and ends its side after the client's. `received` and `endings` are
    by connection.
    """

    def __init__(self, family: int = socket.AF_INET, where: object = ("127.0.0.1", 0)) -> None:
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind(where)  # type: ignore[arg-type]
        self._listener.listen(1024)
        name = self._listener.getsockname()
        self.address = (
            f"unix://{name}"
            if isinstance(name, str)
            else f"tcp://{f'[{name[0]}]' if len(name) > 2 else name[0]}:{name[1]}"
        )
        self.received: list[bytearray] = []
        self.endings: list[str] = []
        self.news = threading.Condition()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self.news:
                self._sockets.append(sock)
                self.received.append(bytearray())
                self.endings.append("")
                thread = threading.Thread(target=self._serve, args=(sock, len(self.received) - 1))
                self._threads.append(thread)
                self.news.notify_all()
            thread.start()

    def _serve(self, sock: socket.socket, number: int) -> None:
        ending = "end"
        try:
            while data := sock.recv(1 << 16):
                with self.news:
                    self.received[number] += data
                    self.news.notify_all()
                sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            ending = type(error).__name__
        with self.news:
            self.endings[number] = ending
            self.news.notify_all()

    def wait_for(self, condition: Callable[[], object]) -> None:
        with self.news:
            assert self.news.wait_for(condition, PATIENCE), (self.received, self.endings)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE)
        for sock in self._sockets:
            sock.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    with contextlib.closing(Echo()) as server:
        yield server


@pytest.fixture
def proxy(echo: Echo) -> Iterator[ChaosProxy]:
    with ChaosProxy(echo.address, seed=1) as proxy:
        yield proxy


@pytest.fixture
def open_sockets() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def dial(proxy: ChaosProxy, open_sockets: contextlib.ExitStack) -> Dial:
    return lambda: open_sockets.enter_context(connect(proxy))


def connect(proxy: ChaosProxy, timeout: float = PATIENCE) -> socket.socket:
    scheme, _, rest = proxy.address.partition("://")
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), timeout)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout)
    try:
        sock.connect(rest)
    except OSError:
        sock.close()
        raise
    return sock


def say(sock: socket.socket, data: bytes) -> bytes:
    """Send, and read as many bytes as were sent."""
    sock.sendall(data)
    return read(sock, len(data))


def read(sock: socket.socket, size: int) -> bytes:
    """Exactly so many bytes; fewer only when the stream ends."""
    found = bytearray()
    while len(found) < size and (data := sock.recv(size - len(found))):
        found += data
    return bytes(found)


def is_silent(sock: socket.socket) -> bool:
    """Whether there is nothing to be read at this moment: no bytes, no end, no error."""
    sock.setblocking(False)
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    finally:
        sock.settimeout(PATIENCE)
    return False


def overflow(sock: socket.socket) -> int:
    """Send until nothing more is taken for a while; how many bytes were."""
    sock.settimeout(0.3)
    sent = 0
    try:
        while sent < 1 << 30:
            sent += sock.send(bytes(1 << 20))
    except TimeoutError:
        return sent
    finally:
        sock.settimeout(PATIENCE)
    raise AssertionError("it takes everything")


def rst(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


# No fault


def test_without_a_fault_bytes_pass_and_are_counted(
    proxy: ChaosProxy, echo: Echo, dial: Dial
) -> None:
    first, second = dial(), dial()
    assert (say(first, b"hello"), say(second, b"you")) == (b"hello", b"you")
    seen = proxy.statistics()
    assert (seen.connections, seen.open, seen.resets) == (2, 2, 0)
    assert (seen.to_server.bytes, seen.to_client.bytes) == (8, 8)
    assert [
        (c.number, c.bytes_to_server, c.bytes_to_client, c.is_open) for c in proxy.connections
    ] == [(0, 5, 5, True), (1, 3, 3, True)]


def test_an_end_passes_in_each_direction_by_itself(
    proxy: ChaosProxy, echo: Echo, dial: Dial
) -> None:
    sock = dial()
    sock.sendall(b"last words")
    sock.shutdown(socket.SHUT_WR)
    assert read(sock, 100) == b"last words"
    echo.wait_for(lambda: echo.endings == ["end"])
    assert proxy.wait_for(lambda seen: not seen.open).connections == 1


def test_a_reset_of_the_client_reaches_the_server(proxy: ChaosProxy, echo: Echo) -> None:
    sock = connect(proxy)
    say(sock, b"hello")
    rst(sock)
    echo.wait_for(lambda: echo.endings == ["ConnectionResetError"])
    assert proxy.wait_for(lambda seen: not seen.open).resets == 0  # not the proxy's doing


def test_a_reset_of_the_server_reaches_the_client_after_what_the_server_said(
    open_sockets: contextlib.ExitStack,
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        ChaosProxy(server.getsockname()) as proxy,
    ):
        sock = open_sockets.enter_context(connect(proxy))
        peer, _ = server.accept()
        peer.sendall(b"too busy")
        rst(peer)
        assert read(sock, 8) == b"too busy"
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
        proxy.wait_for(lambda seen: not seen.open)


def test_a_server_that_answers_and_resets_before_the_proxy_looks(
    open_sockets: contextlib.ExitStack,
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        ChaosProxy(server.getsockname()) as proxy,
    ):

        def serve(seen: ProxyStatistics) -> bool:
            """In the proxy's thread, which cannot have seen yet that it is connected."""
            if seen.connections:
                peer, _ = server.accept()
                peer.sendall(b"too busy")
                rst(peer)
            return seen.connections > 0

        sock = open_sockets.enter_context(connect(proxy))
        proxy.wait_for(serve)
        assert read(sock, 8) == b"too busy"
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
        assert proxy.statistics().unreached == 0


def test_bulk_arrives_as_it_was_sent(proxy: ChaosProxy, dial: Dial) -> None:
    sock = dial()
    block = os.urandom(1 << 20)
    sent = hashlib.sha256()

    def send() -> None:
        for _ in range(64):
            sock.sendall(block)
        sock.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send)
    thread.start()
    found = hashlib.sha256()
    while data := sock.recv(1 << 20):
        found.update(data)
    thread.join()
    for _ in range(64):
        sent.update(block)
    assert found.digest() == sent.digest()


def test_a_sender_waits_for_a_slow_receiver_through_the_proxy(proxy: ChaosProxy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        proxy.retarget(server.getsockname())
        with connect(proxy) as sock, server.accept()[0]:
            # Two pairs of kernel buffers and one read of the proxy.
            assert overflow(sock) < 64 << 20


def test_a_target_that_is_not_there_resets_the_client(open_sockets: contextlib.ExitStack) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with ChaosProxy(nobody.getsockname()) as proxy:
            with contextlib.suppress(ConnectionResetError):
                sock = open_sockets.enter_context(connect(proxy))
                assert sock.recv(1) == b"never"
            seen = proxy.wait_for(lambda seen: not seen.open)
            assert (seen.connections, seen.unreached, seen.resets) == (1, 1, 0)


def test_every_address_of_a_name_is_tried(echo: Echo) -> None:
    # localhost may be ::1 first, where nobody listens.
    with (
        ChaosProxy(f"tcp://localhost:{echo.address.rpartition(':')[2]}") as proxy,
        connect(proxy) as sock,
    ):
        assert say(sock, b"hello") == b"hello"


def test_a_server_that_moved_is_found_again(proxy: ChaosProxy, echo: Echo, dial: Dial) -> None:
    old = dial()
    say(old, b"first")
    with contextlib.closing(Echo()) as moved:
        proxy.retarget(moved.address)
        assert say(dial(), b"second") == b"second"
        assert (bytes(echo.received[0]), bytes(moved.received[0])) == (b"first", b"second")
        assert say(old, b"still") == b"still"


@pytest.mark.parametrize("listen", ["tcp", "unix"])
@pytest.mark.parametrize("target", ["tcp", "unix"])
def test_unix_sockets_on_either_side(tmp_path: Path, listen: str, target: str) -> None:
    server = Echo(socket.AF_UNIX, str(tmp_path / "echo")) if target == "unix" else Echo()
    door = f"unix://{tmp_path}/door" if listen == "unix" else "tcp://127.0.0.1:0"
    with (
        contextlib.closing(server),
        ChaosProxy(server.address, listen=door) as proxy,
        connect(proxy) as sock,
    ):
        assert say(sock, b"hello") == b"hello"
        if listen == "unix":
            for begin in (proxy.refuse, lambda: proxy.black_hole(accept=False)):
                with pytest.raises(UsageError, match="Unix socket"):
                    begin()
        with proxy.black_hole(), connect(proxy) as other:
            assert is_silent(other)
        with connect(proxy) as other:
            assert say(other, b"hello") == b"hello"
        assert say(sock, b"still") == b"still"
        proxy.reset()
        with contextlib.suppress(ConnectionResetError):  # Unix sockets end without one
            assert sock.recv(1) == b""
    assert not (tmp_path / "door").exists()


def test_a_path_that_somebody_else_has_is_not_taken(tmp_path: Path, echo: Echo) -> None:
    (tmp_path / "door").touch()
    with pytest.raises(OSError, match="Address already in use"):
        ChaosProxy(echo.address, listen=f"unix://{tmp_path}/door")
    assert (tmp_path / "door").exists()


def test_descriptors_pass_between_unix_sockets_and_no_copy_is_left(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "server"))
        server.listen()
        with (
            ChaosProxy(f"unix://{tmp_path}/server", listen=f"unix://{tmp_path}/door") as proxy,
            connect(proxy) as sock,
        ):
            peer, _ = server.accept()
            peer.settimeout(PATIENCE)
            descriptors = count_descriptors()
            for _ in range(2):
                read_end, write_end = os.pipe()
                socket.send_fds(sock, [b"take this"], [write_end])
                os.close(write_end)
                data, found, _, _ = socket.recv_fds(peer, 100, 1)
                data += read(peer, 9 - len(data))
                assert (data, len(found)) == (b"take this", 1)
                os.write(found[0], b"through")
                os.close(found[0])
                assert os.read(read_end, 100) == b"through"
                assert os.read(read_end, 100) == b""  # the last copy of the writing end is closed
                os.close(read_end)
            with proxy.black_hole(to="server"):
                read_end, write_end = os.pipe()
                socket.send_fds(sock, [b"gone"], [write_end])
                os.close(write_end)
                assert os.read(read_end, 1) == b""
                os.close(read_end)
            assert (
                array.array("i", [descriptors, descriptors - 2]).index(count_descriptors()) >= 0
            )  # less the two that were reset
            peer.close()


def test_ipv6(open_sockets: contextlib.ExitStack) -> None:
    if (
        not socket.has_ipv6
        or not Path("/proc/net/if_inet6").exists()
        or not Path("/proc/net/if_inet6").read_text()
    ):
        pytest.skip("no IPv6 on this machine")
    with (
        contextlib.closing(Echo(socket.AF_INET6, ("::1", 0))) as server,
        ChaosProxy(server.address, listen="tcp://[::1]:0") as proxy,
    ):
        assert proxy.address.startswith("tcp://[::1]:")
        assert say(open_sockets.enter_context(connect(proxy)), b"hello") == b"hello"


# Slow lines


def test_latency_is_added_in_each_direction(proxy: ChaosProxy, dial: Dial) -> None:
    sock = dial()
    say(sock, b"before")
    proxy.latency(0.05)
    began = time.monotonic()
    assert say(sock, b"hello") == b"hello"
    assert time.monotonic() - began >= 0.1


def test_latency_holds_back_the_end_too(proxy: ChaosProxy, echo: Echo) -> None:
    with connect(proxy) as sock:
        say(sock, b"hello")
        proxy.latency(0.2, to="server")
        sock.sendall(b"bye")
        began = time.monotonic()
    echo.wait_for(lambda: echo.endings != [""])
    assert time.monotonic() - began >= 0.2
    assert echo.received == [b"hellobye"]


def test_jitter_varies_within_its_bounds(proxy: ChaosProxy, dial: Dial) -> None:
    sock = dial()
    say(sock, b"before")
    proxy.latency(0.5, jitter=0.5, to="server")
    delays: list[float] = []
    # Each is drawn between 0 and 1 s: a busy machine makes them longer, never shorter.
    while len(delays) < 20 and not (delays and min(delays) < 0.5 < max(delays)):
        began = time.monotonic()
        say(sock, b"x")
        delays.append(time.monotonic() - began)
    assert min(delays) < 0.5 < max(delays)


def test_what_is_under_way_arrives_when_the_latency_ends(proxy: ChaosProxy, dial: Dial) -> None:
    sock = dial()
    with proxy.latency(3600.0, to="server"):
        sock.sendall(b"hello")
        proxy.wait_for(lambda seen: seen.to_server.held == 5)
    assert read(sock, 5) == b"hello"


def test_latency_goes_on_while_new_connections_are_refused(proxy: ChaosProxy, dial: Dial) -> None:
    sock = dial()
    say(sock, b"before")
    proxy.latency(0.05)
    proxy.refuse()
    assert say(sock, b"hello") == b"hello"


# Silence


def test_in_a_black_hole_all_vanishes_and_nobody_is_told(
    proxy: ChaosProxy, echo: Echo, dial: Dial
) -> None:
    sock = dial()
    say(sock, b"before")
    with proxy.black_hole():
        sock.sendall(b"lost")
        proxy.wait_for(lambda seen: seen.to_server.swallowed == 4)
        assert is_silent(sock)
        assert echo.received == [b"before"]
    with pytest.raises(ConnectionResetError):  # TCP would not let a stream with a hole go on
        sock.recv(1)
    echo.wait_for(lambda: echo.endings == ["ConnectionResetError"])
    assert say(dial(), b"after") == b"after"


def test_an_end_vanishes_in_a_black_hole(proxy: ChaosProxy, echo: Echo) -> None:
    sock = connect(proxy)
    say(sock, b"hello")
    hole = proxy.black_hole()
    rst(sock)
    with connect(proxy) as other:
        other.sendall(b"later")
        proxy.wait_for(lambda seen: seen.to_server.swallowed == 5)
        assert proxy.statistics().open == 2
    assert echo.endings == [""]
    hole.heal()
    echo.wait_for(lambda: echo.endings == ["ConnectionResetError"])
    assert proxy.statistics().open == 0


def test_a_black_hole_in_one_direction(proxy: ChaosProxy, echo: Echo, dial: Dial) -> None:
    sock = dial()
    say(sock, b"before")
    proxy.black_hole(to="client")
    sock.sendall(b"done?")
    echo.wait_for(lambda: echo.received == [b"beforedone?"])  # the server has acted on it
    assert proxy.wait_for(lambda seen: seen.to_client.swallowed == 5).to_server.swallowed == 0
    assert is_silent(sock)


def test_a_connection_that_lost_nothing_goes_on_after_the_black_hole(
    proxy: ChaosProxy, dial: Dial
) -> None:
    sock = dial()
    say(sock, b"before")
    with proxy.black_hole():
        pass
    assert say(sock, b"after") == b"after"


def test_new_connections_in_a_black_hole_are_accepted_and_silent(
    proxy: ChaosProxy, echo: Echo, dial: Dial
) -> None:
    with proxy.black_hole():
        sock = dial()
        loser = dial()
        loser.sendall(b"lost")
        proxy.wait_for(lambda seen: seen.connections == 2 and seen.to_server.swallowed == 4)
        assert is_silent(sock)
        assert echo.received == []  # the server has not heard of them
    assert say(sock, b"after") == b"after"
    with pytest.raises(ConnectionResetError):
        loser.recv(1)


def test_a_black_hole_that_accepts_nobody(proxy: ChaosProxy, dial: Dial) -> None:
    sock = dial()
    for _ in range(3):
        with proxy.black_hole(accept=False), pytest.raises(TimeoutError):
            connect(proxy, 0.2)
    assert say(dial(), b"after") == b"after"
    assert say(sock, b"still") == b"still"
    # The client that gave up was dropped by the kernel, and the proxy's own are not counted.
    assert proxy.statistics().connections == 2


def test_a_client_that_waits_gets_in_when_the_hole_ends(proxy: ChaosProxy) -> None:
    hole = proxy.black_hole(accept=False)
    found: list[bytes] = []

    def client() -> None:
        with connect(proxy) as sock:
            found.append(say(sock, b"patient"))

    thread = threading.Thread(target=client)
    thread.start()
    hole.heal()
    thread.join(PATIENCE)
    assert found == [b"patient"]


def test_frozen_nothing_moves_and_nothing_is_lost(
    proxy: ChaosProxy, echo: Echo, dial: Dial
) -> None:
    sock = dial()
    say(sock, b"before")
    with proxy.freeze() as frost:
        late = dial()
        late.sendall(b"late")
        sent = overflow(sock)
        seen = proxy.statistics()
        assert (seen.connections, seen.to_server.bytes, len(echo.received)) == (2, 6, 1)
        assert is_silent(late)
        assert frost.active
    assert not frost.active
    assert read(late, 4) == b"late"
    found = 0
    while found < sent:
        found += len(sock.recv(1 << 20))
    assert say(sock, b"after") == b"after"


def test_refused_while_open_connections_go_on_and_the_port_stays_ours(
    proxy: ChaosProxy, dial: Dial
) -> None:
    sock = dial()
    port = int(proxy.address.rpartition(":")[2])
    for _ in range(3):
        with proxy.refuse():
            with pytest.raises(ConnectionRefusedError):
                connect(proxy)
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
            assert say(sock, b"still") == b"still"
        assert say(dial(), b"again") == b"again"


# Cuts


def test_reset_cuts_all_connections_for_both_sides(
    proxy: ChaosProxy, echo: Echo, dial: Dial
) -> None:
    socks = [dial() for _ in range(3)]  # connect() has returned, no more
    proxy.reset()
    for sock in socks:
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
    assert (proxy.statistics().resets, proxy.statistics().open) == (3, 0)
    assert say(dial(), b"again") == b"again"


def test_reset_of_a_certain_connection(proxy: ChaosProxy, dial: Dial) -> None:
    first, second = dial(), dial()
    proxy.connection_of(first).reset()
    with pytest.raises(ConnectionResetError):
        first.recv(1)
    assert say(second, b"still") == b"still"
    with pytest.raises(UsageError, match="no open connection"):
        proxy.connection_of(first)


def test_reset_every_so_often(proxy: ChaosProxy, dial: Dial) -> None:
    began = time.monotonic()
    fault = proxy.reset_every(0.05, jitter=0.01)
    for number in range(1, 4):
        sock = dial()
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
        assert fault.times >= number
    assert time.monotonic() - began >= 0.12
    fault.heal()
    times = fault.times
    sock = dial()
    threading.Event().wait(0.1)  # to see that nothing happens
    assert say(sock, b"hello") == b"hello"
    assert (fault.times, proxy.statistics().resets) == (times, 3)


@pytest.mark.parametrize("size", [1, 5, 100_000])
def test_reset_after_so_many_bytes_to_the_client(proxy: ChaosProxy, dial: Dial, size: int) -> None:
    proxy.reset_after(size, of="client")
    for _ in range(2):  # each connection
        sock = dial()
        sock.sendall(bytes(200_000))
        assert len(read(sock, size)) == size
        with pytest.raises(ConnectionResetError):
            sock.recv(1)


def test_reset_after_so_many_bytes_to_the_server(proxy: ChaosProxy, echo: Echo, dial: Dial) -> None:
    sock = dial()
    say(sock, b"before")  # counted from the beginning of the fault
    proxy.reset_after(3, of="server")
    sock.sendall(b"abcdef")
    echo.wait_for(lambda: echo.endings == ["ConnectionResetError"])
    assert echo.received == [b"beforeabc"]


def test_an_answer_that_never_arrives(proxy: ChaosProxy, echo: Echo, dial: Dial) -> None:
    sock = dial()
    assert say(sock, b"one") == b"one"
    proxy.after_bytes(0, of="client").reset()
    sock.sendall(b"two")
    with pytest.raises(ConnectionResetError):
        sock.recv(1)
    assert echo.received == [b"onetwo"]


def test_a_reset_that_only_one_side_learns_of(proxy: ChaosProxy, echo: Echo, dial: Dial) -> None:
    sock = dial()
    say(sock, b"hello")
    proxy.reset(to="client")
    with pytest.raises(ConnectionResetError):
        sock.recv(1)
    seen = proxy.statistics()
    assert (seen.resets, seen.open, echo.endings) == (1, 1, [""])
    proxy.heal()
    echo.wait_for(lambda: echo.endings == ["ConnectionResetError"])
    assert proxy.statistics().open == 0


# When, and together


def test_the_last_of_a_kind_counts_and_then_the_earlier_one_again(
    proxy: ChaosProxy, dial: Dial
) -> None:
    sock = dial()

    def seconds() -> float:
        began = time.monotonic()
        assert say(sock, b"x") == b"x"
        return time.monotonic() - began

    with proxy.latency(3600.0, to="server"):
        with proxy.latency(0.2, to="server"):
            assert seconds() >= 0.2
        sock.sendall(b"late")
        proxy.wait_for(lambda seen: seen.to_server.held == 4)
        assert is_silent(sock)
    assert read(sock, 4) == b"late"


def test_a_fault_of_one_connection_leaves_the_others_alone(proxy: ChaosProxy, dial: Dial) -> None:
    lost, fine = dial(), dial()
    with proxy.connection_of(lost).black_hole() as hole:
        lost.sendall(b"lost")
        assert say(fine, b"fine") == b"fine"
        assert say(dial(), b"new") == b"new"
        proxy.wait_for(lambda seen: seen.to_server.swallowed == 4)
        assert "<Fault black_hole(to='both', only=<ProxiedConnection 0 from " in repr(hole)
    with pytest.raises(ConnectionResetError):
        lost.recv(1)


def test_a_fault_ends_with_its_only_connection(proxy: ChaosProxy, dial: Dial) -> None:
    fault = proxy.connection_of(dial()).latency(1.0)
    assert repr(fault).endswith("active, times=1>")
    proxy.reset()
    assert not fault.active
    assert proxy.faults == ()


def test_after_so_many_bytes_any_fault_may_begin(proxy: ChaosProxy, echo: Echo, dial: Dial) -> None:
    proxy.after_bytes(4, of="server").black_hole()
    sock, other = dial(), dial()
    sock.sendall(b"heardlost")
    proxy.wait_for(lambda seen: seen.to_server.swallowed == 5)
    echo.wait_for(lambda: b"hear" in echo.received)
    assert say(other, b"abc") == b"abc"
    assert is_silent(sock)
    proxy.heal()
    assert say(other, b"defgh") == b"defgh"


def test_heal_ends_everything(proxy: ChaosProxy, dial: Dial) -> None:
    proxy.latency(100.0)
    proxy.freeze()
    proxy.refuse()
    proxy.after_bytes(1).reset()
    proxy.reset_every(100.0)
    assert len(proxy.faults) == 5
    proxy.heal()
    assert not proxy.faults
    assert say(dial(), b"well") == b"well"


def test_all_at_once_loses_no_byte_that_it_should_not(proxy: ChaosProxy) -> None:
    """Resets, cuts and delays: whatever a client got back is a beginning of what it sent."""
    proxy.latency(0.002, jitter=0.002)
    proxy.reset_every(0.02)
    proxy.reset_after(20_000)
    wrong: list[object] = []

    def client(number: int) -> None:
        for _ in range(10):
            data, found = os.urandom(15_000), b""
            try:
                with connect(proxy) as sock:
                    sock.sendall(data)
                    while len(found) < len(data):
                        more = sock.recv(1 << 16)
                        if not more:
                            wrong.append((number, "end"))
                            break
                        found += more
            except (ConnectionResetError, BrokenPipeError):
                pass
            if not data.startswith(found):
                wrong.append((number, len(found)))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not wrong
    seen = proxy.wait_for(lambda seen: not seen.open)
    assert seen.connections == 80
    assert seen.resets == 80  # none gets 15,000 bytes there and back with 20,000


# What it says, and how it fails


def test_it_says_what_it_is_and_does(echo: Echo) -> None:
    with ChaosProxy(echo.address) as proxy:
        names = f"{proxy.address} -> {proxy.target}"
        assert repr(proxy) == f"<ChaosProxy {names}: 0 open, []>"
        with connect(proxy) as sock:
            say(sock, b"hello")
            client = "tcp://{}:{}".format(*sock.getsockname())
            assert (
                repr(proxy.connections[0])
                == f"<ProxiedConnection 0 from {client}: open, 5 B to the server, 5 B to the client>"
            )
            plan = proxy.reset_every(30.0)
            words = "<Fault reset(to='both', every=30.0, jitter=0.0): {}, times=0>"
            assert repr(plan) == words.format("active")
            assert repr(proxy) == f"<ChaosProxy {names}: 1 open, [{plan!r}]>"
    assert repr(proxy) == f"<ChaosProxy {names}: closed>"
    assert repr(plan) == words.format("over")


@pytest.mark.parametrize(
    ("words", "begin"),
    [
        ("black_hole(to='both', accept=False)", lambda proxy: proxy.black_hole(accept=False)),
        (
            "freeze(to='client', size=5, of='server')",
            lambda proxy: proxy.after_bytes(5, of="server").freeze(to="client"),
        ),
        ("refuse(", lambda proxy: proxy.refuse()),
        ("reset(to='both', every=2, jitter=1)", lambda proxy: proxy.reset_every(2, jitter=1)),
        (
            "latency(to='server', seconds=2, jitter=1)",
            lambda proxy: proxy.latency(2, 1, to="server"),
        ),
    ],
)
def test_each_fault_has_its_words(
    proxy: ChaosProxy, words: str, begin: Callable[[ChaosProxy], object]
) -> None:
    begin(proxy)
    assert words in repr(proxy)


@pytest.mark.parametrize(
    ("wrong", "begin"),
    [
        ("seconds=-1", lambda proxy: proxy.latency(-1)),
        ("jitter=2", lambda proxy: proxy.latency(1, jitter=2)),
        ("seconds=nan", lambda proxy: proxy.latency(float("nan"))),
        ("'up' is no", lambda proxy: proxy.black_hole(to="up")),
        ("interval=0", lambda proxy: proxy.reset_every(0)),
        ("jitter=2 is not within 1", lambda proxy: proxy.reset_every(1, jitter=2)),
        ("size=-1", lambda proxy: proxy.reset_after(-1)),
        ("is no address", lambda proxy: proxy.retarget("localhost:80")),
        ("is no address", lambda proxy: proxy.retarget("tcp://localhost:http")),
        ("is no address", lambda proxy: proxy.retarget("tcp://localhost")),
        ("is no address", lambda proxy: proxy.retarget("unix://")),
    ],
)
def test_wrong_use_is_refused_and_begins_nothing(
    proxy: ChaosProxy, wrong: str, begin: Callable[[ChaosProxy], object]
) -> None:
    with pytest.raises(UsageError, match=wrong):
        begin(proxy)
    assert proxy.faults == ()


def test_what_a_client_sends_is_seen_by_who_waits_already(proxy: ChaosProxy) -> None:
    """The call that waits may be the one that accepts the client."""

    def lost(size: int) -> Callable[[ProxyStatistics], bool]:
        return lambda seen: seen.to_server.swallowed == size

    with proxy.black_hole():
        for number in range(1, 200):
            with connect(proxy) as sock:
                sock.sendall(b"x")
                proxy.wait_for(lost(number), 5.0)


def test_wait_for_gives_up_passes_errors_on_and_ends_with_the_proxy(proxy: ChaosProxy) -> None:
    with pytest.raises(TimeoutError, match=r"within 0\.01 s: ProxyStatistics\(connections=0"):
        proxy.wait_for(lambda seen: False, 0.01)

    def wrong(seen: ProxyStatistics) -> bool:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        proxy.wait_for(wrong)
    began = threading.Event()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            proxy.wait_for(lambda seen: began.set())
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert began.wait(PATIENCE)
    proxy.close()
    thread.join(PATIENCE)
    assert "closed" in str(errors[0])


def test_after_close(proxy: ChaosProxy, dial: Dial) -> None:
    sock = dial()
    say(sock, b"hello")
    with proxy.latency(0.001) as fault:
        proxy.close()
    proxy.close()
    assert sock.recv(1) == b""
    assert not fault.active
    proxy.heal()
    assert (proxy.connections, proxy.statistics().connections, proxy.statistics().open) == (
        (),
        1,
        0,
    )
    with pytest.raises(UsageError, match="closed"):
        proxy.reset()
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)


def test_a_failure_of_the_proxy_is_told(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(str(args.exc_value)))
    proxy = ChaosProxy(echo.address)
    with connect(proxy) as sock:
        say(sock, b"hello")
        monkeypatch.setattr(ProxiedConnection, "_step", fail)
        with pytest.raises(UsageError, match="closed"):
            proxy.freeze()
        assert sock.recv(1) == b""  # it has let go of everything
    proxy.close()
    assert told == ["broken"]


# What it costs, and leaves


def descriptors() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder's own
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def count_descriptors() -> int:
    return len(descriptors())


def use_up(rounds: int) -> None:
    """Many proxies one after another, each with connections in every state, before a server that
    ends with the last of them.
    """
    with contextlib.closing(Echo()) as echo:
        for round in range(rounds):
            with (
                ChaosProxy(echo.address) as proxy,
                contextlib.ExitStack() as stack,
            ):
                socks = [stack.enter_context(connect(proxy)) for _ in range(10)]
                for sock in socks[:5]:
                    say(sock, b"hello")
                if round % 4 == 0:
                    proxy.black_hole(accept=False)
                elif round % 4 == 1:
                    proxy.refuse()
                    proxy.reset(to="client")
                elif round % 4 == 2:
                    proxy.latency(100.0)
                    socks[0].sendall(b"never")
                    socks[1].close()
        echo.wait_for(lambda: all(echo.endings))


def test_no_thread_and_no_descriptor_is_left() -> None:
    use_up(1)  # whatever is made once is made now
    gc.collect()
    names, before = threading.enumerate(), descriptors()
    use_up(20)
    assert threading.enumerate() == names
    assert descriptors() == before


def test_connections_that_end_are_let_go_while_it_serves(proxy: ChaosProxy) -> None:
    before = count_descriptors()
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        proxy.retarget(server.getsockname())
        for number in range(200):
            with connect(proxy):
                peer, _ = server.accept()
                with peer:
                    if number % 3 == 0:
                        proxy.reset()
                    elif number % 3 == 1:
                        rst(peer)
        proxy.wait_for(lambda seen: not seen.open)
    assert count_descriptors() == before


@pytest.mark.parametrize(
    "state",
    ["idle", "hole", "frozen", "half-closed", "dead in a hole", "dead when frozen", "blocked"],
)
def test_it_is_quiet_when_nothing_happens(state: str) -> None:
    """A level-triggered event that nobody takes care of would turn the loop as fast as it can."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        ChaosProxy(server.getsockname()) as proxy,
        contextlib.ExitStack() as stack,
    ):
        sock = stack.enter_context(connect(proxy))
        peer = stack.enter_context(server.accept()[0])
        if "hole" in state:
            proxy.black_hole()
            sock.sendall(b"hello")
        elif "frozen" in state:
            proxy.freeze()
            sock.sendall(b"hello")
        elif state == "half-closed":
            sock.shutdown(socket.SHUT_WR)
            assert peer.recv(1) == b""
            peer.sendall(b"unread")
        elif state == "blocked":
            overflow(sock)
            peer.shutdown(socket.SHUT_WR)
            assert sock.recv(1) == b""
        if "dead" in state:
            rst(sock)
            rst(peer)
        proxy.statistics()
        [thread] = (one for one in threading.enumerate() if one.name == "the chaos proxy")
        spent = time.pthread_getcpuclockid(thread.ident or 0)
        before = time.clock_gettime(spent)
        threading.Event().wait(0.3)  # not to wait for something, but to see that nothing happens
        assert time.clock_gettime(spent) - before < 0.1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_keeps_no_connection_open(proxy: ChaosProxy, dial: Dial) -> None:
    sock = dial()
    say(sock, b"hello")
    read_end, write_end = os.pipe()
    ready, started = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(write_end)
            os.write(started, b"x")
            os.read(read_end, 1)  # until the parent has seen what it wants to see
            proxy.heal()
            proxy.close()
            os._exit(0 if "closed" in repr(proxy) else 1)
        finally:
            os._exit(2)
    os.close(read_end)
    os.read(ready, 1)
    os.close(ready)
    os.close(started)
    try:
        assert say(sock, b"still") == b"still"
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            connect(proxy)
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
    finally:
        os.close(write_end)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
