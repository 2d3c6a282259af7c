"""One connection, its other end played by the test: what is queued, what is cut where, what cannot be kept, what is closed when."""

from __future__ import annotations

import array
import os
import resource
import select
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rallypoint.clock import Clock
from rallypoint.host import memory
from rallypoint.store import link as links
from rallypoint.store.dial import Opened
from rallypoint.store.link import Link, LinkBroken, TooLate, Unread
from rallypoint.wire.frames import HEADER, Cutter, header
from rallypoint.wire.messages import (
    HELLO_BYTES,
    MESSAGE_BYTES,
    Absent,
    Done,
    Freed,
    Get,
    Integer,
    Limits,
    Names,
    Set,
    Value,
    Welcome,
    decode_request,
    encode,
)
from rallypoint.wire.values import Parts

from .situations import DEADLINE, descriptors, start

ME, ANOTHER = threading.get_ident(), -7
WELCOME = Welcome(b"s" * 16, "0", Limits(0, 0, 0, 0, 0, 0), "", 0, 10.0)


class Ends:
    """A link, and the server's end of its socket."""

    def __init__(self, family: socket.AddressFamily, *, backlog: bytes = b"") -> None:
        if family == socket.AF_UNIX:
            mine, self.server = socket.socketpair()
        else:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                mine = socket.create_connection(listener.getsockname())
                self.server, _ = listener.accept()
        mine.setblocking(False)
        self.server.settimeout(DEADLINE)
        cutter = Cutter(HELLO_BYTES, 0)
        if backlog:
            cutter.feed(backlog)
        self.link = Link(Opened(mine, cutter, WELCOME, "here"), Clock(), 1, shared_memory=True)
        self.link.backlog()

    def say(self, *frames: bytes) -> None:
        self.server.sendall(b"".join(frames))

    def received(self, count: int) -> list[Any]:
        """What the link receives until it is so much."""
        found: list[Any] = []
        while len(found) < count:
            assert self.link.wait(DEADLINE)
            found += self.link.receive()
        return found

    def read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            data += self.server.recv(min(size - len(data), 1 << 20))
        return bytes(data)

    def fill(self) -> bytes:
        """Send until the socket takes no more; what was sent."""
        filler = frame(Get(1, 0, "x" * 5000))
        whole = b""
        while not whole.endswith(b"!"):
            sent = self.link.post(filler, None, ME)
            whole += filler
            if not sent:
                return whole
        raise AssertionError


@pytest.fixture(params=[socket.AF_UNIX, socket.AF_INET], ids=["unix", "tcp"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = Ends(request.param)
    yield made
    made.link.writer = made.link.driven = 0
    made.link.close()
    made.server.close()


@pytest.fixture
def unix() -> Iterator[Ends]:
    made = Ends(socket.AF_UNIX)
    yield made
    made.link.close()
    made.server.close()


def frame(message: Any, body: bytes = b"") -> bytes:
    encoded = encode(message)
    return header(len(encoded), len(body)) + encoded + body


def requests(data: bytes) -> list[Any]:
    cutter = Cutter(MESSAGE_BYTES, 1 << 40)
    cutter.feed(data)
    found = []
    while (cut := cutter.next()) is not None:
        found.append(decode_request(cut.message))
    assert not len(cutter)
    return found


def parts(*buffers: bytes) -> Parts:
    return Parts(tuple(memoryview(buffer) for buffer in buffers), sum(len(buffer) for buffer in buffers))


# --- out


def test_what_does_not_fit_is_queued_and_pumped_in_order(ends: Ends) -> None:
    sent = ends.fill()
    assert ends.link.writer == ME
    last = frame(Get(2, 0, "last"))
    assert not ends.link.post(last, None, ANOTHER)  # another thread queues behind it, and does not wait
    assert ends.link.writer == ME
    got: list[bytes] = []
    reader = start(lambda: got.append(ends.read(len(sent) + len(last))))
    ends.link.pump(Clock().monotonic() + DEADLINE, 0.0, lambda: True)
    assert ends.link.writer == 0
    reader()
    assert got == [sent + last]
    assert ends.link.sent_bytes == len(sent + last)


def test_two_threads_never_mix_their_frames(ends: Ends) -> None:
    """A large value of one, small requests of the other: each frame arrives whole."""
    value = parts(os.urandom(3_000_000), os.urandom(7), os.urandom(2_000_000))
    small = [frame(Get(seq, 0, "k" * 300)) for seq in range(2000)]
    got: list[bytes] = []

    def upload() -> None:
        me = threading.get_ident()
        while ends.link.writer:
            select.poll().poll(1)
        ends.link.post_with(encode(Set(1, 0, "large", b"")), value, None, me)
        if ends.link.writer == me:
            ends.link.pump(Clock().monotonic() + DEADLINE, 0.0, lambda: True)

    def ask() -> None:
        me = threading.get_ident()
        for one in small:
            if not ends.link.post(one, None, me) and ends.link.writer == me:
                ends.link.pump(Clock().monotonic() + DEADLINE, 0.0, lambda: True)

    size = sum(map(len, small)) + HEADER.size + len(encode(Set(1, 0, "large", b""))) + value.size
    join = start(lambda: got.append(ends.read(size)), upload, ask)
    join()
    cutter = Cutter(MESSAGE_BYTES, 1 << 40)
    cutter.feed(got[0])
    keys = []
    while (cut := cutter.next()) is not None:
        request = decode_request(cut.message)
        keys.append(request.key)
        if request.key == "large":
            assert cut.body == b"".join(value.buffers)
    assert sorted(keys) == sorted(["k" * 300] * 2000 + ["large"])
    assert ends.link.writer == 0


def test_nobody_waits_longer_than_until_the_deadline_for_room(ends: Ends) -> None:
    ends.fill()
    owner = object()
    ends.link.post(frame(Get(9, 0, "k")), owner, ANOTHER)
    clock = Clock()
    with pytest.raises(TooLate):
        ends.link.pump(clock.monotonic() + 0.2, 0.0, lambda: True)
    assert 0.15 < clock.elapsed() < 5.0
    assert list(ends.link.unsent()) == [owner]


def test_a_request_and_its_small_reply_are_one_call(ends: Ends) -> None:
    ends.say(frame(Done(1, 5)))
    assert ends.link.exchange(frame(Get(1, 0, "k")), None, ME, DEADLINE) == Done(1, 5)
    assert ends.link.receiving  # until whoever called has handed it over
    assert requests(ends.read(len(frame(Get(1, 0, "k"))))) == [Get(1, 0, "k")]
    assert (ends.link.writer, ends.link.driven) == (0, 0)


def test_an_exchange_that_is_not_that_simple_leaves_all_to_the_usual_calls(ends: Ends) -> None:
    assert ends.link.exchange(frame(Get(1, 0, "k")), None, ME, 0.0) is None  # nothing has come
    assert not ends.link.receiving
    ends.say(frame(Done(1, 5)), frame(Done(2, 5)))
    assert ends.link.wait(DEADLINE)
    assert ends.link.exchange(frame(Get(3, 0, "k")), None, ME, DEADLINE) is None
    assert ends.link.receiving
    assert ends.link.backlog() == [(Done(1, 5), None), (Done(2, 5), None)]
    ends.say(frame(Value(3, 5, 4, b""), b"x" * 5000))
    assert ends.link.exchange(frame(Get(4, 0, "k")), None, ME, DEADLINE) is None
    assert [reply for reply, _ in ends.link.backlog() or ends.received(1)] == [Value(3, 5, 4, b"")]
    ends.link.writer = ANOTHER
    assert ends.link.exchange(frame(Get(5, 0, "k")), None, ME, DEADLINE) is None  # behind what the other one sends
    assert ends.link.writer == ANOTHER
    assert list(ends.link.unsent()) == []


def lent(value: bytes) -> tuple[bytes, int]:
    """A frame that says so, and the descriptor that goes with its first byte."""
    fd = os.memfd_create("value")
    os.write(fd, value)
    return frame(Value(2, 5, 4, b"", shared=len(value))), fd


@pytest.mark.parametrize("lends", [True, False])
@pytest.mark.parametrize("first", [b"", frame(Done(1, 5)), frame(Names(1, 5, ("n" * 300,)))])
def test_shared_memory_that_was_not_expected_is_never_taken_for_another_ones(first: bytes, lends: bool) -> None:
    """Read without its descriptor, it breaks the link: what is asked again on the next one comes with both."""
    ends = Ends(socket.AF_UNIX)
    ends.link.lends = lends
    announced, fd = lent(b"v" * 5000)
    other, another = lent(b"w" * 5000)
    try:
        if first:
            ends.say(first)
        socket.send_fds(ends.server, [announced], [fd])
        socket.send_fds(ends.server, [other], [another])
    finally:
        os.close(fd)
        os.close(another)
    got: list[Any] = []
    why = ""
    try:
        reply = ends.link.exchange(frame(Get(1, 0, "k")), None, ME, DEADLINE)
        got += [(reply, None)] if reply is not None else ends.link.backlog()
        while len(got) < (3 if first else 2):
            got += ends.received(1)
    except LinkBroken as broken:
        why = str(broken)
    if lends:
        assert why == ""
    elif not first:
        assert "none was expected" in why
    else:  # the kernel ends a read with the bytes before a descriptor, or it does not
        assert why == "" or "none was expected" in why
    values = [bytes(body) for _, body in got if isinstance(body, memoryview)]
    assert values == [b"v" * 5000, b"w" * 5000][: len(values)]
    ends.link.close()
    ends.server.close()


def test_a_frame_that_begins_like_a_whole_one(ends: Ends) -> None:
    """The lower byte of its length is the number of bytes that have come of its message."""
    reply = frame(Names(1, 5, ("n" * 300,)))
    begun = 12 + len(reply[12:]) % 256
    ends.say(reply[:begun])
    assert ends.link.exchange(frame(Get(1, 0, "k")), None, ME, DEADLINE) is None
    assert ends.link.backlog() == []
    ends.say(reply[begun:])
    assert ends.received(1) == [(Names(1, 5, ("n" * 300,)), None)]
    body = b"b" * 300
    ends.say(frame(Value(2, 5, 4, b""), body)[: -len(body)])  # nothing of it is there yet
    assert ends.link.exchange(frame(Get(2, 0, "k")), None, ME, DEADLINE) is None
    found = ends.link.backlog()
    ends.say(body)
    while not found:
        found = ends.received(1)
    assert [(reply, bytes(view)) for reply, view in found if isinstance(view, memoryview)] == [(Value(2, 5, 4, b""), body)]


@pytest.mark.parametrize("more", [-1, 0, 1, 300, 70_000])
def test_a_reply_of_any_length_and_then_the_end(ends: Ends, more: int) -> None:
    """The first read is a short one; what it leaves is read at once, and the end of the stream hides nothing that came before it."""
    reply = next(one for n in range(70_000) if len(one := frame(Names(1, 5, ("n" * (more + 400 + n),)))) >= links.FIRST_BYTES + more)
    assert len(reply) == links.FIRST_BYTES + more
    ends.say(reply)
    ends.server.shutdown(socket.SHUT_WR)
    got = ends.link.exchange(frame(Get(1, 0, "k")), None, ME, DEADLINE)
    found = [got] if got is not None else [one for one, _ in ends.link.backlog() or ends.received(1)]
    assert [encode(one) for one in found] == [reply[12:]]
    ends.link.receiving = False
    with pytest.raises(LinkBroken, match="closed the connection"):
        ends.link.receive()


def test_an_exchange_with_a_server_that_is_gone(ends: Ends) -> None:
    ends.say(b"\x04\0\0\0" + b"\0" * 8 + b"\xff\xff\xff\xff")
    assert ends.link.wait(DEADLINE)
    assert ends.link.exchange(frame(Get(1, 0, "k")), None, ME, DEADLINE) is None
    with pytest.raises(LinkBroken, match="not rallypoint's"):
        ends.link.backlog()
    assert ends.link.receiving  # it was sent: whether it was carried out is not known
    ends.link.receiving = False
    ends.server.close()
    with pytest.raises(LinkBroken):
        ends.link.exchange(frame(Get(2, 0, "k")), None, ME, DEADLINE)  # sending may go well, or not
    assert ends.link.driven == 0


def test_who_waits_for_room_reads_meanwhile(ends: Ends) -> None:
    """The server stops reading from a client that does not read: both would wait for ever."""
    value = parts(os.urandom(16 << 20))
    ends.link.post_with(encode(Set(1, 0, "k", b"")), value, None, ME)
    size = HEADER.size + len(encode(Set(1, 0, "k", b""))) + value.size
    looked: list[Any] = []
    drained: list[Any] = []

    def look_in() -> bool:
        looked.extend(ends.link.receive())
        if not drained:
            drained.append(start(lambda: drained.append(ends.read(size))))
        return True

    ends.say(frame(Done(1, 1)))
    ends.link.pump(Clock().monotonic() + DEADLINE, 0.0, look_in)
    assert [reply for reply, _ in looked] == [Done(1, 1)]
    drained[0]()
    assert drained[1].endswith(bytes(value.buffers[0]))


def test_a_handler_that_finds_a_frame_half_sent_takes_another_link(ends: Ends) -> None:
    ends.fill()
    with pytest.raises(LinkBroken, match="a signal handler used the store"):
        ends.link.post(frame(Get(2, 0, "k")), None, ME)
    with pytest.raises(LinkBroken, match="a signal handler used the store"):
        ends.link.post_with(b"x", parts(b"y"), None, ME)
    assert not ends.link.try_post(encode(Get(0, 0, "k")), ME)


def test_a_closed_link_takes_nothing(ends: Ends) -> None:
    ends.link.close()
    with pytest.raises(LinkBroken):
        ends.link.post(frame(Get(2, 0, "k")), None, ME)
    with pytest.raises(LinkBroken):
        ends.link.post_with(b"x", parts(b"y"), None, ME)
    with pytest.raises(LinkBroken):
        ends.link.fill(parts(b"x"))
    assert not ends.link.try_post(encode(Get(0, 0, "k")), ME)


def test_what_the_server_said_last_can_be_read_when_nothing_can_be_sent(ends: Ends) -> None:
    ends.say(frame(Done(0, 1)))
    ends.server.close()
    broken: list[LinkBroken] = []
    while not broken:  # TCP notices when the answer to the first comes back
        try:
            ends.link.post(frame(Get(2, 0, "k")), None, ME)
        except LinkBroken as error:
            broken.append(error)
    assert broken[0].gone
    assert [reply for reply, _ in ends.received(1)] == [Done(0, 1)]
    with pytest.raises(LinkBroken):
        ends.received(1)


# --- in


REPLIES = [Done(1, 5), Value(2, 6, 3, b"\x01"), Absent(3, 6), Integer(4, 7, -1), Names(5, 7, ("a", "b" * 300))]


@pytest.mark.parametrize("size", [1, 2, 5, 11, 12, 13, 40, 10_000])
def test_replies_are_the_same_however_they_are_cut(ends: Ends, size: int) -> None:
    data = b"".join(frame(reply) for reply in REPLIES)
    found: list[Any] = []
    for at in range(0, len(data), size):
        ends.say(data[at : at + size])
        while ends.link.wait(0.0):
            found += ends.link.receive()
    found += ends.received(len(REPLIES) - len(found)) if len(found) < len(REPLIES) else []
    assert [reply for reply, _ in found] == REPLIES


@pytest.mark.parametrize("size", [70_000, 1_000_000])
def test_large_values_come_between_small_ones(ends: Ends, size: int) -> None:
    values = [os.urandom(size), os.urandom(size + 1)]
    large = [frame(Value(2 * index + 2, 1, 1, b""), value) for index, value in enumerate(values)]
    frames = (frame(Done(1, 1)), large[0], frame(Done(3, 1)), large[1], frame(Done(5, 1)))
    join = start(lambda: ends.say(*frames))
    found = ends.received(5)
    join()
    assert [reply.seq for reply, _ in found] == [1, 2, 3, 4, 5]
    assert [bytes(body) for _, body in found if body is not None] == values


def test_what_came_with_the_welcome_is_not_lost() -> None:
    ends = Ends(socket.AF_UNIX, backlog=frame(Done(1, 1))[:14])
    ends.say(frame(Done(1, 1))[14:], frame(Done(2, 1)))
    assert [reply for reply, _ in ends.received(2)] == [Done(1, 1), Done(2, 1)]
    ends.link.close()
    ends.server.close()


@pytest.mark.parametrize(
    "said",
    [
        header(5) + b"\xc1\xc1\xc1\xc1\xc1",
        header(0),
        header(MESSAGE_BYTES + 1),
        frame(Done(1, 1), b"a body that belongs to nothing"),
        frame(Value(1, 1, 1, b"", 4096)),  # without a descriptor
    ],
    ids=["no message", "empty", "too long", "body", "no descriptor"],
)
def test_what_is_not_of_the_protocol_breaks_the_link(ends: Ends, said: bytes) -> None:
    ends.say(said)
    with pytest.raises(LinkBroken):
        ends.received(1)


def test_the_end_breaks_the_link(ends: Ends) -> None:
    ends.say(frame(Done(1, 1))[:5])
    ends.server.close()
    with pytest.raises(LinkBroken, match=r"closed|reset"):
        ends.received(1)


def test_the_end_in_the_middle_of_a_value(ends: Ends) -> None:
    ends.say(frame(Value(1, 1, 1, b""), b"x" * 200_000)[:100_000])
    ends.server.shutdown(socket.SHUT_WR)
    with pytest.raises(LinkBroken, match="in the middle of a value"):
        ends.received(1)


def test_a_value_without_memory_is_the_trouble_of_who_asked(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes behind it arrives; the connection goes on."""

    def none(size: int) -> memoryview:
        raise MemoryError

    monkeypatch.setattr(links, "alloc", none)
    join = start(lambda: ends.say(frame(Value(1, 1, 1, b""), b"x" * 3_000_000), frame(Done(2, 1))))
    found = ends.received(2)
    join()
    assert [reply.seq for reply, _ in found] == [1, 2]
    unread = found[0][1]
    assert isinstance(unread, Unread)
    assert isinstance(unread.error, MemoryError)
    assert str(unread.error) == "there is no memory here for a value of 3000000 bytes"


# --- shared memory


def lend(ends: Ends, seq: int, value: bytes) -> None:
    fd = memory.create(len(value))
    os.pwrite(fd, value, 0)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))]
    ends.server.sendmsg([frame(Value(seq, 1, 1, b"", len(value)))], rights)
    os.close(fd)


def test_values_in_shared_memory(unix: Ends) -> None:
    before = descriptors()
    values = [os.urandom(100_000) for _ in range(20)]
    for seq, value in enumerate(values):
        lend(unix, seq + 1, value)
        unix.say(frame(Done(100, 1)))
    found = unix.received(40)
    assert [bytes(body) for _, body in found if body is not None] == values
    assert descriptors() == before


def test_received_descriptors_are_not_inherited(unix: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    inheritable = []
    monkeypatch.setattr(links.os, "preadv", lambda fd, views, at: inheritable.append(os.get_inheritable(fd)) or len(views[0]))  # type: ignore[attr-defined,func-returns-value]
    lend(unix, 1, b"x" * 100_000)
    unix.received(1)
    assert inheritable == [False]


def test_a_process_without_room_for_a_descriptor(unix: Ends) -> None:
    """The kernel drops what it cannot install. Who asked is told; the connection goes on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lend(unix, 1, b"x" * 100_000)
    unix.say(frame(Done(2, 1)))
    highest = max(descriptors()) + 1
    taken = []
    try:
        while (fd := os.open(os.devnull, os.O_RDONLY)) < highest:
            taken.append(fd)
        taken.append(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (fd + 1, hard))
        found = unix.received(2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
    unread = found[0][1]
    assert isinstance(unread, Unread)
    assert "no descriptor left" in str(unread.error)
    assert found[1][0] == Done(2, 1)
    lend(unix, 3, b"y" * 100_000)
    assert bytes(unix.received(1)[0][1]) == b"y" * 100_000


def send_lent(ends: Ends, value: bytes) -> tuple[int, int]:
    """As the session does it: which number was announced, and the inode of the memory that arrived."""
    number, segment = ends.link.fill(parts(value))
    ends.link.post_lent(encode(Set(1, 0, "k", b"", len(value), segment=number)), number, segment, None, ME)
    del segment
    ends.link.pump(Clock().monotonic() + DEADLINE, 0.0, lambda: True)
    data, ancillary, _, _ = ends.server.recvmsg(65536, socket.CMSG_SPACE(64))
    (request,) = requests(data)
    fds = array.array("i")
    fds.frombytes(ancillary[0][2])
    assert os.pread(fds[0], len(value), 0) == value
    inode = os.fstat(fds[0]).st_ino
    os.close(fds[0])
    return request.segment, inode


def test_memory_is_used_again_when_the_server_says_so_and_not_before(unix: Ends) -> None:
    first = send_lent(unix, b"a" * 200_000)
    second = send_lent(unix, b"b" * 200_000)
    assert first != second
    unix.say(frame(Freed(0, 1, (first[0], 999))), frame(Done(1, 1)))
    unix.received(1)
    assert send_lent(unix, b"c" * 150_000) == first
    assert send_lent(unix, b"d" * 200_000) not in (first, second)
    unix.say(frame(Freed(0, 1, (second[0],))), frame(Freed(0, 1, (second[0],))), frame(Done(1, 1)))  # twice is once
    unix.received(1)
    assert send_lent(unix, b"e" * 200_000) == second
    assert send_lent(unix, b"f" * 200_000) != second


def test_free_memory_is_bounded_and_given_back(unix: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "FREE_BYTES", 1_000_000)

    def free(size: int, count: int) -> None:
        numbers = [send_lent(unix, b"x" * size)[0] for _ in range(count)]
        unix.say(frame(Freed(0, 1, tuple(numbers))), frame(Done(1, 1)))
        unix.received(1)

    def segments() -> int:
        return sum("memfd:rallypoint" in what for what in descriptors().values())

    before = segments()
    free(100_000, links.FREE_SEGMENTS + 4)
    assert segments() == before + links.FREE_SEGMENTS
    free(900_000, 3)
    assert segments() == before + 1
    free(5_000_000, 2)
    assert segments() == before + 1, "the last one is kept, however large"
    for _ in range(links.FREE_ROUNDS):
        unix.link.trim()
    assert segments() == before


def test_many_values_at_once_do_not_cost_a_descriptor_each(unix: Ends) -> None:
    before = len(descriptors())
    numbers = [send_lent(unix, b"x" * 70_000)[0] for _ in range(links.LENT_SEGMENTS + 10)]
    assert numbers[-10:] == [0] * 10
    assert len(descriptors()) == before + links.LENT_SEGMENTS
    unix.link.close()
    assert len(descriptors()) == before - 1


# --- the end


def test_the_socket_is_closed_when_nobody_uses_it_and_not_before(ends: Ends) -> None:
    """A thread that is about to poll has looked up the number; it must not be another file's by then."""
    ends.link.driven = 1
    ends.link.close()
    assert ends.link.sock.fileno() >= 0
    assert ends.link.wait(DEADLINE), "who polls is woken"
    with pytest.raises(LinkBroken):
        ends.link.receive()
    ends.link.driven = 0
    ends.link.writer = ANOTHER
    ends.link.dispose()
    assert ends.link.sock.fileno() >= 0
    ends.link.writer = 0
    ends.link.dispose()
    assert ends.link.sock.fileno() == -1
    ends.link.dispose()


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # it closes itself, and Python says so
def test_a_link_that_is_forgotten_leaves_nothing_open(unix: Ends) -> None:
    before = descriptors()
    other = Ends(socket.AF_UNIX)
    fd = memory.create(4096)
    other.server.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("ii", fd, fd))])
    os.close(fd)
    assert other.link.wait(DEADLINE)
    other.link.receive()
    other.link.driven = 1
    other.link.close()
    other.server.close()
    del other
    assert descriptors() == before


def test_a_poll_inside_a_poll(ends: Ends) -> None:
    """A signal handler's, in the middle of ours: Python refuses to use the same poll object."""

    def busy(_: float) -> list[tuple[int, int]]:
        raise RuntimeError("concurrent poll() invocation")

    real, ends.link.poll = ends.link.poll, busy  # type: ignore[assignment]
    assert not ends.link.wait(0.0)
    ends.say(frame(Done(1, 1)))
    assert ends.link.wait(DEADLINE)
    ends.link.poll = real
