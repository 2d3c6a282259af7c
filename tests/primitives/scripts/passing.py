"""A SharedTensor on every way into another process. Prints one line per way."""

import gc
import io
import multiprocessing
import os
import pickle
import sys

import cloudpickle
import torch
import torch.multiprocessing

import rallypoint

held = None


def add(shared, much):
    for _ in range(much):
        with shared.locked():
            shared.tensor[0] += 1


def twice(first, second, raw, queue, answers):
    assert first is second
    add(first, 100)
    raw[1] += 1
    from_queue(queue, answers)  # here too: to start a process is what takes long


def keep(shared):
    global held
    held = shared


def add_to_kept(much):
    add(held, much)


def from_queue(queue, answers):
    shared = queue.get(timeout=60)
    add(shared, 100)
    answers.put(shared)  # and back: the same object there
    answers.close()
    answers.join_thread()
    queue.get(timeout=60)


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def main():
    torch.set_num_threads(1)
    shared = rallypoint.SharedTensor(3, torch.int64)

    def told(way, expected):
        found = shared.tensor.tolist()
        assert found == expected, (way, found, expected)
        print(way, flush=True)
        shared.copy_(0)

    for method in ("fork", "spawn", "forkserver"):
        processes = multiprocessing.get_context(method)
        if method == "forkserver":
            processes.set_forkserver_preload(["torch"])
        queue, answers, other = processes.Queue(), processes.Queue(), rallypoint.SharedTensor(3)
        worker = processes.Process(
            target=twice, args=(shared, shared, shared.tensor, queue, answers)
        )
        worker.start()
        queue.put(other)
        assert answers.get(timeout=60) is other
        told(method, [100, 1, 0])
        queue.put(None)
        worker.join()
        assert worker.exitcode == 0
        assert other.tensor.tolist() == [100, 0, 0]
        told(f"{method}, a queue", [0, 0, 0])
        with processes.Pool(1, initializer=keep, initargs=(shared,)) as pool:
            pool.map(add_to_kept, [50] * 2)
            told(f"{method}, a pool's initializer", [100, 0, 0])
            pool.starmap(add, [(shared, 50)] * 2)
            told(f"{method}, a pool's arguments", [100, 0, 0])

    torch.multiprocessing.spawn(rank, args=(shared,), nprocs=1)
    told("torch.multiprocessing.spawn", [100, 0, 0])

    pid = os.fork()
    if pid == 0:
        add(cloudpickle.loads(cloudpickle.dumps(lambda: shared))(), 10)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    told("os.fork and cloudpickle", [10, 0, 0])

    # A file is a way like another, while the sender has it.
    file = io.BytesIO()
    pickle.dump(shared, file)
    assert pickle.loads(file.getvalue()) is shared

    before = descriptors()
    for _ in range(1000):
        assert pickle.loads(pickle.dumps(shared)) is shared
        with shared.locked():
            pass
    assert descriptors() == before, (descriptors(), before)
    print("no descriptor more", flush=True)


def rank(number, shared):
    add(shared, 100)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
