"""Learn to read handwritten digits on several processes at once: an ordinary DDP script on real
data.

    rallypoint run -n 4 examples/digits_ddp.py
    torchrun --nproc-per-node 4 examples/digits_ddp.py

The data are the 1797 digits of 8 x 8 pixels that ship inside scikit-learn. Each rank trains on its
own share; DDP averages the gradients, so that all ranks hold the same model after every step.
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, random_split


def load_data(seed: int) -> tuple[Dataset, Dataset]:
    """Training and test digits: (1, 8, 8) float images in 0..1 and their labels, split alike on
    every rank.
    """
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target).long()
    # The generator has a seed of its own: ranks that split differently would test on what another
    # rank trained on.
    return tuple(
        random_split(TensorDataset(images, labels), [0.8, 0.2], torch.Generator().manual_seed(seed))
    )


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, data: Dataset, device: torch.device) -> float:
    """The share of `data` that the model reads correctly."""
    model.eval()
    right = 0
    for images, labels in DataLoader(data, batch_size=256):
        guesses = model(images.to(device)).argmax(dim=1)
        right += (guesses == labels.to(device)).sum().item()
    return right / len(data)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="train a digit reader with DistributedDataParallel"
    )
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=16, help="digits per rank and step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    # The launcher says who we are. NCCL wants a GPU for each rank; where there are fewer, all ranks
    # use the CPU.
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    use_gpu = torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_gpu else "gloo")
    train_and_test(args, device)
    # After the model is gone, which still uses the group. Not in a `finally`: after an error on one
    # rank the others are still waiting for it in a collective, and tidying up here would wait with
    # them, or hide the error behind one of its own.
    dist.destroy_process_group()


def train_and_test(args: argparse.Namespace, device: torch.device) -> None:
    """Each rank trains on its share of the digits; at the end all have the same model, and each
    tests it.
    """
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    train, test = load_data(args.seed)
    sampler = DistributedSampler(train, shuffle=True, seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)
    model = DistributedDataParallel(
        build_model().to(device), device_ids=[device] if device.type == "cuda" else None
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    loss_of = nn.CrossEntropyLoss()

    first = True
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # without it every epoch would have the order of the first
        model.train()
        total = torch.zeros((), device=device)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_of(model(images.to(device)), labels.to(device))
            loss.backward()  # DDP averages the gradients over the ranks in here
            optimizer.step()
            total += loss.detach()
            if first:
                print(f"rank {rank} on {device}: first step, loss {loss.item():.3f}", flush=True)
                first = False
        if (epoch + 1) % 5 == 0 and rank == 0:
            print(f"epoch {epoch + 1}: loss {total.item() / len(loader):.4f} on rank 0", flush=True)

    # All ranks hold the same model, and 360 digits are read in a moment: each rank reads them all
    # and gets the same answer. A DistributedSampler would not do here: to make the ranks' shares
    # equally long it counts some digits twice.
    result = accuracy(model.module, test, device)
    if rank == 0:
        print(f"test accuracy {result:.4f}", flush=True)


if __name__ == "__main__":
    main()
