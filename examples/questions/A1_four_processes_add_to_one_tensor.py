"""Four processes add 10,000 times each to one tensor in shared memory, and one of them is killed
while it holds the lock.

    python examples/questions/A1_four_processes_add_to_one_tensor.py

The usual answer is `tensor.share_memory_()`, and `tensor += 1` in each process. It runs, and comes
out short: two processes that read the same number write the same number. With a
`multiprocessing.Lock` around it the sum is right, until somebody is killed while he holds that
lock: nobody ever gets it again, and the program hangs without a word.
"""

import os
import signal

import torch
import torch.multiprocessing as mp

import rallypoint

WORKERS, TIMES = 4, 10_000
TOTAL = WORKERS  # the last element; the others say how far each worker is


def work(shared: rallypoint.SharedTensor, worker: int, dies_at: int) -> None:
    while True:
        try:
            with shared.locked() as tensor:
                if tensor[worker] == TIMES:
                    return
                tensor[worker] += 1
                if (
                    tensor[worker] == dies_at
                ):  # the worst moment: this element is changed, and the total is not
                    os.kill(os.getpid(), signal.SIGKILL)
                tensor[TOTAL] += 1
        except (
            rallypoint.LockAbandoned
        ) as error:  # one of the others is told, once, and the lock is free
            print(error)
            with shared.locked() as tensor:
                tensor[TOTAL] = tensor[:WORKERS].sum()


def main() -> None:
    shared = rallypoint.SharedTensor(WORKERS + 1, torch.int64)
    workers = [
        mp.Process(target=work, args=(shared, number, 5_000 if number == 0 else -1))
        for number in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL, 0, 0, 0]

    again = mp.Process(target=work, args=(shared, 0, -1))  # goes on where the killed one was
    again.start()
    again.join()
    assert shared.tensor.tolist() == [TIMES] * WORKERS + [WORKERS * TIMES]
    print(f"total {shared.tensor[TOTAL]}")


if __name__ == "__main__":
    main()
