"""Crashes in its first attempts, and re-initialises gloo in the next."""

import os
import sys

import torch
import torch.distributed as dist

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
tensor = torch.ones(1)
dist.all_reduce(tensor)
print(f"attempt {attempt} of {os.environ['TORCHELASTIC_MAX_RESTARTS']} sums {tensor.item():g}", flush=True)
if attempt < int(sys.argv[1]) and dist.get_rank() == 0:
    os._exit(3)
dist.barrier()
dist.destroy_process_group()
