"""Guard a key of the store, so that one process at a time changes it.

    python examples/questions/D4_lock_between_processes.py

A `threading.Lock` guards nothing here: each process has one of its own. A lock of the store is one
for all. It is passed on when its holder dies; and who was only stopped, and still believes to hold
it, can no longer write with its token.
"""

import multiprocessing as mp
import os
import signal
import time

import rallypoint

PROCESSES, TIMES = 4, 25
TTL = 1.0  # seconds without a sign of life, after which a lock is passed on


def add(store: rallypoint.Store) -> None:
    for _ in range(TIMES):
        with store.lock("w"):
            store["w"] = store["w"] + 1  # read, then write: the lock makes it one


def die(store: rallypoint.Store) -> None:
    with store.lock("w", ttl=TTL):
        os.kill(os.getpid(), signal.SIGKILL)


def sleep(store: rallypoint.Store) -> None:
    try:
        with store.lock("w", ttl=TTL) as grant:
            os.kill(
                os.getpid(), signal.SIGSTOP
            )  # a laptop is closed; somebody else gets the lock; it is opened again
            try:
                store.set("w", "too late", fence=grant.token)
            except rallypoint.FenceStale:
                store["refused"] = True
    except rallypoint.LeaseLost:
        store["told"] = True


def main() -> None:
    with (
        rallypoint.serve() as server,
        rallypoint.connect(server.address, secret=server.secret) as store,
    ):
        store["w"] = 0
        processes = [mp.Process(target=add, args=(store,)) for _ in range(PROCESSES)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * PROCESSES
        assert store["w"] == PROCESSES * TIMES, store["w"]

        dying = mp.Process(target=die, args=(store,))
        dying.start()
        dying.join()
        began = time.monotonic()
        with store.lock("w", timeout=30) as first:
            passed_on = time.monotonic() - began
        assert passed_on < TTL + 5.0, passed_on  # the 5 s are for a busy machine

        sleeping = mp.Process(target=sleep, args=(store,))
        sleeping.start()
        assert sleeping.pid is not None
        os.waitid(os.P_PID, sleeping.pid, os.WSTOPPED | os.WNOWAIT)
        with store.lock("w", timeout=30) as second:
            assert second.token > first.token
            store.set("w", "by its holder", fence=second.token)
            os.kill(sleeping.pid, signal.SIGCONT)
            sleeping.join()
            assert store["w"] == "by its holder"
        assert store["refused"]
        assert store["told"]
    print(
        f"{PROCESSES} x {TIMES} additions under the lock are {PROCESSES * TIMES}; it outlived a killed holder; a stopped one was refused"
    )


if __name__ == "__main__":
    main()
