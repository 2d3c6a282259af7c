"""A free port for something of one's own: a socket that is held, not a number that was free a
moment ago.

    python examples/questions/B2_a_free_port.py

`bind(("", 0))`, read the number, close, use it later: in between anybody may take it, and when
every rank does so, each has another number and all wait for ever. `hold_port` gives a listening
socket; the number in it is taken until whoever serves on it is done.
"""

import contextlib
import errno
import multiprocessing
import socket

import torch
import torch.distributed as dist

import rallypoint

RANKS = 2


def rank(number: int, held: rallypoint.HeldPort) -> None:
    """Rank 0 serves on the socket that it has inherited; nobody can have come in between."""
    if number == 0:
        store = dist.TCPStore(
            held.host, held.port, RANKS, is_master=True, master_listen_fd=held.detach()
        )
    else:
        store = dist.TCPStore(held.host, held.port, RANKS, is_master=False)
    dist.init_process_group("gloo", store=store, rank=number, world_size=RANKS)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == RANKS
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    with rallypoint.hold_port() as held:
        refusal = 0
        try:
            socket.create_server(
                (held.host, held.port)
            ).close()  # a squatter, at any moment from now on
        except OSError as error:
            refusal = error.errno or 0
        assert refusal == errno.EADDRINUSE

        context = multiprocessing.get_context(
            "fork"
        )  # descriptors are inherited; over exec they go by `pass_fds`
        ranks = [context.Process(target=rank, args=(number, held)) for number in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        assert [process.exitcode for process in ranks] == [0] * RANKS

    with contextlib.ExitStack() as stack:  # a thousand at once, and no number twice
        ports = [stack.enter_context(rallypoint.hold_port()).port for _ in range(1000)]
        assert len(set(ports)) == 1000
    print(
        f"{RANKS} ranks met on a port that a squatter could not take; 1000 ports held at once were 1000 different ones"
    )


if __name__ == "__main__":
    main()
