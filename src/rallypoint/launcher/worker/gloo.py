"""A fault of gloo's in torch (2.13 and before) that ends or hangs good programs, and the moment
that avoids it.

gloo's threads drop the last collective's tensors after the program has gone on, and need the
interpreter's lock for that. Two things can come first, both measured with plain DDP programs on a
busy machine:

- the group is destroyed while a DDP model lives: the end of the model then joins such a thread with
  the lock in its hand, for ever (6 of 20 runs under torchrun, 6 of 25 here);
- the interpreter closes down: up to Python 3.13 a thread that asks for the lock too late is ended,
  which C++ answers with `terminate called without an active exception` (4 of 12 runs under
  torchrun, 9 of 35 here in new interpreters).

Nothing says "they have". So they are given the interpreter's lock until a whole moment has passed
in which none of them has run, or wanted to: on a busy machine a thread that can go on does not do
so at once. It makes the fault rare, and not impossible.
"""

from __future__ import annotations

import os
import sys
import time

from rallypoint.host.kernel_files import text_of

MOMENT = 0.01
"""Seconds: twice the interpreter's switch interval, after which a waiting thread gets its lock from
a busy one; this one sleeps.
"""

LONGEST = 1.0
"""Seconds, for all such moments: by then a thread has had its turn also among many times more
processes than processors.
"""

_NAME = "Name:\tpt_gloo_runloop"
_TOLD = ("State:", "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")


def let_threads_finish() -> None:
    """Sleep for as long as threads of gloo's in this process run, and a moment longer; if there are
    none, not at all.
    """
    if "torch.distributed" not in sys.modules:
        return
    end = time.monotonic() + LONGEST
    was, seen = None, _threads()
    while (
        seen
        and (seen != was or any("(running)" in told for told in seen.values()))
        and time.monotonic() < end
    ):
        time.sleep(MOMENT)
        was, seen = seen, _threads()


def _threads() -> dict[str, str]:
    """Return gloo's threads that run collectives: state and number of switches, by thread id."""
    found: dict[str, str] = {}
    try:
        numbers = os.listdir("/proc/self/task")
    except OSError:  # the program has changed its root, or has no descriptor left
        return found
    for number in numbers:
        lines = text_of(f"/proc/self/task/{number}/status").splitlines()  # none: it has ended
        if lines[:1] == [_NAME]:
            found[number] = " ".join(line for line in lines if line.startswith(_TOLD))
    return found
