"""What a rank finds and what it may do, in one run: written to facts<rank>.json."""

import json
import os
import socket
import stat
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import rpc

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
port = int(os.environ["MASTER_PORT"])
given = os.environ["MASTER_ADDR"]

for kind in ("dropped", "kept"):
    print("say:", kind, "out", rank, flush=True)
    print("say:", kind, "err", rank, file=sys.stderr, flush=True)

facts = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv[1:],
    "path": sys.path[0],
    "main": [__name__, __file__, __package__, __spec__ is None],
    "cwd": os.getcwd(),
    "terminals": [os.isatty(fd) for fd in range(3)],
    "stdin": stat.S_ISFIFO(os.fstat(0).st_mode),
    "environment": dict(os.environ),
    "stores": [],
}


def meet(store, name):
    store.set(f"{name} {rank}", "here")
    store.wait([f"{name} {other}" for other in range(size)], timedelta(seconds=60))
    facts["stores"].append(name)


for name, host in (("given", given), ("localhost", "localhost"), ("127.0.0.2", "127.0.0.2"), ("host name", socket.gethostname())):
    meet(dist.TCPStore(host, port, size, is_master=rank == 0, timeout=timedelta(seconds=60)), f"TCPStore at {name}")
meet(next(dist.rendezvous("env://"))[0], "rendezvous env://")
meet(next(dist.rendezvous(f"tcp://127.0.0.2:{port}", rank, size))[0], "rendezvous tcp://")

# One group: a second one at the same store reads the first one's keys under torchrun, and may not meet.
dist.init_process_group("gloo", init_method=f"tcp://{socket.gethostname()}:{port}", rank=rank, world_size=size)
total = torch.ones(1)
dist.all_reduce(total)
facts["stores"].append(f"group: {total.item():g}")
dist.barrier()
dist.destroy_process_group()

if size == 1:
    rpc.init_rpc("worker", rank=0, world_size=1)
    facts["stores"].append(rpc.rpc_sync("worker", max, args=(3, 7)))
    rpc.shutdown()

with open(f"facts{rank}.json", "w") as file:
    json.dump(facts, file)
