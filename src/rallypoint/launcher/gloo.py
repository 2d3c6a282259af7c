"""A fault of gloo's in torch (2.13 and before) that ends or hangs good programs, and the moment that avoids it.

gloo's threads drop the last collective's tensors after the program has gone on, and need the interpreter's lock for that. Two things can
come first, both measured with plain DDP programs on a busy machine:

- the group is destroyed while a DDP model lives: the end of the model then joins such a thread with the lock in its hand, for ever
  (6 of 20 runs under torchrun, 6 of 25 here);
- the interpreter closes down: up to Python 3.13 a thread that asks for the lock too late is ended, which C++ answers with
  `terminate called without an active exception` (4 of 12 runs under torchrun, 9 of 35 here in new interpreters).

There is nothing to wait for that would say "they have": they are given the lock for a moment, which makes it rare and not impossible.
"""

from __future__ import annotations

import os
import sys
import time

# Seconds: twice the interpreter's switch interval, after which a waiting thread gets its lock from a busy one; this one sleeps.
MOMENT = 0.01


def let_threads_finish() -> None:
    """Sleep for a moment if this process has threads of gloo's."""
    if "torch.distributed" in sys.modules and "pt_gloo_runloop" in _threads():
        time.sleep(MOMENT)


def _threads() -> set[str]:
    names = set()
    for number in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{number}/comm") as file:
                names.add(file.read().rstrip())
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
    return names
