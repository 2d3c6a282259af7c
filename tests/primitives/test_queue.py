"""A queue among real clients: nothing is lost, nothing is there twice, whatever becomes of who
takes.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import queue as standard
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rallypoint
from rallypoint.clock import Clock
from rallypoint.errors import (
    LimitExceeded,
    SessionLost,
    StoreClosed,
    StoreTimeout,
    UsageError,
    ValueUnsupported,
)
from rallypoint.primitives.queue import Queue
from rallypoint.primitives.store import Store
from rallypoint.store.server.server import Server
from rallypoint.testing import ChaosProxy
from rallypoint.wire.messages import Settle

from ..store.live import DEADLINE, Thread, running, until
from ..store.processes import ServerProcess
from ..store.situations import Interruption, Storm, alarm, in_child

LARGE = b"x" * 3_000_000
"""Goes by shared memory on one host, and in pieces by TCP."""

SHORT, LONG = 1.0, 3600.0
"""Leases: one that a test can wait for, one that none does."""


@pytest.fixture
def store(connect: Callable[[], Store]) -> Store:
    return connect()


@pytest.fixture
def jobs(store: Store) -> Queue:
    return store.queue("jobs")


@pytest.fixture
def other(connect: Callable[[], Store]) -> Queue:
    """The same queue, of another client."""
    return connect().queue("jobs")


def work(queue: Queue, does: Callable[[Any], Any] = lambda item: item) -> Any:
    """Take an item, and do this with it in the block."""
    with queue.take(DEADLINE) as item:
        return does(item)


def fail(_: Any) -> None:
    raise ZeroDivisionError


# --- as a queue ---


def test_first_in_first_out_over_all_clients(jobs: Queue, other: Queue) -> None:
    for n in range(6):
        (jobs if n % 2 else other).put(n)
    assert len(jobs) == 6
    assert [(jobs if n % 3 else other).get() for n in range(6)] == list(range(6))
    assert len(other) == 0


@pytest.mark.parametrize(
    "value", [None, False, LARGE, {"a": [1, 2.5, (b"",)]}], ids=["None", "False", "large", "nested"]
)
def test_any_value_of_the_store(jobs: Queue, other: Queue, value: Any) -> None:
    jobs.put(value)
    assert other.get() == value
    jobs.put(value)
    with other.take() as taken:
        assert taken == value


@pytest.mark.torch
@pytest.mark.parametrize("size", [0, 10, 1_000_000])
def test_tensors(jobs: Queue, other: Queue, size: int) -> None:
    import torch

    tensor = torch.randn(size).to(torch.bfloat16)
    jobs.put({"w": tensor})
    tensor += 1  # what is in the queue is a copy
    with other.take() as taken:
        assert taken["w"].dtype == torch.bfloat16
        assert torch.equal(taken["w"].to(torch.bfloat16) + 1, tensor)


def test_who_waits_gets_what_comes(store: Store, jobs: Queue, other: Queue) -> None:
    waiting = Thread(other.get)
    until(lambda: store.status()["waiting"] == 1)
    jobs.put(7)
    assert waiting.result() == 7
    assert len(jobs) == 0


def test_nothing_came_in_time(store: Store, jobs: Queue) -> None:
    clock = Clock()
    with pytest.raises(
        StoreTimeout,
        match=r'^nothing came into the queue "jobs" in the store at tcp://127.0.0.1:\d+ within 0.1 s\n',
    ) as caught:
        jobs.get(0.1)
    assert clock.elapsed() >= 0.1
    assert (caught.value.code, caught.value.outcome) == ("wait-timeout", "did not happen")
    with pytest.raises(
        standard.Empty, match=r'^the queue "jobs" in the store at tcp://127.0.0.1:\d+ is empty\n'
    ):
        jobs.get_nowait()
    with pytest.raises(TimeoutError), jobs.take(0.05):
        pytest.fail("there is nothing to work on")
    assert store.status()["waiting"] == 0


def test_they_introduce_themselves(store: Store, jobs: Queue) -> None:
    assert repr(jobs) == f'<Queue "jobs" in the store at {store.address}>'
    jobs.put(1)
    taken = jobs.take()
    assert repr(taken) == '<Taken from queue "jobs": not taken>'
    with taken:
        assert repr(taken).startswith('<Taken from queue "jobs": taken since 0.')
    assert repr(taken) == '<Taken from queue "jobs": acknowledged>'


def test_wrong_calls(store: Store, jobs: Queue) -> None:
    with pytest.raises(TypeError, match="a key is a str"):
        store.queue(7)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="timeout=False"):
        jobs.get(False)  # as in the standard library, where it means: do not wait
    with pytest.raises(UsageError, match="timeout=-1"):
        jobs.take(-1)
    with pytest.raises(ValueUnsupported, match="function_or_method cannot be stored"):
        jobs.put(print)
    jobs.put(1)
    taken = jobs.take()
    with taken, pytest.raises(UsageError, match="one take"), taken:
        pytest.fail("it is in use")
    assert len(jobs) == 0


def fill(queue: Queue, times: int) -> None:
    for _ in range(times):
        queue.put(LARGE)


def test_a_queue_is_as_large_as_the_store(server: Server, jobs: Queue) -> None:
    fill(jobs, 40)
    with pytest.raises(LimitExceeded, match="the store holds"):
        fill(jobs, 10)
    before = len(jobs)
    assert jobs.get() == LARGE
    assert (
        len(jobs) == before - 1
    )  # and this says that the answer is there, so that its memory is free
    jobs.put(LARGE)


# --- work that fails ---


def test_an_item_whose_work_failed_stands_where_it_stood(jobs: Queue, other: Queue) -> None:
    for n in range(4):
        jobs.put(n)
    with jobs.take() as first, jobs.take() as second:
        assert (first, second, len(jobs)) == (0, 1, 2)
        with pytest.raises(ZeroDivisionError):
            work(other, lambda third: 1 / (third - 2))
    assert [other.get() for _ in range(2)] == [2, 3]
    assert len(jobs) == 0


def test_an_item_that_came_back_goes_to_who_waits(store: Store, jobs: Queue, other: Queue) -> None:
    jobs.put(7)
    waiting: list[Thread] = []

    def does(item: int) -> None:
        waiting.append(Thread(other.get))
        until(lambda: store.status()["waiting"] == 1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work(jobs, does)
    assert waiting[0].result() == 7


def test_an_item_that_cannot_be_read_stays(server: Server, jobs: Queue) -> None:
    """Whoever can read it may come."""
    with rallypoint.connect(server.address, secret=server.secret, allow_pickle=True) as store:
        pickles = store.queue("jobs")
        pickles.put(Clock)
        with pytest.raises(ValueUnsupported):
            jobs.get()
        with pytest.raises(ValueUnsupported):
            work(jobs, lambda item: pytest.fail("it cannot be read here"))
        assert len(jobs) == 1
        assert pickles.get() is Clock


def test_leaving_the_block_early_is_a_success(jobs: Queue) -> None:
    for n in range(3):
        jobs.put(n)
    for _ in range(3):
        with jobs.take() as item:
            if item == 1:
                continue
            if item == 2:
                break
    assert len(jobs) == 0


# --- processes that die ---

TAKER = """
import sys
import rallypoint
store = rallypoint.connect(sys.argv[1], secret=bytes.fromhex(sys.argv[2]), ttl=float(sys.argv[3]))
with store.queue("jobs").take() as item:
    print(item, flush=True)
    sys.stdin.readline()
print("done", flush=True)
"""


def test_the_item_of_a_killed_process_goes_to_the_next(server: Server, jobs: Queue) -> None:
    for n in range(3):
        jobs.put(n)
    with running(TAKER, server.address, server.secret.hex(), str(SHORT)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        assert len(jobs) == 2
        assert jobs.get() == 1
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        until(lambda: len(jobs) == 2)
        assert [jobs.get(), jobs.get()] == [0, 2]


def test_sys_exit_in_a_block_gives_it_back(server: Server, jobs: Queue) -> None:
    jobs.put(7)
    program = TAKER.replace("sys.stdin.readline()", "sys.exit(3)")
    with running(program, server.address, server.secret.hex(), str(LONG)) as process:
        assert process.wait(DEADLINE) == 3
    assert jobs.get(DEADLINE) == 7


def test_a_store_that_is_closed_in_a_block(connect: Callable[[], Store], jobs: Queue) -> None:
    jobs.put(7)
    store = connect()

    def does(item: int) -> None:
        store.close()
        assert jobs.get(DEADLINE) == item == 7

    with pytest.raises(StoreClosed):
        work(store.queue("jobs"), does)


def test_a_forked_child_leaves_the_item_to_its_parent(jobs: Queue) -> None:
    for n in range(2):
        jobs.put(n)
    taken = jobs.take()

    def child() -> int:
        taken.__exit__(None, None, None)  # it runs out of the block
        return int(jobs.get())  # with a session of its own

    with taken as item:
        assert (item, in_child(child)) == (0, 1)
        assert len(jobs) == 0
        taken.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
        assert jobs.get() == 0, "it was still the parent's to give back"
        jobs.put(2)
        taken.__enter__()


# --- sessions that are lost ---


@pytest.fixture
def proxy(server: Server) -> Iterator[ChaosProxy]:
    with ChaosProxy(server.address) as made:
        yield made


@pytest.fixture
def flaky_store(server: Server, proxy: ChaosProxy) -> Iterator[Store]:
    """A client with a short lease, behind the proxy."""
    with rallypoint.connect(
        proxy.address, secret=server.secret, same_host=False, ttl=SHORT, timeout=DEADLINE
    ) as store:
        yield store
        proxy.heal()


@pytest.fixture
def flaky(flaky_store: Store) -> Queue:
    """The queue of that client."""
    return flaky_store.queue("jobs")


def lose(proxy: ChaosProxy, watched: Queue, length: int) -> None:
    """Let the session behind the proxy end, and its item come back."""
    proxy.refuse()
    proxy.reset()
    until(lambda: len(watched) == length)
    proxy.heal()


def test_who_was_taken_for_dead_is_told_at_the_end_of_the_block(
    proxy: ChaosProxy, flaky: Queue, jobs: Queue
) -> None:
    jobs.put(7)

    def does(item: int) -> None:
        lose(proxy, jobs, 1)
        assert jobs.get() == item == 7, "somebody else has it"

    with pytest.raises(SessionLost) as caught:
        work(flaky, does)
    assert caught.value.outcome == "did not happen"
    assert any(
        'the item of the queue "jobs" that was taken' in note for note in caught.value.__notes__
    ), caught.value.__notes__
    assert len(jobs) == 0
    jobs.put(8)
    assert flaky.get() == 8, "and the next call works"


def test_also_when_another_call_was_told_before(
    proxy: ChaosProxy, flaky: Queue, jobs: Queue
) -> None:
    """A lost session is told once, and the block may have caught that."""
    jobs.put(7)

    def does(item: int) -> None:
        lose(proxy, jobs, 1)
        with pytest.raises(SessionLost):
            len(flaky)

    with pytest.raises(
        SessionLost, match=r'^the item of the queue "jobs" that was taken \d.* ago went back before'
    ) as caught:
        work(flaky, does)
    assert (caught.value.outcome, caught.value.same_server) == ("did not happen", True)
    assert jobs.get() == 7


def test_the_exception_of_the_block_comes_first(
    proxy: ChaosProxy, flaky: Queue, jobs: Queue
) -> None:
    jobs.put(7)

    def does(item: int) -> None:
        lose(proxy, jobs, 1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work(flaky, does)
    assert jobs.get() == 7
    assert len(flaky) == 0


def test_an_acknowledgement_that_happened_is_none_that_failed(
    proxy: ChaosProxy, flaky_store: Store, flaky: Queue, store: Store, jobs: Queue
) -> None:
    """Its answer was lost, and then the session: the item is gone, so whoever took it must
    have it.
    """
    jobs.put(7)
    jobs.put(8)
    flaky_store.set("mine", 1, ephemeral=True)

    used = store.status()["used_bytes"]
    getting = Thread(work, flaky, lambda item: proxy.black_hole(to="client"))
    until(lambda: store.status()["used_bytes"] < used)  # acknowledged
    proxy.refuse()
    proxy.reset()
    until(lambda: "mine" not in store)
    proxy.heal()
    getting.result()
    assert flaky.get() == 8


def test_a_frozen_server_gets_it_back_when_it_goes_on() -> None:
    with (
        ServerProcess() as process,
        rallypoint.connect(process.address, secret=process.secret, timeout=2.0, ttl=LONG) as store,
    ):
        jobs = store.queue("jobs")
        jobs.put(7)
        clock = Clock()
        with pytest.raises(StoreTimeout) as caught:
            work(jobs, lambda item: process.stop())
        assert clock.elapsed() < DEADLINE / 2
        assert caught.value.code == "store-timeout"
        process.go_on()
        until(lambda: len(jobs) == 1)

        def does(item: int) -> None:
            process.stop()
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            work(jobs, does)
        process.go_on()
        until(lambda: len(jobs) == 1)
        assert jobs.get() == 7
        until(lambda: store.status()["used_bytes"] == 0)


# --- signals ---


@pytest.mark.parametrize("how", ["get", "take"])
def test_ctrl_c_leaves_the_item_in_the_queue(jobs: Queue, how: str) -> None:
    with alarm(0.1, _interrupt), pytest.raises(Interruption):
        jobs.get() if how == "get" else work(jobs)
    jobs.put(7)
    assert jobs.get(DEADLINE) == 7


def _interrupt() -> None:
    raise Interruption


ENOUGH = 400
"""Interruptions: some hit every line on the way of an item."""


@pytest.mark.parametrize("same_host", [True, False], ids=["near", "far"])
@pytest.mark.parametrize("how", ["get", "take"])
def test_interrupted_anywhere_an_item_is_got_or_comes_back(
    server: Server, how: str, same_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signal handlers that raise at random moments. What `get` returned is not in the queue any
    more, and all else is, once. An item whose block has run to its end is there once more at most
    when the end was interrupted; nothing is lost. (What is to be given back, and a second signal
    kept from being told, the server learns with the next sign of life: these come every third of a
    `ttl`.)"""

    # A handler that raises inside of `logging` leaves its lock taken, and then whoever logs in
    # another thread waits for ever.
    monkeypatch.setattr(logging.getLogger("rallypoint"), "disabled", True)

    def run() -> int:
        with rallypoint.connect(
            server.address, secret=server.secret, same_host=same_host, timeout=DEADLINE, ttl=3.0
        ) as store:
            return storm_of_calls(store.queue("jobs"))

    def storm_of_calls(jobs: Queue) -> int:
        done: list[int] = []
        twice: set[int] = set()
        box: list[Any] = []

        def get() -> None:
            box[0] = jobs.get()

        def take() -> None:
            with jobs.take() as item:
                box[0] = item

        items = 0
        with Storm(1, raising=0.8, soon=0.0003) as storm:
            while storm.raised < ENOUGH:
                if len(jobs) < 3:
                    jobs.put(items)
                    items += 1
                box[:] = [None]
                ended = storm.strike(get if how == "get" else take)
                if box[0] is not None:
                    done.append(box[0])
                    if how == "take" and not ended:
                        twice.add(box[0])
        gc.collect()
        while set(done) != set(range(items)) or len(jobs):
            try:
                done.append(jobs.get(5.0))
            except standard.Empty:
                raise AssertionError(
                    f"lost: {sorted(set(range(items)) - set(done))} of {items}"
                ) from None
        more = {item for item, times in Counter(done).items() if times > 1}
        assert more <= twice, f"there twice: {sorted(more - twice)}"
        return storm.raised

    assert in_child(run) >= ENOUGH


def test_an_object_that_nobody_leaves_gives_its_item_back(jobs: Queue) -> None:
    """A signal handler that raises at the first instruction of `__exit__` leaves such a one."""
    jobs.put(7)
    taken = jobs.take()
    assert taken.__enter__() == 7
    assert len(jobs) == 0
    del taken
    gc.collect()
    assert jobs.get(DEADLINE) == 7


def test_a_handler_that_strikes_while_it_is_given_back(
    store: Store, jobs: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread sees to it."""
    jobs.put(7)
    real = store.ask
    struck: list[int] = []

    def ask(kind: Any, *fields: Any, **named: Any) -> Any:
        if kind is Settle and not struck:
            struck.append(threading.get_ident())
            raise Interruption
        return real(kind, *fields, **named)

    monkeypatch.setattr(store, "ask", ask)
    with pytest.raises(Interruption):
        work(jobs, fail)
    assert struck == [threading.get_ident()]
    assert jobs.get(DEADLINE) == 7


# --- threads and processes ---


def test_threads_share_a_queue_object(jobs: Queue) -> None:
    threads, count = 4, 100
    got: list[list[int]] = [[] for _ in range(threads)]

    def work(index: int) -> None:
        for n in range(count):
            jobs.put(index * count + n)
            with jobs.take() as item:
                got[index].append(item)

    for thread in [Thread(work, index) for index in range(threads)]:
        thread.result()
    assert sorted(item for each in got for item in each) == list(range(threads * count))


def double(jobs: Queue, results: Queue) -> None:
    while (item := jobs.get(DEADLINE)) is not None:
        results.put((os.getpid(), 2 * item))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_queue_is_an_argument_of_a_process(server: Server, method: str) -> None:
    """Of the standard library's `multiprocessing`, as its own queues are."""
    context: Any = multiprocessing.get_context(method)
    with rallypoint.connect(server.address, secret=server.secret) as store:
        jobs, results = store.queue("jobs"), store.queue("results")
        processes = [context.Process(target=double, args=(jobs, results)) for _ in range(2)]
        for process in processes:
            process.start()
        for n in range(20):
            jobs.put(n)
        got = [results.get(DEADLINE) for _ in range(20)]
        for _ in processes:
            jobs.put(None)
        for process in processes:
            process.join(DEADLINE)
        assert [process.exitcode for process in processes] == [0, 0]
        assert sorted(number for _, number in got) == [2 * n for n in range(20)]
