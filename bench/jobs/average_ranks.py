"""Ranks that average one tensor. Argument: `party`, `megabytes`, `ranks` and `calls`, as JSON; what
each took goes to `result.json` in BENCH_FOLDER. The parties are those of `bench/average.py`."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rallypoint

CONTEXT = multiprocessing.get_context("fork")
SECRET = b"a secret for one measurement"
WARM = 3
"""Calls before anything is counted."""


def serve(ready: Any) -> None:
    server = rallypoint.Server(secret=SECRET)
    ready.send(server.address)
    server.serve_forever()


def call_of(
    spec: dict[str, Any], rank: int, address: str
) -> tuple[Callable[[torch.Tensor], object], Callable[[], object]]:
    """What is timed, and what brings all ranks together before it."""
    size = spec["ranks"]
    if spec["party"] == "gloo":
        store = dist.FileStore(os.path.join(os.environ["BENCH_FOLDER"], "gloo"), size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
        return dist.all_reduce, dist.barrier
    mine = rallypoint.connect(address, secret=SECRET)
    return lambda tensor: mine.average("w", tensor, size, out=tensor), lambda: mine.barrier(
        "ready", size
    )


def work(spec: dict[str, Any], rank: int, address: str, results: Any) -> None:
    torch.set_num_threads(1)
    call, together = call_of(spec, rank, address)
    tensor = torch.full((spec["megabytes"] * 1_000_000 // 4,), float(rank))
    seconds = []
    cpu = 0.0
    for count in range(WARM + spec["calls"]):
        if spec["party"] == "gloo":
            tensor.fill_(float(rank))  # sums of sums soon are infinite
        together()
        used, began = time.process_time(), time.perf_counter()
        call(tensor)
        seconds.append(time.perf_counter() - began)
        if count >= WARM:
            cpu += time.process_time() - used
    expected = (spec["ranks"] - 1) / 2 * (spec["ranks"] if spec["party"] == "gloo" else 1)
    assert tensor[0] == tensor[-1] == expected, (tensor[0], expected)
    together()
    results.put({"seconds": seconds[WARM:], "first": seconds[0], "cpu": cpu})
    results.close()
    results.join_thread()
    os._exit(0)


def main() -> None:
    spec = json.loads(sys.argv[1])
    here, there = CONTEXT.Pipe()
    server = CONTEXT.Process(target=serve, args=(there,), daemon=True)
    server.start()
    address = here.recv()
    results = CONTEXT.Queue()
    ranks = [
        CONTEXT.Process(target=work, args=(spec, rank, address, results))
        for rank in range(spec["ranks"])
    ]
    for process in ranks:
        process.start()
    found = [results.get(timeout=150.0) for _ in ranks]
    for process in ranks:
        process.join()
    server.kill()
    Path(os.environ["BENCH_FOLDER"], "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
