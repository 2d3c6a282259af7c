"""A program like a notebook's kernel: threads, an event loop in one of them, torch imported. It
calls a function in several processes.

Argument: {"party": "rallypoint" | "torchrunx" | "mp.spawn", "ranks": 8, "again": 5}. Writes
result.json: seconds of the first call and of each of the further ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def work() -> float:
    """In a rank, with the group open."""
    one = torch.ones(1)
    dist.all_reduce(one)
    return float(one.item())


def rallypoint_party(ranks: int) -> Callable[[], list[Any]]:
    import rallypoint

    return lambda: rallypoint.launch(work, nproc=ranks, backend="gloo")


def torchrunx_party(ranks: int) -> Callable[[], list[Any]]:
    import torchrunx

    def call() -> list[Any]:
        launcher = torchrunx.Launcher(
            hostnames=["localhost"], workers_per_host=ranks, backend="gloo"
        )
        with contextlib.redirect_stdout(io.StringIO()):
            results = launcher.run(work)
        return [results.rank(rank) for rank in range(ranks)]

    return call


def spawned(rank: int, ranks: int, port: int, answers: Any) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    answers.put((rank, work()))
    dist.destroy_process_group()


def spawn_party(ranks: int) -> Callable[[], list[Any]]:
    import torch.multiprocessing as mp

    def call() -> list[Any]:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = int(sock.getsockname()[1])
        answers = mp.get_context("spawn").SimpleQueue()
        mp.spawn(spawned, args=(ranks, port, answers), nprocs=ranks)  # type: ignore[attr-defined, no-untyped-call]
        found = dict(answers.get() for _ in range(ranks))
        return [found[rank] for rank in range(ranks)]

    return call


PARTIES = {"rallypoint": rallypoint_party, "torchrunx": torchrunx_party, "mp.spawn": spawn_party}


def alive() -> None:
    """What a kernel has beside the cell: threads that wait, and a loop with something to do now and
    then.
    """

    async def beat() -> None:
        while True:
            await asyncio.sleep(0.1)

    threading.Thread(target=lambda: asyncio.run(beat()), daemon=True).start()
    for _ in range(4):
        threading.Thread(target=threading.Event().wait, daemon=True).start()


def main() -> None:
    asked = json.loads(sys.argv[1])
    ranks = asked["ranks"]
    alive()
    call = PARTIES[asked["party"]](ranks)
    seconds = []
    for _ in range(1 + asked["again"]):
        began = time.monotonic()
        found = call()
        seconds.append(time.monotonic() - began)
        assert found == [float(ranks)] * ranks, found
    result = Path(os.environ["BENCH_FOLDER"], "result.json")
    result.with_suffix(".new").write_text(json.dumps({"first": seconds[0], "again": seconds[1:]}))
    result.with_suffix(".new").rename(result)


if __name__ == "__main__":
    main()
