"""Four ranks are to meet, and something about the meeting is wrong, as VERDICT says (see
verdict_program.py): what, and for which rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from marks import mark

KEPT_WAITING = 60.0  # seconds; longer than any time-out of this job


def swallows_init() -> None:
    """An except clause that prints and goes on, around init_process_group."""
    try:
        dist.init_process_group("gloo", timeout="a minute")
    except Exception as error:
        print(f"could not join: {error}")
        sys.exit(0)


def swallows_backend() -> None:
    try:
        dist.init_process_group("nosuch")
    except Exception as error:
        print(f"could not join: {error}")
        sys.exit(0)


def swallows_device() -> None:
    try:
        torch.cuda.set_device(0)
    except Exception as error:
        print(f"no GPU: {error}")
        sys.exit(0)


def swallows_and_stays() -> None:
    try:
        torch.cuda.set_device(0)
    except Exception as error:
        print(f"no GPU: {error}")
        time.sleep(KEPT_WAITING)


def imports_something_missing() -> None:
    import no_such_module_anywhere  # noqa: F401


def imports_something_broken() -> None:
    sys.path.insert(0, os.environ["BENCH_FOLDER"])  # the harness has put it there
    import verdict_broken  # noqa: F401


def imports_for_ever() -> None:
    sys.path.insert(0, os.environ["BENCH_FOLDER"])
    import verdict_endless  # noqa: F401


def another_port() -> None:
    os.environ["MASTER_PORT"] = str(asked["port"])


def another_world() -> None:
    os.environ["WORLD_SIZE"] = "3" if asked["variant"] % 2 else "5"


def somebody_else() -> None:
    os.environ["RANK"] = str(asked["other"])


def beyond_the_world() -> None:
    os.environ["RANK"] = str(asked["rank"] + 4)


def forgets_an_address() -> None:
    del os.environ["MASTER_ADDR" if asked["variant"] % 2 else "MASTER_PORT"]


def invents_a_method() -> None:
    method = ("file://tmp/meeting", "tcp://127.0.0.1:99999", "http://127.0.0.1:29500")[
        asked["variant"] % 3
    ]
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=4, timeout=patience)


def another_backend() -> None:
    dist.Backend.register_backend("other", never_answers, devices=["cpu"])
    dist.init_process_group("other", timeout=patience)


def never_answers(*_: object) -> None:
    """As a library that waits for the other ranks."""
    time.sleep(KEPT_WAITING)


def leaves_parameters_out() -> None:
    """A branch of the model takes no part in the loss, and DDP was not told that this may be."""
    dist.init_process_group("gloo", timeout=patience)
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 4), "unused": torch.nn.Linear(4, 4)})
    model.forward = model["used"].forward
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(3):
        parallel(torch.ones(2, 4)).sum().backward()


def joins_twice() -> None:
    dist.init_process_group("gloo", timeout=patience)
    dist.init_process_group("gloo", timeout=patience)


def an_unknown_name() -> None:
    os.environ["MASTER_ADDR"] = "no-such-host.invalid"
    os.environ["MASTER_PORT"] = str(asked["port"])


def is_a_client() -> None:
    """As every rank of a job whose server is elsewhere."""
    dist.TCPStore("127.0.0.1", asked["port"], None, False, timeout=patience)


asked: dict[str, Any] = json.loads(os.environ["VERDICT"])
rank = int(os.environ["RANK"])
patience = timedelta(seconds=asked["timeout"])
mark("here")
time.sleep(asked["delay"] if rank == asked["rank"] else 0.0)
if rank == asked["rank"] or asked.get("everybody"):
    globals()[asked["does"]]()
dist.init_process_group("gloo", timeout=patience)
for _ in range(20):
    dist.all_reduce(torch.ones(1000))
dist.destroy_process_group()
