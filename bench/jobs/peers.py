"""Rank 2 dies of SIGKILL at a chosen moment; its peers answer the lost connection in a chosen way.

SOAK_MOMENT: before-init, during-init, loop or finalisation. SOAK_DELAY: seconds after the moment
began. SOAK_KILLER: `self`, or `outside`: then the harness does it, after the mark. SOAK_ANSWER:
raise, abort or exit, what peers do when a call of torch's fails.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time

import torch
import torch.distributed as dist
from marks import mark


def moment(name: str) -> None:
    """The moment has come: rank 2 arms its own end, if it is to be its own."""
    if rank == 2 and name == os.environ["SOAK_MOMENT"]:
        mark("moment")
        if os.environ["SOAK_KILLER"] == "self":
            threading.Thread(target=end_later, daemon=True).start()


def end_later() -> None:
    time.sleep(float(os.environ["SOAK_DELAY"]))
    end()


def end() -> None:
    mark("killed")
    os.kill(os.getpid(), signal.SIGKILL)


def answer() -> None:
    mark("lost")
    how = os.environ["SOAK_ANSWER"]
    if how == "abort":
        os.abort()
    if how == "exit":
        os._exit(1)
    raise  # what is being handled: this is called in except clauses only


rank = int(os.environ["RANK"])
loops = 200 if os.environ["SOAK_MOMENT"] == "finalisation" else 1_000_000
moment("before-init")
if os.environ["SOAK_MOMENT"] == "before-init":
    time.sleep(0.05)
try:
    moment("during-init")
    dist.init_process_group("gloo")
    moment("loop")
    for _ in range(loops):
        dist.all_reduce(torch.ones(1000))
except RuntimeError:
    answer()
moment("finalisation")
if (
    os.environ["SOAK_MOMENT"] == "finalisation"
    and os.environ["SOAK_KILLER"] == "self"
    and rank == 2
):
    atexit.register(end)  # the thread may not run any more while the interpreter is taken down
dist.destroy_process_group()
