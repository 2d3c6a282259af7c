"""Ranks 1 and 2 fail one after the other; the others finish."""

import os
import sys
import time

rank = int(os.environ["RANK"])
if rank == 1:
    sys.exit(4)
if rank == 2:
    time.sleep(0.5)
    raise ValueError("boom")
time.sleep(1)
print("finished", flush=True)
