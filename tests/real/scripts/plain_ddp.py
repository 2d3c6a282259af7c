"""The shortest DDP program: it reads the environment that torchrun gives, and every rank ends with the same weights."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group(backend="gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    assert (rank, dist.get_world_size()) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 10)).square().mean().backward()
        optimizer.step()
    weights = [torch.zeros(10) for _ in range(dist.get_world_size())]
    dist.all_gather(weights, model.module.weight.detach().flatten())
    assert all(torch.equal(one, weights[0]) for one in weights)
    print(f"rank {rank} of {dist.get_world_size()}, local rank {local_rank}: same weights", flush=True)
    # Before the group: torch 2.13 hangs for ever, in one run of four, when a DDP model goes after it and the last collective's
    # tensors are still held by gloo's thread (the model's end joins that thread, which waits for the interpreter's lock).
    del model, optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
