"""Learn to read handwritten digits on several processes that meet only now and then: Local SGD.

    rallypoint run -n 4 examples/local_sgd.py
    rallypoint run -n 4 --on-failure continue examples/local_sgd.py --quorum 3

Each rank trains a model of its own on its share of the 1797 digits that ship inside scikit-learn,
and every H steps all ranks go on from the mean of their models. That is H times less traffic than
DDP, which averages every gradient, and needs no process group: with `--quorum` the others train on
when a rank is lost.
"""

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, random_split

import rallypoint


def load_data(seed: int) -> tuple[Dataset, Dataset]:
    """Training and test digits: (1, 8, 8) float images in 0..1 and their labels, split alike on
    every rank.
    """
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target).long()
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
def accuracy(model: nn.Module, data: Dataset) -> float:
    """The share of `data` that the model reads correctly."""
    model.eval()
    right = 0
    for images, labels in DataLoader(data, batch_size=256):
        right += (model(images).argmax(dim=1) == labels).sum().item()
    return right / len(data)


def main() -> None:
    parser = argparse.ArgumentParser(description="train a digit reader with Local SGD")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=16, help="digits per rank and step")
    parser.add_argument("--every", type=int, default=8, metavar="H", help="steps between two means")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quorum", type=int, default=None, help="go on with this many ranks when others are lost"
    )
    args = parser.parse_args()

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(args.seed)
    train, test = load_data(args.seed)
    sampler = DistributedSampler(train, num_replicas=size, rank=rank, shuffle=True, seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    loss_of = nn.CrossEntropyLoss()

    with rallypoint.connect() as store:
        step = 0
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            model.train()
            for images, labels in loader:
                optimizer.zero_grad()
                loss = loss_of(model(images), labels)
                loss.backward()
                optimizer.step()
                step += 1
                if step % args.every == 0:
                    average(store, model, size, args.quorum, step)
        average(store, model, size, args.quorum, step)
    # All who are left hold the same model now.
    print(f"rank {rank}: test accuracy {accuracy(model, test):.4f}", flush=True)


def average(
    store: rallypoint.Store, model: nn.Module, size: int, quorum: int | None, step: int
) -> None:
    """From here on the model is the mean of all models; the optimizer's state stays each rank's
    own.
    """
    state = model.state_dict()
    got = store.average("model", state, size, quorum=quorum, out=state, details=True)
    if step <= 8 or len(got.present) < size:
        print(f"step {step}: the mean of {len(got.present)} of {size}", flush=True)


if __name__ == "__main__":
    main()
