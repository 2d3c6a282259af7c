"""A rank stands in a call of torch's store that the program itself makes, argument 1 says which; rank 0 handles Ctrl-C elsewhere."""

import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

manner, rank = sys.argv[1], int(os.environ["RANK"])
PATIENCE = timedelta(seconds=300)


def save(number, frame):
    time.sleep(0.6)
    print("rank 0 has saved", flush=True)
    threading.Timer(1.4, theirs.send, (b".",)).start()


dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
ours, theirs = socket.socketpair()
unused = socket.socket()
unused.bind(("127.0.0.1", 0))
dist.barrier()
if rank == 0:
    signal.signal(signal.SIGINT, save)
print(f"rank {rank} goes on", flush=True)
if rank == 0:
    ours.settimeout(PATIENCE.total_seconds())
    ours.recv(1)
    print("rank 0 is done", flush=True)
    os._exit(0)
if manner == "get":
    store.set_timeout(PATIENCE)
    store.get("nobody sets this")
else:
    dist.TCPStore("127.0.0.1", unused.getsockname()[1], is_master=False, timeout=PATIENCE)
