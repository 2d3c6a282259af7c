"""A peer: torch.multiprocessing.spawn, as the tutorials write it. Argument: the number of ranks."""

from __future__ import annotations

import os
import socket
import sys

import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def work(rank: int, size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    from first_all_reduce import main

    main()


if __name__ == "__main__":
    size = int(sys.argv[1])
    mp.spawn(work, args=(size, free_port()), nprocs=size)  # type: ignore[attr-defined, no-untyped-call]
