"""Models whose parameters are spread over the ranks: one with FullyShardedDataParallel (1), one with fully_shard (2)."""

import torch
import torch.distributed as dist
from torch import nn


def learn(version: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    if version == 2:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        local = sum(parameter.to_local().numel() for parameter in model.parameters())
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        local = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first = last = 0.0
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(10):
        optimizer.zero_grad()
        loss = (model(inputs) - 1).square().mean()
        loss.backward()
        optimizer.step()
        first, last = (loss.item() if step == 0 else first), loss.item()
    assert last < first, (first, last)
    print(f"FSDP{version}: {local < 161}", flush=True)  # 161 parameters in all


def main() -> None:
    dist.init_process_group("gloo")
    for version in (1, 2):
        learn(version)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
