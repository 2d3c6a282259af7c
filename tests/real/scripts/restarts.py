"""Rank 0 fails in the first two attempts, after the group has met; the third goes well."""

import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"attempt {attempt} of {os.environ['TORCHELASTIC_MAX_RESTARTS']}: {total.item():g}", flush=True)
dist.barrier()
if attempt != "2" and dist.get_rank() == 0:
    sys.exit(3)
if attempt != "2":
    dist.barrier()
dist.destroy_process_group()
