"""`store["counter"] += 1` from two processes.

    python examples/questions/D6_counter_plus_one.py

That line reads and then writes: two requests, and what another process writes between them is lost.
`add` and `update` are one. The plain form is not forbidden; when it has lost something, it says so.
"""

import multiprocessing as mp
import warnings

import rallypoint

TIMES = 500


def work(store: rallypoint.Store) -> None:
    store.barrier("both are here", size=2)
    for _ in range(TIMES):
        store.add("added", 1)
        store.update("updated", lambda n: n + 1, default=0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(TIMES):
            store["plain"] += 1
    assert bool(told) == bool(store.statistics()["lost_updates"])
    store.add("lost updates", store.statistics()["lost_updates"])


def main() -> None:
    with (
        rallypoint.serve() as server,
        rallypoint.connect(server.address, secret=server.secret) as store,
    ):
        store["plain"] = 0
        processes = [mp.Process(target=work, args=(store,)) for _ in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0, 0]
        assert store["added"] == store["updated"] == 2 * TIMES
        plain, lost = store["plain"], store["lost updates"]
        assert (plain < 2 * TIMES) == (lost > 0), (plain, lost)

        # The same by two clients in one process, where the order is certain.
        with rallypoint.connect(server.address, secret=server.secret) as other:
            read = store["plain"]
            other["plain"] = 1000
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                store["plain"] = read + 1
            [warning] = told
            assert warning.category is rallypoint.UpdateLostWarning
            assert "use add() or update()" in str(warning.message)
        print(
            f"add {2 * TIMES}, update {2 * TIMES}, plain += {plain}, and {lost} lost updates were noticed"
        )


if __name__ == "__main__":
    main()
