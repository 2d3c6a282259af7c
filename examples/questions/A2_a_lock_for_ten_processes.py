"""Ten processes count together, with a lock.

    python examples/questions/A2_a_lock_for_ten_processes.py

The usual mistake is a `threading.Lock`. Each process has a copy of it, so it excludes nobody: on a
quiet machine the count is right by luck, on a busy one it is short, and neither says why. A
SharedTensor brings its lock along. It excludes processes and threads, and is freed when its holder
dies.
"""

import threading

import torch
import torch.multiprocessing as mp

import rallypoint

PROCESSES, THREADS, TIMES = 10, 2, 250


def count(shared: rallypoint.SharedTensor) -> None:
    for _ in range(TIMES):
        with shared.locked() as tensor:
            tensor += 1


def work(shared: rallypoint.SharedTensor) -> None:
    threads = [threading.Thread(target=count, args=(shared,)) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shared.add_(
        1000
        # a single change needs no block: this takes the lock itself, and is done as a whole or not
        # at all
    )


def main() -> None:
    shared = rallypoint.SharedTensor(1, torch.int64)
    workers = [mp.Process(target=work, args=(shared,)) for _ in range(PROCESSES)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    expected = PROCESSES * (THREADS * TIMES + 1000)
    assert shared.tensor.item() == expected, f"{shared.tensor.item()}, and not {expected}"
    print(f"counted {shared.tensor.item()}")


if __name__ == "__main__":
    main()
