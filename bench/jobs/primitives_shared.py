"""Processes that add to one tensor in shared memory. Argument: `party`, `processes`, `sizes` and
`seconds`, as JSON.

What they did per second, by size, goes to `result.json` in BENCH_FOLDER. The parties are those of
`bench/primitives.py`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import rallypoint

CONTEXT = multiprocessing.get_context("fork")


def adders(party: str, size: int) -> tuple[Callable[[torch.Tensor], object], torch.Tensor]:
    """What adds once, and the tensor it adds to."""
    if party == "multiprocessing.Lock":
        tensor = torch.zeros(size // 4).share_memory_()
        lock = CONTEXT.Lock()

        def add(one: torch.Tensor) -> None:
            with lock:
                tensor.add_(one)

        return add, tensor
    shared = rallypoint.SharedTensor(size // 4, torch.float32)
    if party == "SharedTensor.add_":
        return shared.add_, shared.tensor

    def add_in_block(one: torch.Tensor) -> None:
        with shared.locked() as locked:
            locked.add_(one)

    return add_in_block, shared.tensor


def work(
    add: Callable[[torch.Tensor], object], size: int, seconds: float, start: Any, results: Any
) -> None:
    torch.set_num_threads(1)
    one = torch.ones(size // 4)
    for _ in range(20):
        add(one)
    start.wait()
    began, count = time.monotonic(), 0
    until = began + seconds
    while time.monotonic() < until:
        add(one)
        count += 1
    results.put((began, time.monotonic(), count))


def rate(spec: dict[str, Any], size: int) -> float:
    add, tensor = adders(spec["party"], size)
    start, results = CONTEXT.Barrier(spec["processes"]), CONTEXT.Queue()
    processes = [
        CONTEXT.Process(target=work, args=(add, size, spec["seconds"], start, results))
        for _ in range(spec["processes"])
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=spec["seconds"] + 30.0) for _ in processes]
    for process in processes:
        process.join()
    count = sum(one for _, _, one in found)
    expected = count + 20 * spec["processes"]
    if not (tensor == expected).all():
        raise SystemExit(
            f"{spec['party']}: {expected} were added, and the sums are {tensor.min().item():g} to {tensor.max().item():g}"
        )
    return float(
        count / (max(ended for _, ended, _ in found) - min(began for began, _, _ in found))
    )


def main() -> None:
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    outcome = {f"rate_{size}": rate(spec, size) for size in spec["sizes"]}
    fresh = Path(os.environ["BENCH_FOLDER"]) / "result.new"
    fresh.write_text(json.dumps(outcome))
    fresh.rename(fresh.with_suffix(".json"))


if __name__ == "__main__":
    main()
