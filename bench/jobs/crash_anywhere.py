"""In the first attempt one rank ends at a chosen moment, in a chosen way; in the second all meet,
reduce and end well.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import torch
import torch.distributed as dist
from marks import mark


def crash() -> None:
    time.sleep(float(os.environ["SOAK_DELAY"]))
    mark("crashed")
    how = os.environ["SOAK_HOW"]
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(3)


def moment(name: str) -> None:
    if first and rank == int(os.environ["SOAK_RANK"]) and name == os.environ["SOAK_MOMENT"]:
        if os.environ["SOAK_HOW"] == "raise":
            mark("crashed")
            raise ValueError("on purpose")
        threading.Thread(target=crash, daemon=True).start()


rank = int(os.environ["RANK"])
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
moment("before-init")
if first and os.environ["SOAK_MOMENT"] == "before-init":
    time.sleep(0.05)
moment("during-init")
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
assert int(value) == dist.get_world_size()
moment("loop")
while first:
    dist.all_reduce(torch.ones(1000))
mark("again")
dist.destroy_process_group()
