"""Ranks that have imported torch and do nothing; then, when told so, meet and do nothing again."""

from __future__ import annotations

import torch
import torch.distributed as dist
from marks import mark, wait_for

mark("imported")
wait_for("meet")
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
mark("met")
wait_for("end")
dist.destroy_process_group()
