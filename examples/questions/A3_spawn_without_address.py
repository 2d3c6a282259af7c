"""Several processes meet in a process group, without an address, a port or a rank.

    python examples/questions/A3_spawn_without_address.py

`mp.spawn(fn, nprocs=2)` and `init_process_group("gloo")` in the function end in "ValueError: ...
environment variable RANK expected, but not set", and with a rank and a size given in the same for
MASTER_ADDR: spawn says nothing about where to meet. With address and port set by hand it runs,
until the port is taken; it wants `if __name__ == "__main__"`; and it has no results. `launch` has
none of that to get wrong. The group is closed at the end, also when the function raises.
"""

import torch
import torch.distributed as dist

import rallypoint


def train(rate: float) -> float:
    """In a rank: the group is open."""
    weight = torch.ones(1) * dist.get_rank()
    dist.all_reduce(weight)
    return rate * weight.item()


def fails() -> None:
    """In a rank: one raises while the others wait for it."""
    if dist.get_rank() == 1:
        raise ValueError("the loss is not a number")
    dist.barrier()


def main() -> None:
    results = rallypoint.launch(train, (0.5,), nproc=3, backend="gloo")
    assert results == [1.5, 1.5, 1.5]

    causes = None
    try:
        rallypoint.launch(fails, nproc=3, backend="gloo")
    except rallypoint.WorkerError as error:
        causes = [
            (rank, type(cause)) for rank, cause in zip(error.ranks, error.exceptions, strict=True)
        ]
    assert causes == [(1, ValueError)]  # not the others, which lost their peer

    assert rallypoint.launch(train, (1.0,), nproc=2, backend="gloo") == [
        1.0,
        1.0,
    ]  # and the next one meets as if nothing had been
    print(
        "3 ranks met without address and port, each returned 1.5; of a failure rank 1 is named, and the next 2 met again"
    )


main()
