"""Each rank on a device of its own, before the process group opens.

    python examples/questions/C2_a_device_for_each_rank.py

The usual mistake is `"cuda"` without a number, which is GPU 0 in every rank, or a `set_device` that
comes after `init_process_group`. With `backend=` the group is open when the function starts, and
the rank has the GPU of its LOCAL_RANK; "auto" is NCCL where each rank has a GPU, and gloo
elsewhere. Two ranks on one GPU with NCCL are an `error[device-shared]` that names both.
"""

import torch
import torch.distributed as dist

import rallypoint


def train() -> tuple[str, int]:
    """In a rank: "cuda" without a number is this rank's own."""
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    return dist.get_backend(), int(
        total.item()
    ) if total.device.type == "cpu" or total.device.index == dist.get_rank() else -1


def main() -> None:
    ranks = max(2, torch.cuda.device_count())
    results = rallypoint.launch(train, nproc=ranks, backend="auto")
    backend = "nccl" if torch.cuda.device_count() >= ranks else "gloo"
    assert results == [(backend, ranks)] * ranks, results
    print(
        f"{ranks} ranks added up over {backend}, each on {'its own GPU' if backend == 'nccl' else 'the CPU'}"
    )


if __name__ == "__main__":
    main()
