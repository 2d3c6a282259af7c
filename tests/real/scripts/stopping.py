"""How ranks take a request to stop: argument 1 says it. Rank 0 never comes to init_process_group, so the others wait inside torch; with
argument 2, `sleep`, they sleep."""

import os
import signal
import sys
import time

manner, rank = sys.argv[1], int(os.environ["RANK"])


def save(number, frame):
    print(f"rank {rank} saves on {signal.Signals(number).name}", flush=True)
    time.sleep(0.6)
    print(f"rank {rank} has saved", flush=True)
    sys.exit(0)


if manner == "handler":
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGINT, save)
if manner == "ignore":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if rank == 0:
    print("rank 0 sleeps", flush=True)
    if manner == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(1000)
print(f"rank {rank} joins", flush=True)
while sys.argv[2:] == ["sleep"]:
    time.sleep(1000)
import torch.distributed as dist

dist.init_process_group("gloo")
