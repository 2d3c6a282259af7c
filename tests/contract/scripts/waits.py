"""Waits for a signal and says which one came."""

import os
import signal
import sys
import time

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: sys.exit(print("say:", signal.Signals(number).name, flush=True)))
print("say: ready", os.environ["RANK"], flush=True)
time.sleep(120)
