"""`update` is one change, whatever the value: also a large tensor that eight processes change at
once.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

import rallypoint
from rallypoint.errors import FenceStale
from rallypoint.primitives.store import Store

from ..store.live import DEADLINE
from ..store.processes import ServerProcess

PROCESSES, TIMES, SIZE = 8, 6, 300_000


def work(store: Store, rank: int) -> None:
    import torch

    torch.set_num_threads(1)

    def one_more(value: Any) -> Any:
        value["sum"] += 1.0
        value["by"][rank] = value["by"].get(rank, 0) + 1
        return value

    store.barrier("all are here", size=PROCESSES, timeout=DEADLINE)
    for _ in range(TIMES):
        store.update("k", one_more, default=None)
    with store.lock("l", timeout=DEADLINE) as grant:
        store.update("fenced", lambda n: n + 1, default=0, fence=grant.token)


@pytest.mark.torch
@pytest.mark.parametrize("same_host", [True, False], ids=["near", "far"])
def test_eight_processes_lose_nothing(same_host: bool) -> None:
    import torch

    context: Any = multiprocessing.get_context("fork")
    with (
        ServerProcess() as process,
        rallypoint.connect(
            process.address, secret=process.secret, same_host=same_host, timeout=DEADLINE
        ) as store,
    ):
        store["k"] = {"sum": torch.zeros(SIZE), "by": {}}  # 1.2 MB
        workers = [
            context.Process(target=work, args=(store, rank), daemon=True)
            for rank in range(PROCESSES)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(2 * DEADLINE)
        assert [worker.exitcode for worker in workers] == [0] * PROCESSES
        found = store["k"]
        assert found["by"] == dict.fromkeys(range(PROCESSES), TIMES)
        assert torch.equal(found["sum"], torch.full((SIZE,), float(PROCESSES * TIMES)))
        assert store["fenced"] == PROCESSES


def test_a_stale_token_changes_nothing() -> None:
    with (
        rallypoint.serve() as server,
        rallypoint.connect(server.address, secret=server.secret) as store,
    ):
        store["k"] = 1
        with store.lock("l") as grant:
            assert store.update("k", lambda n: n + 1, fence=grant.token) == 2
        with pytest.raises(FenceStale):
            store.update("k", lambda n: n + 1, fence=grant.token)
        assert store["k"] == 2
