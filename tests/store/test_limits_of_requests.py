"""What one client may ask for or half say without harm to the others: long messages that never end,
waits for very many keys.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest

import rallypoint
from rallypoint.store.server.server import Server
from rallypoint.wire.frames import header
from rallypoint.wire.messages import (
    TAGS,
    Add,
    Append,
    Exists,
    Failed,
    Get,
    Keys,
    Names,
    Set,
    Status,
    encode,
    seq_of,
)

from .live import until
from .processes import ServerProcess
from .raw import DEADLINE, In1970, Raw

MIB = 1024 * 1024


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(max_bytes="2MiB", clock=In1970()) as made:
        yield made


def used(client: Raw) -> int:
    return int(client.ask(Status).used_bytes)


def begin(client: Raw, size: int) -> None:
    """Announce a message of `size` bytes, and send half of it: the beginning of a list of keys."""
    client.seq += 1
    begun = encode((TAGS[Keys], client.seq, client.acked, "k" * (size // 2)))
    client.sock.sendall((header(size) + begun)[: size // 2])


def test_a_message_that_has_begun_counts_as_what_the_store_holds(server: Server) -> None:
    """Messages of up to 64 MiB that a client never finished counted against nothing: forty
    connections took 2.4 GB of a server that was to hold 2 MiB, and it kept that."""
    with Raw(server.address, server.secret) as observer:
        before = used(observer)
        with Raw(server.address, server.secret) as client:
            begin(client, MIB)
            until(lambda: used(observer) >= before + MIB)
            with Raw(server.address, server.secret) as second:
                begin(second, 3 * MIB // 2)
                refused = second.reply()
                assert isinstance(refused, Failed)
                assert (refused.code, refused.seq) == ("store-full", second.seq)
                second.sock.sendall(bytes(3 * MIB // 2 - 3 * MIB // 4 + len(header(1))))
                assert second.ask(Add, "n", 1).number == 1, (
                    "the rest was thrown away, and the connection goes on"
                )
        until(lambda: used(observer) < before + 1000)


def test_a_long_message_that_fits_is_carried_out_and_charged_once(server: Server) -> None:
    with Raw(server.address, server.secret) as client:
        before = used(client)
        assert client.ask(Append, "k", bytes(MIB)).number == MIB
        assert MIB <= used(client) - before < MIB + 1000
        refused = client.ask(Append, "j", bytes(MIB))
        assert isinstance(refused, Failed)
        assert refused.code == "store-full"
        names = tuple(f"a key that is not there {number}" for number in range(20_000))
        assert client.ask(Exists, names) == Names(client.seq, 1, ())
        assert MIB <= used(client) - before < MIB + 1000


def test_the_memory_of_messages_that_never_end_is_bounded() -> None:
    def resident() -> int:
        with open(f"/proc/{process.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096

    with (
        ServerProcess(
            'rallypoint.Server = (lambda make: lambda **named: make(**named | {"max_bytes": "2MiB"}))(rallypoint.Server)'
        ) as process,
        rallypoint.connect(process.address, secret=process.secret) as store,
    ):
        before = resident()
        clients = [Raw(process.address, process.secret) for _ in range(10)]
        for client in clients:
            client.sock.sendall(header(60 * MIB))
            client.sock.sendall(b"\x93" * (20 * MIB))
        store["k"] = 1
        assert resident() - before < 50 * MIB
        for client in clients:
            client.close()


@pytest.mark.parametrize(
    "request_",
    [Get(7, 3, "k"), Set(300, 2, "k", b"v"), Exists(70_000, 1, ("k",)), Add(2**40, 1, "k", 1)],
)
def test_the_number_of_a_request_that_has_only_begun(request_: Get | Set | Exists | Add) -> None:
    message = encode(request_)
    assert seq_of(message) == request_.seq
    assert seq_of(b"") == seq_of(message[:1]) == seq_of(b"\xc1" * 64) == 0


def test_a_wait_for_very_many_keys_holds_nobody_up(server: Server) -> None:
    """A wait for 100,000 keys that timed out took the server half a second, for a million 9 s:
    others lost their sessions.
    """
    with Raw(server.address, server.secret) as client:
        refused = client.ask(Exists, tuple(f"k{number}" for number in range(5000)), 1.0)
        assert isinstance(refused, Failed)
        assert refused.code == "too-many-waiting"
        assert "4096" in refused.text


def test_torch_waits_for_many_keys_a_thousand_at_a_time(server: Server) -> None:
    dist = pytest.importorskip("torch.distributed")
    names = [f"k{number}" for number in range(6000)]
    with rallypoint.connect(server.address, secret=server.secret) as store:
        c10d = store.c10d()
        with pytest.raises(dist.DistStoreError, match="keys: k0"):
            c10d.wait(names, timedelta(seconds=0.1))
        waiting = threading.Thread(target=c10d.wait, args=(names, timedelta(seconds=DEADLINE)))
        waiting.start()
        c10d.multi_set(names[1:], ["v"] * (len(names) - 1))
        assert not c10d.check(names)
        assert waiting.is_alive()
        c10d.set("k0", "v")
        waiting.join(DEADLINE)
        assert not waiting.is_alive()
        assert c10d.check(names)
        c10d.delete_key("k5999")
        with pytest.raises(dist.DistStoreError, match=r"keys: k5999$"):
            c10d.wait(names, timedelta(seconds=0.1))
