"""Restarts three times; says how many children and descriptors its template has."""

import os
import sys

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
template = os.getppid()
if dist.get_rank() == 0:
    children = len(open(f"/proc/{template}/task/{template}/children").read().split())
    print(f"template has {children} children and {len(os.listdir(f'/proc/{template}/fd'))} descriptors", flush=True)
dist.barrier()
if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 3:
    os._exit(3)
