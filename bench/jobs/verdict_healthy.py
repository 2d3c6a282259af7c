"""Four ranks that end well, each job in a way that looks like a fault from afar, as VERDICT says
(see verdict_program.py).
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from marks import mark

PATIENCE = timedelta(seconds=60)
LATE = 1.0  # seconds: many times what meeting takes
SLOW, STEP = (
    4.0,
    0.05,
)  # seconds: what the others wait, and how soon the rank for which they wait does something else


def meet() -> None:
    dist.init_process_group("gloo", timeout=PATIENCE)
    for _ in range(20):
        dist.all_reduce(torch.ones(1000))


def one_comes_late() -> None:
    time.sleep(LATE if it else 0.0)
    meet()
    dist.destroy_process_group()


def one_goes_early() -> None:
    """Nobody needs it any more; the others still work, without it."""
    meet()
    dist.destroy_process_group()
    time.sleep(0.0 if it else LATE)


def one_leaves_the_group_open() -> None:
    meet()
    dist.barrier()
    time.sleep(asked["delay"] if it else 0.0)


def an_error_is_mended() -> None:
    """Tried with a method that there is not, then with the usual one."""
    try:
        dist.init_process_group(
            "gloo", init_method="etcd://nowhere", rank=rank, world_size=4, timeout=PATIENCE
        )
    except (ValueError, RuntimeError) as error:
        print(f"falling back: {error}")
    meet()
    dist.destroy_process_group()


def meets_twice() -> None:
    meet()
    dist.destroy_process_group()
    meet()
    dist.destroy_process_group()


def two_jobs_of_two() -> None:
    """Each pair has a meeting point, ranks and a world size of its own."""
    pair = rank // 2
    method = f"file://{os.environ['BENCH_FOLDER']}/pair{pair}"
    dist.init_process_group(
        "gloo", init_method=method, rank=rank % 2, world_size=2, timeout=PATIENCE
    )
    dist.all_reduce(torch.ones(1000))
    dist.destroy_process_group()


def groups_in_turn() -> None:
    """Ranks of two groups are in different collectives at the same time."""
    meet()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for _ in range(20):
        if rank < 2:
            dist.all_reduce(torch.ones(1000), group=halves[0])
        else:
            dist.broadcast(torch.ones(1000), src=2, group=halves[1])
    dist.destroy_process_group()


def one_computes_for_long() -> None:
    """The others wait for it, and it moves all the time: from one thing to the next, each shorter
    than --stall.
    """
    meet()
    began = time.monotonic()
    while it and time.monotonic() - began < SLOW:
        loads()
        computes()
    dist.all_reduce(torch.ones(1000))
    dist.destroy_process_group()


def loads() -> None:
    time.sleep(STEP)


def computes() -> None:
    began = time.monotonic()
    while time.monotonic() - began < STEP:
        torch.ones(100, 100) @ torch.ones(100, 100)


def never_meets() -> None:
    """Ranks that have nothing to do with each other."""
    time.sleep(asked["delay"] if it else 0.0)


asked: dict[str, Any] = json.loads(os.environ["VERDICT"])
rank = int(os.environ["RANK"])
it = rank == asked["rank"]
mark("here")
globals()[asked["does"]]()
