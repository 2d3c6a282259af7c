"""Eight processes count together while their network is cut in the middle, and a server that is
frozen holds nobody up.

    python examples/questions/D3_network_interruption.py [--cut SECONDS]

A TCPStore client whose connection breaks is dead for ever, and what it had set last is lost without
a word. Here the client connects again by itself, repeats what has no answer yet, and the server
knows what it has carried out: each `add` counts once.
"""

import argparse
import multiprocessing as mp
import os
import signal
import threading
import time
from multiprocessing.connection import Connection

import rallypoint
from rallypoint.testing import ChaosProxy

CLIENTS, ADDS = 8, 1250


def count(store: rallypoint.Store) -> None:
    store.barrier("all are connected", size=CLIENTS)
    for _ in range(ADDS):
        store.add("n", 1)


def serve(told: Connection) -> None:
    with rallypoint.serve() as server:
        told.send((server.address, server.secret))
        signal.pause()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument(
        "--cut", type=float, default=2.0, help="seconds for which the network is away"
    )
    cut = arguments.parse_args().cut

    told, telling = mp.Pipe()
    server = mp.Process(target=serve, args=(telling,), daemon=True)
    server.start()
    assert server.pid is not None
    address, secret = told.recv()

    # `ttl` is how long a session outlives silence, `timeout` how long a call waits for its answer:
    # both longer than the cut.
    with (
        ChaosProxy(address) as network,
        rallypoint.connect(
            network.address, secret=secret, same_host=False, timeout=cut + 60, ttl=cut + 60
        ) as store,
    ):
        workers = [mp.Process(target=count, args=(store,), daemon=True) for _ in range(CLIENTS)]
        for worker in workers:
            worker.start()
        next(change for change in store.watch("n") if change.value > CLIENTS * ADDS // 10)
        network.black_hole()  # what is sent disappears, and nobody is told: a cable is out
        counted = rallypoint.connect(address, secret=secret).get("n")
        threading.Event().wait(cut)
        network.heal()
        for worker in workers:
            worker.join()
        assert [worker.exitcode for worker in workers] == [0] * CLIENTS
        assert counted < CLIENTS * ADDS, "the cut came too late"
        assert store["n"] == CLIENTS * ADDS, store["n"]

    with rallypoint.connect(address, secret=secret, timeout=2.0) as store:
        store["k"] = 1
        os.kill(server.pid, signal.SIGSTOP)  # it lives, and does nothing
        os.waitid(os.P_PID, server.pid, os.WSTOPPED | os.WNOWAIT)
        began = time.monotonic()
        try:
            store["k"]
        except TimeoutError:
            pass
        took = time.monotonic() - began
        os.kill(server.pid, signal.SIGCONT)
        assert 2.0 <= took < 10.0, took
        assert store["k"] == 1, "and then it goes on"
    server.kill()
    server.join()
    print(
        f"{CLIENTS} x {ADDS} adds around a cut of {cut:g} s: {CLIENTS * ADDS}; a frozen server cost no more than the timeout"
    )


if __name__ == "__main__":
    main()
