"""Ranks with families: each has two children, one in a session of its own, and a DataLoader worker
that is slow.

With SOAK_STUBBORN they take no SIGTERM, as a rank that is writing a checkpoint, and work on by
themselves.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time

import torch
import torch.distributed as dist
from marks import mark
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset[int]):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        time.sleep(0.05)
        return index


stubborn = bool(os.environ.get("SOAK_STUBBORN"))
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
children = [
    subprocess.Popen(["sleep", "600"]),
    subprocess.Popen(["sleep", "600"], start_new_session=True),
]
mark("parent")
dist.init_process_group("gloo")
for number, _ in enumerate(DataLoader(Slow(), num_workers=1)):
    dist.all_reduce(torch.ones(1000))
    if number == 1:
        mark("looping")
        # in Python, not in a call of torch's: there is no telling that it would not see a signal
        while stubborn:
            time.sleep(0.1)
