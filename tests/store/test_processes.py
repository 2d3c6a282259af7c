"""One store object in many threads, in forked children, and on its way into new processes."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import rallypoint
from rallypoint.errors import StoreClosed, StorePickled, StoreTimeout
from rallypoint.primitives.store import Store
from rallypoint.store.server.server import Server, serve

from .live import DEADLINE, Thread, descriptors, ended_well, output_of, until

pytestmark = pytest.mark.usefixtures("torch_in_parts")

LONG = 3600.0
"""Seconds that no test waits."""

LARGE = 3_000_000
"""Bytes that go by shared memory on the same host."""


@pytest.fixture
def server() -> Iterator[Server]:
    with serve(max_bytes="128MiB") as made:
        yield made


@pytest.fixture(params=[True, False], ids=["shared-memory", "tcp"])
def connect(server: Server, request: pytest.FixtureRequest) -> Iterator[Callable[[], Store]]:
    made: list[Store] = []

    def make() -> Store:
        made.append(
            rallypoint.connect(
                server.address,
                secret=server.secret,
                same_host=request.param,
                timeout=DEADLINE,
                ttl=LONG,
            )
        )
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def store(connect: Callable[[], Store]) -> Store:
    return connect()


# --- fork ---


def forked(does: Callable[[], object]) -> int:
    """A child that runs this, and ends with status 0 if it returned something true."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if does() else 2
        except BaseException as error:
            os.write(2, f"in the child: {error!r}\n".encode())
        finally:
            os._exit(status)
    return child


FORKS = """
import multiprocessing, os, sys
import rallypoint

store = rallypoint.connect(sys.argv[1], secret=bytes.fromhex(sys.argv[2]))
store["parent"] = 1
child = os.fork()
if child == 0:
    store["child"] = 1
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
process = multiprocessing.get_context("fork").Process(target=store.add, args=("child", 1))
process.start()
process.join()
assert process.exitcode == 0
print(store["child"])
"""


def test_a_fork_works_where_warnings_are_errors(server: Server) -> None:
    """Python 3.12 and newer warn at the fork of a process with threads, and a connected store has
    one: see docs/reference/store.md.
    """
    command = [sys.executable, "-W", "error", "-c", FORKS, server.address, server.secret.hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert (done.stdout, done.stderr, done.returncode) == ("2\n", "", 0)


CLOSES = """
import os, sys
import rallypoint

store = rallypoint.connect(sys.argv[1], secret=bytes.fromhex(sys.argv[2]))
store["before"] = 1
os.closerange(3, 4096)
store["after"] = 2
print(store["before"], store["after"])
"""


def test_a_program_that_closes_all_descriptors_gets_another_connection(server: Server) -> None:
    """As daemons do. The next call failed with "bad file descriptor"."""
    assert output_of(CLOSES, server.address, server.secret.hex()) == ["1 2"]


@pytest.mark.filterwarnings(
    "ignore:This process:DeprecationWarning"
)  # that it has threads: that is what is tried
def test_forks_while_other_threads_use_the_store(store: Store) -> None:
    forks, threads, stop = 6, 4, threading.Event()
    large = bytes(range(256)) * (LARGE // 256)

    def use(index: int) -> int:
        count = 0
        while not stop.is_set():
            store.add("parents")
            count += 1
            if index == 0 and count % 20 == 0:
                store["large"] = large
                assert store["large"] == large
            elif index == 1:
                with pytest.raises(StoreTimeout):
                    store.wait("none", 0.01)
        return count

    def in_child() -> bool:
        assert repr(store).endswith(f": not connected, pid {os.getpid()} on {os.uname().nodename}>")
        assert store.add("children") > 0
        store["of child"] = large
        assert store["of child"] == large
        assert store.identity.pid == os.getpid()
        seen = store.statistics()
        return bool(seen["sessions"] == 1 and seen["operations"] == {"Add": 1, "Get": 1, "Set": 1})

    users = [Thread(use, index) for index in range(threads)]
    until(lambda: store.get("parents", 0) > 0)
    results = [ended_well(forked(in_child)) for _ in range(forks)]
    stop.set()
    count = sum(user.result() for user in users)
    assert all(results)
    assert (store["parents"], store["children"]) == (count, forks)
    seen = store.statistics()
    assert (seen["sessions"], seen["reconnects"]) == (1, 0)  # the parent noticed nothing
    assert store.identity.pid == os.getpid()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_what_the_parent_holds_the_child_does_not_hold(
    store: Store, connect: Callable[[], Store]
) -> None:
    other = connect()
    store.set("of the parent", 1, ephemeral=True)

    def in_child() -> bool:
        store.set("of the child", 1, ephemeral=True)
        store.close()
        return True

    def closed() -> bool:
        store.close()
        return True

    changes = other.watch("of", timeout=DEADLINE)
    assert ended_well(forked(in_child))
    assert [(each.key, each.value) for each in (next(changes), next(changes))] == [
        ("of the child", 1),
        ("of the child", rallypoint.ABSENT),
    ]
    assert ended_well(forked(closed))  # without having used it: not the child's to end
    assert other.keys() == ["of the parent"]
    assert store.add("n") == 1
    assert store.statistics()["reconnects"] == 0


@pytest.fixture
def of_others() -> Counter[str]:
    """What this process has before the store: other tests leave memory that is shared for as long
    as the process lives.
    """
    return Counter(descriptors())


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_keeps_nothing_of_the_parent_s_connection(
    of_others: Counter[str], store: Store, server: Server
) -> None:
    store["k"] = bytes(LARGE)
    assert len(store["k"]) == LARGE

    def ours() -> list[str]:
        """Of client and server, which are both the parent's."""
        return [
            name
            for name in (Counter(descriptors()) - of_others).elements()
            if name.startswith(("socket", "/memfd"))
        ]

    assert len(ours()) >= 3
    assert ended_well(forked(lambda: not ours()))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_of_a_child(store: Store) -> None:
    def in_grandchild() -> bool:
        return store.add("n") == 3 and store.identity.pid == os.getpid()

    def in_child() -> bool:
        return store.add("n") == 2 and ended_well(forked(in_grandchild)) and store.add("n") == 4

    assert store.add("n") == 1
    assert ended_well(forked(in_child))
    assert store.add("n") == 5


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_store_that_was_closed_before_the_fork_is_closed_after_it(store: Store) -> None:
    store.close()

    def in_child() -> bool:
        with pytest.raises(StoreClosed, match="this store object was closed"):
            store.add("n")
        return True

    assert ended_well(forked(in_child))


# --- processes that are started ---

WORK = """
import os, sys
import multiprocessing
import rallypoint

def work(store, index):
    assert store.identity.pid == os.getpid(), store.identity
    for _ in range(20):
        store.add("n")
    store[f"from/{index}"] = os.getpid()
    secret = bytes.fromhex(store["secret"])
    for name in ("environ", "cmdline"):
        with open(f"/proc/self/{name}", "rb") as file:
            read = file.read()
            assert secret not in read and secret.hex().encode() not in read

def turned(index, store):
    work(store, index)

def main():
    with rallypoint.serve() as server, rallypoint.connect(server.address, secret=server.secret) as store:
        store["secret"] = server.secret.hex()
        START
        pids = list(store.values("from/"))
        assert len({*pids, os.getpid()}) == 1 + len(pids) > 1, pids
        assert store.add("n") == 20 * len(pids) + 1
        assert store.statistics()["reconnects"] == 0
        assert store.status()["sessions"] == 1, store.status()  # those of the children ended with them
        print("well")

if __name__ == "__main__":
    main()
"""

PROCESSES = """
        context = multiprocessing.get_context(sys.argv[1])
        processes = [context.Process(target=work, args=(store, index)) for index in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0
"""

PROCESSES_OF_TORCH = """
        import torch.multiprocessing
        torch.multiprocessing.spawn(turned, args=(store,), nprocs=1)
"""


def runs(program: str, folder: Path, *arguments: str) -> None:
    """As users do: a file, which spawned children import."""
    file = folder / "program.py"
    file.write_text(program)
    run = "import runpy, sys; sys.argv = sys.argv[1:]; sys.path.insert(0, sys.argv[0].rpartition('/')[0]); import program; program.main()"
    assert output_of(run, str(file), *arguments) == ["well"]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_an_argument_of_a_process(tmp_path: Path, method: str) -> None:
    runs(WORK.replace("        START\n", PROCESSES), tmp_path, method)


@pytest.mark.torch
def test_an_argument_of_torch_s_spawn(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    runs(WORK.replace("        START\n", PROCESSES_OF_TORCH), tmp_path)


OPTIONS = """
import multiprocessing, sys, warnings
import rallypoint

def work(store):
    store["said"] = [store.timeout, store.address, repr(store).endswith(f"{store.identity}>"), "shared memory" in repr(store)]
    store.get("k")
    other = rallypoint.connect(store.address, secret=bytes.fromhex(store["secret"]))
    other["k"] = 2
    try:
        store["k"] = 3
    except rallypoint.UpdateLost:
        store["strict"] = True

def main():
    with rallypoint.serve() as server:
        store = rallypoint.connect(server.address, secret=server.secret, strict=True, timeout=12.5, same_host=False)
        store["secret"] = server.secret.hex()
        process = multiprocessing.get_context("spawn").Process(target=work, args=(store,))
        process.start()
        process.join()
        assert store["said"] == [12.5, server.address, True, False], store["said"]
        assert store["strict"] is True
        store.close()
        print("well")
"""


def test_it_arrives_with_its_options(tmp_path: Path) -> None:
    runs(OPTIONS, tmp_path)


# --- pickling ---


def saved_by_torch(store: Store, file: io.BytesIO) -> None:
    import torch

    torch.save({"w": torch.ones(3), "store": store}, file)


WAYS: dict[str, Callable[[Store, io.BytesIO], object]] = {
    "pickle": lambda store, file: pickle.dump(["text before", store], file),
    "pickle, protocol 0": lambda store, file: pickle.dump(["text before", store], file, protocol=0),
    "cloudpickle": lambda store, file: cloudpickle.dump(lambda: store, file),
    "copy": lambda store, file: copy.copy(store),
    "deepcopy": lambda store, file: copy.deepcopy([store]),
    "as a value": lambda store, file: store.set("store", {"a": store}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_store_is_not_pickled(server: Server, store: Store, way: str) -> None:
    refused(server, store, WAYS[way])


@pytest.mark.torch
def test_a_store_is_not_saved_by_torch(server: Server, store: Store) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    refused(server, store, saved_by_torch)


def refused(server: Server, store: Store, way: Callable[[Store, io.BytesIO], object]) -> None:
    file = io.BytesIO()
    with pytest.raises(TypeError) as caught:
        way(store, file)
    assert getattr(caught.value, "code", "") in ("store-pickled", "value-unsupported")
    if isinstance(caught.value, StorePickled):
        assert "it carries its secret" in str(caught.value)
    said = file.getvalue() + str(caught.value).encode() + repr(caught.value.__notes__).encode()
    for secret in (server.secret, server.secret.hex().encode(), repr(server.secret)[2:-1].encode()):
        assert secret not in said
    assert store.add("n") == 1


def test_pickling_is_refused_also_with_allow_pickle(server: Server) -> None:
    with rallypoint.connect(server.address, secret=server.secret, allow_pickle=True) as store:
        with pytest.raises(TypeError):
            store["store"] = [store]
        assert "store" not in store


# --- threads ---


def test_thirty_threads_share_a_store_while_others_wait(
    store: Store, connect: Callable[[], Store]
) -> None:
    other = connect()
    waiters = [Thread(store.wait, f"late/{index}", LONG) for index in range(10)]
    until(lambda: other.status()["waiting"] == 10)

    def work(index: int) -> list[int]:
        sums = []
        for count in range(25):
            sums.append(store.add("n"))
            store[f"k/{index}"] = (index, count)
            assert store[f"k/{index}"] == (index, count)
        return sums

    threads = [Thread(work, index) for index in range(30)]
    sums = [
        number for thread in threads for number in thread.result()
    ]  # long before the waits are over
    assert sorted(sums) == list(range(1, 30 * 25 + 1))
    assert all(waiter.is_alive() for waiter in waiters)
    for index in reversed(range(10)):
        store[f"late/{index}"] = index
    assert [waiter.result() for waiter in waiters] == list(range(10))
    assert store.statistics()["sessions"] == 1


def test_threads_move_large_values_at_once(store: Store) -> None:
    def work(index: int) -> None:
        for count in range(5):
            value = bytes([index, count]) * (LARGE // 2)
            store[f"{index}"] = value
            assert store[f"{index}"] == value

    threads = [Thread(work, index) for index in range(6)]
    adding = Thread(lambda: [store.add("n") for _ in range(200)])
    assert adding.result() == list(range(1, 201))
    for thread in threads:
        thread.result()


def test_each_item_goes_to_one_of_the_threads_that_wait(store: Store) -> None:
    threads = [Thread(store.queue("q").get, LONG) for _ in range(12)]
    until(lambda: store.status()["waiting"] == 12)
    for number in range(12):
        store.queue("q").put(number)
    assert sorted(thread.result() for thread in threads) == list(range(12))


def test_closing_while_others_wait(store: Store, connect: Callable[[], Store]) -> None:
    other = connect()
    calls: list[Callable[[], Any]] = [
        *[lambda: store.wait("none", LONG)] * 3,
        lambda: store.wait("none"),
        lambda: next(store.watch("none")),
        lambda: store.queue("q").get(LONG),
    ]

    def ended(call: Callable[[], Any]) -> StoreClosed:
        with pytest.raises(StoreClosed, match="this store object was closed") as caught:
            call()
        return caught.value

    threads = [Thread(ended, call) for call in calls]
    until(lambda: other.status()["waiting"] == len(calls))
    store.close()
    errors = [thread.result() for thread in threads]
    assert all(error.code == "store-closed" for error in errors)
    assert [error.outcome for error in errors[:-1]] == ["did not happen"] * (len(calls) - 1)
    assert other.status() | {"waiting": 0, "sessions": 1} == other.status()


DAEMONS = """
import threading
import rallypoint

server = rallypoint.serve()
store = rallypoint.connect(server.address, secret=server.secret)
began = threading.Semaphore(0)
store.lock("taken").acquire()

def held():
    with store.lock("held"):
        began.release()
        store.wait("never")

def asking():
    began.release()
    while True:
        store.add("n", 1)
        store.get_many(["a", "b"])

def after(what):
    def run():
        began.release()
        what()
    return run

waits = [
    held, asking, after(lambda: store.wait("never")), after(lambda: list(store.watch("never"))), after(lambda: store.queue("q").get()),
    after(lambda: store.barrier("b", 2)), after(lambda: store.lock("taken").acquire()),
    after(lambda: store.once("o", lambda: store.wait("never"))),
]
for wait in waits:
    threading.Thread(target=wait, daemon=True).start()
for _ in waits:
    began.acquire()
print("done")
"""


def test_a_daemon_thread_that_waits_when_the_program_ends_says_nothing() -> None:
    """A program that ended well printed "Exception in thread ... StoreClosed" for each of its
    daemon threads that waited in the store.
    """
    for _ in range(4):
        assert output_of(DAEMONS) == ["done"]


def test_a_thread_that_is_waited_for_is_told_that_its_process_closes_the_store() -> None:
    """A child of multiprocessing closes its stores before it waits for its threads: only daemon
    threads stay where they are.
    """
    program = """
import multiprocessing, threading
import rallypoint

def child(store):
    def wait():
        try:
            store.wait("never")
        except rallypoint.StoreClosed:
            print("closed", flush=True)
    threading.Thread(target=wait, daemon=False).start()
    store["begun"] = 1

server = rallypoint.serve()
with rallypoint.connect(server.address, secret=server.secret) as store:
    process = multiprocessing.get_context("fork").Process(target=child, args=(store,))
    process.start()
    store.wait("begun")
    process.join()
    print(process.exitcode)
"""
    assert output_of(program) == ["closed", "0"]
