"""`set_start_method` in a rank, and a DataLoader whose workers must not be forked.

    python examples/questions/C5_start_methods_and_loaders.py

In a process that was started by multiprocessing the call fails: "context has already been set". A
rank's is not set. A loader's workers cannot use CUDA when they are forked from a rank that has used
it (`error[cuda-before-fork]` names both lines); started anew they can.
"""

import torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, TensorDataset

import rallypoint


def train() -> tuple[str, float]:
    mp.set_start_method("spawn")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    total = torch.zeros(1, device=device)  # from here on a forked worker could not use CUDA
    data = TensorDataset(torch.arange(8.0))
    for (batch,) in DataLoader(data, batch_size=4, num_workers=1):
        total += batch.to(device).sum()
    return mp.get_start_method(), total.item()


def main() -> None:
    results = rallypoint.launch(train, nproc=2)
    assert results == [("spawn", 28.0)] * 2, results
    print("2 ranks set the start method themselves, and read 2 batches each from a spawned worker")


if __name__ == "__main__":
    main()
