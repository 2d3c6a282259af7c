"""The real client and the real server over socket pairs."""

from __future__ import annotations

import threading

import pytest

from rallypoint.errors import StoreClosed, StoreTimeout, StoreUnreachable
from rallypoint.testing import Network


def test_clients_share_a_store_without_a_port() -> None:
    with Network() as network:
        a, b = network.connect(), network.connect(rank=3)
        a["x"] = {"lr": 0.1}
        assert b["x"] == {"lr": 0.1}
        assert b.identity.rank == 3
        assert (len(network), network.opened) == (2, 2)
        assert repr(network) == "<Network: 2 connections, 2 opened in all>"


def test_a_cut_connection_is_opened_again_and_nothing_is_done_twice() -> None:
    with Network() as network:
        store = network.connect()
        for cuts in range(20):
            assert store.add("n") == 2 * cuts + 1
            assert network.cut() >= 1  # a second one while a sign of life is under way
            assert store.add("n") == 2 * cuts + 2
        assert store.statistics()["reconnects"] > 10  # a cut may meet the sign of life's alone


def test_adds_of_several_threads_are_exact_while_connections_are_cut() -> None:
    with Network() as network:
        stores = [network.connect() for _ in range(4)]
        stop = threading.Event()
        done: list[int] = []

        def add(index: int) -> None:
            for _ in range(250):
                stores[index % 4].add("n")
                done.append(index)

        def cut() -> None:
            """After each so many adds: so often in a second a busy machine would do none at all."""
            uncut = 0
            while not stop.wait(0.001):
                if len(done) - uncut >= 20:
                    uncut = len(done)
                    network.cut()

        threads = [threading.Thread(target=add, args=(index,)) for index in range(8)]
        cutter = threading.Thread(target=cut)
        for thread in [*threads, cutter]:
            thread.start()
        try:
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()
        finally:
            stop.set()
            cutter.join(60)
        assert stores[0]["n"] == 2000


def test_a_server_that_refuses_is_waited_for_until_the_deadline() -> None:
    with Network() as network:
        store = network.connect(timeout=1.0)
        network.refuse()
        network.cut()
        with pytest.raises(StoreTimeout) as caught:
            store.add("n")
        assert caught.value.code == "store-timeout"
        assert network.refused > 0
        with pytest.raises(StoreUnreachable) as refused:
            network.connect(timeout=0.1)
        assert refused.value.code == "port-refused"
        network.accept()
        assert store.add("m") == 1


def test_leaving_stops_server_and_clients() -> None:
    with Network() as network:
        store = network.connect()
    with pytest.raises(StoreClosed):
        store.add("n")
    assert len(network) == 0
