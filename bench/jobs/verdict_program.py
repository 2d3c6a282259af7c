"""Four ranks meet, reduce and part; at the start, in the run or at the end one of them fails, in
the way that VERDICT names.

VERDICT is JSON: `rank`, which one; `other`, a second one; `does`, a name of `FAULTS`; `phase`:
start, run or end; `delay`: seconds after the phase began; `variant`: a number that chooses among
forms of the same fault; `answer`: what the others do when a call of torch's fails: raise, abort or
exit; `timeout`: seconds that torch waits for the others.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from marks import mark
from torch.utils.data import DataLoader, Dataset

KILLED_WITHIN = (
    60.0  # seconds; whoever waits for a signal from outside gets it a fraction of one later
)
FEW, MANY = 20, 1_000_000  # turns of the loop: enough to be in the run, and until something fails


def raises() -> NoReturn:
    variant = asked["variant"] % 6
    if variant == 0:
        raise ValueError("the learning rate is NaN")
    if variant == 1:
        raise KeyError("weights")
    if variant == 2:
        open("data/missing.csv").close()
    if variant == 3:
        torch.ones(2, 3) @ torch.ones(2, 3)
    if variant == 4:
        raise RuntimeError("loss went to infinity in step 20")
    raise AssertionError(f"expected 32 samples, got {1 / 0}")


def raises_something_else() -> NoReturn:
    raise LookupError("no sample has this index")


def raises_behind_a_finally() -> NoReturn:
    """What many scripts have: the cleaning up fails, too, and is the last that is heard."""
    try:
        raise ValueError("the first error")
    finally:
        dist.destroy_process_group(dist.group.WORLD)
        dist.barrier()


def exits() -> NoReturn:
    sys.exit(asked["status"])


def exits_at_once() -> NoReturn:
    os._exit(asked["status"])


def leaves() -> NoReturn:
    if asked["variant"] % 2:
        os._exit(0)
    sys.exit(0)


def crashes() -> None:
    variant = asked["variant"] % 3
    if variant == 0:
        ctypes.string_at(0)
    os.kill(os.getpid(), (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE)[variant])


def aborts() -> NoReturn:
    os.abort()


def wants_too_much() -> None:
    if asked["variant"] % 2:
        bytearray(1 << 62)
    torch.empty(1 << 50, dtype=torch.uint8)


def asks_for_a_gpu() -> None:
    """On a machine without one; where there are some, for one more than there are."""
    torch.zeros(1, device=f"cuda:{torch.cuda.device_count()}")


class Deadly(Dataset[int]):
    """Its loading ends the process that does it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


def loses_a_worker() -> None:
    for _ in DataLoader(Deadly(), num_workers=1):
        pass


def calls_another_collective() -> None:
    dist.broadcast(torch.ones(1000), src=asked["rank"])
    dist.broadcast(torch.ones(1000), src=asked["other"])


def reduces_alone() -> None:
    dist.all_reduce(torch.ones(1))


def sends_a_tensor(queue: multiprocessing.Queue[torch.Tensor]) -> None:
    queue.put(torch.ones(10))


def reads_from_a_dead_producer() -> None:
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    context = torch.multiprocessing.get_context("fork")
    queue = context.Queue()
    producer = context.Process(target=sends_a_tensor, args=(queue,))
    producer.start()
    producer.join()
    queue.get(timeout=KILLED_WITHIN)


def kills_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_signalled() -> None:
    """The harness waits for the mark, and does it."""
    mark("armed")
    if asked["phase"] != "run":
        time.sleep(KILLED_WITHIN)


def asks_torchs_store() -> None:
    """Until the harness has stopped it, and then for ever: torch knows no deadline for this."""
    store = (
        dist.distributed_c10d._get_default_store()
    )  # torch's own name: what programs use, for want of a public one
    while True:
        store.add("asked", 1)


def stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def never_goes_on() -> None:
    time.sleep(KILLED_WITHIN)


FAULTS: dict[str, Callable[[], None]] = {
    "raises": raises,
    "raises something else": raises_something_else,
    "raises behind a finally": raises_behind_a_finally,
    "exits": exits,
    "exits at once": exits_at_once,
    "leaves": leaves,
    "crashes": crashes,
    "aborts": aborts,
    "wants too much": wants_too_much,
    "asks for a GPU": asks_for_a_gpu,
    "loses a worker": loses_a_worker,
    "calls another collective": calls_another_collective,
    "reduces alone": reduces_alone,
    "reads from a dead producer": reads_from_a_dead_producer,
    "kills itself": kills_itself,
    "is signalled": is_signalled,
    "asks torch's store": asks_torchs_store,
    "stops": stops,
    "never goes on": never_goes_on,
    "nothing": lambda: None,
}


def fault() -> Callable[[], None] | None:
    """What this rank does when the moment has come."""
    if rank == asked["rank"]:
        return FAULTS[asked["does"]]
    if rank == asked["other"] and "other_does" in asked:
        return FAULTS[asked["other_does"]]
    return None


def answer() -> None:
    """Called in except clauses only: what programs do when torch says that something is lost."""
    how = asked.get("answer", "raise")
    if how == "abort":
        os.abort()
    if how == "exit":
        os._exit(1)
    raise  # what is being handled


def moment(phase: str) -> None:
    if asked["phase"] == phase and (due := fault()) is not None:
        time.sleep(asked["delay"])
        due()


def loop() -> None:
    due, began = fault() if asked["phase"] == "run" else None, time.monotonic()
    endless = (
        asked["phase"] == "run" or asked["does"] == "nothing"
    )  # then it is the harness that ends it
    for _ in range(MANY if endless else FEW):
        dist.all_reduce(torch.ones(1000))
        if due is not None and time.monotonic() - began > asked["delay"]:
            due()
            due = None


asked: dict[str, Any] = json.loads(os.environ["VERDICT"])
rank = int(os.environ["RANK"])
mark("here")
moment("start")
try:
    dist.init_process_group("gloo", timeout=timedelta(seconds=asked["timeout"]))
    mark("met")
    loop()
    dist.barrier()
except RuntimeError:
    if fault() is not None:
        raise
    answer()
moment("end")
dist.destroy_process_group()
