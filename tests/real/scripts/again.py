"""Crashes in its first attempts, and re-initialises gloo in the next; says how many children and descriptors its template has."""

import os
import sys

import torch
import torch.distributed as dist

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
tensor = torch.ones(1)
dist.all_reduce(tensor)
print(
    f"attempt {attempt} of {os.environ['TORCHELASTIC_MAX_RESTARTS']} sums {tensor.item():g}",
    flush=True,
)
if dist.get_rank() == 0:
    template = os.getppid()
    children = len(open(f"/proc/{template}/task/{template}/children").read().split())
    print(
        f"template has {children} children and {len(os.listdir(f'/proc/{template}/fd'))} descriptors",
        flush=True,
    )
if attempt < int(sys.argv[1]) and dist.get_rank() == 0:
    os._exit(3)
dist.barrier()
dist.destroy_process_group()
