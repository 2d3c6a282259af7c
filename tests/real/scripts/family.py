"""Ranks with children: a plain one, one in a session of its own, and a DataLoader's workers. Then it waits, or does as it is told."""

import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if index > 8:
            time.sleep(1000)
        return index


def main():
    what = sys.argv[1]
    rank = int(os.environ["RANK"])
    subprocess.Popen(["sleep", "1001"])
    subprocess.Popen(["sleep", "1002"], start_new_session=True)
    batches = iter(DataLoader(Slow(), num_workers=1, batch_size=4))
    next(batches)
    dist.init_process_group("gloo")
    print(f"rank {rank} is up", flush=True)
    if what == "wait":
        next(batches)
        next(batches)
    if what == "raise" and rank == 1:
        raise ValueError("boom")
    if what == "segfault" and rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    while True:
        dist.all_reduce(torch.ones(1))


main()
