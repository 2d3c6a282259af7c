"""Large values: through the socket, by shared memory, refused, half sent; and readers that do not
read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

import rallypoint
from rallypoint.clock import Clock
from rallypoint.store.server import bulk as transfers
from rallypoint.store.server import connection as peers
from rallypoint.store.server.server import Server
from rallypoint.store.server.server_loop import Loop
from rallypoint.store.state.attendance import Sighting
from rallypoint.wire.frames import header
from rallypoint.wire.messages import (
    Absent,
    Add,
    Closing,
    CompareAndSet,
    Delete,
    Done,
    Failed,
    Freed,
    Get,
    Integer,
    Ping,
    Pop,
    Push,
    Release,
    Set,
    Status,
    Value,
    encode,
)

from .processes import ServerProcess
from .raw import DEADLINE, Closed, In1970, Raw, memory, plug

MIB = 1024 * 1024
SIZES = [65_537, 300_000, MIB - 1, MIB, 3 * MIB + 17]


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(max_bytes="64MiB", clock=In1970()) as made:
        yield made


@pytest.fixture
def far(server: Server) -> Iterator[Raw]:
    with Raw(server.address, server.secret) as made:
        yield made


@pytest.fixture
def near(server: Server) -> Iterator[Raw]:
    with Raw(server.address, server.secret) as made:
        path = made.welcome.local
    with Raw(f"unix://{path}", server.secret) as made:
        yield made


def write_only(data: bytes) -> int:
    fd = memory(data)
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
    finally:
        os.close(fd)


def used(client: Raw) -> int:
    return int(client.ask(Status).used_bytes)


@pytest.mark.parametrize("size", SIZES)
def test_a_value_of_any_size_through_the_socket(
    server: Server, far: Raw, near: Raw, size: int
) -> None:
    value = os.urandom(size)
    assert far.ask(Set, "k", b"", body=value) == Done(1, 1)
    assert far.ask(Get, "k") == Value(2, 1, 1, b"")
    assert far.body == value
    reply = near.ask(Get, "k")
    if size < MIB:
        assert reply == Value(1, 1, 1, b"")
        assert near.body == value
    else:
        assert reply == Value(1, 1, 1, b"", size)
        assert near.shared(reply) == value
    assert far.ask(Add, "n", 1).number == 1, "the connection goes on"


@pytest.mark.parametrize("size", SIZES)
def test_a_value_in_shared_memory(server: Server, far: Raw, near: Raw, size: int) -> None:
    value = os.urandom(size)
    fd = memory(value)
    assert near.ask(Set, "k", b"", shared=size, segment=4, fds=(fd,)) == Done(1, 1)
    os.close(fd)
    assert far.ask(Get, "k") == Value(1, 1, 1, b"")
    assert far.body == value


def test_every_request_that_brings_a_value(far: Raw) -> None:
    value = os.urandom(2 * MIB)
    far.ask(CompareAndSet, "k", b"", body=value)
    assert far.ask(Push, "q", b"", body=value) == Integer(2, 2, 1)
    assert isinstance(far.ask(Get, "k"), Value)
    assert far.body == value
    assert isinstance(far.ask(Pop, "q"), Value)
    assert far.body == value
    assert isinstance(far.ask(CompareAndSet, "k", b"x", expected=b"y"), Value), "as it is"
    assert far.body == value
    assert isinstance(far.ask(Delete, "k", True), Value)
    assert far.body == value
    assert far.ask(Get, "k") == Absent(7, far.ask(Ping).revision)


def test_who_waits_for_a_large_value_gets_it(server: Server, far: Raw, near: Raw) -> None:
    near.post(Get, "k", DEADLINE)
    far.post(Get, "k", DEADLINE)
    with Raw(server.address, server.secret) as writer:
        value = os.urandom(2 * MIB)
        writer.ask(Set, "k", b"", body=value)
    assert near.shared(near.reply()) == value
    far.reply()
    assert far.body == value


def test_a_segment_is_reported_when_nothing_needs_it(near: Raw) -> None:
    fd = memory(bytes(2 * MIB))
    near.ask(Set, "k", b"", shared=2 * MIB, segment=9, fds=(fd,))
    near.ask(Ping)
    assert near.freed() == []
    near.ask(Set, "k", b"\x01")
    near.ask(Ping)
    assert near.freed() == [9]
    near.ask(Set, "k", b"", shared=1000, segment=9, fds=(fd,))
    near.ask(Ping)
    assert near.freed() == [9, 9], "a small one is copied, and free at once"
    near.ask(Set, "k", b"", shared=2 * MIB, segment=0, fds=(fd,))
    near.ask(Delete, "k")
    near.ask(Ping)
    assert near.freed() == [9, 9], "nobody wants to hear of number 0"
    os.close(fd)


def test_a_segment_is_not_free_while_somebody_reads_it(server: Server, near: Raw) -> None:
    value = os.urandom(2 * MIB)
    fd = memory(value)
    near.ask(Set, "k", b"", shared=len(value), segment=9, fds=(fd,))
    with Raw(f"unix://{near.welcome.local}", server.secret) as reader:
        reply = reader.ask(Get, "k")
        near.ask(Delete, "k")
        near.ask(Ping)
        assert near.freed() == []
        assert reader.shared(reply) == value
        reader.say(encode(Release(0, 0, (reply.seq,))))
        reader.ask(Ping)
        near.ask(Ping)
        near.ask(Ping)
        assert near.freed() == [9]
    os.close(fd)


def test_a_segment_whose_reader_vanished_is_never_used_again(server: Server, near: Raw) -> None:
    """Its process may be frozen in the middle of the copy."""
    fd = memory(bytes(2 * MIB))
    near.ask(Set, "k", b"", shared=2 * MIB, segment=9, fds=(fd,))
    with Raw(server.address, server.secret) as other:
        other.ask(Set, "ours", b"", body=bytes(2 * MIB))
    reader = Raw(f"unix://{near.welcome.local}", server.secret)
    reader.ask(Get, "k")
    reader.ask(Get, "ours")
    reader.sock.close()
    again = Raw(
        f"unix://{near.welcome.local}", server.secret, session=reader.session, resume=True, acked=2
    )
    again.ask(Delete, "k")
    again.ask(Delete, "ours")
    near.ask(Ping)
    near.ask(Ping)
    assert near.freed() == []
    assert server._loop is not None
    assert server._loop._values.pool._count == 0
    again.close()
    reader.close()
    os.close(fd)


def test_memory_of_ours_is_used_again(server: Server, far: Raw) -> None:
    seen = set()
    for turn in range(6):
        far.ask(Set, "k", b"", body=bytes([turn]) * (2 * MIB + turn))
        assert server._loop is not None
        seen |= {os.fstat(segment.fileno()).st_ino for segment in server._loop._values.segments}
        far.ask(Get, "k")
        assert far.body == bytes([turn]) * (2 * MIB + turn)
    assert len(seen) <= 3, (
        "one is the value, one is filled, and one may still be on its way back from a reader"
    )


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: memory(bytes(MIB), seals=0), "not sealed"),
        (lambda: memory(bytes(100)), "are announced, the memory has 100"),
        (lambda: os.open("/dev/null", os.O_RDWR), "not a memfd"),
        (lambda: os.open("/", os.O_RDONLY), "not a memfd"),
        (lambda: os.open("/", os.O_PATH), "not a memfd"),
        (lambda: os.eventfd(0), "not a memfd"),
        (lambda: write_only(bytes(MIB)), "cannot be read"),
    ],
)
def test_memory_that_is_none_is_refused(
    server: Server, near: Raw, make: Callable[[], int], says: str
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    fd = make()
    near.post(Set, "k", b"", shared=MIB, fds=(fd,))
    reply = near.reply()
    os.close(fd)
    assert isinstance(reply, Failed)
    assert reply.code == "bad-request"
    assert says in reply.text
    with pytest.raises(Closed):
        near.reply()
    assert len(os.listdir("/proc/self/fd")) == before - 1, (
        "the server's end of the connection, and the descriptor that it was sent"
    )


def test_descriptors_that_belong_to_nothing_are_closed(server: Server, near: Raw) -> None:
    before = len(os.listdir("/proc/self/fd"))
    fd = memory(bytes(100))
    for _ in range(50):
        near.ask(Ping, fds=(fd,))
    os.close(fd)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_too_many_descriptors_close_the_connection(server: Server, near: Raw) -> None:
    fd = memory(bytes(100))
    for part in (header(100)[:5], header(100)[5:]):
        near.sock.sendmsg(
            [part], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("5i", *[fd] * 5))]
        )
    with pytest.raises(Closed):
        near.reply()
    os.close(fd)
    with Raw(server.address, server.secret) as other:
        assert isinstance(other.ask(Ping), Done)


@pytest.mark.parametrize("size", [70 * MIB, 66 * MIB])
def test_a_value_that_does_not_fit_is_refused_before_it_is_read(
    server: Server, far: Raw, size: int
) -> None:
    if size == 66 * MIB:
        size = 40 * MIB
        far.ask(Set, "first", b"", body=bytes(40 * MIB))
    far.say_begin(Set, size, "k", b"")
    failed = far.reply()
    assert isinstance(failed, Failed)
    assert failed.code in ("value-too-large", "store-full")
    assert "--max-bytes" in failed.text
    sent = 0
    while sent < size:  # the whole of it: the connection lives on
        sent += far.sock.send(bytes(min(MIB, size - sent)))
    assert far.ask(Add, "n", 1).number == 1


def test_an_upload_that_breaks_off_leaves_nothing(server: Server, far: Raw) -> None:
    before = used(far)
    for size in (500_000, 20 * MIB):
        with Raw(server.address, server.secret) as broken:
            broken.say_begin(Set, size, "k", b"")
            broken.sock.sendall(bytes(400_000))
    clock = Clock()
    while used(far) != before:
        assert clock.elapsed() < DEADLINE
    assert isinstance(far.ask(Get, "k"), Absent)


def test_a_repeated_upload_is_answered_as_before(server: Server, far: Raw) -> None:
    value = os.urandom(40 * MIB)
    far.post(Set, "k", b"", body=value)
    first = far.reply()
    far.acked = 0
    with Raw(server.address, server.secret, session=far.session, resume=True) as again:
        # No room for it a second time, and none needed.
        assert again.ask(Set, "k", b"", body=value) == first
        again.ask(Get, "k")
        assert again.body == value


def test_a_slow_upload_is_a_sign_of_life(server: Server) -> None:
    with Raw(server.address, server.secret, ttl=1.5) as slow:
        size = 2 * MIB
        slow.say_begin(Set, size, "k", b"")
        pause = threading.Event()
        for _ in range(16):
            slow.sock.sendall(bytes(size // 16))
            pause.wait(0.25)
        assert slow.reply() == Done(1, 1)


def test_small_requests_do_not_wait_for_a_frozen_upload_or_download(
    server: Server, far: Raw
) -> None:
    frozen = []
    far.ask(Set, "large", b"", body=bytes(20 * MIB))
    try:
        for turn in range(transfers.THREADS + 3):
            client = Raw(server.address, server.secret)
            frozen.append(client)
            if turn % 2:
                client.say_begin(Set, 2 * MIB, f"k{turn}", b"")
                client.sock.sendall(bytes(MIB))
            else:
                client.post(Get, "large")
        assert far.ask(Add, "n", 1).number == 1
        assert far.ask(Set, "other", b"", body=bytes(3 * MIB)).seq == 3, (
            "large values are not held up either"
        )
        frozen[0].reply()
        assert frozen[0].body == bytes(20 * MIB)
        frozen[1].sock.sendall(bytes(MIB))
        assert isinstance(frozen[1].reply(), Done)
    finally:
        for client in frozen:
            client.close()


def test_a_reader_that_does_not_read_is_not_read_from(server: Server, far: Raw) -> None:
    """It asks for a gigabyte in small requests; the server keeps some megabytes."""
    far.ask(Set, "k", bytes(60_000))
    with Raw(server.address, server.secret) as frozen:
        frozen.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        message = encode(Get(1, 0, "k"))
        frame = header(len(message)) + message
        frozen.sock.settimeout(0.5)
        asked = 0
        try:
            while asked < 17_000:
                frozen.sock.sendall(frame * 1000)
                asked += 1000
        except TimeoutError:
            pass
        assert server._loop is not None
        queued = [peer.queued for peer in list(server._loop._peers.values())]
        assert max(queued) < 2 * peers.PAUSE_BYTES
        assert far.ask(Add, "n", 1).number == 1
        frozen.sock.settimeout(DEADLINE)
        for _ in range(2000):
            assert len(frozen.reply().value) == 60_000


def test_a_reader_with_too_many_waiting_answers_is_closed(
    server: Server, far: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "BACKLOG_BYTES", 8 * MIB)
    with Raw(server.address, server.secret) as frozen:
        frozen.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        for _ in range(600):
            frozen.post(Get, "k", DEADLINE)
        while far.ask(Status).waiting < 600:
            pass
        far.ask(Set, "k", bytes(60_000))
        threading.Event().wait(0.2)  # it does not read
        with pytest.raises(Closed):
            all(frozen.reply() for _ in range(600))
        assert far.ask(Add, "n", 1).number == 1


def test_values_that_are_lent_are_bounded(server: Server, near: Raw) -> None:
    value = os.urandom(2 * MIB)
    near.ask(Set, "k", b"", body=value)
    for turn in range(peers.LENT + 3):
        reply = near.ask(Get, "k")
        if turn < peers.LENT:
            assert near.shared(reply) == value
        else:
            assert (reply.shared, near.body) == (0, value)


def test_stop_sends_what_was_on_its_way(server: Server, far: Raw) -> None:
    value = os.urandom(30 * MIB)
    far.ask(Set, "k", b"", body=value)
    far.post(Get, "k")
    stopping = threading.Thread(target=server.stop, args=("the end", DEADLINE))
    far.sock.recv(1, socket.MSG_PEEK)
    stopping.start()
    assert isinstance(far.reply(), Value)
    assert far.body == value
    assert far.reply() == Closing(0, 1, "the end")
    stopping.join(DEADLINE)
    assert not stopping.is_alive()


def test_stop_does_not_wait_for_who_does_not_read(server: Server, far: Raw) -> None:
    far.ask(Set, "k", b"", body=bytes(30 * MIB))
    far.post(Get, "k")
    far.sock.recv(1, socket.MSG_PEEK)
    clock = Clock()
    server.stop("the end", 0.1)
    assert clock.elapsed() < DEADLINE / 2


def test_freed_comes_behind_a_reply(near: Raw) -> None:
    fd = memory(bytes(MIB))
    near.post(Set, "k", b"", shared=1000, segment=3, fds=(fd,))
    assert isinstance(near.reply(), Done)
    assert near.reply() == Freed(0, 0, (3,))
    os.close(fd)


def test_a_transfer_has_one_thread_whatever_epoll_said_before() -> None:
    """Who waits for a large value, and has just read what kept him from getting it: in one and the
    same look, he becomes writable and is sent that value. Two threads with one transfer would send
    a mixture of its bytes."""
    server = Server(max_bytes="64MiB", clock=In1970())
    loop = server._loop
    assert loop is not None
    reading, writing = (
        _joined(server, loop, server.address),
        _joined(server, loop, f"unix://{loop._local}"),
    )
    writing.post(Set, "k", bytes(60_000))
    reading.post(Get, "large", 60.0)
    loop._turn(loop._now() + 0.1)
    (peer,) = (peer for peer in loop._peers.values() if not peer.local)
    while peer.out is None:
        reading.post(Get, "k")
        for _ in range(5):  # until the kernel really takes no more
            loop._turn(loop._now() + 0.005)
    value = os.urandom(8 * MIB)
    fd = memory(value)
    writing.post(Set, "large", b"", len(value), fds=(fd,))
    os.close(fd)
    reading.sock.settimeout(0.1)
    with contextlib.suppress(TimeoutError):
        while True:
            reading._data += reading.sock.recv(MIB)
    clock = Clock()
    while (
        peer.fd not in (ready := [fd for fd, _ in loop._epoll.poll(0)])
        and clock.elapsed() < DEADLINE
    ):
        threading.Event().wait(0.001)
    assert peer.fd in ready[1:], "first what makes the large value, then who can be sent it"
    bodies = {}

    def read() -> None:
        reading.sock.settimeout(DEADLINE)
        for _ in range(reading.seq):
            reply = reading.reply()
            bodies[reply.seq] = reading.body

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    clock = Clock()
    while thread.is_alive() and clock.elapsed() < DEADLINE:
        loop._turn(loop._now() + 0.01)
    assert bodies[1] == value
    server.stop()
    reading.close()
    writing.close()


def _joined(server: Server, loop: Loop, address: str) -> Raw:
    """A client of a server that is turned by hand."""
    made: list[Raw] = []
    thread = threading.Thread(target=lambda: made.append(Raw(address, server.secret)))
    thread.start()
    while thread.is_alive():
        loop._turn(loop._now() + 0.01)
    return made[0]


def test_without_a_thread_only_the_large_value_fails(
    server: Server, far: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no)
        with pytest.raises((Closed, BrokenPipeError)):
            far.ask(Set, "k", b"", body=bytes(3 * MIB))
    with Raw(server.address, server.secret) as other:
        assert used(other) == 0
        other.ask(Set, "k", b"", body=bytes(3 * MIB))
        assert other.ask(Get, "k").seq
        assert len(other.body) == 3 * MIB


def test_a_descriptor_that_was_lost_costs_its_own_request_only(server: Server, near: Raw) -> None:
    """The first request's descriptor is lost for want of room in this process; the second one's
    must not be taken for it, although both requests are cut from one read."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first, second = memory(b"1" * MIB), memory(b"2" * MIB)
    near.post(Ping)
    near.reply()
    message = encode(Set(2, 1, "one", b"", MIB))
    head = header(len(message)) + message
    loop = server._loop
    assert loop is not None
    (peer,) = loop._peers.values()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        near.sock.sendmsg(
            [head[:5]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", first))]
        )
        clock = Clock()
        while not peer.descriptors and clock.elapsed() < DEADLINE:
            threading.Event().wait(0.001)
        assert list(peer.descriptors or ()) == [-1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    message = encode(Set(3, 1, "two", b"", MIB))
    near.sock.sendmsg(
        [head[5:] + header(len(message)) + message],
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", second))],
    )
    lost, done = near.reply(), near.reply()
    assert lost.code == "store-full"
    assert isinstance(done, Done)
    os.close(first)
    os.close(second)
    with Raw(server.address, server.secret) as far:
        assert isinstance(far.ask(Get, "one"), Absent)
        far.ask(Get, "two")
        assert far.body == b"2" * MIB


def test_descriptors_of_strangers_are_not_kept(server: Server, near: Raw) -> None:
    with plug(f"unix://{near.welcome.local}") as sock:
        fd = memory(bytes(100))
        sock.sendall(b"\x40")
        loop, clock = server._loop, Clock()
        assert loop is not None
        while (
            not any(len(peer.cutter.data) for peer in list(loop._gate.strangers))
            and clock.elapsed() < DEADLINE
        ):
            near.ask(Ping)
        before = len(os.listdir("/proc/self/fd"))
        for part in (b"\x00", b"\x00", b"\x00"):
            sock.sendmsg(
                [part], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("2i", fd, fd))]
            )
        while (
            any(len(peer.cutter.data) < 4 for peer in list(loop._gate.strangers))
            and clock.elapsed() < DEADLINE
        ):
            near.ask(Ping)
        assert len(os.listdir("/proc/self/fd")) <= before
        os.close(fd)


FEW = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from rallypoint.store.server import large_values as loop
loop.HUGE_BYTES = 4 << 20
"""


@pytest.mark.parametrize("same_host", [True, False])
def test_values_leave_descriptors_for_who_is_still_to_come(same_host: bool) -> None:
    """Each value of a mebibyte took a descriptor until there was none: new clients were refused,
    and in a job the launcher, in whose process the store is, could not look at its ranks any more
    and ended with an internal error."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess(FEW))
        store = stack.enter_context(
            rallypoint.connect(server.address, secret=server.secret, same_host=same_host)
        )
        values = [bytes([number]) * MIB for number in range(70)]
        for number, value in enumerate(values):
            store[f"k{number}"] = value
        assert len(os.listdir(f"/proc/{server.pid}/fd")) < 56
        for _ in range(6):
            stack.enter_context(
                rallypoint.connect(
                    server.address, secret=server.secret, same_host=same_host, timeout=60.0
                )
            )
        assert all(store[f"k{number}"] == value for number, value in enumerate(values))
        if same_host:
            with pytest.raises(rallypoint.LimitExceeded, match="a quarter") as caught:
                store["huge"] = bytes(5 * MIB)
            assert caught.value.code == "store-full"
        else:  # it comes by the socket, bit by bit, and is nobody's copy
            store["huge"] = bytes(5 * MIB)
            assert store["huge"] == bytes(5 * MIB)
        for number in range(70):
            del store[f"k{number}"]
        store["huge"] = bytes(5 * MIB)


def test_a_roster_that_cannot_be_had_is_not_the_end_of_the_store() -> None:
    """A barrier's timeout asked the launcher who is missing, that could not open /proc for want of
    descriptors, and the OSError ended the store's thread: every key was gone."""

    def roster() -> dict[int, Sighting]:
        raise OSError(errno.EMFILE, "Too many open files")

    with (
        Server(max_bytes="64MiB", roster=roster) as server,
        rallypoint.connect(server.address, secret=server.secret) as store,
    ):
        store["k"] = 1
        with pytest.raises(rallypoint.BarrierTimeout):
            store.barrier("b", 2, timeout=0.1)
        assert store["k"] == 1
