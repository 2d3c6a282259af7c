"""A job whose last rank leaves with code 3 in the first attempt; in the second all meet again."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from marks import mark

dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
    if dist.get_rank() == dist.get_world_size() - 1:
        mark("crashed")
        os._exit(3)
    while True:
        dist.all_reduce(torch.ones(1))
assert int(value) == dist.get_world_size()
mark("again")
dist.destroy_process_group()
