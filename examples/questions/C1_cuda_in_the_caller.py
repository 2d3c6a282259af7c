"""The calling program has used CUDA, and its workers use it, too.

    python examples/questions/C1_cuda_in_the_caller.py

Forked from that program (`mp.Process` on Linux, a notebook's launcher), a worker cannot: "Cannot
re-initialize CUDA in forked subprocess". Here the ranks come from a process of their own that has
imported torch and has never touched CUDA. Without a GPU the same goes for what else does not
survive a fork: a thread that holds a lock.
"""

import os
import threading

import torch

import rallypoint

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def work(device: str) -> tuple[int, float]:
    """In a rank: use the device that the caller has in use."""
    return os.getpid(), torch.arange(10.0, device=device).sum().item()


def main() -> None:
    held = torch.ones(1000, device=DEVICE)  # CUDA is up in this process from here on
    lock, end = threading.Lock(), threading.Event()
    lock.acquire()
    threading.Thread(target=end.wait, daemon=True).start()

    results = rallypoint.launch(work, (DEVICE,), nproc=2)

    assert [total for _, total in results] == [45.0, 45.0]
    assert len({os.getpid(), *(pid for pid, _ in results)}) == 3
    assert held.sum().item() == 1000
    end.set()
    print(f"2 ranks used {DEVICE} while their caller had it in use")


if __name__ == "__main__":
    main()
