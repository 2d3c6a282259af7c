"""A job that fails twice: rank 0 waits for its SIGTERM, rank 1 raises under @record."""

import os
import signal
import sys
import time

from torch.distributed.elastic.multiprocessing.errors import record

rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]


def tidy(number, frame):
    open(f"tidied-{attempt}", "w").close()
    sys.exit(0)


@record
def main():
    if rank == "0":
        signal.signal(signal.SIGTERM, tidy)
        open(f"ready-{attempt}", "w").close()
        time.sleep(120)
    while not os.path.exists(f"ready-{attempt}"):
        time.sleep(0.01)
    raise ValueError(f"attempt {attempt}")


print("say: started", rank, attempt, flush=True)
main()
