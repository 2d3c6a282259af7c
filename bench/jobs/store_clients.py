"""What a bench asks of a store's client, in the words of each party. Imported late: connecting is
part of what is measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

SMALL = b"v" * 32
TIMEOUT = 300.0  # seconds for any answer: the harness decides when it has been long enough


class Rallypoint:
    """Ours: as a user gets it on the server's host, or over TCP."""

    def __init__(self, where: dict[str, Any], *, same_host: bool) -> None:
        import rallypoint

        self.store = rallypoint.connect(
            where["address"],
            secret=bytes.fromhex(where["secret"]),
            same_host=same_host,
            timeout=TIMEOUT,
        )

    def operation(self, name: str, key: str) -> Callable[[], object]:
        """One call, as a user writes it."""
        store = self.store
        return {
            "get": lambda: store.get(key),
            "set": lambda: store.set(key, SMALL),
            "add": lambda: store.add(key, 1),
        }[name]

    @staticmethod
    def value(size: int) -> Any:
        import torch

        return torch.randint(0, 256, (size,), dtype=torch.uint8)

    def put(self, key: str, value: Any) -> None:
        """Returns when the server has it."""
        self.store.set(key, value)

    def get(self, key: str) -> Any:
        return self.store.get(key)

    @staticmethod
    def equal(one: Any, other: Any) -> bool:
        return bool((one == other).all())

    def barrier(self, name: str, size: int, number: int) -> None:
        self.store.barrier(name, size, TIMEOUT)

    def lock(self, name: str, number: int) -> tuple[Callable[[], object], Callable[[], object]]:
        """How it is had and how it is given back."""
        lock = self.store.lock(name)
        return lock.acquire, lock.release

    def close(self) -> None:
        self.store.close()


class TCPStore:
    """torch's, with libuv. `pause`: seconds between two tries for a lock."""

    def __init__(self, where: dict[str, Any], pause: float = 0.0) -> None:
        from torch import distributed

        self.pause = pause
        self.store = distributed.TCPStore(
            "127.0.0.1",
            where["port"],
            None,
            False,
            timeout=timedelta(seconds=TIMEOUT),
            wait_for_workers=False,
        )

    def operation(self, name: str, key: str) -> Callable[[], object]:
        store = self.store
        return {
            "get": lambda: store.get(key),
            "set": lambda: store.set(key, SMALL),
            "add": lambda: store.add(key, 1),
        }[name]

    @staticmethod
    def value(size: int) -> bytes:
        return os.urandom(size)

    def put(self, key: str, value: Any) -> None:
        """`set` is not acknowledged: when the next answer comes, the server has the value."""
        self.store.set(key, value)
        assert self.store.check([key])

    def get(self, key: str) -> Any:
        return self.store.get(key)

    @staticmethod
    def equal(one: Any, other: Any) -> bool:
        return bool(one == other)

    def barrier(self, name: str, size: int, number: int) -> None:
        self.store.barrier(f"{name}-{number}", size, timedelta(seconds=TIMEOUT))

    def lock(self, name: str, number: int) -> tuple[Callable[[], object], Callable[[], object]]:
        """What can be built on it: whoever tries at the right moment has it. To give it back is a
        `set`, which nothing is waited for.
        """
        store, pause, me = self.store, self.pause, f"client {number}"

        def acquire() -> None:
            while store.compare_set(name, "free", me) != me.encode():
                if pause:
                    time.sleep(pause)

        return acquire, lambda: store.set(name, "free")

    def close(self) -> None:
        del self.store


class Gloo:
    """`dist.barrier` of a gloo group; its store is a TCPStore."""

    def __init__(self, where: dict[str, Any], rank: int, size: int) -> None:
        from torch import distributed

        self.distributed = distributed
        store = distributed.TCPStore(
            "127.0.0.1",
            where["port"],
            None,
            False,
            timeout=timedelta(seconds=TIMEOUT),
            wait_for_workers=False,
        )
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT)
        )

    def barrier(self, name: str, size: int, number: int) -> None:
        self.distributed.barrier()


def connect(party: str, where: dict[str, Any], rank: int = 0, size: int = 1) -> Any:
    """A client of this party."""
    if party.startswith("TCPStore"):
        return TCPStore(where, 0.001 if "1 ms" in party else 0.0)
    if party == "gloo":
        return Gloo(where, rank, size)
    return Rallypoint(where, same_host=party == "rallypoint")


def barrier_of_many(clients: Sequence[Any], name: str, size: int) -> None:
    """All these clients, of one thread, pass one barrier of `size` members.

    Ours all arrive before the first is waited for. The public face does not send and wait in two
    steps, so this uses the session's own: a thread for each client would measure thread starts.
    TCPStore's `barrier` blocks, so its clients add and wait, the quickest they have.
    """
    if isinstance(clients[0], TCPStore):
        for client in clients:
            if client.store.add(f"{name}-arrived", 1) == size:
                client.store.set(f"{name}-done", b"1")
        for client in clients:
            client.store.wait([f"{name}-done"])
        return
    from rallypoint.wire.messages import Arrive, Integer

    under_way = []
    for client in clients:
        session = client.store._session
        ticket = session.slots.take()
        slot = ticket.slot
        now = time.monotonic()
        (call,) = slot.begin([(Arrive, (name, size, TIMEOUT))], now, now + TIMEOUT)
        connection = slot.connection or session._connect(slot, call.deadline)
        connection.send(b"", [call])
        under_way.append((session, ticket, connection, call))
    for session, ticket, connection, call in under_way:
        reply, _ = connection.receive(call, call.deadline, session.keep_alive.interval, session.ttl)
        assert isinstance(reply, Integer), reply
        session.slots.put_back(ticket)


def repeat(
    act: Callable[[], object], seconds: float, least: int = 3, most: int = 1_000_000
) -> list[float]:
    """How long each call took, in seconds; calls for `seconds`, but at least and at most so many
    times.
    """
    clock = time.perf_counter
    times: list[float] = []
    until = clock() + seconds
    while len(times) < most:
        began = clock()
        act()
        ended = clock()
        times.append(ended - began)
        if ended >= until and len(times) >= least:
            break
    return times
