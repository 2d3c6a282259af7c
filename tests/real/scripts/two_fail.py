"""Ranks 1 and 2 fail one after the other; the others finish."""

import os
import select
import sys
import time

import rallypoint

rank = int(os.environ["RANK"])
store = rallypoint.connect()
if rank == 1:
    store["pid"] = os.getpid()
    store.wait("watched")
    sys.exit(4)
if rank == 2:
    ended = os.pidfd_open(store.wait("pid"))
    store["watched"] = True
    select.select([ended], [], [])
    time.sleep(0.5)  # the launcher has heard of it
    raise ValueError("boom")
time.sleep(1)
print("finished", flush=True)
