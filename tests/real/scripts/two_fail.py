"""Ranks 1 and 2 fail one after the other; the others finish."""

import os
import pathlib
import re
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
    events = pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).with_name("events.jsonl")
    while not re.search(r'"what": ?"ended",.*"rank": ?1\b', events.read_text()):
        time.sleep(0.01)  # the launcher has not heard of it yet
    raise ValueError("boom")
time.sleep(1)
print("finished", flush=True)
