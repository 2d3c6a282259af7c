"""Four processes count together, and none of them knows where the store is.

    python examples/store_counter.py

The store object itself is handed to the processes, as any other argument: it connects where it
arrives. `add` counts in the store, so nothing is lost; `counts["n"] = counts["n"] + 1` would read
and write in two steps, and lose what others did between them.
"""

import multiprocessing

import rallypoint

WORKERS, TIMES = 4, 250


def work(store: rallypoint.Store, name: int) -> None:
    for _ in range(TIMES):
        store.add("total", 1)
        store.update(
            "by worker", lambda counts: {**counts, name: counts.get(name, 0) + 1}, default={}
        )


def main() -> None:
    processes = multiprocessing.get_context("spawn")
    with (
        rallypoint.serve() as server,
        rallypoint.connect(server.address, secret=server.secret) as store,
    ):
        workers = [processes.Process(target=work, args=(store, name)) for name in range(WORKERS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        print(f"total {store['total']}, by worker {dict(sorted(store['by worker'].items()))}")


if __name__ == "__main__":
    main()
