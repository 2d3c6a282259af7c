"""One program that launches very often, and what it holds after each time. Argument: {"count": 500,
"ranks": 2}. Writes result.json.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from pathlib import Path

import rallypoint

SETTLED = 10.0
"""Seconds for the agent to put away what the last launch left: it answers its caller first. What
leaks is there after them, too.
"""

BEFORE = 5
"""Launches before anything is counted: what is made once is made then."""


def held() -> dict[str, float]:
    """Of this process: descriptors, threads, children, resident bytes that are its own; and files
    in /dev/shm.
    """
    gc.collect()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "children": len(children),
        "memory": _own("self"),
        "agent's descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in children),
        "agent's memory": sum(_own(pid) for pid in children),
        "shared": len(os.listdir("/dev/shm")),
    }


def settled(before: dict[str, float]) -> dict[str, float]:
    """What is held when the agent has no more descriptors than before, or after `SETTLED`
    seconds.
    """
    until = time.monotonic() + SETTLED
    while True:
        now = held()
        if now["agent's descriptors"] <= before["agent's descriptors"] or time.monotonic() > until:
            return now
        time.sleep(0.02)


def _own(pid: str) -> int:
    status = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    )
    return sum(int(status[name].split()[0]) * 1024 for name in ("Private_Clean", "Private_Dirty"))


def main() -> None:
    asked = json.loads(sys.argv[1])
    factor = 3

    def work(rank: int, data: list[int]) -> dict[str, object]:
        print("a line of this rank")
        return {"rank": rank * factor, "data": data, "large": b"x" * 300_000}

    def fails(rank: int) -> None:
        if rank == 0:
            raise ValueError("on purpose")

    before: dict[str, float] = {}
    seconds = []
    for number in range(BEFORE + asked["count"]):
        if number == BEFORE:
            before = held()
        began = time.monotonic()
        found = rallypoint.launch(work, ([number],), nproc=asked["ranks"], pass_rank=True)
        seconds.append(time.monotonic() - began)
        assert [one["rank"] for one in found] == [factor * rank for rank in range(asked["ranks"])]
        del found
        if number % 25 == 3:
            try:
                rallypoint.launch(fails, nproc=asked["ranks"], pass_rank=True)
            except* ValueError:
                pass
            else:
                raise AssertionError("it did not fail")
    result = Path(os.environ["BENCH_FOLDER"], "result.json")
    result.with_suffix(".new").write_text(
        json.dumps({"before": before, "after": settled(before), "seconds": seconds[BEFORE:]})
    )
    result.with_suffix(".new").rename(result)


if __name__ == "__main__":
    main()
