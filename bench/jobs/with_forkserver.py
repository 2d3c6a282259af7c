"""A peer: the standard library's forkserver with torch preloaded. Argument: the number of ranks."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys


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
    size, port = int(sys.argv[1]), free_port()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    ranks = [context.Process(target=work, args=(rank, size, port)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))
