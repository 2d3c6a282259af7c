"""A live server, and clients that say anything at all: it serves the others, logs no fault of its
own, and in the end holds nothing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import socket
import struct
import threading
from typing import Any

import pytest

from rallypoint.clock import Clock
from rallypoint.store.server.server import Server
from rallypoint.store.state import quotas
from rallypoint.wire.frames import header
from rallypoint.wire.messages import (
    Add,
    Append,
    Arrive,
    Bye,
    Cancel,
    Claim,
    CompareAndSet,
    Delete,
    Done,
    Exists,
    Get,
    Keys,
    Length,
    Lock,
    Ping,
    Pop,
    Push,
    Release,
    Request,
    Resolve,
    Set,
    Settle,
    Status,
    Unlock,
    Watch,
    encode,
)

from .raw import DEADLINE, Closed, Raw, memory, plug

ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "20"))
MIB = 1024 * 1024


class Hostile:
    """A source of requests of which most are valid, and the rest nearly."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def name(self) -> str:
        return self.dice.choice(["a", "b", "c", "a/b", "", "\0", "n" * 5000, "é\U0001f600"])

    def number(self) -> int:
        return self.dice.choice(
            [0, 1, 2, 3, self.dice.randrange(40), 2**31, 2**62, 2**63 - 1, 2**64 - 1, -1, -(2**63)]
        )

    def time(self) -> float | None:
        return self.dice.choice(
            [None, 0.0, -1.0, 0.01, math.nan, math.inf, -math.inf, 1e300, 5e-324, 1e9]
        )

    def value(self) -> bytes:
        return self.dice.choice(
            [
                b"",
                b"\x01",
                b"\xcc",
                b"\xc4\x01a",
                b"\xc4\x02",
                b"\xc4\x0212",
                self.dice.randbytes(2000),
            ]
        )

    def request(self, seq: int, acked: int) -> Request:
        name, number, time, value, dice = (
            self.name(),
            self.number(),
            self.time(),
            self.value(),
            self.dice,
        )
        flag = dice.random() < 0.5
        some = dice.choice([None, number])
        shared = dice.choice([0] * 6 + [1, 100, 2 * MIB, number])
        makers: list[Any] = [
            lambda: Ping(seq, acked),
            lambda: Get(seq, acked, name, time),
            lambda: Set(
                seq,
                acked,
                name,
                b"" if shared else value,
                shared,
                time,
                flag,
                some,
                dice.choice([None, number]),
                number,
            ),
            lambda: CompareAndSet(
                seq,
                acked,
                name,
                b"" if shared else value,
                shared,
                dice.choice([None, value]),
                some,
                time,
                some,
                number,
            ),
            lambda: Delete(seq, acked, name, flag, some),
            lambda: Keys(seq, acked, name, flag),
            lambda: Exists(seq, acked, tuple(self.name() for _ in range(dice.randrange(4))), time),
            lambda: Add(seq, acked, name, number, flag),
            lambda: Append(seq, acked, name, value),
            lambda: Push(seq, acked, name, b"" if shared else value, shared, number),
            lambda: Pop(seq, acked, name, time, flag),
            lambda: Settle(seq, acked, name, number, flag),
            lambda: Length(seq, acked, name),
            lambda: Watch(seq, acked, name, dice.choice([None, number]), time or 0.0),
            lambda: Claim(seq, acked, name, time),
            lambda: Resolve(
                seq,
                acked,
                name,
                b"" if shared else value,
                shared,
                flag,
                dice.random() < 0.3,
                number,
            ),
            lambda: Lock(seq, acked, name, self.name(), time),
            lambda: Unlock(seq, acked, name, number),
            lambda: Arrive(seq, acked, name, dice.choice([1, 2, number]), time),
            lambda: Status(seq, acked),
            lambda: Cancel(
                dice.choice([0, seq]), acked, dice.choice([number, seq, max(0, seq - 1)])
            ),
            lambda: Release(0, acked, tuple(range(dice.randrange(5)))),
            lambda: Bye(seq, acked),
        ]
        request: Request = dice.choice(makers[:-1] if dice.random() < 0.98 else makers)()
        return request

    def frame(self, seq: int, acked: int) -> tuple[bytes, list[int]]:
        """What is sent, and descriptors to go with it, which the caller closes."""
        dice = self.dice
        request = self.request(seq, acked)
        message = encode(request)
        fits = (
            isinstance(request, Set | CompareAndSet | Push | Resolve)
            and not request.value
            and not request.shared
        )
        size = (
            dice.choice([1, 5000, 70_000, MIB, 2 * MIB])
            if dice.random() < (0.9 if fits else 0.02)
            else 0
        )
        body = bytes(dice.choice([size, size, size // 2]))
        data = bytearray(header(len(message), size) + message + body)
        if dice.random() < 0.03:  # some bytes are others
            for _ in range(dice.randrange(1, 4)):
                data[dice.randrange(min(len(data), 200))] = dice.randrange(256)
        if dice.random() < 0.02:
            del data[dice.randrange(len(data)) :]
        fds: list[int] = []
        if (getattr(request, "shared", 0) and dice.random() < 0.9) or dice.random() < 0.02:
            sizes = [1, 100, 2 * MIB]
            fds = [
                memory(bytes(dice.choice(sizes)))
                if dice.random() < 0.8
                else os.open("/dev/null", os.O_RDWR)
            ]
        return bytes(data), fds


def stranger(server: Server, dice: random.Random, path: str) -> None:
    with (
        plug(dice.choice([server.address, f"unix://{path}"])) as sock,
        contextlib.suppress(OSError),
    ):
        sock.settimeout(0.2)
        data = dice.randbytes(dice.randrange(300))
        sock.sendall(
            dice.choice(
                [
                    data,
                    header(len(data)) + data,
                    struct.pack("<IQ", dice.randrange(2**32), dice.randrange(2**64)) + data,
                ]
            )
        )
        if dice.random() < 0.3:
            sock.recv(100)


def conversation(server: Server, seed: int, path: str) -> None:
    """One session that talks nonsense, on several connections perhaps, reads some of its replies,
    and ends.
    """
    hostile = Hostile(seed)
    dice = hostile.dice
    session, seq, acked = os.urandom(16), 0, 0
    for _ in range(dice.randrange(1, 4)):
        try:
            address = dice.choice([server.address, f"unix://{path}"])
            client = Raw(
                address,
                server.secret,
                session=session,
                ttl=dice.choice([0.05, 0.3, math.nan, -1.0, 0.1]) if seed % 7 else 0.3,
            )
        except Exception:
            return  # refused: it has ended
        with client, contextlib.suppress(OSError, Closed):
            client.sock.settimeout(0.2)
            for _ in range(dice.randrange(60)):
                seq = seq + 1 if dice.random() < 0.9 else max(0, seq - dice.randrange(3))
                acked = dice.choice(
                    [acked, acked, max(0, seq - dice.randrange(5)), hostile.number() % 2**62]
                )
                data, fds = hostile.frame(seq, acked)
                try:
                    if fds and client.sock.family == socket.AF_UNIX:
                        sent = client.sock.sendmsg(
                            [data],
                            [
                                (
                                    socket.SOL_SOCKET,
                                    socket.SCM_RIGHTS,
                                    struct.pack(f"{len(fds)}i", *fds),
                                )
                            ],
                        )
                        client.sock.sendall(data[sent:])
                    else:
                        client.sock.sendall(data)
                finally:
                    for fd in fds:
                        os.close(fd)
                if dice.random() < 0.2:
                    client.frame()


@pytest.mark.parametrize("seed", [1, 2])
def test_nonsense_of_every_kind(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with (
        Server(max_bytes="16MiB") as server,
        Raw(server.address, server.secret) as watcher,
        caplog.at_level(logging.INFO, "rallypoint"),
    ):
        loop = server._loop
        assert loop is not None
        dice = random.Random(seed)
        slowest = 0.0
        for number in range(ROUNDS):
            threads = [
                threading.Thread(
                    target=stranger,
                    args=(server, random.Random(dice.random()), watcher.welcome.local),
                )
            ]
            threads += [
                threading.Thread(
                    target=conversation, args=(server, dice.randrange(2**32), watcher.welcome.local)
                )
                for _ in range(3)
            ]
            for thread in threads:
                thread.start()
            began = clock.elapsed()
            watcher.sock.settimeout(DEADLINE)
            assert isinstance(watcher.ask(Ping), Done)
            slowest = max(slowest, clock.elapsed() - began)
            for thread in threads:
                thread.join()
            if (
                number % 20 == 0
            ):  # whoever holds the locks now is gone: give what was said a moment to run out
                watcher.ask(Ping)
        assert slowest < 5.0
        until = clock.elapsed() + DEADLINE
        while (state := watcher.ask(Status)).sessions > 1 and clock.elapsed() < until:
            threading.Event().wait(0.02)
        assert state.sessions == 1
        for key in watcher.ask(Keys).names:
            watcher.ask(Delete, key)
        for queue in list(loop._state._queues._queues):
            while (
                not isinstance(watcher.ask(Pop, queue), Done) and watcher.ask(Length, queue).number
            ):
                pass
        results = loop._state._claims._results  # `once` keeps its values for good
        kept = sum(
            320 + len(name.encode()) + quotas.bytes_of(value)
            for name, (_, value) in results.items()
        )
        watcher.ask(Ping)
        assert watcher.ask(Status).used_bytes == kept
        assert watcher.ask(Status).waiting == 0
        assert watcher.ask(Status).keys == len(results)
        faults = [
            record.message
            for record in caplog.records
            if record.levelno >= logging.ERROR or record.exc_info
        ]
        assert faults == []
        assert not loop._movers.moving
        assert not loop._state._locks._held
        assert not loop._state._claims._open
