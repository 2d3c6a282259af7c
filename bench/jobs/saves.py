"""All ranks reduce, one of them slowly, until they are asked to stop; then every one saves.

SAVES_HOW: how it hears of that, `flag` (a handler of SIGTERM sets one, and the ranks agree on it in
all_reduce) or `interrupt` (`except KeyboardInterrupt`). SAVES_CALL: `sync`, `async`, or `ddp`,
where the ranks wait in backward, too.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType

import torch
import torch.distributed as dist
from marks import mark

how, call, step_time = (
    os.environ["SAVES_HOW"],
    os.environ["SAVES_CALL"],
    float(os.environ["SAVES_STEP"]),
)
asked = False


def ask(number: int, frame: FrameType | None) -> None:
    global asked
    asked = True


def reduce(tensor: torch.Tensor) -> None:
    if call == "sync":
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    elif call == "ddp":
        model(torch.ones(1, 4)).sum().backward()
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    else:
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True)
        work.wait()


def save() -> None:
    time.sleep(0.3)
    mark("saved")


if how == "flag":
    signal.signal(signal.SIGTERM, ask)
dist.init_process_group("gloo")
rank, stop = dist.get_rank(), torch.zeros(1)
model = (
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    if call == "ddp"
    else torch.nn.Linear(4, 4)
)
step = 0
try:
    while not stop.item():
        if rank == int(os.environ["SAVES_SLOW"]):
            time.sleep(step_time)
        stop.fill_(asked)
        reduce(stop)
        step += 1
        if step == 2:
            mark("looping")
    save()
    dist.barrier()
    dist.destroy_process_group()
except KeyboardInterrupt:
    save()
    sys.exit(130)
