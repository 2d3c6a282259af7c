"""Writers of a large tensor are killed at random moments, and no state but a whole one is ever seen under the lock.

Argument: the number of kills, by add_ and then by copy_. The tensor's elements are equal at any time when a change is whole.
"""

import multiprocessing
import os
import random
import signal
import sys
import time

import torch

import rallypoint

SIZE = 2_000_000


def write(shared, how, done):
    torch.set_num_threads(1)
    ones = torch.ones(SIZE, dtype=torch.int64)
    turn = 0
    while True:
        if how == "add_":
            shared.add_(ones)
        else:
            turn += 1
            shared.copy_(ones * (os.getpid() * 1000 + turn))
        done.value += 1


def main(how, kills):
    torch.set_num_threads(1)
    processes = multiprocessing.get_context("fork")
    chance = random.Random(how)
    shared = rallypoint.SharedTensor(SIZE, torch.int64)
    finished_for_the_dead = seen = 0
    for _ in range(kills):
        done = processes.RawValue("i", 0)
        began = time.monotonic()
        writer = processes.Process(target=write, args=(shared, how, done))
        writer.start()
        while not done.value:
            time.sleep(0.001)
        time.sleep(chance.random() * min(0.05, time.monotonic() - began))
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        finished_for_the_dead += shared._lock.holder() is not None and pending(shared)
        with shared.locked(timeout=60) as tensor:  # no LockAbandoned: nothing can be half changed
            low, high = torch.aminmax(tensor)
            assert low == high, (how, low, high)
            if how == "add_":
                assert low >= seen, (how, low, seen)
            seen = int(low)
    assert seen > 0, how
    print(f"{how}: {finished_for_the_dead} finished for the dead", flush=True)


def pending(shared):
    return os.pread(shared._lock.fileno(), 1, 16) != b"\0"


if __name__ == "__main__":
    for way in ("add_", "copy_"):
        main(way, int(sys.argv[1]))
