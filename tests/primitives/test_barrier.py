"""`store.barrier` between real clients and a real server: in one process without a network; in
processes that are killed and stopped.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from rallypoint.clock import Clock
from rallypoint.errors import (
    BarrierBroken,
    BarrierMismatch,
    BarrierTimeout,
    StoreClosed,
    UsageError,
)
from rallypoint.primitives.store import Store
from rallypoint.store.server.server import Server
from rallypoint.testing import Network
from rallypoint.wire.messages import Arrive, Met

DEADLINE = 60.0
"""Seconds within which what is to come comes, on a busy machine."""

LONG = 50.0
"""Seconds, the timeout of calls that are to end long before."""


class Call(threading.Thread):
    """Runs at once, and hands over what its function returned or raised."""

    def __init__(self, does: Callable[..., Any], *args: Any, **named: Any) -> None:
        super().__init__(daemon=True)
        self._does = does
        self._given = args, named
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._does(*self._given[0], **self._given[1])
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join(DEADLINE)
        assert not self.is_alive(), "it still waits"
        if self._error is not None:
            raise self._error
        return self._result

    def error(self) -> Any:
        self.join(DEADLINE)
        assert not self.is_alive(), "it still waits"
        return self._error


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as network:
        yield network


def waiting(store: Store, many: int) -> None:
    """Return when so many wait in the store."""
    clock, pause = Clock(), threading.Event()
    while store.status()["waiting"] != many:
        assert clock.elapsed() < DEADLINE, "they do not wait"
        pause.wait(0.002)


# --- all, or nobody ---


def test_round_after_round_all_pass_and_all_get_the_same_number(network: Network) -> None:
    stores = [network.connect(rank=rank) for rank in range(5)]
    calls = [
        Call(lambda store: [store.barrier("epoch", 5, timeout=LONG) for _ in range(50)], store)
        for store in stores
    ]
    [rounds] = {tuple(call.result()) for call in calls}
    assert list(rounds) == sorted(set(rounds))
    assert len(rounds) == 50
    assert stores[0].statistics()["operations"] == {"Arrive": 50}  # one round trip each


def test_threads_of_one_store_take_a_seat_each(network: Network) -> None:
    store = network.connect()
    calls = [Call(store.barrier, "b", 3, LONG) for _ in range(3)]
    assert len({call.result() for call in calls}) == 1


def test_nobody_passes_before_the_last(network: Network) -> None:
    stores = [network.connect(rank=rank) for rank in range(4)]
    calls = [Call(store.barrier, "b", 4, timeout=None) for store in stores[:3]]
    waiting(stores[3], 3)
    assert all(call.is_alive() for call in calls)
    number = stores[3].barrier("b", 4, timeout=math.inf)
    assert {call.result() for call in calls} == {number}


def test_a_barrier_of_one_does_not_wait(network: Network) -> None:
    assert network.connect().barrier("b", 1, timeout=0) > 0


def test_one_that_waits_for_a_lock_of_those_who_came_is_named(network: Network) -> None:
    """A barrier inside of a lock: more time, which is the advice for others, does not help."""
    stores = [network.connect(rank=rank) for rank in range(2)]
    lock = stores[0].lock("L")
    lock.acquire()
    call = Call(stores[1].lock("L").acquire)
    waiting(stores[0], 1)
    with pytest.raises(BarrierTimeout) as caught:
        stores[0].barrier("epoch", 2, timeout=0.2)
    assert 'waits for the lock "L"' in caught.value.absent[0]
    lock.release()
    call.result()


def test_a_timeout_names_who_came_and_who_did_not(network: Network) -> None:
    stores = [network.connect(rank=rank) for rank in range(4)]
    call = Call(stores[1].barrier, "epoch", 4, LONG)
    waiting(stores[0], 1)
    clock = Clock()
    with pytest.raises(BarrierTimeout) as caught:
        stores[0].barrier("epoch", 4, timeout=timedelta(milliseconds=300))
    assert 0.3 <= clock.elapsed() < DEADLINE / 2
    error = caught.value
    me = f"pid {os.getpid()} on {os.uname().nodename}"
    assert error.code == "barrier-timeout"
    assert isinstance(error, TimeoutError)
    assert error.headline.startswith(
        'the barrier "epoch" of 4 timed out after 0.3 s: 2 arrived (ranks 0-1), missing: rank 2 ('
    )
    assert error.present == (f"rank 1 ({me})", f"rank 0 ({me})")
    assert [text.partition(",")[0] for text in error.absent] == [f"rank 2 ({me}", f"rank 3 ({me}"]
    assert "last heard of" in error.absent[0]
    broken = call.error()
    assert isinstance(broken, BarrierBroken)
    assert broken.code == "barrier-broken"
    assert broken.headline.startswith(
        f'the barrier "epoch" of 4 is broken: rank 0 ({me}) gave up after 0.3 s; 2 arrived (ranks 0-1), missing: rank 2 ('
    )
    assert (broken.present, len(broken.absent)) == (error.present, 2)
    with pytest.raises(BarrierBroken, match="before this caller came"):
        stores[2].barrier("epoch", 4, timeout=LONG)


def test_with_no_time_at_all_it_passes_only_as_the_last(network: Network) -> None:
    first, second = network.connect(), network.connect()
    with pytest.raises(BarrierTimeout, match='the barrier "b" of 2 was not complete: 1 arrived'):
        first.barrier("b", 2, timeout=0)
    call = Call(first.barrier, "b", 2, LONG)
    waiting(first, 1)
    with pytest.raises(BarrierBroken):  # of the round before
        second.barrier("b", 2, timeout=0)
    assert second.barrier("b", 2, timeout=0) == call.result()


def test_two_sizes_are_an_error_for_all(network: Network) -> None:
    stores = [network.connect(rank=rank) for rank in range(3)]
    calls = [Call(store.barrier, "b", 4, LONG) for store in stores[:2]]
    waiting(stores[2], 2)
    with pytest.raises(
        BarrierMismatch,
        match=r'the barrier "b" has no one size: ranks 0-1 said 4, rank 2 \(pid \d+ on .*\) said 3',
    ) as caught:
        stores[2].barrier("b", 3, timeout=LONG)
    assert {str(call.error()) for call in calls} == {str(caught.value)}
    assert {type(call.error()) for call in calls} == {BarrierMismatch}
    assert isinstance(caught.value, UsageError)


# --- what ends a call ---


class Stop(Exception):
    """What a signal handler raises here."""


def test_an_exception_of_a_signal_handler_gives_the_seat_up_and_all_learn_it(
    network: Network,
) -> None:
    mine, other = network.connect(rank=0), network.connect(rank=1)
    call = Call(other.barrier, "b", 3, LONG)
    waiting(mine, 1)

    def stop(number: int, frame: object) -> None:
        raise Stop

    former = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Stop):
            mine.barrier("b", 3, timeout=LONG)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)
    broken = call.error()
    assert isinstance(broken, BarrierBroken)
    assert "an exception ended its call" in broken.headline
    assert mine.status()["waiting"] == 0
    call = Call(other.barrier, "b", 2, LONG)  # both were there: this is the next round
    assert mine.barrier("b", 2, timeout=LONG) == call.result()


def test_a_closed_store_gives_its_seats_up(network: Network) -> None:
    mine, other = network.connect(rank=0), network.connect(rank=1)
    gone, left = Call(mine.barrier, "b", 3, LONG), Call(other.barrier, "b", 3, LONG)
    waiting(other, 2)
    mine.close()
    assert isinstance(gone.error(), StoreClosed)
    assert "the session of rank 0" in str(left.error())
    assert "it said goodbye" in str(left.error())


def test_a_connection_that_breaks_costs_no_seat(network: Network) -> None:
    stores = [network.connect(rank=rank) for rank in range(3)]
    for _ in range(20):
        calls = [Call(store.barrier, "b", 3, LONG) for store in stores[:2]]
        waiting(stores[2], 2)
        network.cut()
        number = stores[2].barrier("b", 3, timeout=LONG)
        assert {call.result() for call in calls} == {number}
    assert sum(store.statistics()["reconnects"] for store in stores) >= 20


def test_a_server_that_stops_ends_the_wait() -> None:
    with Network() as network:
        call = Call(network.connect().barrier, "b", 2, None)
        waiting(network.connect(), 1)
        network.server.stop("enough")
        assert isinstance(call.error(), StoreClosed)


# --- what may be given ---


class Whole:
    """As numpy's integers are."""

    def __index__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((b"b", 2), TypeError, "a key is a str, not bytes"),
        (
            ("b", 2.0),
            TypeError,
            "size=2.0: the number of callers of a barrier is an int, not a float",
        ),
        (("b", True), TypeError, "size=True"),
        (("b", "2"), TypeError, "size='2'"),
        (("b", 0), UsageError, "size=0: at least one comes to a barrier"),
        (("b", -1), UsageError, "size=-1"),
        (("b", 1 << 40), UsageError, "and fewer than"),
        (("b", 2, -1.0), UsageError, "timeout=-1.0 is no number of seconds from 0"),
        (("b", 2, math.nan), UsageError, "timeout=nan"),
        (("b", 2, "1"), TypeError, "timeout='1'"),
        (("\udcff", 2), UsageError, "lone surrogate"),
    ],
)
def test_what_is_no_name_size_or_time_is_refused_before_anything_is_sent(
    network: Network, arguments: Any, error: Any, text: str
) -> None:
    store = network.connect()
    with pytest.raises(error, match=text):
        store.barrier(*arguments)
    assert store.statistics()["operations"] == {}


def test_a_whole_number_of_any_kind_is_a_size(network: Network) -> None:
    size: Any = Whole()
    assert network.connect().barrier("ä", size, timeout=1) > 0


# --- values, for what is built on barriers ---


def test_everybody_meets_what_all_have_brought(network: Network) -> None:
    stores = [network.connect(rank=rank) for rank in range(3)]

    def meet(store: Store, value: bytes) -> Any:
        return store.ask(Arrive, "m", 3, LONG, value, 2, wait=LONG)[0]

    calls = [Call(meet, store, bytes([rank]) * 2000) for rank, store in enumerate(stores)]
    mets = [call.result() for call in calls]
    assert all(type(met) is Met for met in mets)
    assert len({(met.generation, met.seats, met.absent) for met in mets}) == 1
    for rank, met in enumerate(mets):
        assert met.seats[met.mine].value == bytes([rank]) * 2000
    assert stores[0].status()["used_bytes"] in (0, 6000)  # until the answers are acknowledged


# --- processes that die, and that stand still ---

_PROGRAM = """
import sys
import rallypoint
store = rallypoint.connect(sys.argv[1], secret=sys.stdin.readline().strip(), ttl=float(sys.argv[2]))
print("here", flush=True)
for name, size in zip(sys.argv[3::2], sys.argv[4::2]):
    print(store.barrier(name, int(size), timeout=600), flush=True)
sys.stdin.readline()
"""

SECRET = "a secret of a test, in clear"


class Process:
    """Comes to these barriers, one after the other."""

    def __init__(self, address: str, ttl: float, *barriers: object) -> None:
        arguments = [sys.executable, "-c", _PROGRAM, address, str(ttl), *map(str, barriers)]
        self._process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def begin(self) -> None:
        """Have it connect."""
        assert self._process.stdin is not None
        self._process.stdin.write(SECRET + "\n")
        self._process.stdin.flush()
        assert self.line() == "here"

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.kill()
        with self._process:
            pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(secret=SECRET) as server:
        yield server


@pytest.fixture
def start(server: Server) -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def start(ttl: float, *barriers: object) -> Process:
        processes.append(Process(server.address, ttl, *barriers))
        processes[-1].begin()  # when it fails, the process is ended all the same
        return processes[-1]

    yield start
    for process in processes:
        process.close()


def connected(server: Server) -> Store:
    import rallypoint

    return rallypoint.connect(server.address, secret=SECRET)


def test_a_process_that_is_killed_at_the_barrier_breaks_it_at_once(
    server: Server, start: Callable[..., Process]
) -> None:
    with connected(server) as store:
        killed = start(600.0, "b", 3)
        call = Call(store.barrier, "b", 3, timeout=None)
        waiting(store, 2)
        killed.kill()
        broken = call.error()  # with the process, not with its lease of ten minutes
    assert isinstance(broken, BarrierBroken)
    assert (
        f"the session of pid {killed.pid} on {os.uname().nodename} ended while it waited: its process died"
        in broken.headline
    )
    assert broken.present[-1].startswith(f"pid {killed.pid} on ")


def test_a_process_that_stands_still_breaks_it_when_its_lease_is_over(
    server: Server, start: Callable[..., Process]
) -> None:
    with connected(server) as store:
        stopped = start(1.0, "b", 2, "c", 3)
        store.barrier("b", 2, timeout=LONG)
        call = Call(store.barrier, "c", 3, timeout=None)
        waiting(store, 2)
        os.kill(stopped.pid, signal.SIGSTOP)
        broken = call.error()
        assert "ended while it waited: nothing was heard of it for 1 s" in str(broken)
        os.kill(stopped.pid, signal.SIGCONT)


def test_who_died_after_the_former_round_is_named_with_the_reason(
    server: Server, start: Callable[..., Process]
) -> None:
    with connected(server) as store:
        process = start(600.0, "b", 2)
        store.barrier("b", 2, timeout=LONG)
        process.line()
        process.kill()
        clock, pause = Clock(), threading.Event()
        while store.status()["sessions"] > 1:
            assert clock.elapsed() < DEADLINE, "it is not noticed"
            pause.wait(0.005)
        with pytest.raises(
            BarrierTimeout,
            match=rf"missing: pid {process.pid} on .* \(its session ended .* s ago: its process died\)",
        ):
            store.barrier("b", 2, timeout=0.1)


def test_eight_processes_pass_a_hundred_times(
    server: Server, start: Callable[..., Process]
) -> None:
    many, rounds = 8, 100
    barriers = [part for _ in range(rounds) for part in ("b", many)]
    processes = [start(600.0, *barriers) for _ in range(many)]
    [said] = {tuple(process.line() for _ in range(rounds)) for process in processes}
    assert len(set(said)) == rounds
    assert "" not in said
