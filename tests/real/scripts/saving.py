"""Rank 0 waits in all_reduce for rank 1, which takes its time, as in any job with a little imbalance; then both save. Argument 1: how they
hear that they are to stop, a `flag` on which they agree, or `interrupt`. Argument 2: in which call, `sync`, `async`, or `ddp` (backward)."""

import signal
import sys
import time

import torch
import torch.distributed as dist

how, call = sys.argv[1:]
asked = False


def ask(number, frame):
    global asked
    asked = True
    print("asked", flush=True)


if how == "flag":
    signal.signal(signal.SIGTERM, ask)
dist.init_process_group("gloo")
rank, stop = dist.get_rank(), torch.zeros(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4)) if call == "ddp" else None
try:
    while not stop.item():
        if rank == 1:
            print("rank 1 computes", flush=True)
            time.sleep(3)
        stop.fill_(asked)
        if call == "ddp":
            model(torch.ones(1, 4)).sum().backward()
        if call != "async":
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        else:
            dist.all_reduce(stop, op=dist.ReduceOp.MAX, async_op=True).wait()
    print(f"rank {rank} has saved", flush=True)
    dist.barrier()
    dist.destroy_process_group()
except KeyboardInterrupt:
    time.sleep(0.5)
    print(f"rank {rank} has saved", flush=True)
