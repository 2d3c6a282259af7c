"""torch.compile in every rank, with its pool of compiling processes."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")


@torch.compile
def curve(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) ** 2 + torch.cos(x) ** 2


total = curve(torch.linspace(0, 1, 64)).sum()
dist.all_reduce(total)
print(f"{total.item():.1f}", flush=True)
dist.destroy_process_group()
