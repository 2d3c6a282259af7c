"""Rank 1 is killed among its peers, which answer the lost connection in one of three ways."""

import os
import signal
import sys

import torch
import torch.distributed as dist

answer, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
tensor = torch.ones(1)
try:
    for step in range(100_000):
        dist.all_reduce(tensor)
        if step == steps and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
except RuntimeError:
    if answer == "abort":
        os.abort()
    if answer == "exit":
        os._exit(1)
    raise
