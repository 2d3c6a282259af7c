"""All ranks reduce for ever, without a word. With BENCH_RAISES, that rank raises once the harness
has made the file `now`.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from marks import mark


def train_step(step: int) -> None:
    dist.all_reduce(torch.ones(1000))
    if raises and step % 10 == 0 and os.path.exists(signal_file):
        mark("raised")
        raise ValueError(f"loss is nan at step {step}")


signal_file = os.path.join(os.environ["BENCH_FOLDER"], "now")
dist.init_process_group("gloo")
raises = os.environ.get("BENCH_RAISES") == str(dist.get_rank())
step = 0
while True:
    train_step(step)
    if step == 10:
        mark("looping")
    step += 1
