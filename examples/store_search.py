"""Find a good learning rate: several processes take settings from one list until all are tried.

    rallypoint run -n 4 examples/store_search.py

No process group, no collective: the ranks meet in the store alone. `add` counts exactly once, so
each setting is tried by one rank, and a rank that is quicker tries more of them.
"""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn

import rallypoint

RATES = [10.0**exponent for exponent in (-4, -3.5, -3, -2.5, -2, -1.5, -1, -0.5, 0, 0.5)]


def accuracy_with(rate: float) -> float:
    """Train a linear reader of handwritten digits with this learning rate; the share that it reads
    correctly of those it never saw.
    """
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().flatten(1) / 16
    labels = torch.from_numpy(digits.target).long()
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[:1400]), labels[:1400]).backward()
        optimizer.step()
    return (model(images[1400:]).argmax(dim=1) == labels[1400:]).float().mean().item()


def main() -> None:
    rank = int(os.environ["RANK"])
    store = rallypoint.connect()
    while (number := store.add("taken")) <= len(RATES):
        rate = RATES[number - 1]
        store[f"accuracy/{rate:g}"] = (accuracy_with(rate), rank)
    if rank == 0:
        results = {rate: store.wait(f"accuracy/{rate:g}", timeout=60.0) for rate in RATES}
        for rate, (accuracy, by) in results.items():
            print(f"rate {rate:<12g} accuracy {accuracy:.4f}   (rank {by})")
        best = max(RATES, key=lambda rate: results[rate][0])
        print(f"best rate {best:g}: accuracy {results[best][0]:.4f}", flush=True)


if __name__ == "__main__":
    main()
