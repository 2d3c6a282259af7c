"""An ordinary torchrun script: the first all_reduce, and when it was finished."""

from __future__ import annotations

import torch
import torch.distributed as dist
from marks import mark


def main() -> None:
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    mark("reduced")
    assert int(value) == dist.get_world_size()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
